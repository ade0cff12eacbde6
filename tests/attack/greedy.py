"""One key that takes all it can get, beside another key that asks for a little at a time.

The greedy key opens any number of connections, over every dialect that generates, and reads all of
what comes or none of it. The other key is never refused, and waits for no text to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import time
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import TYPE_CHECKING, Any, Self

from tests.attack.crowd import frame, percentile, post, upgrade
from tests.attack.summary import Summary, main
from tests.attack.target import target

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.attack.target import Target

N_CTX = 1024
GREEDY, OTHER = "greedy-key", "other-key"
CONNECTIONS = (4, 40, 200)
WAITS_S = 60.0
OPENS_WITHIN_S = 3.0
WORST_S = 20.0  # a stall; figures say what is usual, and tests/server/test_shares.py what may be
FLAGS = (
    "--ctx", str(N_CTX), "--api-key", GREEDY, "--api-key", OTHER,
    "--max-connections-per-client", "1000",
)  # fmt: skip
LONG = 8000
TEXT = "Mirelda found a silver key near the old bridge."
SOCKET = "/api/extra/generate/stream/ws"
# Each asks for as much text as a slot holds; ids keep different prompts apart.
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": LONG, "stream": True, "ignore_eos": True},
    ),
    "whole reply": ("/v1/completions", {"prompt": TEXT, "max_tokens": LONG, "ignore_eos": True}),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": TEXT}], "max_tokens": LONG, "stream": True,
            "ignore_eos": True,
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": TEXT}], "max_tokens": LONG, "stream": True,
            "model": "demo",
        },
    ),
    "llama-server": (
        "/completion", {"prompt": TEXT, "n_predict": LONG, "stream": True, "ignore_eos": True},
    ),
    "kobold with rows": (
        "/api/extra/generate/stream",
        {
            "prompt": TEXT, "max_length": LONG, "bypass_eos": True, "output_attentions": True,
        },
    ),
    "steered": (  # a phrase that is banned
        "/api/extra/generate/stream",
        {"prompt": TEXT, "max_length": LONG, "bypass_eos": True, "banned_tokens": ["a zebra"]},
    ),
    "kobold socket": (SOCKET, {"prompt": TEXT, "max_length": LONG, "bypass_eos": True}),
    "long prompts": (
        "/v1/completions", {"prompt": [300] * (N_CTX - 8), "max_tokens": 1, "cache_prompt": False},
    ),
    "samples": (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": LONG, "n": 16, "stream": True, "ignore_eos": True},
    ),
    "grammar": (
        "/completion",
        {"prompt": TEXT, "n_predict": LONG, "stream": True, "grammar": "root ::= [a-z ]*"},
    ),
}  # fmt: skip
_RETRY: re.Pattern[bytes] = re.compile(rb"retry-after: (\d+)", re.IGNORECASE)


def request_of(kind: str) -> tuple[bytes, bytes]:
    """One greedy request: what is sent at once, and what follows a WebSocket's handshake."""
    path, body = KINDS[kind]
    named = f"authorization: Bearer {GREEDY}"
    if path != SOCKET:
        return post(path, body, named, "content-type: application/json", "connection: close"), b""
    head = upgrade(path).replace(b"\r\n\r\n", f"\r\n{named}\r\n\r\n".encode())
    return head, frame(json.dumps(body).encode(), 1)


class Greedy:
    """*n* connections of the greedy key, each of which asks again once it was answered.

    They are a process of their own, so that they slow nothing down but the server.
    """

    def __init__(self, port: int, kinds: tuple[str, ...], n: int, *, reads: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._counts = spawn.Array("q", len(Counts))
        self._process = spawn.Process(
            target=_connect, args=(port, kinds, n, reads, self._counts), daemon=True
        )

    def __enter__(self) -> Self:
        self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def __getitem__(self, what: Counts) -> int:
        return self._counts[what]


class Counts(IntEnum):
    """What is counted of the greedy key's requests."""

    SENT = 0
    ANSWERED = auto()
    REFUSED = auto()
    BYTES = auto()


def _connect(port: int, kinds: tuple[str, ...], n: int, reads: bool, counts: Any) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(one(kinds[i % len(kinds)]) for i in range(n)))

    async def one(kind: str) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await ask(kind)
            await asyncio.sleep(0.01)

    async def ask(kind: str) -> None:
        sock = socket.socket()
        if not reads:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        limit = 2**16 if reads else 2**10
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
        try:
            first, then = request_of(kind)
            writer.write(first)
            counts[Counts.SENT] += 1
            head = await reader.readuntil(b"\r\n\r\n")
            counts[Counts.ANSWERED] += 1
            if head[9:12] not in (b"200", b"101"):
                counts[Counts.REFUSED] += 1
                found = _RETRY.search(head)
                # As clients do that are told when to come back: not all in the same moment.
                await asyncio.sleep((int(found[1]) if found else 1) * (1 + random.random()))
            else:
                writer.write(then)
                if not reads:
                    await asyncio.Event().wait()
            while part := await reader.read(limit):
                counts[Counts.BYTES] += len(part)
        finally:
            writer.transport.abort()

    os.nice(10)  # what is measured is the server
    asyncio.run(all_of_them())


@dataclass
class Other:
    """The other key's requests, one after another: what each took, and what was refused."""

    took_s: list[float] = field(default_factory=list[float])
    refused: list[str] = field(default_factory=list[str])

    @property
    def p99_s(self) -> float:
        """What 99 of 100 requests take at most."""
        return percentile(self.took_s, 0.99)

    def ask(self, running: Target, n: int) -> Self:
        """Send *n* requests."""
        asked = {"prompt": "Tom has a red ball.", "max_tokens": 8, "ignore_eos": True}
        named = f"authorization: Bearer {OTHER}"
        for i in range(n):
            data = post("/v1/completions", {**asked, "seed": i}, named, "connection: close")
            started_s = time.monotonic()
            with running.connect(timeout_s=WAITS_S) as sock:
                sock.sendall(data)
                got = b""
                while part := sock.recv(1 << 16):
                    got += part
            self.took_s.append(time.monotonic() - started_s)
            if got[9:12] != b"200":
                self.refused.append(repr(got[:300]))
        return self


def observe(
    running: Target, kinds: tuple[str, ...], n: int, *, reads: bool, n_requests: int
) -> tuple[Greedy, Other]:
    """The other key's requests beside *n* greedy connections of *kinds*."""
    with Greedy(running.port, kinds, n, reads=reads) as greedy:
        ends_s = time.monotonic() + OPENS_WITHIN_S
        # Whole replies are answered at their end.
        while greedy[Counts.ANSWERED] < n and time.monotonic() < ends_s:
            time.sleep(0.01)
        return greedy, Other().ask(running, n_requests)


def turn_s(running: Target) -> float:
    """How long a key may keep the only slot: the evaluation of a whole one, and as long again."""
    path, body = KINDS["long prompts"]
    took_s: list[float] = []
    for _ in range(5):
        started_s = time.monotonic()
        status, got = running.request("POST", path, body, key=OTHER)
        took_s.append(time.monotonic() - started_s)
        assert status == 200, got
    return 2 * statistics.median(took_s)


def run(seconds: float, seed: int) -> Summary:
    """Greedy connections of random kinds and numbers, until the time is over."""
    summary = Summary("greedy", seed)
    rng = random.Random(seed)
    ends_s = time.monotonic() + seconds
    n_slots = rng.choice([1, 2, 4])
    with target(summary, "--slots", str(n_slots), *FLAGS) as running:
        summary.figures["slots"] = n_slots
        summary.figures["turn ms"] = turn_s(running) * 1000
        alone = Other().ask(running, 50)
        summary.figures["alone: p99 ms"] = alone.p99_s * 1000
        while time.monotonic() < ends_s:
            kinds = tuple(rng.sample(sorted(KINDS), rng.choice([1, 1, 2, len(KINDS)])))
            n, reads = rng.choice(CONNECTIONS), rng.random() < 0.5
            name = f"{n} of {', '.join(kinds)}{'' if reads else ', not read'}"
            try:
                greedy, other = observe(running, kinds, n, reads=reads, n_requests=20)
            except OSError as error:
                summary.fail(f"{name}: the other key got no answer: {error!r}")
                continue
            summary.count("requests of the other key", len(other.took_s))
            summary.count("requests of the greedy key", greedy[Counts.SENT])
            summary.count("refused requests of the greedy key", greedy[Counts.REFUSED])
            summary.figures[f"{name}: p50 ms"] = percentile(other.took_s, 0.5) * 1000
            for what in other.refused:
                summary.fail(f"{name}: the other key was refused: {what}")
            if max(other.took_s) > WORST_S:
                summary.fail(f"{name}: the other key waited {max(other.took_s):.1f} s")
        if running.process.poll() is not None:
            summary.fail(f"the server ended with {running.process.returncode}")
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
