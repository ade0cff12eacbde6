"""How much slower is a decoded token when its attention is captured?

One engine, one prompt that stays in its slot. A pair is a short greedy generation with capture and
one without; its ratio is that of their median step times, as tokens arrive in Python. Changing the
capture makes llama.cpp build new graphs in the first steps, which do not count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from console import attempt, main
from report import Timing
from runs import decode_runs, open_engine

from kqview import Capture
from kqview.bench.pairs import Pairs, alternate, step_ms
from kqview.bench.sweep import chosen_heads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut
    from kqview.bench.sweep import DecodeRuns


@dataclass(frozen=True)
class Case:
    """A way to capture, against no capture or *baseline*.

    None stands for ten chosen heads, which ones depends on the model.
    """

    what: str
    flash_attn: bool
    capture: Capture | None
    target: float | None = None
    baseline: Capture | None = None


CASES = {
    "decode-flash-logits": Case("logits, all heads", True, Capture("logits"), 1.05),
    "decode-flash-scores": Case("scores, all heads", True, Capture("scores")),
    "decode-flash-probs": Case("probs, all heads", True, Capture("probs")),
    "decode-flash-float16": Case(
        "logits as float16, all heads", True, Capture("logits", dtype="float16")
    ),
    "decode-flash-10-heads": Case("logits of 10 chosen heads", True, None),
    "decode-flash-logits-mean-heads": Case(
        "logits, mean over heads", True, Capture("logits", reduce="mean_heads")
    ),
    "decode-flash-probs-mean": Case(
        "probs, mean over layers and heads", True, Capture("probs", reduce="mean")
    ),
    "decode-flash-top-8": Case("probs, the 8 largest of each row", True, Capture("probs", top_k=8)),
    # Expected: a sum is read from the row that is still in the cache, and saves writing it.
    "decode-flash-spans": Case(
        "probs, sums over two spans of each row",
        True,
        Capture("probs", spans=[(0, 512), (512, None)]),
        target=1.00,
        baseline=Capture("probs"),
    ),
    "decode-plain-logits": Case("logits, all heads", False, Capture("logits"), 1.02),
    "decode-plain-probs": Case("probs, all heads", False, Capture("probs"), 1.02),
}
WEIGHTS = {name: 16.0 if case.target else 8.0 for name, case in CASES.items()}


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases, one engine for each setting of flash attention."""
    for flash_attn in (True, False):
        names = [n for n in settings.chosen(CASES) if CASES[n].flash_attn == flash_attn]
        if not names:
            continue
        with open_engine(settings, flash_attn=flash_attn) as engine:
            runs = decode_runs(settings, engine)
            for name in names:
                line.start(name, settings.pairs_for(CASES[name].target))
                yield attempt(name, _measure, settings, line, engine, runs, name)


def _measure(
    settings: Settings, line: ProgressLine, engine: Engine, runs: DecodeRuns, name: str
) -> Timing:
    case = CASES[name]
    capture = case.capture or chosen_heads(engine.model)

    def run(capture: Capture | None) -> float:
        return step_ms(runs.stamps_s(settings.n_tokens, capture=capture), settings.n_skip)

    run(case.baseline), run(capture)  # memory of the first blocks and graphs
    pairs = Pairs()
    n_pairs = settings.pairs_for(case.target)
    for baseline, candidate in alternate(lambda: run(case.baseline), lambda: run(capture), n_pairs):
        pairs.add(baseline, candidate)
        line.tick()
    flash = "on" if case.flash_attn else "off"
    return Timing(
        name=name,
        what=f"{case.what}; flash attention {flash}",
        baseline="whole rows" if case.baseline else "no capture",
        work=f"a decoded token at {settings.n_context} tokens of context",
        pairs=pairs,
        target=settings.target(case.target),
        command=f"python bench/decode.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
