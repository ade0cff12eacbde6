"""How does the cost of capture grow with the context?

The sweep of `kqview bench` (kqview.bench.sweep says how it pairs) on the random model: no capture,
each kind, chosen heads, reductions and top-k, with flash attention on and off, at 256 to 16,384
tokens. One --row is all captures at one context. `python bench/plot.py` draws the saved rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from console import main
from runs import open_engine

from kqview.bench.sweep import SweepPlan, fitting_contexts, sweep

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut, SweepRow

# name -> (flash attention, tokens of context)
CASES = {
    f"context-{n}-{'flash' if flash_attn else 'plain'}": (flash_attn, n)
    for flash_attn in (True, False)
    for n in (256, 1024, 4096, 16384)
}
WEIGHTS = {name: 50.0 + n_context * 0.03 for name, (_, n_context) in CASES.items()}
QUICK_SHARE = 16  # a quick run has this much less context
# A token takes a third of a second there: fewer and shorter runs keep a row below ten minutes.
LONG_CONTEXT, LONG_ROUNDS, LONG_TOKENS = 16384, 5, 8


def measure(settings: Settings, line: ProgressLine) -> Iterator[SweepRow | LeftOut]:
    """Measure the chosen contexts, one engine for each setting of flash attention."""

    def open_one(n_ctx: int, flash_attn: bool) -> Engine:
        return open_engine(settings, flash_attn=flash_attn, n_ctx=n_ctx)

    share = QUICK_SHARE if settings.is_quick else 1
    for flash_attn in (True, False):
        names = {
            CASES[name][1] // share: name
            for name in settings.chosen(CASES)
            if CASES[name][0] == flash_attn
        }
        if not names:
            continue
        with open_one(256, flash_attn) as engine:
            contexts, left_out = fitting_contexts(engine.model, list(names), trained_only=False)
        yield from left_out
        for n_context in contexts:
            is_long = n_context >= LONG_CONTEXT
            plan = SweepPlan(
                contexts=(n_context,),
                flash_attn=(flash_attn,),
                n_rounds=LONG_ROUNDS if is_long else settings.pairs_for(None),
                n_tokens=LONG_TOKENS if is_long else settings.n_tokens,
                now_s=settings.now_s,
            )
            line.start(names[n_context], plan.n_runs)
            yield from sweep(open_one, plan, lambda _, n_runs: line.tick(n_runs))


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
