"""How much slower is a prompt when its last row, or all its rows, are captured?

And how much faster than with llama.cpp's flash attention (`prefill-kernel-...`, by type of cache)?

One engine, two for the last question; every prompt begins with a different id, so the slot's cache
never helps. A pair is a prompt with capture and one without, timed from the call to the first token
in Python (or to the last block of rows), including the graphs that llama.cpp builds when the
capture changes. Blocks of rows are dropped as they come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from console import attempt, main
from report import Timing
from runs import PrefillRuns, open_engine

from kqview import Capture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut


@dataclass(frozen=True)
class Case:
    """A way to capture; with *attend* through `Engine.attend`, else through `generate`."""

    what: str
    flash_attn: bool
    capture: Capture
    target: float | None = None
    attend: bool = False


# Prompts take long: rows without target are for information and have few pairs.
CASES = {
    "prefill-flash-logits": Case("logits of the last row", True, Capture("logits"), 1.02),
    "prefill-plain-logits": Case("logits of the last row", False, Capture("logits")),
    "prefill-flash-attend-logits": Case(
        "logits of all rows, attend", True, Capture("logits"), 1.25, attend=True
    ),
    "prefill-flash-attend-probs": Case(
        "probs of all rows, attend", True, Capture("probs"), attend=True
    ),
    "prefill-plain-attend-logits": Case(
        "logits of all rows, attend", False, Capture("logits"), attend=True
    ),
    "prefill-flash-prompt-logits": Case(
        "logits of all rows, Capture(prompt=True)", True, Capture("logits", prompt=True), 1.25
    ),
}
KERNEL_CASES = {f"prefill-kernel-{kv_type}": kv_type for kv_type in ("f16", "q8_0")}
MOST_PAIRS = 6
WEIGHTS = {name: 180.0 if case.target else 60.0 for name, case in CASES.items()} | dict.fromkeys(
    KERNEL_CASES, 180.0
)


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases, one engine for each setting of flash attention."""
    for flash_attn in (True, False):
        names = [n for n in settings.chosen(CASES) if CASES[n].flash_attn == flash_attn]
        if not names:
            continue
        with open_engine(settings, flash_attn=flash_attn) as engine:
            runs = PrefillRuns(settings, engine)
            runs.ms(None)  # brings the weights into memory
            for name in names:
                yield attempt(name, _measure, settings, line, runs, name)
    for name in settings.chosen(KERNEL_CASES):
        yield attempt(name, _measure_kernel, settings, line, name)


def _measure_kernel(settings: Settings, line: ProgressLine, name: str) -> Timing:
    options = {"flash_attn": True, "kv_type": KERNEL_CASES[name]}
    with (
        open_engine(settings, **options) as ours,
        open_engine(settings, attention_kernel="llama.cpp", **options) as stock,
    ):
        runs, other = PrefillRuns(settings, ours), PrefillRuns(settings, stock)
        pairs = line.pairs(name, lambda: other.ms(None), lambda: runs.ms(None), settings.n_pairs)
    return Timing(
        name=name,
        what=f"kqview's attention, {KERNEL_CASES[name]} cache",
        baseline="llama.cpp's flash attention",
        work=f"a prompt of {settings.n_context} tokens",
        pairs=pairs,
        target=None,
        command=f"python bench/prefill.py --row {name} {settings.flags}",
    )


def _measure(settings: Settings, line: ProgressLine, runs: PrefillRuns, name: str) -> Timing:
    case = CASES[name]
    n_pairs = settings.n_pairs if case.target else min(settings.n_pairs, MOST_PAIRS)
    run = runs.attend_ms if case.attend else runs.ms
    pairs = line.pairs(name, lambda: runs.ms(None), lambda: run(case.capture), n_pairs)
    return Timing(
        name=name,
        what=f"{case.what}, all heads; flash attention {'on' if case.flash_attn else 'off'}",
        baseline="no capture",
        work=f"a prompt of {settings.n_context} tokens",
        pairs=pairs,
        target=settings.target(case.target),
        command=f"python bench/prefill.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
