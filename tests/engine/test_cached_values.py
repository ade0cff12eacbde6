"""Rows after a roll-back, a restore and a prefix reuse: those of the cache's content."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.cached_reference import CachedReference
from tests.support.rows import KINDS, Kind, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kqview import Engine

    from .conftest import MakeEngine

PROMPT = random_ids(40)
# llama.cpp's flash attention rounds V to F16, which shows from the second layer on, the more the
# sharper heads are; another column would be an error of 1.
LIMITS = {False: 2e-5, True: 3e-2}


def roll_back(engine: Engine) -> list[int]:
    with engine.generate(PROMPT, max_tokens=30, temperature=0, ignore_eos=True) as generation:
        for _ in range(3):
            next(generation)
    return engine.slots[0].tokens


def truncate(engine: Engine) -> list[int]:
    engine.generate(PROMPT, max_tokens=10, temperature=0, ignore_eos=True).read()
    engine.slots[0].truncate(33)
    return engine.slots[0].tokens


def restore(engine: Engine) -> list[int]:
    engine.generate(PROMPT, max_tokens=10, temperature=0, ignore_eos=True).read()
    blob = engine.slots[0].save()
    engine.generate(random_ids(60, seed=9), max_tokens=5).read()
    engine.slots[0].restore(blob, exact=True)
    return engine.slots[0].tokens


def reuse(engine: Engine) -> list[int]:
    engine.generate(PROMPT, max_tokens=10, temperature=0, ignore_eos=True).read()
    return PROMPT[:25]


def fork(engine: Engine) -> list[int]:
    engine.generate(PROMPT, max_tokens=10, temperature=0, ignore_eos=True, slot=1).read()
    return PROMPT[:36]


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [roll_back, truncate, restore, reuse, fork])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rows_equal_reference(
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
    architecture: str,
    before: Callable[[Engine], list[int]],
    kind: Kind,
    flash_attn: bool,
) -> None:
    model: Path = request.getfixturevalue(f"tiny_{architecture}")
    engine = make_engine(model, kv_type="f32", flash_attn=flash_attn, n_slots=2)
    kept = before(engine)
    generation = engine.generate(
        [*kept, 7, 9], max_tokens=6, capture=kind, temperature=0, ignore_eos=True, slot=0
    )
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(kept)
    reference = CachedReference(model)
    reference.decode_all([*kept, 7])
    found = reference.errors(9, tokens, kind)
    assert found[0] <= 2e-5
    assert found.max() <= LIMITS[flash_attn]
