"""What does keeping the cache of a pruned prompt cost, compared with evaluating the prompt again?

A tenth of the context is cut out of its middle. One run sends what is left with reuse="shift", so
that only the last token is evaluated; the other sends it with reuse="exact", which evaluates
everything after the cut. Both end with the first token, and both start with the whole context in
the slot; Slot.restore brings it back before each run, outside the measured time. The second row is
Slot.shift alone, which is what the first one adds to a token, compared with two memcpy runs of the
bytes it moves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from console import attempt, main
from report import Timing
from runs import open_engine

from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut

# Name: flash attention
REUSE = {"reuse-shift-flash": True, "reuse-shift-plain": False}
SHIFT = {"slot-shift-flash": True, "slot-shift-plain": False}
WEIGHTS = {**dict.fromkeys(REUSE, 90.0), **dict.fromkeys(SHIFT, 15.0)}


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen rows, one engine for each setting of flash attention."""
    for flash_attn in (True, False):
        names = [n for n in settings.chosen(WEIGHTS) if {**REUSE, **SHIFT}[n] == flash_attn]
        if not names:
            continue
        with open_engine(settings, flash_attn=flash_attn) as engine:
            runs = _Runs(settings, engine)
            for name in names:
                yield attempt(name, _measure, settings, line, runs, name)


class _Runs:
    """The slot with its whole context, and what is cut out of it."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._now_s = settings.now_s
        self._engine = engine
        self._slot = engine.slots[0]
        ids = prompt_ids(settings.n_context, engine.model.n_vocab)
        self.n_gone = len(ids) // 10
        self.n_keep = (len(ids) - self.n_gone) // 2
        self._left = ids[: self.n_keep] + ids[self.n_keep + self.n_gone :]
        engine.generate(ids, max_tokens=1, ignore_eos=True).read()
        self._blob = self._slot.save()
        self._source = np.frombuffer(self._blob, np.uint8)
        self._room = np.zeros_like(self._source)
        self.n_mb = len(self._blob) / 1e6

    def evaluate_ms(self) -> float:
        return self._ms(lambda: self._generate("exact"))

    def keep_ms(self) -> float:
        return self._ms(lambda: self._generate("shift"))

    def shift_ms(self) -> float:
        return self._ms(lambda: self._slot.shift(self.n_keep, self.n_gone))

    def copy_ms(self) -> float:
        start_s = self._now_s()
        for _ in range(2):
            np.copyto(self._room, self._source)
        return (self._now_s() - start_s) * 1e3

    def _generate(self, reuse: str) -> None:
        options = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "reuse": reuse}
        self._engine.generate(self._left, **options).read()  # pyright: ignore[reportArgumentType]

    def _ms(self, call: Callable[[], object]) -> float:
        self._slot.restore(self._blob, exact=True)
        start_s = self._now_s()
        call()
        return (self._now_s() - start_s) * 1e3


def _measure(settings: Settings, line: ProgressLine, runs: _Runs, name: str) -> Timing:
    is_reuse = name in REUSE
    ways = (runs.evaluate_ms, runs.keep_ms) if is_reuse else (runs.copy_ms, runs.shift_ms)
    pairs = line.pairs(name, *ways, settings.pairs_for(None))
    flash = f"flash attention {'on' if name.endswith('flash') else 'off'}"
    return Timing(
        name=name,
        what=f'reuse="shift", {flash}' if is_reuse else f"Slot.shift, {flash}",
        baseline='reuse="exact"' if is_reuse else f"two copies of {runs.n_mb:.0f} MB by memcpy",
        work=(
            f"the first token after {runs.n_gone} of {settings.n_context} tokens were cut out of "
            "the middle"
            if is_reuse
            else f"{runs.n_gone} of {settings.n_context} tokens cut out of the middle of a slot"
        ),
        pairs=pairs,
        target=None,
        command=f"python bench/reuse.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
