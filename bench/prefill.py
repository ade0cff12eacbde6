"""How much dearer is a prompt when the attention of its last row is captured?

One engine; every prompt begins with another id, so nothing of it is in the slot. A pair is a prompt
with capture and one without, timed from the call of `generate` to the first token in Python: the
graphs that a change of capture makes llama.cpp build are part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from console import main
from harness import Pairs, alternate
from report import Timing
from runs import PrefillRuns, open_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from settings import Settings

# name -> (flash attention, target). Prompts take long: the second row is for information.
CASES = {"prefill-flash-logits": (True, 1.02), "prefill-plain-logits": (False, None)}
MOST_PAIRS = 6  # of that one
WEIGHTS = {"prefill-flash-logits": 120.0, "prefill-plain-logits": 40.0}


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing]:
    """Measure the chosen cases."""
    for name in settings.chosen(CASES):
        flash_attn, target = CASES[name]
        n_pairs = settings.n_pairs if target else min(settings.n_pairs, MOST_PAIRS)
        line.start(name, n_pairs)
        with open_engine(settings, flash_attn=flash_attn) as engine:
            runs = PrefillRuns(settings, engine)
            runs.ms(None)  # brings the weights into memory
            pairs = Pairs()
            for baseline, candidate in alternate(
                lambda runs=runs: runs.ms(None),
                lambda runs=runs: runs.ms("logits"),
                n_pairs,
            ):
                pairs.add(baseline, candidate)
                line.tick()
        flash = "on" if flash_attn else "off"
        yield Timing(
            name=name,
            what=f"logits of the last row, all heads; flash attention {flash}",
            baseline="no capture",
            work=f"a prompt of {settings.n_context} tokens",
            pairs=pairs,
            target=settings.target(target),
            command=f"python bench/prefill.py --row {name} {settings.flags}",
        )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
