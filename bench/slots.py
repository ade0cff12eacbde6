"""How much faster are several slots together, and how much do they slow each other down?

Greedy, no capture, flash attention on. Every prompt stays in its slot, so a run is a generation in
each slot, started together; its time starts when all of them have their first token, and is divided
by the number of tokens after that. The stock programs are llama-batched-bench, which decodes given
ids, and llama-server, which samples and streams over HTTP: the same model,
prompts of the same length, threads and batch sizes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from console import attempt, main
from models import model_path, peer
from report import Timing
from runs import open_engine
from started import Started, free_port, is_healthy

from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut

N_CONTEXT = 256
N_SLOTS = 4
N_TOKENS = 32
ANSWER_LIMIT_S = 300  # of llama-server
N_ARRIVING = 512  # tokens of the prompt that arrives while others generate
# 4 slots at least 2.2 times the tokens of 1; at least 0.95 times those of llama-batched-bench.
CASES = {
    "slots-4": 1 / 2.2,
    "slots-batched-bench": 1 / 0.95,
    "slots-server": 1 / 0.95,
    "slots-hole": None,
    "slots-arriving-prompt": None,
}
WEIGHTS = {"slots-4": 90.0, "slots-batched-bench": 90.0, "slots-server": 90.0, "slots-hole": 50.0,
           "slots-arriving-prompt": 90.0}  # fmt: skip


class ServerEvent(NamedTuple):
    """An event of a stream of llama-server.

    Attributes:
        at_s: When it came.
        n_evaluated: Tokens of the prompt that were not in the slot's cache.
        n_tokens: Tokens of the generation so far.
        spent_ms: Since the end of the prompt, by the server's clock.
    """

    at_s: float
    n_evaluated: int
    n_tokens: int
    spent_ms: float


class ServerRuns(Started):
    """One start of the stock llama-server on loopback, its prompts evaluated.

    Each slot keeps a prompt of ids and streams its tokens. HTTP and JSON are part of the time, as
    they are for every user of that program.
    """

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[list[int]],
        n_tokens: int,
        *,
        flash_attn: bool = True,
        model: Path | None = None,
        more_flags: Sequence[object] = (),
    ) -> None:
        self._prompts = prompts
        self._n_tokens = n_tokens
        self._port = free_port()
        n_ctx = (len(prompts[0]) + n_tokens + 255) // 256 * 256
        flags: dict[str, object] = {
            "--model": model or model_path(settings),
            "--threads": settings.n_threads,
            "--parallel": len(prompts),
            "--ctx-size": n_ctx * len(prompts),
            "--flash-attn": "on" if flash_attn else "off",
            "--n-gpu-layers": settings.n_gpu_layers,
            "--batch-size": 2048,
            "--ubatch-size": 512,
            "--cache-ram": 0,
            "--host": "127.0.0.1",
            "--port": self._port,
        }
        command = [str(peer("llama-server")), "--no-kv-unified"]
        command += [str(word) for flag in flags.items() for word in flag]
        command += [str(word) for word in more_flags]
        super().__init__(command)

    def prepare(self) -> None:
        """Evaluate the prompts."""
        self.ms()

    def ms(self) -> float:
        """Milliseconds a token, one generation a slot, from when all have their first one on."""
        runs = self.generate()
        n_left = len(runs) * (self._n_tokens - 1)
        first_s, last_s = max(run[0].at_s for run in runs), max(run[-1].at_s for run in runs)
        return (last_s - first_s) * 1000.0 / n_left

    def generate(self) -> list[list[ServerEvent]]:
        """What comes of a generation in each slot, all at the same time."""
        found: list[list[ServerEvent]] = []
        failures: list[Exception] = []

        def generate(i_slot: int) -> None:
            try:
                found.append(self._events(i_slot))
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=generate, args=(i,)) for i in range(len(self._prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return found

    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_healthy(self._port)

    def post(self, path: str, body: dict[str, Any]) -> http.client.HTTPResponse:
        """The response to this request; close it.

        Raises:
            RuntimeError: Its status is not 200.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT_S)
        # The response keeps the socket until it is closed itself.
        with contextlib.closing(connection):
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"llama-server: {response.status} {response.read(500)!r}")
            return response

    def _events(self, i_slot: int) -> list[ServerEvent]:
        body = {
            "prompt": self._prompts[i_slot],
            "id_slot": i_slot,
            "n_predict": self._n_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "timings_per_token": True,
        }
        found: list[ServerEvent] = []
        with self.post("/completion", body) as response:
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                at_s = time.perf_counter()
                timings = json.loads(line[6:])["timings"]
                figures = (timings[key] for key in ("prompt_n", "predicted_n", "predicted_ms"))
                found.append(ServerEvent(at_s, *figures))
        if found[-1].n_tokens != self._n_tokens:
            raise RuntimeError(
                f"llama-server: {found[-1].n_tokens} tokens, {self._n_tokens} were asked for"
            )
        return found


class SlotRuns:
    """Generations in chosen slots of one engine, each behind a prompt of its own."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._now_s = settings.now_s
        self._engine = engine
        n_vocab = engine.model.n_vocab
        self._prompts = [prompt_ids(N_CONTEXT, n_vocab, seed=i) for i in range(N_SLOTS)]
        self._arriving = prompt_ids(N_ARRIVING, n_vocab, seed=99)
        self._n_arrived = 0
        self.ms(range(N_SLOTS))

    @property
    def prompts(self) -> list[list[int]]:
        """Of each slot."""
        return self._prompts

    def ms(self, slots: Sequence[int], *, arrives: bool = False) -> float:
        """Milliseconds a token of generations in *slots*; *arrives*: a prompt in the next slot."""
        running = [
            self._engine.generate(
                self._prompts[i], slot=i, max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True
            )
            for i in slots
        ]
        for generation in running:
            next(generation)
        start = self._now_s()
        late = None
        if arrives:
            self._n_arrived += 1
            late = self._engine.generate(
                [self._n_arrived, *self._arriving[1:]], slot=len(slots), max_tokens=1
            )
        n_left = len(slots) * (N_TOKENS - 1)
        for _ in range(N_TOKENS - 1):
            for generation in running:
                next(generation)
        spent_ms = (self._now_s() - start) * 1000.0
        if late is not None:
            late.read()
        return spent_ms / n_left


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases with one engine."""
    names = settings.chosen(CASES)
    if not names:
        return
    with open_engine(
        settings, flash_attn=True, n_slots=N_SLOTS, n_ctx=N_ARRIVING + 64, run_ahead=N_TOKENS
    ) as engine:
        runs = SlotRuns(settings, engine)

        def one() -> float:
            return runs.ms((0,))

        def four() -> float:
            return runs.ms(range(N_SLOTS))

        stock = "llama-batched-bench (stock build), 4 sequences"
        cases: dict[str, tuple[str, Callable[[], float], str, Callable[[], float]]] = {
            "slots-4": ("4 slots", four, "1 slot", one),
            "slots-batched-bench": ("4 slots", four, stock, lambda: _stock_ms(settings)),
            "slots-hole": (
                "slots 0, 1 and 3",
                lambda: runs.ms((0, 1, 3)),
                "slots 0, 1 and 2",
                lambda: runs.ms((0, 1, 2)),
            ),
            "slots-arriving-prompt": (
                f"1 slot, a prompt of {N_ARRIVING} tokens arrives",
                lambda: runs.ms((0,), arrives=True),
                "1 slot",
                one,
            ),
        }
        for name in names:
            if name == "slots-server":
                yield attempt(name, _measure_server, settings, line, name, runs)
            else:
                yield attempt(name, _measure, settings, line, name, *cases[name])


def _measure_server(settings: Settings, line: ProgressLine, name: str, runs: SlotRuns) -> Timing:
    with ServerRuns(settings, runs.prompts, N_TOKENS) as server:
        against = "llama-server (stock build), 4 slots"

        def four() -> float:
            return runs.ms(range(N_SLOTS))

        return _measure(settings, line, name, "4 slots", four, against, server.ms)


def _measure(
    settings: Settings,
    line: ProgressLine,
    name: str,
    what: str,
    candidate: Callable[[], float],
    against: str,
    baseline: Callable[[], float],
) -> Timing:
    target = CASES[name]
    pairs = line.pairs(name, baseline, candidate, settings.pairs_for(target))
    return Timing(
        name=name,
        what=what,
        baseline=against,
        work=f"a decoded token at {N_CONTEXT} tokens of context, tokens of all slots counted",
        pairs=pairs,
        target=settings.target(target),
        command=f"python bench/slots.py --row {name} {settings.flags}",
    )


def _stock_ms(settings: Settings) -> float:
    """Milliseconds a token of one start of llama-batched-bench."""
    flags: dict[str, object] = {
        "-m": model_path(settings),
        "-t": settings.n_threads,
        "-fa": "on",
        "-ngl": settings.n_gpu_layers,
        "-c": (N_CONTEXT + N_TOKENS + 224) * N_SLOTS,
        "-b": 2048,
        "-ub": 512,
        "-npp": N_CONTEXT,
        "-ntg": N_TOKENS,
        "-npl": N_SLOTS,
        "--output-format": "jsonl",
    }
    command = [str(peer("llama-batched-bench"))]
    command += [str(word) for flag in flags.items() for word in flag]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode != 0 or len(lines) != 1:
        raise RuntimeError(
            f"llama-batched-bench: exit status {done.returncode}; {done.stderr[-500:]}"
        )
    return json.loads(lines[0])["t_tg"] * 1000.0 / (N_TOKENS * N_SLOTS)


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
