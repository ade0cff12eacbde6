"""What does a prompt that arrives cost running texts, and what does sparing them cost the prompt?

Three slots generate greedily when a prompt of 512 tokens comes to the fourth. Its pieces go through
the model between the texts' steps; ``Engine(max_gap_ms=)`` sets how long they last. Two rows each:
the longest gap between two tokens of the texts against their own step, and the first token of the
prompt against that of the same prompt in an idle engine.
"""

from __future__ import annotations

import threading
import time
from statistics import median
from typing import TYPE_CHECKING

from console import attempt, main
from report import Timing
from runs import open_engine

from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine, Generation
    from kqview.bench.records import LeftOut

N_CONTEXT = 256
N_TEXTS = 3
N_ARRIVING = 512
N_STEPS = 16  # of the texts, at least
GAPS_MS = {"auto": None, "50": 50.0, "100": 100.0, "200": 200.0, "whole": 1e6}
WEIGHTS = {f"gaps-{name}-{of}": 60.0 for name in GAPS_MS for of in ("text", "prompt")}


class Runs:
    """Texts in an engine, and a prompt that comes to them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        n_vocab = engine.model.n_vocab
        self._texts = [prompt_ids(N_CONTEXT, n_vocab, seed=i) for i in range(N_TEXTS)]
        self._arriving = prompt_ids(N_ARRIVING, n_vocab, seed=99)
        self._n_arrived = 0
        self.first_ms()
        self.gap_ms()  # from here on the engine knows what steps take

    def first_ms(self) -> float:
        """First token of a prompt in an idle engine."""
        begun = time.monotonic()
        self._arrive().read()
        return (time.monotonic() - begun) * 1000

    def step_ms(self) -> float:
        """Median step of the texts."""
        return median(self._run(arrives=False)[0])

    def gap_ms(self) -> float:
        """Longest gap between two steps of the texts while a prompt arrives."""
        return max(self._run(arrives=True)[0])

    def late_ms(self) -> float:
        """First token of the prompt that arrives."""
        return self._run(arrives=True)[1]

    def _arrive(self) -> Generation:
        self._n_arrived += 1
        ids = [self._n_arrived, *self._arriving[1:]]
        return self._engine.generate(ids, slot=N_TEXTS, max_tokens=1)

    def _run(self, *, arrives: bool) -> tuple[list[float], float]:
        """Milliseconds between steps of the texts, and until the prompt's first token."""
        texts = [
            self._engine.generate(ids, slot=i, max_tokens=None, temperature=0.0, ignore_eos=True)
            for i, ids in enumerate(self._texts)
        ]
        for text in texts * 2:
            next(text)
        gaps: list[float] = []
        late: list[float] = []
        last = begun = time.monotonic()

        def read() -> None:
            self._arrive().read()
            late.append((time.monotonic() - begun) * 1000)

        reader = threading.Thread(target=read)
        if arrives:
            reader.start()
        while len(gaps) < N_STEPS or reader.is_alive():
            for text in texts:
                next(text)
            now = time.monotonic()
            gaps.append((now - last) * 1000)
            last = now
        for text in texts:
            text.close()
        return gaps, late[0] if late else 0.0


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen rows, with an engine for each gap."""
    for gap, value in GAPS_MS.items():
        names = settings.chosen([f"gaps-{gap}-{of}" for of in ("text", "prompt")])
        if not names:
            continue
        with open_engine(
            settings, flash_attn=True, n_slots=N_TEXTS + 1, n_ctx=N_CONTEXT + N_ARRIVING + 512,
            max_gap_ms=value,
        ) as engine:  # fmt: skip
            runs = Runs(engine)
            for name in names:
                yield attempt(name, _measure, settings, line, name, gap, runs)


def _measure(settings: Settings, line: ProgressLine, name: str, gap: str, runs: Runs) -> Timing:
    is_text = name.endswith("text")
    sides = (runs.step_ms, runs.gap_ms) if is_text else (runs.first_ms, runs.late_ms)
    return Timing(
        name=name,
        what=f"{'longest gap' if is_text else 'first token'}, max_gap_ms {gap}",
        baseline="the texts' own step" if is_text else "the prompt alone",
        work=f"a prompt of {N_ARRIVING} tokens comes to {N_TEXTS} texts",
        pairs=line.pairs(name, *sides, settings.pairs_for(None)),
        target=None,
        command=f"python bench/gaps.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
