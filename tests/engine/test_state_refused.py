"""Slot.restore: every blob that is not sound is refused by name and offset, and changes nothing."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings, strategies as st

from kqview import Engine, errors
from tests.support import ses1, tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from .conftest import MakeEngine

PROMPT = random_ids(20)
NAN, INFINITY = float("nan"), float("inf")
FORMAT, MISMATCH = errors.StateFormatError, errors.StateMismatch


@pytest.fixture(scope="module", params=[False, True], ids=["columns", "rows"])
def engine(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Engine]:
    """An engine whose slot holds PROMPT; rows of V with flash attention, columns without."""
    options: dict[str, Any] = {"kv_type": "f32", "flash_attn": request.param}
    with Engine(tiny_llama, n_threads=1, n_ctx=64, **options) as opened:
        list(opened.attend(PROMPT))
        yield opened


def put(form: str, field: str, value: float) -> Callable[[bytes], bytes]:
    def mutate(blob: bytes) -> bytes:
        changed = bytearray(blob)
        struct.pack_into(form, changed, ses1.offsets(blob)[field], value)
        return bytes(changed)

    return mutate


def parts(**fields: Any) -> Callable[[bytes], bytes]:
    def mutate(blob: bytes) -> bytes:
        read = ses1.decode(blob)
        for name, value in fields.items():
            setattr(read, name, value)
        return read.encode()

    return mutate


N = len(PROMPT)
REFUSED: dict[str, tuple[Callable[[bytes], bytes], type[errors.StateError], str]] = {
    "nothing": (lambda _: b"", FORMAT, "magic at byte 0"),
    "seven bytes": (lambda b: b[:7], FORMAT, "n_tokens at byte 4"),
    "magic": (put("<B", "magic", 0), FORMAT, "magic at byte 0"),
    "n_tokens above n_ctx": (put("<I", "n_tokens", 65), MISMATCH, "n_tokens at byte 4 is 65"),
    "n_tokens of 2**32 - 1": (put("<I", "n_tokens", 2**32 - 1), MISMATCH, "n_tokens at byte 4"),
    "ids cut short": (lambda b: b[: 8 + 4 * N - 1], FORMAT, "tokens at byte 8"),
    "one id fewer": (put("<I", "n_tokens", N - 1), FORMAT, "kv magic at byte"),
    "id below 0": (put("<i", "token", -1), FORMAT, "token id at byte 8 is -1"),
    "id of another vocabulary": (put("<i", "token", 320), MISMATCH, "token id at byte 8 is 320"),
    "kv magic": (put("<I", "kv_magic", 0), FORMAT, "kv magic at byte"),
    "n_stream 0": (put("<I", "n_stream", 0), FORMAT, "n_stream at byte"),
    "n_stream beyond the end": (put("<I", "n_stream", 2**32 - 1), FORMAT, "n_cells at byte"),
    "n_cells 0": (put("<I", "n_cells", 0), FORMAT, "n_cells at byte"),
    "n_cells above n_tokens": (put("<I", "n_cells", N + 1), FORMAT, "n_cells at byte"),
    "n_cells of 2**32 - 1": (put("<I", "n_cells", 2**32 - 1), FORMAT, "n_cells at byte"),
    "ids without cells": (parts(positions=[]), FORMAT, "n_cells at byte"),
    "position -1": (put("<i", "position", -1), FORMAT, "position at byte"),
    "position -2": (put("<i", "position", -2), FORMAT, "position at byte"),
    "position of 2**31 - 1": (put("<i", "position", 2**31 - 1), FORMAT, "position at byte"),
    "position n": (put("<i", "position", N), FORMAT, f"position at byte {8 + 4 * N + 16} is {N}"),
    "position twice": (put("<i", "position", 1), FORMAT, "for the second time"),
    "n_seq_id 0": (put("<I", "n_seq_id", 0), FORMAT, "n_seq_id at byte"),
    "n_seq_id 2": (put("<I", "n_seq_id", 2), FORMAT, "n_seq_id at byte"),
    "V transposed 2": (put("<I", "v_trans", 2), FORMAT, "V transposed at byte"),
    "n_layer": (put("<I", "n_layer", 2), MISMATCH, "n_layer at byte"),
    "n_layer of 2**32 - 1": (put("<I", "n_layer", 2**32 - 1), MISMATCH, "n_layer at byte"),
    "K type": (put("<i", "k_type", 1), MISMATCH, 'kv_type="f16"'),
    "K type unknown": (put("<i", "k_type", -7), MISMATCH, "K type at byte"),
    "K row size": (put("<Q", "k_row_bytes", 64), MISMATCH, "K row size at byte"),
    "K row size of 2**64 - 1": (put("<Q", "k_row_bytes", 2**64 - 1), MISMATCH, "K row size"),
    "V type": (put("<i", "v_type", 1), MISMATCH, "V type at byte"),
    "V unit": (put("<I", "v_unit", 3), MISMATCH, "V (row|element) size at byte"),
    "V width": (put("<I", "v_width", 9), MISMATCH, "V (row size|width) at byte"),
    "NaN in K": (put("<f", "k_value", NAN), FORMAT, "K rows at byte .* not finite"),
    "infinity in V": (put("<f", "v_value", INFINITY), FORMAT, "V (rows|columns) at byte"),
    "-infinity in V": (put("<f", "v_value", -INFINITY), FORMAT, "V (rows|columns) at byte"),
    "a value that flash attention cannot cast": (
        put("<f", "k_value", 65536),
        FORMAT,
        "above 65504",
    ),
    "a value whose product overflows": (put("<f", "v_value", -3e38), FORMAT, "above 65504"),
    "a byte short": (lambda b: b[:-1], FORMAT, "bytes, .* are left"),
    "a byte more": (lambda b: b + b"\0", FORMAT, "the end at byte"),
    "100 bytes more": (lambda b: b + bytes(100), FORMAT, "has 100 bytes behind it"),
    "two blobs": (lambda b: b + b, FORMAT, "the end at byte"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsound_blob_is_refused_and_changes_nothing(engine: Engine, name: str) -> None:
    mutate, kind, message = REFUSED[name]
    slot = engine.slots[0]
    blob = slot.save()
    with pytest.raises(kind, match=message) as caught:
        slot.restore(mutate(blob))
    assert type(caught.value) is kind
    assert slot.tokens == PROMPT
    assert slot.save() == blob


def test_second_stream_with_cells_is_refused(engine: Engine) -> None:
    slot = engine.slots[0]
    blob = slot.save()
    kv = ses1.offsets(blob)["n_cells"]
    twice = bytearray(blob + blob[kv:])
    struct.pack_into("<I", twice, ses1.offsets(blob)["n_stream"], 2)
    with pytest.raises(FORMAT, match=f"n_cells at byte {len(blob)} is {N}, a second stream"):
        slot.restore(bytes(twice))
    assert slot.save() == blob


def test_cells_without_ids_are_refused(engine: Engine) -> None:
    slot = engine.slots[0]
    blob = slot.save()
    with pytest.raises(FORMAT, match="n_cells at byte"):
        slot.restore(parts(tokens=[])(blob))
    assert slot.save() == blob


# Each is a position in the blob and what is put there: bytes, or an end.
CHANGES = st.lists(
    st.tuples(st.floats(0, 1, exclude_max=True), st.binary(min_size=1, max_size=8)), max_size=4
)


@pytest.mark.full
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(CHANGES, st.booleans(), st.none() | st.floats(0, 1))
def test_any_change_is_refused_or_restores_what_it_says(
    engine: Engine, changes: list[tuple[float, bytes]], in_front: bool, cut: float | None
) -> None:
    slot = engine.slots[0]
    list(engine.attend(PROMPT))
    blob = slot.save()
    changed = bytearray(blob)
    # Half of them among the numbers that say what follows.
    n_bytes = ses1.offsets(blob)["k_value"] if in_front else len(blob)
    for where, value in changes:
        at = int(where * n_bytes)
        changed[at : at + len(value)] = value
    changed = changed[: len(changed) if cut is None else int(cut * len(changed))]
    refusal: errors.StateError | None = None
    try:
        slot.restore(bytes(changed))
    except errors.StateError as failure:
        refusal = failure
    if refusal:
        assert any(where in str(refusal) for where in (" at byte ", "the trailer "))
        assert slot.save() == blob
    else:
        # What was taken is what the slot holds; sequence numbers are the engine's own.
        read, now = ses1.decode(bytes(changed)), ses1.decode(slot.save())
        assert slot.tokens == read.tokens
        order = np.argsort(read.positions).tolist()
        read = read.reordered(order)
        for ours, theirs in zip(now.keys + now.values, read.keys + read.values, strict=True):
            np.testing.assert_array_equal(ours.values, theirs.values)
        generation = engine.generate(slot.tokens, max_tokens=2, temperature=0.0, top_logprobs=1)
        assert all(np.isfinite(t.logprob) for t in generation if t.logprob is not None)


@pytest.mark.parametrize(
    ("saved", "opened", "message"),
    [
        ({"kv_type": "f32"}, {"kv_type": "f16"}, 'K type .* is f32, .* f16; .*kv_type="f32"'),
        ({"flash_attn": True}, {"flash_attn": False}, "flash_attn=True"),
        ({"flash_attn": False}, {"flash_attn": True}, "flash_attn=False"),
        ({"n_ctx": 64}, {"n_ctx": 20}, "n_tokens at byte 4 is 24, .* 20; raise n_ctx"),
    ],
)
def test_blob_of_other_options_is_a_mismatch(
    make_engine: MakeEngine,
    tiny_llama: Path,
    saved: dict[str, Any],
    opened: dict[str, Any],
    message: str,
) -> None:
    base: dict[str, Any] = {"kv_type": "f16", "flash_attn": False}
    first = make_engine(tiny_llama, **{**base, **saved})
    list(first.attend(random_ids(24)))
    second = make_engine(tiny_llama, **{**base, **opened})
    list(second.attend(PROMPT))
    blob = second.slots[0].save()
    with pytest.raises(MISMATCH, match=message):
        second.slots[0].restore(first.slots[0].save())
    assert second.slots[0].save() == blob


@pytest.mark.parametrize("shape", [{"n_layer": 2}, {"n_head_kv": 4}])
def test_blob_of_a_model_of_another_shape_is_a_mismatch(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path, shape: dict[str, Any]
) -> None:
    other = make_engine(tiny_gguf.write_model(tmp_path / "other.gguf", arch="llama", **shape))
    list(other.attend(PROMPT))
    engine = make_engine(tiny_llama)
    with pytest.raises(MISMATCH, match=r"(n_layer|K row size) at byte"):
        engine.slots[0].restore(other.slots[0].save())


BLOCKS = {
    name: (getattr(GGMLQuantizationType, name.upper()), n_scales)
    for name, n_scales in {
        "q4_0": 1,
        "q4_1": 2,
        "q5_0": 1,
        "q5_1": 2,
        "q8_0": 1,
        "iq4_nl": 1,
    }.items()
}


@pytest.mark.parametrize("kv_type", BLOCKS)
def test_quantised_block_is_taken_if_every_number_it_stands_for_is_finite_and_in_range(
    make_engine: MakeEngine, tmp_path: Path, kv_type: str
) -> None:
    # What a block stands for is gguf's word here, not that of our own reader.
    model = tiny_gguf.write_model(tmp_path / "wide.gguf", arch="llama", n_embd=128)
    engine = make_engine(model, kv_type=kv_type, flash_attn=True)
    list(engine.attend(PROMPT))
    slot = engine.slots[0]
    blob = slot.save()
    kind, n_scales = BLOCKS[kv_type]
    n_bytes = GGML_QUANT_SIZES[kind][1]
    random = np.random.default_rng(7)
    taken = {True: 0, False: 0}
    for _ in range(60):
        # Scales around those at which the largest numbers pass 65504.
        scales = (2.0 ** random.uniform(6, 16, n_scales) * random.choice([-1, 1], n_scales)).clip(
            -65504, 65504
        )
        integers = random.integers(0, 256, n_bytes - 2 * n_scales, dtype=np.uint8)
        block = scales.astype("<f2").tobytes() + integers.tobytes()
        numbers = dequantize(np.frombuffer(block, np.uint8), kind)
        is_fine = bool((np.abs(numbers) <= 65504).all())
        taken[is_fine] += 1
        changed = blob[:-n_bytes] + block
        if is_fine:
            slot.restore(changed)
            assert slot.save() == changed
        else:
            with pytest.raises(FORMAT, match=f"V rows at byte {len(blob) - n_bytes} hold a value"):
                slot.restore(changed)
    assert min(taken.values()) > 5
