"""What does an edit cost a decoded token, and a prompt?

Greedy, flash attention on, no capture. Two prompts of the same ids stay in two slots, one of them
evaluated with the edits; a generation in each is timed in turn, from its fourth token on, because
another plan of nodes makes llama.cpp build its graphs anew. Prompts are new each time.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import numpy as np
from console import attempt, main
from report import Timing
from runs import open_engine

from kqview import Edit
from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut

N_TOKENS = 36
N_BUILDING = 3  # tokens
EDITS = {
    "add": "a vector added behind every layer",
    "heads": "a head of every layer scaled",
    "bias": "a span's attention boosted, all layers and heads",
    "block": "a span hidden, all layers and heads",
    "bias-heads": "a span's attention boosted for one head of every layer",
}
TARGETS = {
    **{f"edits-{name}": 1.03 for name in EDITS},
    "edits-add": 1.02,
    "edits-heads": 1.02,
    "edits-bias-heads": None,
    "edits-prefill-bias": 1.03,
    "edits-prefill-bias-heads": 1.3,
}
WEIGHTS = dict.fromkeys(TARGETS, 60.0)


def edits_of(engine: Engine, name: str) -> list[Edit]:
    """The edits of a row."""
    layers = engine.model.attention_layers
    rng = np.random.default_rng(0)
    return [
        {
            "add": lambda: Edit.add(
                rng.normal(size=engine.model.n_embd) * 1e-3, range(engine.model.n_layer)
            ),
            "heads": lambda: Edit.scale_heads({(layer, 1): 0.5 for layer in layers}),
            "bias": lambda: Edit.attention_bias([(8, 264)], 1.5),
            "block": lambda: Edit.block((300, None), (8, 264)),
            "bias-heads": lambda: Edit.attention_bias([(8, 264)], 1.5, layers=layers, heads=[1]),
        }[name]()
    ]


class EditRuns:
    """Generations in two slots of one engine, one of them with edits."""

    def __init__(self, settings: Settings, engine: Engine, name: str) -> None:
        self._now_s = settings.now_s
        self._engine = engine
        self._edits = edits_of(engine, name)
        self._prompt = prompt_ids(settings.n_context, engine.model.n_vocab)
        self._n_prompts = 0

    def decode_ms(self, slot: int) -> float:
        """Median milliseconds of a token; in slot 1 with the edits."""
        generation = self._engine.generate(
            self._prompt, slot=slot, max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True,
            edits=self._edits if slot == 1 else None,
        )  # fmt: skip
        at = [self._now_s() for _ in generation][N_BUILDING:]
        return statistics.median(np.diff(at)) * 1000.0

    def prefill_ms(self, slot: int) -> float:
        """Milliseconds from the call to the first token of a new prompt."""
        self._n_prompts += 1
        prompt = [self._n_prompts % self._engine.model.n_vocab, *self._prompt[1:]]
        edits = self._edits if slot == 1 else None
        # The graphs of these edits exist before the time begins.
        self._engine.generate(prompt[:40] * 10, slot=slot, max_tokens=1, edits=edits).read()
        start = self._now_s()
        self._engine.generate(prompt, slot=slot, max_tokens=1, edits=edits).read()
        return (self._now_s() - start) * 1000.0


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the chosen rows."""
    names = settings.chosen(TARGETS)
    n_ctx = settings.n_context + N_TOKENS + 8
    with open_engine(settings, flash_attn=True, n_slots=2, n_ctx=n_ctx) as engine:
        for name in names:
            yield attempt(name, _measure, settings, line, name, engine)


def _measure(settings: Settings, line: ProgressLine, name: str, engine: Engine) -> Timing:
    is_prefill = name.startswith("edits-prefill-")
    edit = name.removeprefix("edits-prefill-" if is_prefill else "edits-")
    runs = EditRuns(settings, engine, edit)
    ms = runs.prefill_ms if is_prefill else runs.decode_ms
    for slot in (0, 1):
        ms(slot)
    target = TARGETS[name]
    return Timing(
        name=name,
        what=EDITS[edit],
        baseline="no edits",
        work=f"{'a prompt of' if is_prefill else 'a decoded token at'} {settings.n_context} tokens",
        pairs=line.pairs(name, lambda: ms(0), lambda: ms(1), settings.pairs_for(target)),
        target=settings.target(target),
        command=f"python bench/edits.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
