"""How much does an attack slow down another client: /health requests, gaps between tokens?

Each attack runs in its own process with its own key, while a client with another key streams and
polls /health. Phases with and without the attack alternate; the result is the difference of their
99 % quantiles (target: at most 50 ms). The attackers use CPU time too: with few cores, part of the
difference is theirs and not the server's.

    python bench/fairness.py [--seconds 4] [--rounds 3] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from started import Started, free_port, is_healthy

if TYPE_CHECKING:
    from collections.abc import Callable

VICTIM, ATTACKER = "victim-key", "attacker-key"
TARGET_MS = 50.0
N_ATTACKERS = 4
HEALTH_EVERY_S = 0.02
EVERY_MS = 5.0
STREAM = {"prompt": "Tom has", "max_length": 400, "ban_eos_token": True}
HEAD = (
    "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nx-api-key: {key}\r\nconnection: close\r\n"
    "content-length: {n}\r\n\r\n"
)


class Server(Started):
    """``kqview serve --demo`` with two keys."""

    def __init__(self) -> None:
        self.port = free_port()
        super().__init__(
            [
                sys.executable, "-m", "kqview", "serve", "--demo", "--port", str(self.port),
                "--threads", "1", "--slots", "4", "--api-key", VICTIM, "--api-key", ATTACKER,
                "--no-access-log", "--no-supervise",
            ]
        )  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_healthy(self.port)


# ---- attacks: one connection's worth each, again and again


def post(port: int, path: str, body: bytes, *, key: str = ATTACKER, leaves: bool = False) -> None:
    """A request; one who *leaves* does not wait for the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(HEAD.format(path=path, key=key, n=len(body)).encode() + body)
        if leaves:
            time.sleep(0.05)
            return
        while sock.recv(1 << 16):
            pass


def trailers(port: int) -> None:
    """Trailers without end, and without a key."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(
            b"POST /api/v1/tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n"
            b"\r\n2\r\n{}\r\n0\r\n"
        )
        part = (b"x: " + b"y" * 1000 + b"\r\n") * 64
        for _ in range(3000):
            sock.sendall(part)


def half_sent(port: int) -> None:
    """Bodies of which a byte is missing."""
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            n = 30 * 2**20
            sock.sendall(HEAD.format(path="/api/v1/tokenize", key=ATTACKER, n=n).encode())
            with contextlib.suppress(OSError):
                sock.sendall(b" " * (n - 1))


def refused_sockets(port: int) -> None:
    """WebSockets without a key that send large messages."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(
            b"GET /api/v1/generate/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\n"
            b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
            b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        sock.recv(1 << 16)
        sock.sendall(b"\x81\xff" + (30 * 2**20).to_bytes(8, "big") + bytes(4))
        for _ in range(30):
            sock.sendall(bytes(2**20))


def json_body(**fields: Any) -> bytes:
    return json.dumps({"prompt": "Tom", "max_length": 8, **fields}).encode()


def generate(**fields: Any) -> Callable[[int], None]:
    body = json_body(**fields)
    return lambda port: post(port, "/api/v1/generate", body)


RULES = "\n".join(f'r{i} ::= "{"a" * 9}{i}" | r{i + 1} "b" | [a-z0-9]{{1,20}}' for i in range(4000))
ATTACKS: dict[str, Callable[[int], None]] = {
    "trailers": trailers,
    "half-sent": half_sent,
    "refused-sockets": refused_sockets,
    "logprobs": generate(num_samples=16, top_logprobs=700, max_length=400, ban_eos_token=True),
    "grammar": generate(grammar=f'root ::= r0\n{RULES}\nr4000 ::= "z"'),
    "bias": generate(logit_bias={str(i): 0.5 for i in range(768)}, num_samples=16),
    "bias-unknown": generate(logit_bias={str(i): 0.5 for i in range(2**18)}),
    "bans": generate(banned_tokens=[i % 700 for i in range(65_536)], num_samples=16),
    "ban-texts": generate(banned_tokens=[f"word{i % 999}" for i in range(65_536)]),
    "ids": lambda port: post(
        port, "/api/v1/detokenize", b'{"token_ids":[' + b"300," * 10**6 + b"1]}"
    ),
    "ids-too-many": lambda port: post(
        port, "/api/v1/detokenize", b'{"token_ids":[' + b"300," * (7 * 10**6) + b"1]}"
    ),
    "texts": lambda port: post(
        port, "/api/v1/tokenize", json.dumps({"text": "word " * 200_000}).encode()
    ),
    "leavers": lambda port: post(
        port, "/api/extra/tokencount", json_body(prompt="word " * 600_000), leaves=True
    ),
}


def attack(name: str, port: int) -> None:
    """Attack until the process is ended."""

    def work() -> None:
        while True:
            with contextlib.suppress(OSError):
                ATTACKS[name](port)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(N_ATTACKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- the other client


def waits_ms(port: int, until_s: float) -> list[float]:
    """How long /health takes to answer, again and again."""
    found: list[float] = []
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while time.perf_counter() < until_s:
        start_s = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        found.append((time.perf_counter() - start_s) * 1e3)
        time.sleep(HEALTH_EVERY_S)
    connection.close()
    return found


def gaps_ms(port: int, until_s: float) -> list[float]:
    """Time between two tokens of a stream, of one after another."""
    found: list[float] = []
    body = json.dumps(STREAM).encode()
    while time.perf_counter() < until_s:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            head = HEAD.format(path="/api/extra/generate/stream", key=VICTIM, n=len(body))
            sock.sendall(head.encode() + body)
            last_s = None
            while sock.recv(1 << 16) and time.perf_counter() < until_s:
                now_s = time.perf_counter()
                if last_s is not None:
                    found.append((now_s - last_s) * 1e3)
                last_s = now_s
    return found


def by_time(values_ms: list[float]) -> np.ndarray[Any, Any]:
    """Waits of clients that come all the time, not of one that asks again when it was served.

    A second in which nothing goes on would be one value of many; it is that for all who come then.
    """
    steps = [np.arange(ms, 0, -EVERY_MS) for ms in values_ms]
    return np.concatenate(steps)


def stretch(port: int, seconds: float, attacked_by: str | None) -> tuple[list[float], list[float]]:
    """Waits and gaps of one stretch of time."""
    attacker = None
    if attacked_by is not None:
        command = [sys.executable, __file__, "--attack", attacked_by, "--port", str(port)]
        attacker = subprocess.Popen(command)
        time.sleep(1.0)
    gaps: list[float] = []
    until_s = time.perf_counter() + seconds
    reader = threading.Thread(target=lambda: gaps.extend(gaps_ms(port, until_s)))
    reader.start()
    try:
        waits = waits_ms(port, until_s)
        reader.join()
    finally:
        if attacker is not None:
            attacker.kill()
            attacker.wait()
    return waits, gaps


def main() -> None:
    """Measure what the command line names and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*ATTACKS], default=[*ATTACKS])
    parser.add_argument("--attack", choices=[*ATTACKS])
    parser.add_argument("--port", type=int)
    given = parser.parse_args()
    if given.attack:
        attack(given.attack, given.port)
        return
    table = Table("attack", "/health p99", "alone", "more", "token gap p99", "alone", "more")
    for name in given.only:
        pairs: list[list[list[float]]] = [[], [], [], []]
        with Server() as server:
            stretch(server.port, 1.0, None)  # first use of everything
            for _ in range(given.rounds):
                alone = stretch(server.port, given.seconds, None)
                under = stretch(server.port, given.seconds, name)
                for kept, values in zip(pairs, (*under, *alone), strict=True):
                    kept.append(values)
        wait, gap, wait_alone, gap_alone = (
            float(np.percentile(by_time([ms for one in values for ms in one]), 99))
            for values in pairs
        )
        cells = (wait, wait_alone, wait - wait_alone, gap, gap_alone, gap - gap_alone)
        is_over = max(wait - wait_alone, gap - gap_alone) > TARGET_MS
        table.add_row(name, *(f"{ms:.1f} ms" for ms in cells), style="red" if is_over else None)
        print(name, *(f"{ms:.1f}" for ms in cells), file=sys.stderr, flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
