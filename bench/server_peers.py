"""How does serving compare with llama-server, client for client?

The stock llama-server and ``kqview serve`` serve one model with the same threads, slots, context
and flash attention, and answer the same requests in turn: ``/completion``, streamed, prompts of new
ids, greedy. 1, 4 and 16 clients send one request each at the same moment. Rows
are milliseconds a token over all clients, to the first token (its mean over the clients), and
between two tokens of a client at the 99th percentile; "mean" asks kqview's ``/v1/completions`` for
the mean of all rows with each token, beside llama-server's plain tokens. Peak memory of both
processes is printed to stderr.
"""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console import attempt, main
from models import model_path, peer
from report import Timing
from started import Started, free_port, is_healthy

from kqview.bench.pairs import Pairs, alternate
from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

N_CONTEXT = 128  # tokens of a prompt
N_TOKENS, QUICK_TOKENS = 32, 32
N_VOCAB = 256  # ids of the prompts, which every model has
ANSWER_LIMIT_S = 600
MOST_ROUNDS = 8
MEAN = {"attention": {"values": "probs", "reduce": "mean"}}
# At least 0.95 times the tokens, no worse gaps; 0.9 times with the mean of all rows.
TARGETS = {"tokens": 1 / 0.95, "gap": 1.0, "first": None, "mean": 1 / 0.9}
TEXTS = {
    "tokens": "a token, all clients counted",
    "gap": "between two tokens of a client, 99th percentile",
    "first": "to the first token",
    "mean": "a token with the mean of all rows, all clients counted",
}
# llama-server sends nothing for a token that ends inside a character; ids of the model's bytes.
NO_BYTES = [[i, False] for i in (*range(128, 256), 259)]
CLIENTS = (1, 4, 16)
_PLAIN = ("/completion", b'"stop":false')  # a line with this is a token
CASES = {
    f"peers-{what}-{n}": (what, n) for n in CLIENTS for what in ("tokens", "gap", "first", "mean")
}
WEIGHTS = {name: 60.0 for name in CASES}


@dataclass
class Run:
    """One request of each client, in milliseconds."""

    token_ms: float
    first_ms: float
    gap_ms: float


class Server(Started):
    """One of the two servers on loopback."""

    def __init__(self, settings: Settings, n_slots: int, *, is_stock: bool) -> None:
        self._now_s = settings.now_s
        self._n_tokens = QUICK_TOKENS if settings.is_quick else N_TOKENS
        self.port = free_port()
        n_ctx = (N_CONTEXT + self._n_tokens + 255) // 256 * 256
        common: dict[str, object] = {
            "--model": model_path(settings),
            "--threads": settings.n_threads,
            "--parallel": n_slots,
            "--ctx-size": n_ctx * n_slots,
            "--flash-attn": "on",
            "--n-gpu-layers": settings.n_gpu_layers,
            "--batch-size": 2048,
            "--ubatch-size": 512,
            "--cache-ram": 0,
            "--host": "127.0.0.1",
            "--port": self.port,
        }
        words = [str(word) for flag in common.items() for word in flag]
        if is_stock:
            command = [str(peer("llama-server")), "--no-kv-unified", *words]
        else:
            # The command line of llama-server is that of `kqview serve`.
            command = [sys.executable, "-m", "kqview", "serve", "--no-supervise", *words]
        super().__init__(command)

    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_healthy(self.port)

    @property
    def peak_mb(self) -> float:
        """Most memory that it had, in MB."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1000

    def run(self, prompts: Sequence[list[int]], extra: dict[str, Any]) -> Run:
        """One request of each client."""
        stamps: list[list[float]] = [[] for _ in prompts]
        failures: list[Exception] = []

        def ask(i: int) -> None:
            try:
                self._stream(prompts[i], extra, stamps[i])
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
        start_s = self._now_s()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        gaps = sorted(b - a for one in stamps for a, b in itertools.pairwise(one))
        n_tokens = len(prompts) * self._n_tokens
        return Run(
            token_ms=(max(one[-1] for one in stamps) - start_s) * 1e3 / n_tokens,
            first_ms=sum(one[0] - start_s for one in stamps) * 1e3 / len(stamps),
            gap_ms=gaps[int(0.99 * (len(gaps) - 1))] * 1e3,
        )

    def _stream(self, prompt: list[int], extra: dict[str, Any], stamps: list[float]) -> None:
        body = {
            "prompt": prompt, "max_tokens": self._n_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "cache_prompt": False, "logit_bias": NO_BYTES, **extra,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_LIMIT_S)
        try:
            headers = {"Content-Type": "application/json"}
            path, mark = ("/v1/completions", b'"attention":{') if extra else _PLAIN
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"{response.status} {response.read(500)!r}")
            for line in response:
                if line.startswith(b"data: {") and mark in line:
                    stamps.append(self._now_s())
        finally:
            connection.close()
        if len(stamps) < self._n_tokens - 1:
            raise RuntimeError(f"{len(stamps)} tokens came, {self._n_tokens} were asked for")


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, settings, line, name, *CASES[name])


def _measure(
    settings: Settings, line: ProgressLine, name: str, what: str, n_clients: int
) -> Timing:
    n_pairs = min(settings.n_pairs, MOST_ROUNDS)
    line.start(name, n_pairs)
    pairs = Pairs()
    seeds = iter(range(10**6))

    def value(run: Run) -> float:
        return {"gap": run.gap_ms, "first": run.first_ms}.get(what, run.token_ms)

    with (
        Server(settings, n_clients, is_stock=True) as stock,
        Server(settings, n_clients, is_stock=False) as ours,
    ):
        # New prompts for each run, the same for both: neither finds them in its cache.
        def prompts(first: int) -> list[list[int]]:
            return [prompt_ids(N_CONTEXT, N_VOCAB, seed=first + i) for i in range(n_clients)]

        def of(server: Server, extra: dict[str, Any]) -> float:
            return value(server.run(prompts(next(seeds) * n_clients), extra))

        extra = MEAN if what == "mean" else {}
        of(stock, {})
        of(ours, extra)
        for stock_ms, ours_ms in alternate(lambda: of(stock, {}), lambda: of(ours, extra), n_pairs):
            pairs.add(stock_ms, ours_ms)
            line.tick()
        print(
            f"{name}: peak memory {ours.peak_mb:.0f} MB, llama-server {stock.peak_mb:.0f} MB",
            file=sys.stderr,
        )
    return Timing(
        name=name,
        what=f"kqview serve, {n_clients} clients",
        baseline="llama-server (stock build), the same clients",
        work=TEXTS[what],
        pairs=pairs,
        target=settings.target(TARGETS[what]),
        command=f"python bench/server_peers.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
