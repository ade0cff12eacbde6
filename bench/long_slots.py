"""How do slots with long contexts decode together, compared with llama-server's?

4 and 16 slots with a prompt of 4,096 tokens each, greedy, beside the stock llama-server with as
many slots, with flash attention on or off, whichever is faster in a trial. The prompt is evaluated
once and its cells are restored into every slot, on both sides from a file in the cache folder. A
figure is the median step while all slots generate, divided by their number: llama-server's by the
timings that it reports with each token, so without HTTP; ours as tokens arrive in Python.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

import cells
from console import attempt, main
from report import Timing
from runs import LockstepRuns, open_engine
from slots import ServerRuns

from kqview import Capture
from kqview.bench.pairs import step_ms

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

N_CONTEXT, QUICK_CONTEXT = 4096, 256
N_TOKENS = 12  # of a run; a step of 16 slots takes half a second
N_TRIALS = 2  # of each of llama-server's ways
TARGET = 1 / 1.5
# name -> (slots, capture, target)
CASES: Final[dict[str, tuple[int, Capture | None, float | None]]] = {
    f"long-slots-{n_slots}{suffix}": (n_slots, capture, target)
    for n_slots in (4, 16)
    for suffix, capture, target in (("", None, TARGET), ("-logits", Capture("logits"), None))
}
WEIGHTS = {"long-slots-4": 110.0, "long-slots-4-logits": 40.0, "long-slots-16": 200.0,
           "long-slots-16-logits": 100.0}  # fmt: skip
STOCK = {"on": True, "off": False}


class LongServerRuns(ServerRuns):
    """One start of the stock llama-server, the same cells in all its slots."""

    def __init__(
        self, settings: Settings, prompts: Sequence[list[int]], *, flash_attn: bool
    ) -> None:
        super().__init__(
            settings, prompts, N_TOKENS, flash_attn=flash_attn,
            more_flags=("--slot-save-path", cells.folder()),
        )  # fmt: skip
        self._file = f"{cells.name(settings, flash_attn=flash_attn)}.llama-server"

    def prepare(self) -> None:
        """Bring the cells into the slots, from the file or by evaluating the prompt."""
        file = {"filename": self._file}
        others = range(len(self._prompts))
        try:
            self.post("/slots/0?action=restore", file).close()
        except RuntimeError:  # not there yet, or of another version
            body = {"prompt": self._prompts[0], "id_slot": 0, "n_predict": 1, "cache_prompt": True}
            self.post("/completion", body).close()
            self.post("/slots/0?action=save", file).close()
        for i in others[1:]:
            self.post(f"/slots/{i}?action=restore", file).close()

    def ms(self) -> float:
        """Milliseconds a token, tokens of all slots counted."""
        runs = self.generate()
        if any(events[0].n_evaluated > 1 for events in runs):
            raise RuntimeError("llama-server evaluated a prompt that it had restored")
        # Slots begin one after the other.
        from_s = max(events[0].at_s for events in runs)
        until_s = min(events[-1].at_s for events in runs)
        steps_ms = [
            (after.spent_ms - before.spent_ms) / (after.n_tokens - before.n_tokens)
            for events in runs
            for before, after in pairwise(events)
            if from_s <= before.at_s and after.at_s <= until_s and after.n_tokens > before.n_tokens
        ]
        return median(steps_ms) / len(runs)


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases."""
    at = replace(settings, n_context=QUICK_CONTEXT if settings.is_quick else N_CONTEXT)
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, at, line, name, f"{name} {settings.flags}")


def _measure(settings: Settings, line: ProgressLine, name: str, words: str) -> Timing:
    n_slots, capture, target = CASES[name]
    n_ctx = settings.n_context + 256
    with open_engine(settings, flash_attn=True, n_slots=n_slots, n_ctx=n_ctx) as engine:
        prompts = [cells.fill(settings, engine, flash_attn=True)] * n_slots
        runs = LockstepRuns(settings, engine, n_slots, prompts=prompts)

        def ours() -> float:
            return step_ms(runs.stamps_s(N_TOKENS, capture), settings.n_skip) / n_slots

        ours()
        way = _faster_way(settings, n_slots, tuple(prompts[0]))
        with LongServerRuns(settings, prompts, flash_attn=STOCK[way]) as server:
            server.ms()
            pairs = line.pairs(name, server.ms, ours, settings.pairs_for(target))
    return Timing(
        name=name,
        what=f"{n_slots} slots" + ("" if capture is None else ", logits of all heads"),
        baseline=f"llama-server (stock build), {n_slots} slots, flash attention {way}",
        work=f"a decoded token at {settings.n_context:,} tokens of context in every slot, "
        f"tokens of all slots counted; {settings.shape}, {settings.n_threads} threads",
        pairs=pairs,
        target=settings.target(target),
        command=f"python bench/long_slots.py --row {words}",
    )


@cache
def _faster_way(settings: Settings, n_slots: int, prompt: tuple[int, ...]) -> str:
    """The way of llama-server that takes less time for a token."""
    trials: dict[str, float] = {}
    for way, flash_attn in STOCK.items():
        with LongServerRuns(settings, [list(prompt)] * n_slots, flash_attn=flash_attn) as server:
            server.ms()
            trials[way] = min(server.ms() for _ in range(N_TRIALS))
    return min(trials, key=lambda way: trials[way])


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
