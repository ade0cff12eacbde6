"""Automatic shift: a full slot discards tokens and goes on, and rows say which columns are left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, errors
from tests.support.cached_reference import CachedReference, row_errors
from tests.support.rows import KINDS, Kind, random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Token

    from .conftest import MakeEngine

N_CTX = 64
PROMPT = random_ids(40)
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": N_CTX}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SHIFT: dict[str, Any] = {**GREEDY, "context_shift": True}
# llama.cpp's flash attention rounds V to F16, which shows from the second layer on, the more the
# sharper heads are; another column would be an error of 1.
LIMITS = {False: 2e-5, True: 3e-2}


def check_rows(
    model: Path, tokens: list[Token], kind: Kind, n_keep: int, n_discard: int, limit: float
) -> CachedReference:
    """Every row against a reference that discards in step, and the columns it says it has."""
    reference = CachedReference(model)
    reference.decode_all(PROMPT[:-1])
    sequence = [*PROMPT, *(token.id for token in tokens)]
    n_gone = 0
    for token in tokens:
        fed = sequence[len(PROMPT) - 1 + token.index]
        if reference.n_tokens == N_CTX:
            reference.discard(n_keep, n_discard)
            n_gone += n_discard
        found = row_errors(reference.decode(fed), token, kind)
        assert found[0] <= 2e-5
        assert max(found) <= limit
        assert token.discarded == range(n_keep, n_keep + n_gone)
        indices = token.source_indices(np.arange(reference.n_tokens))
        kept = [i for i in range(len(PROMPT) + token.index) if i not in token.discarded]
        assert indices.tolist() == kept
    assert n_gone > 0
    return reference


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_after_shifts_equal_reference(
    make_engine: MakeEngine, tiny_llama: Path, kind: Kind, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, **EXACT | {"flash_attn": flash_attn})
    generation = engine.generate(
        PROMPT, max_tokens=90, capture=kind, n_keep=4, n_discard=20, **SHIFT
    )
    tokens = list(generation)
    assert len(tokens) == 90
    assert generation.finish_reason == "length"
    reference = check_rows(tiny_llama, tokens, kind, 4, 20, LIMITS[flash_attn])
    assert engine.slots[0].n_tokens == reference.n_tokens
    sequence = [*PROMPT, *generation.tokens]
    last = tokens[-1]
    held = [
        sequence[i] for i in last.source_indices(np.arange(np.asarray(last.attention).shape[-1]))
    ]
    assert engine.slots[0].tokens == held


@pytest.mark.parametrize(
    ("n_keep", "n_discard", "expected"),
    [
        (0, None, (0, 32)),
        (10, None, (10, 27)),
        (-1, None, (40, 12)),
        (-1, 1, (40, 1)),
        (0, 64, (0, 64)),
        (40, 24, (40, 24)),
    ],
)
def test_what_is_kept_and_discarded(
    make_engine: MakeEngine,
    tiny_qwen2: Path,
    n_keep: int,
    n_discard: int | None,
    expected: tuple[int, int],
) -> None:
    engine = make_engine(tiny_qwen2, **EXACT)
    tokens = list(
        engine.generate(
            PROMPT, max_tokens=60, capture="probs", n_keep=n_keep, n_discard=n_discard, **SHIFT
        )
    )
    check_rows(tiny_qwen2, tokens, "probs", *expected, 2e-5)


def test_full_slot_ends_a_generation_unless_it_may_shift(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    generation = engine.generate(PROMPT, max_tokens=1000, **GREEDY)
    ids = [token.id for token in generation]
    assert len(ids) == N_CTX - len(PROMPT) + 1
    assert generation.finish_reason == "length"
    assert all(token.discarded == range(0) for token in engine.generate(PROMPT, **GREEDY))
    longer = engine.generate(PROMPT, max_tokens=1000, **SHIFT)
    assert [token.id for token in longer][: len(ids)] == ids
    assert longer.usage.completion_tokens == 1000


def test_prompt_that_fills_the_slot_is_shifted(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    prompt = random_ids(N_CTX, seed=3)
    tokens = list(engine.generate(prompt, max_tokens=20, capture="probs", **SHIFT))
    assert [np.asarray(t.attention).shape[-1] for t in tokens[:3]] == [64, 33, 34]
    with pytest.raises(errors.RequestError, match="n_keep"):
        engine.generate(prompt, n_keep=-1, **SHIFT)
    with pytest.raises(errors.PromptTooLong):
        engine.generate([*prompt, 1], **SHIFT)


@pytest.mark.parametrize("run_ahead", [0, 8, 60])
@pytest.mark.parametrize("n_taken", [3, 20, 26, 40, 55])
def test_cancellation_leaves_what_was_taken_and_is_still_there(
    make_engine: MakeEngine, tiny_llama: Path, run_ahead: int, n_taken: int
) -> None:
    engine = make_engine(tiny_llama, run_ahead=run_ahead, **EXACT)
    with engine.generate(PROMPT, max_tokens=90, n_keep=4, n_discard=20, **SHIFT) as generation:
        for _ in range(n_taken):
            next(generation)
    held = engine.slots[0].tokens
    fed = [*PROMPT, *generation.tokens[:-1]]
    n_gone = len(fed) - len(held)
    assert 0 <= n_gone <= len(fed) - 4
    assert n_gone % 20 == 0 or len(held) == 4
    assert held == fed[:4] + fed[4 + n_gone :]
    # What is left is used by those who say that they may.
    again = engine.generate([*held, 5, 6], max_tokens=2, reuse="shift", **GREEDY)
    again.read()
    assert again.usage.cached_tokens == len(held)
    # The others evaluate what is behind the first place that lost something.
    engine.slots[0].clear()
    engine.generate(PROMPT, max_tokens=40, n_keep=4, n_discard=20, **SHIFT).read()
    left = engine.slots[0].tokens
    exact = engine.generate([*left, 5, 6], max_tokens=5, **GREEDY)
    ids = [token.id for token in exact]
    assert exact.usage.cached_tokens == 4
    fresh = make_engine(tiny_llama, **EXACT).generate([*left, 5, 6], max_tokens=5, **GREEDY)
    assert ids == [token.id for token in fresh]


def test_slots_shift_each_for_itself(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_slots=3, **EXACT)
    prompts = [random_ids(n, seed=n) for n in (10, 30, 50)]

    async def take(i: int) -> list[int]:
        generation = engine.generate(
            prompts[i], max_tokens=150, n_keep=i, capture="probs" if i == 1 else None, **SHIFT
        )
        return [token.id async for token in generation]

    async def take_all() -> list[list[int]]:
        return await asyncio.gather(*(take(i) for i in range(3)))

    together = asyncio.run(take_all())
    for i in range(3):
        alone = make_engine(tiny_llama, **EXACT)
        tokens = alone.generate(prompts[i], max_tokens=150, n_keep=i, **SHIFT)
        assert [token.id for token in tokens] == together[i]


def test_positions_of_the_largest_values_map_back(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    options = {"max_tokens": 60, "n_keep": 2, **SHIFT}
    whole = list(engine.generate(PROMPT, capture="probs", **options))
    engine.slots[0].clear()
    capture = Capture("probs", top_k=3)
    for full, token in zip(whole, engine.generate(PROMPT, capture=capture, **options), strict=True):
        best = np.argsort(-np.asarray(full.attention), axis=-1, kind="stable")[..., :3]
        np.testing.assert_array_equal(
            token.source_indices(np.asarray(token.attention_positions)), full.source_indices(best)
        )


@pytest.mark.parametrize(
    "options",
    [
        {"n_keep": -2},
        {"n_keep": 41},
        {"n_keep": 2**63},
        {"n_keep": 2**31 + 4},
        {"n_keep": 1.5},
        {"n_discard": 0},
        {"n_discard": -1},
        {"n_discard": 65},
        {"n_discard": 2**63},
        {"n_discard": 2**32 + 1},
        {"n_keep": 40, "n_discard": 25},
        {"n_keep": 2**31 - 1, "n_discard": 2**31 - 1},
        {"context_shift": 1},
        {"context_shift": None},
        {"context_shift": False, "n_keep": 1},
        {"context_shift": False, "n_discard": 5},
    ],
)
def test_ranges_that_no_slot_has_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    with pytest.raises(errors.RequestError, match=r"n_keep|n_discard|context_shift"):
        engine.generate(PROMPT, **SHIFT | options)
    assert engine.stats().n_requests == 0
