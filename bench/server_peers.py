"""How does serving compare with llama-server, client for client?

The stock llama-server and ``kqview serve`` serve one model with the same threads, slots, context
and flash attention, and answer the same requests in turn: ``/completion``, streamed, prompts of new
ids, greedy. 1, 4 and 16 clients send one request each at the same moment; rows are milliseconds a
token over all clients, to the first token (its mean over the clients), and between two tokens of a
client (the 99th percentile and the longest). "mean" asks kqview's ``/v1/completions`` for the mean
of all rows with each token, beside llama-server's plain tokens. "mixed" has prompts of 16 to 2,000
ids that arrive by chance (Poisson) at 70 % of what llama-server can take, whoever has been
answered. Rows of the same clients come out of the same runs. Peak memory of both processes is
printed to stderr.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console import attempt, main
from models import model_path, peer
from report import Timing
from started import Started, free_port, is_healthy

from kqview.bench.pairs import Pairs, quantile
from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

N_PROMPT = 128  # tokens of a prompt
N_TOKENS = 32
N_VOCAB = 256  # ids of the prompts, which every model has
MIXED_PROMPTS = (16, 2000)  # tokens, as often from 16 to 32 as from 1,000 to 2,000
N_MIXED, QUICK_MIXED = 16, 4  # requests of a run
MIXED_SLOTS = 4
MIXED_LOAD = 0.7  # of the requests a second that llama-server answers where all come at once
ANSWER_LIMIT_S = 600
MOST_ROUNDS = 8
MEAN = {"attention": {"values": "probs", "reduce": "mean"}}
# llama-server sends nothing for a token that ends inside a character; ids of the model's bytes.
NO_BYTES = [[i, False] for i in (*range(128, 256), 259)]
CLIENTS = (1, 4, 16)
_PLAIN = ("/completion", b'"stop":false')  # a line with this is a token


@dataclass(frozen=True)
class Case:
    """A row: what of a run it shows, and the most that its ratio may be, by number of clients."""

    work: str
    of: Callable[[Run], float]
    targets: tuple[float, ...]
    has_rows: bool = False  # kqview also sends the mean of all rows with each token


KINDS = {
    "tokens": Case("a token, all clients counted", lambda run: run.token_ms, (1.0, 0.97, 0.95)),
    "gap": Case(
        "between two tokens of a client, 99th percentile",
        lambda run: quantile(run.gaps_ms, 0.99),
        (1.0, 1.0, 0.9),
    ),
    "longest": Case(
        "longest between two tokens of a client", lambda run: max(run.gaps_ms), (1.0, 1.0, 1.0)
    ),
    "first": Case(
        "to the first token", lambda run: sum(run.firsts_ms) / len(run.firsts_ms), (1.0, 0.95, 0.95)
    ),
    "mean": Case(
        "a token with the mean of all rows, all clients counted",
        lambda run: run.token_ms,
        (1.02, 1.03, 1.05),
        has_rows=True,
    ),
}
MIXED_KINDS = {
    "gap": Case(
        "prompts of 16 to 2,000 ids by chance: between two tokens, 99th percentile",
        KINDS["gap"].of,
        (1.0,),
    ),
    "first": Case(
        "prompts of 16 to 2,000 ids by chance: to the first token, 99th percentile",
        lambda run: quantile(run.firsts_ms, 0.99),
        (1.0,),
    ),
}
# Cases of one group come out of the same runs.
GROUPS = {
    **{
        n: {f"peers-{kind}-{n}": (case, case.targets[i]) for kind, case in KINDS.items()}
        for i, n in enumerate(CLIENTS)
    },
    None: {f"peers-mixed-{kind}": (case, case.targets[0]) for kind, case in MIXED_KINDS.items()},
}
WEIGHTS = {
    name: {1: 8.0, 4: 25.0, 16: 90.0, None: 300.0}[group]
    for group, cases in GROUPS.items()
    for name in cases
}


@dataclass
class Run:
    """What the requests of one run took, in milliseconds."""

    token_ms: float  # from the first request to the last token, by the tokens of all
    firsts_ms: list[float]  # to the first token, of each request
    gaps_ms: list[float]  # between two tokens of a request, of all


@dataclass
class Request:
    """A prompt and when it is sent, in seconds from the start of the run."""

    prompt: list[int]
    at_s: float = 0.0


class Server(Started):
    """One of the two servers on loopback."""

    def __init__(
        self,
        settings: Settings,
        n_slots: int,
        n_prompt: int,
        *,
        is_stock: bool,
        is_supervised: bool = False,
        model: Path | None = None,
    ) -> None:
        self._now_s = settings.now_s
        self.port = free_port()
        n_ctx = (n_prompt + N_TOKENS + 255) // 256 * 256
        common: dict[str, object] = {
            "--model": model or model_path(settings),
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
            alone = [] if is_supervised else ["--no-supervise"]
            command = [sys.executable, "-m", "kqview", "serve", *alone, *words]
        super().__init__(command)

    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_healthy(self.port)

    @property
    def pid(self) -> int:
        """Id of its process, or of its supervisor."""
        return self._process.pid

    @property
    def peak_mb(self) -> float:
        """Most memory that it had, in MB."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1000

    def run(self, requests: Sequence[Request], extra: dict[str, Any]) -> Run:
        """All *requests*, each by a client of its own, which sends it when it is due."""
        stamps: list[list[float]] = [[] for _ in requests]
        failures: list[Exception] = []
        start_s = self._now_s()

        def ask(i: int) -> None:
            try:
                time.sleep(max(0.0, start_s + requests[i].at_s - self._now_s()))
                self._stream(requests[i].prompt, extra, stamps[i])
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(requests))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return Run(
            token_ms=(max(s[-1] for s in stamps) - start_s) * 1e3 / (len(requests) * N_TOKENS),
            firsts_ms=[
                (s[0] - start_s - request.at_s) * 1e3
                for s, request in zip(stamps, requests, strict=True)
            ],
            gaps_ms=[(b - a) * 1e3 for one in stamps for a, b in itertools.pairwise(one)],
        )

    def _stream(self, prompt: list[int], extra: dict[str, Any], stamps: list[float]) -> None:
        body = {
            "prompt": prompt, "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True,
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
        if len(stamps) < N_TOKENS - 1:
            raise RuntimeError(f"{len(stamps)} tokens came, {N_TOKENS} were asked for")


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases; those of the same clients come out of the same rounds."""
    for n_clients, cases in GROUPS.items():
        names = settings.chosen(cases)
        if not names:
            continue
        for name in names[:-1]:
            line.start(name, 1)
        n_rounds = min(settings.n_pairs, MOST_ROUNDS)
        line.start(names[-1], n_rounds)
        try:
            runs: list[dict[str, Run]] | Exception = _runs(
                settings, line, n_clients, n_rounds, any(cases[name][0].has_rows for name in names)
            )
        except Exception as error:
            runs = error
        for name in names:
            yield attempt(name, _timing, settings, name, n_clients, runs)


def _timing(
    settings: Settings, name: str, n_clients: int | None, runs: list[dict[str, Run]] | Exception
) -> Timing:
    if isinstance(runs, Exception):
        raise runs
    case, target = GROUPS[n_clients][name]
    clients = f"{MIXED_SLOTS} slots" if n_clients is None else f"{n_clients} clients"
    return Timing(
        name=name,
        what=f"kqview serve, {clients}",
        baseline="llama-server (stock build), the same requests",
        work=case.work,
        pairs=Pairs(
            [case.of(run["stock"]) for run in runs],
            [case.of(run["mean" if case.has_rows else "ours"]) for run in runs],
        ),
        target=settings.target(target),
        command=f"python bench/server_peers.py --row {name} {settings.flags}",
    )


def _runs(
    settings: Settings, line: ProgressLine, n_clients: int | None, n_rounds: int, has_rows: bool
) -> list[dict[str, Run]]:
    """What each server did in each round, with requests of new ids, the same for all."""
    n_slots = n_clients or MIXED_SLOTS
    n_prompt = N_PROMPT if n_clients else MIXED_PROMPTS[1]
    with (
        Server(settings, n_slots, n_prompt, is_stock=True) as stock,
        Server(settings, n_slots, n_prompt, is_stock=False) as ours,
    ):
        requests = (
            _together(n_clients)
            if n_clients
            else _by_chance(stock, QUICK_MIXED if settings.is_quick else N_MIXED)
        )
        # Each way of a round has the same requests, whichever comes first.
        of_round: list[Request] = []
        ways = {
            "stock": lambda: stock.run(of_round, {}),
            "ours": lambda: ours.run(of_round, {}),
            **({"mean": lambda: ours.run(of_round, MEAN)} if has_rows else {}),
        }
        runs: list[dict[str, Run]] = []
        for i in range(n_rounds + 1):  # the first round brings weights and buffers into memory
            of_round[:] = next(requests)
            order = list(ways)[:: 1 if i % 2 else -1]
            runs.append({way: ways[way]() for way in order})
            if i:
                line.tick()
        print(
            f"{n_slots} slots: peak memory {ours.peak_mb:.0f} MB, "
            f"llama-server {stock.peak_mb:.0f} MB",
            file=sys.stderr,
        )
    return runs[1:]


def _together(n_clients: int) -> Iterator[list[Request]]:
    """One request of each client at the same moment."""
    seeds = itertools.count()
    while True:
        yield [Request(prompt_ids(N_PROMPT, N_VOCAB, seed=next(seeds))) for _ in range(n_clients)]


def _by_chance(stock: Server, n_requests: int) -> Iterator[list[Request]]:
    """Prompts of mixed lengths; the times between them are exponential (Poisson arrivals)."""
    chance = random.Random(0)
    seeds = itertools.count(10**6)
    low, high = MIXED_PROMPTS

    def prompt() -> list[int]:
        n = round(low * (high / low) ** chance.random())
        return prompt_ids(n, N_VOCAB, seed=next(seeds))

    at_once = [Request(prompt()) for _ in range(n_requests)]
    every_s = stock.run(at_once, {}).token_ms * N_TOKENS / 1e3 / MIXED_LOAD
    while True:
        times = itertools.accumulate(chance.expovariate(1 / every_s) for _ in range(n_requests))
        yield [Request(prompt(), at_s) for at_s in times]


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
