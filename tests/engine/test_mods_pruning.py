"""Pruning while generating, with a real cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine, Generation
from kqview.mods.pruning import generate_pruned

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = "Mirelda found a silver key near the old bridge. Then Mirelda went home."


class Recording(Engine):
    """An engine that keeps its generations."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parts: list[Generation] = []

    def generate(self, *arguments: Any, **options: Any) -> Generation:
        self.parts.append(super().generate(*arguments, **options))
        return self.parts[-1]


@pytest.fixture
def engine() -> Iterator[Recording]:
    with Recording.demo(n_ctx=64, n_threads=1) as opened:
        yield opened


def test_every_pruning_is_one_shift_that_evaluates_one_token(engine: Recording):
    generation = generate_pruned(
        engine, PROMPT, max_tokens=120, temperature=0, ignore_eos=True, span_tokens=4, n_last=12
    )
    assert len(list(generation)) == 120
    usages = [part.usage for part in engine.parts[1:]]
    assert len(usages) == len(generation.removed) >= 4
    assert [usage.prompt_tokens - usage.cached_tokens for usage in usages] == [1] * len(usages)
    # Spans that are no neighbours leave several gaps, which that one shift closes.
    gaps = [np.count_nonzero(np.diff(removed) > 1) for removed in generation.removed]
    assert max(gaps) >= 2
    assert engine.slots[0].tokens == [generation.ids[i] for i in generation.places[:-1]]


def test_text_before_the_first_pruning_is_that_of_a_plain_generation(engine: Recording):
    plain = engine.generate(PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
    ids = plain.read() and plain.tokens
    pruned = generate_pruned(engine, PROMPT, max_tokens=60, temperature=0, ignore_eos=True)
    list(pruned)
    n_before = 64 - plain.usage.prompt_tokens
    assert pruned.tokens[: min(40, n_before)] == ids[: min(40, n_before)]
    assert pruned.removed
