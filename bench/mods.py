"""What does a mod or a logits processor cost its own request, and a mod the other requests?

Greedy, flash attention on, through `Engine.generate`. Every prompt stays in its slot; timing begins
with the first token. The slow mod sleeps, so it holds neither the GIL nor a core: only the cost of
waiting for it remains. It is consumed on a thread of its own.

The row of a logits processor counts the processor time of the thread that takes the tokens, where
the processor runs: of all threads together, the model's own would hide it.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from console import attempt, main
from report import Timing
from runs import open_engine

from kqview import Engine, mod
from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview import Generation
    from kqview.bench.records import LeftOut
    from kqview.mods.steering import LogitsProcessor

N_CONTEXT = 256
N_SLOTS = 4
N_TOKENS = 32
SLOW_S = 0.005
# A Noop mod at most 1.05 times a token of the 24 layers; the others keep 0.95 of their speed.
CASES = {
    "mods-noop": 1.05,
    "mods-noop-demo": None,
    "mods-beside-slow": 1 / 0.95,
    "mods-processor": None,
}
WEIGHTS = {
    "mods-noop": 60.0,
    "mods-noop-demo": 5.0,
    "mods-beside-slow": 120.0,
    "mods-processor": 60.0,
}


@mod
def noop(event: Any, actions: Any, tokenizer: Any) -> None:
    """Do nothing at any event."""


@mod
def slow(event: Any, actions: Any, tokenizer: Any) -> None:
    """Take 5 ms once a token."""
    if type(event).__name__ == "ForwardPass":
        time.sleep(SLOW_S)


class ModRuns:
    """Generations in the slots of one engine, each behind a prompt of its own."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._now_s = settings.now_s
        self._engine = engine
        n_vocab = engine.model.n_vocab
        self._prompts = [prompt_ids(N_CONTEXT, n_vocab, seed=i) for i in range(N_SLOTS)]

    def _start(
        self, slot: int, mods: Sequence[Any] = (), n_tokens: int = N_TOKENS, **options: Any
    ) -> Generation:
        generation = self._engine.generate(
            self._prompts[slot],
            slot=slot,
            max_tokens=n_tokens,
            temperature=0.0,
            ignore_eos=True,
            mods=mods,
            **options,
        )
        next(generation)
        return generation

    def ms(self, mods: Sequence[Any] = ()) -> float:
        """Milliseconds a token of one generation with *mods*."""
        generation = self._start(0, mods)
        start = self._now_s()
        generation.read()
        return (self._now_s() - start) * 1000.0 / (N_TOKENS - 1)

    def processor_ms(self, processor: LogitsProcessor | None = None) -> float:
        """The consumer's milliseconds of processor time a token, with *processor*."""
        generation = self._start(0, logits_processor=processor)
        start = time.thread_time()
        generation.read()
        return (time.thread_time() - start) * 1000.0 / (N_TOKENS - 1)

    def beside_ms(self, mods: Sequence[Any]) -> float:
        """Milliseconds a token of three plain generations beside one with *mods*."""
        other = self._start(N_SLOTS - 1, mods, 4 * N_TOKENS)
        reader = threading.Thread(target=other.read)
        running = [self._start(slot) for slot in range(N_SLOTS - 1)]
        reader.start()
        start = self._now_s()
        for _ in range(N_TOKENS - 1):
            for generation in running:
                next(generation)
        spent_ms = (self._now_s() - start) * 1000.0
        other.cancel()
        reader.join()
        return spent_ms / (len(running) * (N_TOKENS - 1))


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the chosen cases: the model of the other benchmarks, then the demo model."""
    names = settings.chosen(CASES)
    large = [name for name in names if name != "mods-noop-demo"]
    if large:
        with open_engine(
            settings, flash_attn=True, n_slots=N_SLOTS, n_ctx=N_CONTEXT + 4 * N_TOKENS + 8
        ) as engine:
            runs = ModRuns(settings, engine)
            for name in large:
                yield attempt(name, _measure, settings, line, name, runs)
    if len(large) < len(names):
        with Engine.demo(n_threads=settings.n_threads, n_ctx=N_CONTEXT + N_TOKENS + 8) as engine:
            yield attempt(
                "mods-noop-demo",
                _measure,
                settings,
                line,
                "mods-noop-demo",
                ModRuns(settings, engine),
            )


def _measure(settings: Settings, line: ProgressLine, name: str, runs: ModRuns) -> Timing:
    cases: dict[str, tuple[str, Callable[[], float], str, Callable[[], float], str]] = {
        "mods-noop": ("a mod that does nothing", lambda: runs.ms([noop]), "no mod", runs.ms, ""),
        "mods-noop-demo": (
            "a mod that does nothing; demo model",
            lambda: runs.ms([noop]),
            "no mod; demo model",
            runs.ms,
            "",
        ),
        "mods-beside-slow": (
            "3 plain slots beside one whose mod takes 5 ms",
            lambda: runs.beside_ms([slow]),
            "3 plain slots beside a plain one",
            lambda: runs.beside_ms([]),
            ", tokens of the three counted",
        ),
        "mods-processor": (
            "a logits_processor that does nothing",
            lambda: runs.processor_ms(lambda ids, logits: None),
            "none",
            runs.processor_ms,
            ", processor time of the consumer's thread",
        ),
    }
    what, candidate, against, baseline, counted = cases[name]
    target = CASES[name]
    baseline(), candidate()  # memory of the first blocks and graphs
    pairs = line.pairs(name, baseline, candidate, settings.pairs_for(target))
    return Timing(
        name=name,
        what=what,
        baseline=against,
        work=f"a decoded token at {N_CONTEXT} tokens of context{counted}",
        pairs=pairs,
        target=settings.target(target),
        command=f"python bench/mods.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
