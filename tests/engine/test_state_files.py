"""Saved slots in files and stores: what the trailer knows of the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kqview import errors
from kqview.state import SessionStore, read_state, write_state
from tests.support import tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

PROMPT = random_ids(20)


def test_file_of_a_slot_restores_in_another_engine(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    first = make_engine(tiny_llama).slots[0]
    second = make_engine(tiny_llama).slots[0]
    path = tmp_path / "slot.ses1"
    engine = make_engine(tiny_llama)
    list(engine.attend(PROMPT))
    blob = engine.slots[0].save()
    n_bytes = write_state(path, blob, engine.slots[0].state_facts())
    # Through the reader, which checks the trailer, and as it lies on the disk.
    assert second.restore(read_state(path, second.state_facts())) == len(blob)
    assert second.save() == blob
    assert len(path.read_bytes()) == n_bytes > len(blob)
    assert first.restore(path.read_bytes()) == len(blob)
    assert first.save() == blob


def test_file_keeps_what_a_blob_cannot_hold(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    engine, path = make_engine(tiny_llama), tmp_path / "slot.ses1"
    slot = engine.slots[0]
    list(engine.attend(PROMPT))
    for n_exact, act in ((20, lambda: None), (4, lambda: slot.shift(4, 6))):
        act()
        assert slot.n_exact == n_exact
        assert slot.save_file(path) == path.stat().st_size
        other = make_engine(tiny_llama).slots[0]
        assert other.restore_file(path) == len(slot.save())
        assert (other.save(), other.n_exact) == (slot.save(), n_exact)
    path.write_bytes(slot.save())  # a raw blob: nobody knows
    assert other.restore_file(path) == len(slot.save())
    assert other.n_exact == 0


def test_file_is_refused_where_a_blob_would_be_taken(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "slot.ses1"
    engine = make_engine(tiny_llama)
    list(engine.attend(PROMPT))
    engine.slots[0].save_file(path)
    twin = tiny_gguf.write_preset(tmp_path / "twin.gguf", "tiny_llama", seed=5)
    lora = tiny_gguf.write_lora(tmp_path / "lora.gguf", "tiny_llama", merged=tmp_path / "merged")
    for other in (make_engine(twin), make_engine(tiny_llama, lora=lora)):
        with pytest.raises(errors.StateMismatch, match="another model or of other LoRA"):
            other.slots[0].restore_file(path)
        assert other.slots[0].tokens == []
        assert other.slots[0].restore(engine.slots[0].save()) > 0


def test_model_that_was_replaced_on_disk_is_not_vouched_for(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = tiny_gguf.write_preset(tmp_path / "model.gguf", "tiny_llama")
    engine = make_engine(model)
    list(engine.attend(PROMPT))
    tiny_gguf.write_preset(tmp_path / "new.gguf", "tiny_llama", seed=5).replace(model)
    with pytest.raises(errors.StateError, match="open the engine again"):
        engine.slots[0].save_file(tmp_path / "slot.ses1")
    assert not (tmp_path / "slot.ses1").exists()
    assert engine.slots[0].save()  # which says nothing of the model


def test_other_weights_of_the_same_shape_are_found_by_the_trailer_alone(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "slot.ses1"
    engine = make_engine(tiny_llama)
    list(engine.attend(PROMPT))
    slot = engine.slots[0]
    write_state(path, slot.save(), slot.state_facts())
    model = tiny_gguf.write_preset(tmp_path / "other.gguf", "tiny_llama", seed=5)
    other = make_engine(model).slots[0]
    with pytest.raises(errors.StateMismatch, match="another model"):
        read_state(path, other.state_facts())
    with pytest.raises(errors.StateMismatch, match="another model"):
        other.restore(path.read_bytes())
    assert other.tokens == []
    # Without it nothing tells them apart.
    assert other.restore(slot.save()) > 0


def test_adapters_are_part_of_the_facts(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    adapter = tiny_gguf.write_lora(
        tmp_path / "lora.gguf", "tiny_llama", merged=tmp_path / "merged.gguf"
    )
    facts = [
        make_engine(tiny_llama, **options).slots[0].state_facts().model
        for options in ({}, {"lora": adapter}, {"lora": (adapter, 0.5)}, {"lora": adapter})
    ]
    assert facts[1] == facts[3]
    assert len(set(facts)) == 3


def test_changed_file_is_refused_and_changes_nothing(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    path = tmp_path / "slot.ses1"
    engine = make_engine(tiny_llama)
    list(engine.attend(PROMPT))
    slot = engine.slots[0]
    blob = slot.save()
    write_state(path, blob, slot.state_facts())
    changed = bytearray(path.read_bytes())
    changed[len(blob) - 3] ^= 1  # a value, still finite: the checksum alone can see it
    with pytest.raises(errors.StateFormatError, match="checksum"):
        slot.restore(bytes(changed))
    assert slot.save() == blob


def test_sessions_of_one_slot_do_not_mix(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_llama)
    slot = engine.slots[0]
    store = SessionStore(tmp_path, max_sessions=1)
    prompts = {name: random_ids(20 + i, seed=i) for i, name in enumerate("abc")}
    blobs: dict[str, bytes] = {}
    for name, ids in prompts.items():
        list(engine.attend(ids))
        store.save(name, slot)
        blobs[name] = slot.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ses1", "b.ses1"]
    for name in "cab":
        assert store.restore(name, slot) == len(blobs[name])
        assert slot.tokens == prompts[name]
        assert slot.save() == blobs[name]
