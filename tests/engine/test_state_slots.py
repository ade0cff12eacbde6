"""Saved slots between engines with other numbers of slots, and beside slots that work."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import ses1
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine, Token

    from .conftest import MakeEngine

PROMPT = random_ids(40)
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def go_on(engine: Engine, slot: int, ids: list[int], **options: Any) -> list[Token]:
    generation = engine.generate(
        ids, slot=slot, max_tokens=6, top_logprobs=20, capture="logits", **GREEDY, **options
    )
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(ids) - 1
    return tokens


def assert_same(ours: list[Token], theirs: list[Token]) -> None:
    assert [(t.id, t.top_logprobs) for t in ours] == [(t.id, t.top_logprobs) for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(a.attention), np.asarray(b.attention))


def with_sequence(blob: bytes, sequence: int) -> bytes:
    read = ses1.decode(blob)
    read.sequence = sequence
    return read.encode()


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize(("n_from", "n_to"), [(4, 1), (1, 4), (4, 3), (2, 4)])
def test_blob_moves_between_engines_of_other_slots(
    make_engine: MakeEngine, tiny_llama: Path, n_from: int, n_to: int, flash_attn: bool
) -> None:
    options: dict[str, Any] = {"kv_type": "f32", "flash_attn": flash_attn}
    ours = make_engine(tiny_llama, n_slots=n_from, **options)
    theirs = make_engine(tiny_llama, n_slots=n_to, **options)
    for source in {0, n_from - 1}:
        ours.generate(PROMPT, slot=source, max_tokens=5, **GREEDY).read()
        ids = [*ours.slots[source].tokens, 7]
        blob = ours.slots[source].save()
        # One stream, whatever the context has: only the sequence tells where it comes from.
        assert struct.unpack_from("<iI", blob, ses1.offsets(blob)["sequence"]) == (source, 1)
        expected = go_on(ours, source, ids)
        for target in range(n_to):
            theirs.slots[target].restore(blob, exact=True)
            assert theirs.slots[target].save() == with_sequence(blob, target)
            assert_same(go_on(theirs, target, ids), expected)


def test_restore_changes_no_other_slot(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_slots=4, **EXACT)
    prompts = [random_ids(30 + i, seed=i) for i in range(4)]
    for i, ids in enumerate(prompts):
        engine.generate(ids, slot=i, max_tokens=1, **GREEDY).read()
    blobs = [slot.save() for slot in engine.slots]
    engine.slots[2].restore(blobs[0])
    engine.slots[1].clear()
    assert engine.slots[2].save() == with_sequence(blobs[0], 2)
    assert engine.slots[1].tokens == []
    for i in (0, 3):
        assert engine.slots[i].save() == blobs[i]
        assert engine.slots[i].tokens == prompts[i]


def test_slots_go_on_while_another_is_saved_and_restored(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_slots=3, run_ahead=0, **EXACT)
    alone = [t.id for t in engine.generate(PROMPT, slot=0, max_tokens=30, **GREEDY)]
    other = random_ids(50, seed=9)
    engine.generate(other, slot=1, max_tokens=1, **GREEDY).read()
    blob = engine.slots[1].save()
    engine.slots[0].clear()
    with engine.generate(PROMPT, slot=0, max_tokens=30, **GREEDY) as generation:
        ids: list[int] = []
        for i, token in enumerate(generation):
            ids.append(token.id)
            slot = engine.slots[1 + i % 2]
            slot.restore(blob)
            assert slot.save() == with_sequence(blob, slot.id)
            slot.truncate(10)
    assert ids == alone


def test_shifted_slot_is_saved_as_it_goes_on(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_slots=2, **EXACT)
    engine.generate(PROMPT, slot=0, max_tokens=1, **GREEDY).read()
    engine.slots[0].shift(5, 12)
    blob = engine.slots[0].save()
    assert ses1.decode(blob).positions == list(range(28))
    ids = [*engine.slots[0].tokens, 9]
    expected = go_on(engine, 0, ids, reuse="shift")
    engine.slots[1].restore(blob)
    assert_same(go_on(engine, 1, ids, reuse="shift"), expected)
