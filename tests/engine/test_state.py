"""Slot.save and restore: the bytes, and that a restored slot goes on as the saved one would have.

Blobs that are refused are in test_state_refused.py.
"""

from __future__ import annotations

import json
import mmap
import struct
import subprocess
import sys
import threading
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import errors
from kqview.state import SessionStore, inspect, read_state, write_state
from tests.support import ses1, tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine, Token
    from tests.engine.conftest import MakeEngine

PROMPT = random_ids(40)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# Identical ids and logits need arithmetic that does not depend on the cache's rounding.
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
KINDS_OF_CACHE = [
    {"kv_type": kv_type, "flash_attn": flash_attn}
    for kv_type in ("f32", "f16", "bf16")
    for flash_attn in (False, True)
] + [{"kv_type": "q8_0", "flash_attn": True}, {"kv_type": "q4_1", "flash_attn": True}]


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32: a block of the quantised caches."""
    return tiny_gguf.write_model(
        tmp_path_factory.mktemp("model") / "wide.gguf", arch="llama", n_embd=128
    )


def go_on(
    engine: Engine, ids: list[int], n: int = 8, *, slot: int = 0, **options: Any
) -> list[Token]:
    """Greedy tokens after *ids*, with logprobs of the whole top and every attention row."""
    generation = engine.generate(
        ids, slot=slot, max_tokens=n, top_logprobs=20, capture="logits", **GREEDY, **options
    )
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(ids) - 1
    return tokens


def fill(engine: Engine, n: int = 12) -> list[int]:
    """Generate into slot 0; returns its ids and the one that was sampled but not decoded."""
    return PROMPT + [token.id for token in engine.generate(PROMPT, max_tokens=n, **GREEDY)]


def assert_same(ours: list[Token], theirs: list[Token]) -> None:
    assert [t.id for t in ours] == [t.id for t in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a.top_logprobs == b.top_logprobs  # equal to the bit
        assert a.attention is not None
        assert b.attention is not None
        np.testing.assert_array_equal(a.attention, b.attention)


@pytest.mark.parametrize("cache", KINDS_OF_CACHE, ids=lambda c: "-".join(map(str, c.values())))
def test_restored_slot_goes_on_as_the_saved_one(
    make_engine: MakeEngine, wide_llama: Path, cache: dict[str, Any]
) -> None:
    engine = make_engine(wide_llama, **cache)
    ids = fill(engine)
    blob = engine.slots[0].save()
    expected = go_on(engine, ids)
    # The same slot after other work, another engine with another context size.
    engine.generate(random_ids(60, seed=3), max_tokens=5).read()
    assert engine.slots[0].restore(blob, exact=True) == len(blob)
    assert engine.slots[0].tokens == ids[:-1]
    assert_same(go_on(engine, ids), expected)
    other = make_engine(wide_llama, **cache)
    assert other.slots[0].restore(blob, exact=True) == len(blob)
    assert_same(go_on(other, ids), expected)


def test_restored_slot_goes_on_in_another_process(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    ids = fill(engine)
    (tmp_path / "slot.ses1").write_bytes(engine.slots[0].save())
    expected = go_on(engine, ids)
    script = """
import json, sys, numpy as np
from kqview import Engine
model, blob, ids, out = sys.argv[1:]
with Engine(model, n_threads=1, n_ctx=512, kv_type="f32", flash_attn=False) as engine:
    engine.slots[0].restore(open(blob, "rb").read(), exact=True)
    generation = engine.generate(json.loads(ids), max_tokens=8, temperature=0.0, top_logprobs=20,
                                 capture="logits", ignore_eos=True)
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(json.loads(ids)) - 1
    np.savez(out, *[t.attention for t in tokens])
    print(json.dumps([[t.id, t.top_logprobs] for t in tokens]))
"""
    arguments = [tiny_llama, tmp_path / "slot.ses1", json.dumps(ids), tmp_path / "rows.npz"]
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    assert [t.id for t in expected] == [token_id for token_id, _ in theirs]
    assert [[list(p) for p in t.top_logprobs or []] for t in expected] == [top for _, top in theirs]
    with np.load(tmp_path / "rows.npz") as rows:
        for ours, name in zip(expected, rows.files, strict=True):
            np.testing.assert_array_equal(ours.attention, rows[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_blob_is_the_format_byte_for_byte(
    make_engine: MakeEngine, tiny_llama: Path, kv_type: str, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, kv_type=kv_type, flash_attn=flash_attn)
    ids = fill(engine)
    blob = engine.slots[0].save()
    read = ses1.decode(blob)
    assert read.tokens == ids[:-1]
    assert read.positions == list(range(len(ids) - 1))
    assert read.is_transposed is not flash_attn
    # tiny_llama: 3 layers, 2 KV heads of 16
    assert [rows.values.shape for rows in read.keys + read.values] == [(len(ids) - 1, 32)] * 6
    assert {rows.values.dtype.name for rows in read.keys} == {f"float{kv_type[1:]}"}
    assert read.encode() == blob
    found = inspect(blob)
    assert (found.tokens, found.n_layer) == (tuple(ids[:-1]), 3)
    assert (found.kv_type, found.flash_attn, found.n_stream) == (kv_type, flash_attn, 1)
    assert (found.n_bytes, found.n_tokens) == (len(blob), len(ids) - 1)
    assert found.kv_bytes == len(blob) - 8 - 4 * found.n_tokens


def test_keys_in_the_blob_are_those_that_attention_used(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    # q . k of the newest row changes with one row of K: column i belongs to position i of the blob.
    engine = make_engine(tiny_llama, **EXACT)
    ids = fill(engine)
    expected = go_on(engine, ids, 1)[0].attention
    assert expected is not None
    engine.slots[0].truncate(len(ids) - 1)
    read = ses1.decode(engine.slots[0].save())
    for position in (0, 7, len(ids) - 2):
        changed = ses1.decode(read.encode())
        keys = changed.keys[0].values.copy()
        keys[position] = 0
        changed.keys[0] = ses1.Rows(keys)
        engine.slots[0].restore(changed.encode(), exact=True)
        row = go_on(engine, ids, 1)[0].attention
        assert row is not None
        first = row[0]
        assert not first[:, position].any()
        others = np.arange(first.shape[1]) != position
        np.testing.assert_array_equal(first[:, others], expected[0][:, others])


@pytest.mark.parametrize("flash_attn", [False, True])
def test_cells_in_another_order_come_back_at_their_positions(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=flash_attn)
    ids = fill(engine)
    blob = engine.slots[0].save()
    expected = go_on(engine, ids)
    order = np.random.default_rng(0).permutation(len(ids) - 1).tolist()
    shuffled = ses1.decode(blob).reordered(order).encode()
    assert shuffled != blob
    engine.slots[0].restore(shuffled, exact=True)
    assert engine.slots[0].save() == blob
    assert_same(go_on(engine, ids), expected)


@pytest.mark.parametrize("i_stream", [0, 1, 3])
def test_blob_of_four_streams_restores(
    make_engine: MakeEngine, tiny_llama: Path, i_stream: int
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    ids = fill(engine)
    blob = engine.slots[0].save()
    expected = go_on(engine, ids)
    read = ses1.decode(blob)
    read.n_stream, read.i_stream = 4, i_stream
    engine.slots[0].clear()
    engine.slots[0].restore(read.encode(), exact=True)
    assert engine.slots[0].save() == blob
    assert_same(go_on(engine, ids), expected)


def test_empty_slot_is_24_bytes_and_empties_another(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    blob = engine.slots[0].save()
    assert blob == ses1.Blob([], [], [], False).encode()
    assert len(blob) == 24
    assert inspect(blob).flash_attn is None
    fill(engine)
    assert engine.slots[0].restore(blob) == 24
    assert engine.slots[0].tokens == []
    fresh = make_engine(tiny_llama)
    assert fill(engine) == fill(fresh)


def test_restore_into_a_fresh_engine_leaves_no_trace_of_the_probe(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    with pytest.raises(errors.StateFormatError):
        engine.slots[0].restore(b"SES1")
    assert engine.slots[0].tokens == []
    ids = fill(engine)
    assert ids == fill(make_engine(tiny_llama, **EXACT))


def test_truncate_keeps_the_first_tokens(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    ids = fill(engine)
    slot = engine.slots[0]
    whole = slot.save()
    slot.truncate(25)
    assert slot.tokens == ids[:25]
    short = ses1.decode(slot.save())
    long = ses1.decode(whole)
    for ours, theirs in zip(short.keys + short.values, long.keys + long.values, strict=True):
        np.testing.assert_array_equal(ours.values, theirs.values[:25])
    for n in (-1, 26, True, 1.5, "1"):
        with pytest.raises(errors.RequestError, match=r"^n (must be|is 26)"):
            slot.truncate(n)  # type: ignore[arg-type]
    slot.clear()
    assert slot.n_tokens == 0


def test_slot_in_use_is_refused_and_goes_on(engine: Engine) -> None:
    fill(engine)
    slot = engine.slots[0]
    blob = slot.save()
    with engine.generate(PROMPT, max_tokens=100, ignore_eos=True) as generation:
        next(generation)
        for call in (slot.save, slot.clear, lambda: slot.restore(blob), lambda: slot.truncate(0)):
            with pytest.raises(errors.BusyError, match="slot 0"):
                call()
        assert len([next(generation) for _ in range(5)]) == 5
    assert slot.restore(blob) == len(blob)


def test_closed_engine_says_so(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    blob = engine.slots[0].save()
    engine.close()
    for call in (engine.slots[0].save, lambda: engine.slots[0].restore(blob)):
        with pytest.raises(errors.ClosedError):
            call()


def test_other_buffers_and_types(engine: Engine) -> None:
    fill(engine)
    slot = engine.slots[0]
    blob = slot.save()
    mapped = mmap.mmap(-1, len(blob))
    mapped.write(blob)
    as_array = np.frombuffer(blob, np.uint8)
    for value in (bytearray(blob), memoryview(blob), mapped, array("B", blob), as_array):
        assert slot.restore(value) == len(blob)
    for value in ("SES1", None, 3, [1]):
        with pytest.raises(errors.RequestError, match=r"bytes of Slot\.save"):
            slot.restore(value)  # type: ignore[arg-type]


def test_many_threads_save_restore_and_generate(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    ids = fill(engine)
    blob = engine.slots[0].save()
    expected = [t.id for t in go_on(engine, ids)]
    failures: list[BaseException] = []
    stop = threading.Event()

    def work(call: Any) -> None:
        while not stop.is_set():
            try:
                call()
            except errors.BusyError:
                pass
            except BaseException as failure:
                failures.append(failure)
                return

    slot = engine.slots[0]
    calls = [lambda: slot.restore(blob, exact=True), slot.save, lambda: slot.truncate(0)]
    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            generation = engine.generate(ids, max_tokens=8, temperature=0.0, ignore_eos=True)
            assert [t.id for t in generation] == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []


def test_messages_end_with_the_end_of_turn(engine: Engine) -> None:
    eot = engine.model.eot_token_id
    assert eot == tiny_gguf.END_OF_TEXT
    slot = engine.slots[0]
    slot.clear()
    assert slot.messages() == []
    for ids, expected in (
        ([1, 2, eot, 3, eot, 4, 5], [(0, 2), (3, 4), (5, 6)]),
        ([1, 2, eot, 3, eot], [(0, 2), (3, 4)]),
        ([1, 2, 3], [(0, 2)]),
        ([eot, eot, 1], [(0, 0), (1, 1), (2, 2)]),
    ):
        list(engine.attend(ids))
        assert slot.tokens == ids
        assert slot.messages() == expected


# ---- between engines with other numbers of slots, and beside slots that work


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
        expected = go_on(ours, ids, slot=source)
        for target in range(n_to):
            theirs.slots[target].restore(blob, exact=True)
            assert theirs.slots[target].save() == with_sequence(blob, target)
            assert_same(go_on(theirs, ids, slot=target), expected)


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
    expected = go_on(engine, ids, slot=0, reuse="shift")
    engine.slots[1].restore(blob)
    assert_same(go_on(engine, ids, slot=1, reuse="shift"), expected)


# ---- files and stores: what the trailer knows of the engine

SHORT_PROMPT = random_ids(20)


def test_file_keeps_what_a_blob_cannot_hold(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    engine, path = make_engine(tiny_llama), tmp_path / "slot.ses1"
    slot = engine.slots[0]
    list(engine.attend(SHORT_PROMPT))
    for n_exact, act in ((20, lambda: None), (4, lambda: slot.shift(4, 6))):
        act()
        assert slot.n_exact == n_exact
        assert slot.save_file(path) == path.stat().st_size
        other = make_engine(tiny_llama).slots[0]
        assert other.restore_file(path) == len(slot.save())
        assert (other.save(), other.n_exact) == (slot.save(), n_exact)
        assert other.restore(path.read_bytes()) == len(slot.save())
    path.write_bytes(slot.save())  # a raw blob: nobody knows
    assert other.restore_file(path) == len(slot.save())
    assert other.n_exact == 0


def test_model_that_was_replaced_on_disk_is_not_vouched_for(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = tiny_gguf.write_preset(tmp_path / "model.gguf", "tiny_llama")
    engine = make_engine(model)
    list(engine.attend(SHORT_PROMPT))
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
    list(engine.attend(SHORT_PROMPT))
    slot = engine.slots[0]
    write_state(path, slot.save(), slot.state_facts())
    model = tiny_gguf.write_preset(tmp_path / "other.gguf", "tiny_llama", seed=5)
    other = make_engine(model).slots[0]
    for call in (
        lambda: read_state(path, other.state_facts()),
        lambda: other.restore(path.read_bytes()),
        lambda: other.restore_file(path),
    ):
        with pytest.raises(errors.StateMismatch, match="another model or other LoRA"):
            call()
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


def test_changed_file_is_refused_and_changes_nothing(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "slot.ses1"
    list(engine.attend(SHORT_PROMPT))
    slot = engine.slots[0]
    blob = slot.save()
    write_state(path, blob, slot.state_facts())
    changed = bytearray(path.read_bytes())
    changed[len(blob) - 3] ^= 1  # a value, still finite: the checksum alone can see it
    with pytest.raises(errors.StateFormatError, match="checksum"):
        slot.restore(bytes(changed))
    assert slot.save() == blob


def test_sessions_of_one_slot_do_not_mix(engine: Engine, tmp_path: Path) -> None:
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
