"""How much dearer is a decoded token when its attention is captured?

One engine, one prompt that stays in its slot. A pair is a short greedy generation with capture and
one without; its ratio is that of their median step times, as tokens arrive in Python. Changing the
capture makes llama.cpp build new graphs: those are the first steps, which are not counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from console import main
from harness import Pairs, alternate, step_ms
from report import Timing
from runs import CHOSEN_HEADS, CHOSEN_HEADS_QUICK, DecodeRuns, open_engine

from kqview import Capture

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from settings import Settings


@dataclass(frozen=True)
class Case:
    """A way to capture."""

    what: str
    flash_attn: bool
    capture: Capture
    target: float | None = None


CASES = {
    "decode-flash-logits": Case("logits, all heads", True, Capture("logits"), 1.05),
    "decode-flash-scores": Case("scores, all heads", True, Capture("scores")),
    "decode-flash-probs": Case("probs, all heads", True, Capture("probs")),
    "decode-flash-float16": Case(
        "logits as float16, all heads", True, Capture("logits", dtype="float16")
    ),
    "decode-flash-10-heads": Case("logits of 10 chosen heads", True, CHOSEN_HEADS),
    "decode-plain-logits": Case("logits, all heads", False, Capture("logits"), 1.02),
    "decode-plain-probs": Case("probs, all heads", False, Capture("probs"), 1.02),
}
WEIGHTS = {name: 16.0 if case.target else 8.0 for name, case in CASES.items()}


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing]:
    """Measure the chosen cases, one engine for each setting of flash attention."""
    for flash_attn in (True, False):
        names = [n for n in settings.chosen(CASES) if CASES[n].flash_attn == flash_attn]
        if not names:
            continue
        with open_engine(settings, flash_attn=flash_attn) as engine:
            runs = DecodeRuns(settings, engine)
            for name in names:
                line.start(name, settings.pairs_for(CASES[name].target))
                yield _measure_case(settings, line, runs, name)


def _measure_case(settings: Settings, line: ProgressLine, runs: DecodeRuns, name: str) -> Timing:
    case = CASES[name]
    capture = case.capture
    if settings.is_quick and capture is CHOSEN_HEADS:
        capture = CHOSEN_HEADS_QUICK

    def run(capture: Capture | None) -> float:
        return step_ms(runs.stamps_s(settings.n_tokens, capture=capture), settings.n_skip)

    run(None), run(capture)  # memory of the first blocks and graphs
    pairs = Pairs()
    n_pairs = settings.pairs_for(case.target)
    for baseline, candidate in alternate(lambda: run(None), lambda: run(capture), n_pairs):
        pairs.add(baseline, candidate)
        line.tick()
    flash = "on" if case.flash_attn else "off"
    return Timing(
        name=name,
        what=f"{case.what}; flash attention {flash}",
        baseline="no capture",
        work=f"a decoded token at {settings.n_context} tokens of context",
        pairs=pairs,
        target=settings.target(case.target),
        command=f"python bench/decode.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
