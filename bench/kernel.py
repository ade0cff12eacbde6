"""Does a token with all its attention cost more than llama.cpp's without any?

kqview's own attention of decode (``attention_kernel="kqview"``) with the logits of all layers and
heads, against the faster of llama.cpp's two ways without capture, flash attention on and off, and
against itself without capture. Each engine has a process of its own, and they are asked in turn:
several engines in one process would slow each other down.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import cells
from console import attempt, main
from processes import OwnProcess
from report import Timing
from runs import decode_runs, open_engine

from kqview.bench.pairs import step_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

# name -> (tokens of context, whether against llama.cpp, target, type of the cache)
CASES: Final[dict[str, tuple[int, bool, float, str]]] = {
    f"kernel-{n_context}-{'stock' if is_stock else 'own'}": (n_context, is_stock, target, "f16")
    for n_context, of_stock, of_own in ((1024, 1.0, 1.02), (4096, 0.75, 1.03), (16384, 0.5, 1.05))
    for is_stock, target in ((True, of_stock), (False, of_own))
} | {f"kernel-16384-{kv_type}": (16384, True, 0.5, kv_type) for kv_type in ("q8_0", "q4_0")}
# The first row of a context also evaluates its prompt, for each of the ways.
WEIGHTS = {
    name: 30.0 + n_context * 8e-3 if is_stock else 20.0 + n_context * 5e-4
    for name, (n_context, is_stock, *_) in CASES.items()
}
QUICK_SHARE = 16  # a quick run has this much less context
# A prompt of this length takes 24 layers more than four minutes, 6 of them about one.
LONG_CONTEXT, LONG_SHAPE = 16384, "6x16"
STOCK: Final = {
    "flash attention on": {"flash_attn": True, "attention_kernel": "llama.cpp"},
    "flash attention off": {"flash_attn": False, "attention_kernel": "llama.cpp"},
}
OURS: Final = {"flash_attn": True, "attention_kernel": "kqview"}
N_TRIALS = 3  # by which the faster of llama.cpp's ways is chosen


@contextmanager
def opened(settings: Settings, options: dict[str, Any]) -> Generator[Callable[[str | None], float]]:
    """An engine behind its prompt; what it yields returns the median milliseconds of a token."""
    with open_engine(settings, **options) as engine:
        prompt = cells.fill(
            settings, engine, flash_attn=options["flash_attn"], kv_type=options["kv_type"]
        )
        runs = decode_runs(settings, engine, prompt)

        def ms(capture: str | None) -> float:
            return step_ms(runs.stamps_s(settings.n_tokens, capture=capture), settings.n_skip)

        yield ms


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, settings, line, name)


def at_context(settings: Settings, n_context: int) -> Settings:
    """The settings of a row at *n_context* tokens; long prompts are those of a smaller model."""
    return replace(
        settings,
        n_context=n_context // (QUICK_SHARE if settings.is_quick else 1),
        shape=LONG_SHAPE if n_context >= LONG_CONTEXT else settings.shape,
    )


def _measure(settings: Settings, line: ProgressLine, name: str) -> Timing:
    n_context, is_stock, target, kv_type = CASES[name]
    at = at_context(settings, n_context)
    with ExitStack() as stack:
        cache = {"kv_type": kv_type}
        ours = stack.enter_context(OwnProcess(opened, at, OURS | cache))
        if is_stock:
            ways = {
                way: stack.enter_context(OwnProcess(opened, at, options | cache))
                for way, options in STOCK.items()
                if kv_type == "f16" or options["flash_attn"]  # else it takes no V of this type
            }
            trials = {
                way: median(one.ask(None) for _ in range(N_TRIALS)) for way, one in ways.items()
            }
            baseline = min(trials, key=lambda way: trials[way])
            against = ways[baseline]
        else:
            baseline, against = "the same without capture", ours
        ours.ask("logits")
        pairs = line.pairs(
            name, lambda: against.ask(None), lambda: ours.ask("logits"), settings.n_pairs
        )
    return Timing(
        name=name,
        what=f"kqview's attention, logits of all heads, {at.n_context:,} tokens"
        + ("" if kv_type == "f16" else f", cache in {kv_type}"),
        baseline=f"llama.cpp without capture, {baseline}" if is_stock else baseline,
        work=f"a decoded token; {at.shape}, {settings.n_threads} threads",
        pairs=pairs,
        target=settings.target(target),
        command=f"python bench/kernel.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
