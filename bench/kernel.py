"""Does a token with all its attention cost more than llama.cpp's without any?

kqview's own attention of decode (``attention_kernel="kqview"``) with the logits of all layers and
heads, against the faster of llama.cpp's two ways without capture, flash attention on and off, and
against itself without capture. Each engine has a process of its own, and they are asked in turn:
several engines in one process would slow each other down.
"""

from __future__ import annotations

import multiprocessing
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Self

from console import attempt, main
from report import Timing
from runs import decode_runs, open_engine

from kqview.bench.pairs import step_ms

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from types import TracebackType

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

# name -> (tokens of context, whether against llama.cpp, target)
CASES: Final[dict[str, tuple[int, bool, float]]] = {
    f"kernel-{n_context}-{'stock' if is_stock else 'own'}": (n_context, is_stock, target)
    for n_context, of_stock, of_own in ((1024, 1.0, 1.02), (4096, 0.75, 1.03), (16384, 0.5, 1.05))
    for is_stock, target in ((True, of_stock), (False, of_own))
}
WEIGHTS = {name: 60.0 + n_context * 0.03 for name, (n_context, _, _) in CASES.items()}
QUICK_SHARE = 16  # a quick run has this much less context
STOCK: Final = {
    "flash attention on": {"flash_attn": True, "attention_kernel": "llama.cpp"},
    "flash attention off": {"flash_attn": False, "attention_kernel": "llama.cpp"},
}
OURS: Final = {"flash_attn": True, "attention_kernel": "kqview"}
N_TRIALS = 3  # by which the faster of llama.cpp's ways is chosen


class EngineProcess:
    """An engine in a process of its own that runs when it is asked to; a context manager."""

    def __init__(self, settings: Settings, options: dict[str, Any]) -> None:
        """Open it; the prompt is evaluated before the first run."""
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(target=_serve, args=(end, settings, options), daemon=True)
        self._process.start()
        end.close()

    def ms(self, capture: str | None) -> float:
        """Median milliseconds a token of one run."""
        self._pipe.send(capture)
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._process.join()


def _serve(pipe: Connection, settings: Settings, options: dict[str, Any]) -> None:
    try:
        with open_engine(settings, **options) as engine:
            runs = decode_runs(settings, engine)
            while True:
                capture = pipe.recv()
                pipe.send(step_ms(runs.stamps_s(settings.n_tokens, capture=capture)))
    except EOFError:
        return
    except Exception as error:  # told to whoever asks
        pipe.send(error)


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, settings, line, name)


def _measure(settings: Settings, line: ProgressLine, name: str) -> Timing:
    n_context, is_stock, target = CASES[name]
    at = replace(settings, n_context=n_context // (QUICK_SHARE if settings.is_quick else 1))
    with ExitStack() as stack:
        ours = stack.enter_context(EngineProcess(at, OURS))
        if is_stock:
            ways = {
                way: stack.enter_context(EngineProcess(at, options))
                for way, options in STOCK.items()
            }
            trials = {
                way: median(one.ms(None) for _ in range(N_TRIALS)) for way, one in ways.items()
            }
            baseline = min(trials, key=lambda way: trials[way])
            against = ways[baseline]
        else:
            baseline, against = "the same without capture", ours
        ours.ms("logits")
        pairs = line.pairs(
            name, lambda: against.ms(None), lambda: ours.ms("logits"), settings.n_pairs
        )
    return Timing(
        name=name,
        what=f"kqview's attention, logits of all heads, {at.n_context:,} tokens",
        baseline=f"llama.cpp without capture, {baseline}" if is_stock else baseline,
        work=f"a decoded token; {settings.shape}, {settings.n_threads} threads",
        pairs=pairs,
        target=settings.target(target),
        command=f"python bench/kernel.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
