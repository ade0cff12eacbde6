"""``reuse="shift"``: the cache of what follows pruned tokens is kept, at its new positions.

The reference keeps what was computed while the pruned tokens were there (`CachedReference`), so the
rows are compared with what the cache holds, not with a fresh evaluation of the shorter prompt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import errors
from tests.support import encoder_gguf, shared_kv_gguf, tiny_gguf
from tests.support.cached_reference import CachedReference
from tests.support.rows import KINDS, Kind, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kqview import Engine, Generation

    from .conftest import MakeEngine

PROMPT = random_ids(120)
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SHIFT: dict[str, Any] = {**GREEDY, "reuse": "shift", "reuse_min_tokens": 4}
# llama.cpp's flash attention rounds V to F16, which shows from the second layer on, the more the
# sharper heads are; another column would be an error of 1.
LIMITS = {False: 2e-5, True: 3e-2}
Ranges = list[tuple[int, int]]
PRUNED: list[Ranges] = [
    [(10, 30)],
    [(0, 7)],
    [(5, 1), (20, 13), (60, 2), (90, 20)],
    [(3, 50), (57, 59)],
]


def prune(ids: list[int], ranges: Ranges) -> list[int]:
    left = list(ids)
    for start, n in reversed(ranges):
        del left[start : start + n]
    return left


def text_of(generation: Generation) -> list[tuple[int, float | None]]:
    return [(token.id, token.logprob) for token in generation]


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranges", PRUNED)
def test_rows_after_pruning_equal_reference(
    make_engine: MakeEngine, tiny_llama: Path, ranges: Ranges, kind: Kind, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=flash_attn)
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    reference = CachedReference(tiny_llama)
    reference.decode_all(PROMPT)
    for start, n in reversed(ranges):
        reference.discard(start, n)
    left = prune(PROMPT, ranges)
    generation = engine.generate([*left, 7, 9], max_tokens=6, capture=kind, **SHIFT)
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(left)
    assert generation.usage.prompt_tokens == len(left) + 2
    reference.decode(7)
    found = reference.errors(9, tokens, kind)
    assert found[0] <= 2e-5
    assert found.max() <= LIMITS[flash_attn]
    assert engine.slots[0].tokens == [*left, 7, 9, *(token.id for token in tokens[:-1])]


def test_pruning_again_and_again_equals_reference(
    make_engine: MakeEngine, tiny_qwen2: Path
) -> None:
    engine = make_engine(tiny_qwen2, **EXACT)
    reference = CachedReference(tiny_qwen2)
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    reference.decode_all(PROMPT)
    held = PROMPT
    for i, ranges in enumerate([[(4, 6)], [(30, 9), (50, 3)], [(0, 2)], [(60, 30)]]):
        for start, n in reversed(ranges):
            reference.discard(start, n)
        prompt = [*prune(held, ranges), i]
        tokens = list(engine.generate(prompt, max_tokens=4, capture="probs", **SHIFT))
        assert reference.errors(i, tokens, "probs").max() <= 2e-5
        held = engine.slots[0].tokens
        assert len(held) == reference.n_tokens


def test_pruned_prompt_that_ends_within_the_cache_decodes_its_last_token_again(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    left = prune(PROMPT[:100], [(10, 30)])
    generation = engine.generate(left, max_tokens=3, capture="scores", **SHIFT)
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(left) - 1
    reference = CachedReference(tiny_llama)
    reference.decode_all(PROMPT[:99])
    reference.discard(10, 30)
    assert reference.errors(PROMPT[99], tokens, "scores").max() <= 2e-5


def test_pruned_prompt_is_exact_unless_asked_otherwise(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    left = prune(PROMPT, [(10, 30)])
    options = {**GREEDY, "max_tokens": 8, "top_logprobs": 0}
    fresh = text_of(make_engine(tiny_llama, **EXACT).generate(left, **options))
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    shifted = engine.generate(left, **options | {"reuse": "shift"})
    kept = text_of(shifted)
    assert shifted.usage.cached_tokens == len(left) - 1
    assert kept != fresh  # it is approximate, and this model shows it
    # What the shift has kept is not taken for exact by those who want that.
    again = engine.generate(left, **options)
    assert [id_ for id_, _ in text_of(again)] == [id_ for id_, _ in fresh]
    assert again.usage.cached_tokens == 10
    exact = engine.generate(left, **options)
    np.testing.assert_allclose(
        [p for _, p in text_of(exact)], [p for _, p in fresh], rtol=0, atol=1e-4
    )
    assert exact.usage.cached_tokens == len(left) - 1


def test_slot_with_most_to_keep_is_taken_and_the_others_do_not_move(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_slots=3, **EXACT)
    others = random_ids(50, seed=5)
    for slot, ids in enumerate([others, PROMPT, others[:20]]):
        engine.generate(ids, max_tokens=1, slot=slot, **GREEDY).read()
    before = [engine.slots[i].save() for i in (0, 2)]
    generation = engine.generate(prune(PROMPT, [(0, 40)]), max_tokens=4, **SHIFT)
    generation.read()
    assert generation.slot == 1
    assert generation.usage.cached_tokens == 79
    assert [engine.slots[i].save() for i in (0, 2)] == before


@pytest.mark.parametrize(
    "kv_type", ["f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
)
def test_cache_of_another_slot_stays_bit_for_bit(
    make_engine: MakeEngine, tmp_path: Path, kv_type: str
) -> None:
    model = tiny_gguf.write_model(tmp_path / "wide.gguf", n_embd=128, n_head=2, n_head_kv=1)
    engine = make_engine(model, n_slots=2, kv_type=kv_type, flash_attn=True)
    for slot in (0, 1):
        engine.generate(PROMPT, max_tokens=1, slot=slot, **GREEDY).read()
    before = engine.slots[1].save()
    engine.generate(prune(PROMPT, [(10, 30)]), max_tokens=2, slot=0, **SHIFT).read()
    engine.slots[0].shift(3, 20)
    assert engine.slots[1].save() == before


def test_busy_slot_is_left_alone(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_slots=2, **EXACT)
    expected = [t.id for t in engine.generate(PROMPT, max_tokens=30, slot=0, **GREEDY)]
    running = engine.generate(PROMPT, max_tokens=30, slot=0, capture="probs", **GREEDY)
    first = next(running)
    engine.generate(PROMPT, max_tokens=1, slot=1, **GREEDY).read()
    engine.generate(prune(PROMPT, [(10, 30)]), max_tokens=4, **SHIFT).read()
    engine.slots[1].shift(2, 9)
    assert [first.id, *(token.id for token in running)] == expected


def test_short_runs_are_coincidences(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    for n_min, n_cached in ((20, 10), (19, 29), (1, 29)):
        engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
        ids = [*PROMPT[:10], *PROMPT[50:69], 7]
        options = SHIFT | {"reuse_min_tokens": n_min}
        generation = engine.generate(ids, max_tokens=1, **options)
        generation.read()
        assert generation.usage.cached_tokens == n_cached
        engine.slots[0].clear()


def test_what_follows_an_insertion_is_evaluated(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    ids = [*PROMPT[:10], 7, *PROMPT[10:]]
    generation = engine.generate(ids, max_tokens=8, **SHIFT)
    tokens = [token.id for token in generation]
    assert generation.usage.cached_tokens == 10
    fresh = make_engine(tiny_llama, **EXACT).generate(ids, max_tokens=8, **GREEDY)
    assert tokens == [token.id for token in fresh]


def test_penalties_see_the_pruned_prompt(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    options = {"repeat_penalty": 1e6, "repeat_last_n": -1, "max_tokens": 5}
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    left = prune(PROMPT, [(10, 80)])
    tokens = [token.id for token in engine.generate(left, **SHIFT, **options)]
    assert set(tokens).isdisjoint(left)
    assert len(set(tokens)) == 5


def test_cancelled_while_it_shifts_leaves_a_sound_slot(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    left = prune(PROMPT, [(10, 30)])
    with engine.generate(left, max_tokens=50, **SHIFT) as generation:
        taken = [next(generation).id for _ in range(3)]
    assert engine.slots[0].tokens == left + taken[:2]
    (token,) = engine.generate(left + taken, max_tokens=1, capture="probs", **SHIFT)
    reference = CachedReference(tiny_llama)
    reference.decode_all(PROMPT)
    reference.discard(10, 30)
    # The last token of the prompt was evaluated again, with what is left before it.
    reference.truncate(len(left) - 1)
    reference.decode_all([left[-1], *taken[:2]])
    assert reference.errors(taken[2], [token], "probs").max() <= 2e-5


def test_chat_takes_the_option(demo_engine: Engine) -> None:
    system = {"role": "system", "content": "You tell stories about animals and the forest."}
    turns = [
        {"role": "user", "content": "Tell me about the old owl near the river."},
        {"role": "assistant", "content": "The owl lived in a tall tree and saw everything."},
        {"role": "user", "content": "And what did the fox find behind the wooden bridge?"},
    ]
    demo_engine.chat([system, *turns], max_tokens=1).read()
    n_prompt = len(demo_engine.apply_chat_template([system, turns[2]]))
    generation = demo_engine.chat([system, turns[2]], max_tokens=4, reuse="shift")
    generation.read()
    assert generation.usage.cached_tokens == n_prompt - 1


@pytest.fixture
def demo_engine(make_engine: MakeEngine) -> Engine:
    pytest.importorskip("jinja2")
    from kqview.demo import MODEL_PATH

    return make_engine(MODEL_PATH)


@pytest.mark.parametrize(
    "options",
    [
        {"reuse": "other"},
        {"reuse": None},
        {"reuse": True},
        {"reuse_min_tokens": 0},
        {"reuse_min_tokens": -1},
        {"reuse_min_tokens": 2**31},
        {"reuse_min_tokens": 1.5},
    ],
)
def test_options_out_of_range_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(tiny_llama)
    with pytest.raises(errors.RequestError, match="reuse"):
        engine.generate([1, 2, 3], **options)
    assert engine.stats().n_requests == 0


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (tiny_gguf.write_mamba, "recurrent"),
        (shared_kv_gguf.write_gemma3n, "sliding windows"),
    ],
)
@pytest.mark.parametrize("options", [{"reuse": "shift"}, {"context_shift": True}])
def test_models_that_cannot_shift_are_refused_before_anything_runs(
    make_engine: MakeEngine,
    tmp_path: Path,
    write: Callable[[Path], Path],
    reason: str,
    options: dict[str, Any],
) -> None:
    engine = make_engine(write(tmp_path / "model.gguf"))
    with pytest.raises(errors.UnsupportedModel, match=reason):
        engine.generate([1, 2, 3], **options)
    assert engine.stats().n_requests == 0
    assert len(list(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True))) == 3


def test_cache_whose_keys_cannot_be_rotated_is_refused(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, kv_type="bf16")
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    with pytest.raises(errors.UnsupportedModel, match="bf16"):
        engine.generate(prune(PROMPT, [(10, 30)]), **SHIFT)
    with pytest.raises(errors.UnsupportedModel):
        engine.slots[0].shift(3, 20)
    assert engine.slots[0].tokens == PROMPT


def test_encoders_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(encoder_gguf.write_bert(tmp_path / "bert.gguf"))
    with pytest.raises(errors.UnsupportedModel):
        engine.generate([1, 2, 3], reuse="shift")
