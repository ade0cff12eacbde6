"""How fast do rows leave the server, compared with a bare socket, and what does it add to a token?

Replay: 512 tokens with rows of 6.9 MB (28 layers x 28 heads x 2,200 tokens, float32) go from memory
along the whole path of a real request to a client in this process that only receives. The baseline
is a bare socket with the same bytes of rows. Live: the demo model generates with the
probabilities of all heads, taken in this process, or through the WebSocket from another one. Its
token takes less than a millisecond, about as long as serving one: "live" leaves one core to server
and client, on both sides of the pair, "live-all" computes on every core. The servers are uvicorn as
``kqview serve`` runs it, and granian.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console import attempt, main
from report import Timing
from serve_app import ROW_BYTES
from serve_client import bare_bytes, event_bytes, socket_bytes, socket_ms
from started import Started, free_port, is_healthy

from kqview import Engine
from kqview.bench.pairs import Pairs, alternate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

N_ROWS, QUICK_ROWS = 512, 4
MOST_ROUNDS = 6  # 3.5 GB a run
N_LIVE = 400
PROMPT = "Anna is a painter. She lives in a small house by the river, and every morning"
# What is asked: (path, request, bytes of rows become so many)
WAYS: dict[str, tuple[str, dict[str, Any], float]] = {
    "ws-binary": ("/api/extra/generate/stream/ws", {"output_attentions": True}, 1.0),
    "ws-base64": (
        "/api/v1/generate/stream",
        {"type": "generate", "return_attention": True, "encoding": "base64"},
        4 / 3,
    ),
    "sse-base64": ("/api/extra/generate/stream", {"output_attentions": True}, 4 / 3),
}
TEXTS = {
    "ws-binary": "rows as binary WebSocket frames",
    "ws-base64": "rows as base64 in WebSocket text",
    "sse-base64": "rows as base64 in Server-Sent Events",
}
# At least 0.4 times the bare socket's rate, 0.15 times for base64 in events, 0.9 times in process.
TARGETS = {"ws-binary": 1 / 0.4, "ws-base64": None, "sse-base64": 1 / 0.15, "live": 1 / 0.9,
           "live-all": 1 / 0.9}  # fmt: skip
SERVERS = ("uvicorn", "granian")
CASES = {f"server-{way}-{server}": (way, server) for server in SERVERS for way in TARGETS}
WEIGHTS = {name: 20.0 if "live" in name else 60.0 for name in CASES}


class Process(Started):
    """One of serve_app.py's servers."""

    def __init__(self, server: str, *kind: str, n_threads: int = 1) -> None:
        self.port = free_port()
        self._is_bare = server == "bare"
        here = Path(__file__).resolve().parent
        environ = {**os.environ, "SERVE_APP_THREADS": str(n_threads)}
        environ["PYTHONPATH"] = os.pathsep.join([str(here), environ.get("PYTHONPATH", "")])
        command = [sys.executable, str(here / "serve_app.py"), server, str(self.port), *kind]
        super().__init__(command, environ)

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return bare_bytes(self.port, 0, 0) == 0 if self._is_bare else is_healthy(self.port)
        except OSError:
            return False


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(CASES):
        way, server = CASES[name]
        yield attempt(
            name, _live if way.startswith("live") else _replay, settings, line, name, way, server
        )


def _replay(settings: Settings, line: ProgressLine, name: str, way: str, server: str) -> Timing:
    n_rows = QUICK_ROWS if settings.is_quick else N_ROWS
    path, request, share = WAYS[way]
    request = {**request, "prompt": "a", "max_length": n_rows, "max_new_tokens": n_rows}
    receive: Callable[..., int] = event_bytes if way.startswith("sse") else socket_bytes
    with Process("bare") as bare, Process(server, "replay") as ours:

        def limit() -> float:
            return _ms(settings, lambda: bare_bytes(bare.port, n_rows, ROW_BYTES))

        def candidate() -> float:
            return _ms(settings, lambda: received.append(receive(ours.port, path, request)))

        received: list[int] = []
        n_pairs = min(settings.n_pairs, MOST_ROUNDS)
        line.start(name, n_pairs)
        pairs = Pairs()
        candidate()  # first use of everything
        for baseline_ms, candidate_ms in alternate(limit, candidate, n_pairs):
            pairs.add(baseline_ms / n_rows, candidate_ms / n_rows)
            line.tick()
    if min(received) < n_rows * ROW_BYTES * share:
        raise RuntimeError(f"{min(received)} bytes came, fewer than the rows have")
    return Timing(
        name=name,
        what=f"{TEXTS[way]}, {server}",
        baseline="a bare socket",
        work=f"a token with rows of {ROW_BYTES / 1e6:.1f} MB, replayed from memory",
        pairs=pairs,
        target=settings.target(TARGETS[way]),
        command=f"python bench/server.py --row {name} {settings.flags}",
    )


def _live(settings: Settings, line: ProgressLine, name: str, way: str, server: str) -> Timing:
    line.start(name, settings.n_pairs)
    pairs = Pairs()
    n_threads = settings.n_threads if way == "live-all" else max(1, settings.n_threads - 1)
    with (
        Process(server, "live", n_threads=n_threads) as process,
        Engine.demo(n_threads=n_threads) as engine,
    ):
        ids = engine.tokenize(PROMPT)
        path = WAYS["ws-binary"][0]
        request = {
            "input_ids": ids, "max_length": N_LIVE, "temperature": 0.0, "bypass_eos": True,
            "attention_values": "probs", "output_attentions": True,
        }  # fmt: skip

        def in_process() -> float:
            stamps: list[float] = []
            for _ in engine.generate(
                ids, max_tokens=N_LIVE, temperature=0.0, ignore_eos=True, capture="probs"
            ):
                stamps.append(time.perf_counter())
            return _token_ms(stamps)

        def through_socket() -> float:
            return socket_ms(process.port, path, request)

        in_process()
        through_socket()
        for baseline_ms, candidate_ms in alternate(in_process, through_socket, settings.n_pairs):
            pairs.add(baseline_ms, candidate_ms)
            line.tick()
    return Timing(
        name=name,
        what=f"through the WebSocket, {server}; {n_threads} compute threads",
        baseline=f"in process; {n_threads} compute threads",
        work=f"a token of the demo model with its rows, {len(ids)} to {len(ids) + N_LIVE} tokens",
        pairs=pairs,
        target=settings.target(TARGETS[way]),
        command=f"python bench/server.py --row {name} {settings.flags}",
    )


def _token_ms(stamps_s: list[float]) -> float:
    if len(stamps_s) != N_LIVE:
        raise RuntimeError(f"{len(stamps_s)} tokens came, {N_LIVE} were asked for")
    # The mean and not the median: tokens may come in bursts.
    return (stamps_s[-1] - stamps_s[0]) * 1e3 / (N_LIVE - 1)


def _ms(settings: Settings, call: Callable[[], object]) -> float:
    start_s = settings.now_s()
    call()
    return (settings.now_s() - start_s) * 1e3


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
