"""state.inspect: what a blob says about itself, and what is no blob."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from kqview import errors
from kqview.state import inspect
from tests.support import ses1


def made(
    dtype: str = "<f2", *, is_transposed: bool = False, n_values: int = 2, n: int = 5
) -> ses1.Blob:
    rng = np.random.default_rng(0)

    def rows() -> ses1.Rows:
        return ses1.Rows(rng.normal(size=(n, 6)).astype(dtype))

    return ses1.Blob(
        tokens=list(range(7, 7 + n)),
        keys=[rows(), rows()],
        values=[rows() for _ in range(n_values)],
        is_transposed=is_transposed,
        positions=list(range(n)),
    )


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", ["<f2", "<f4"])
@pytest.mark.parametrize("n_values", [2, 0])
def test_blob_says_what_it_is(dtype: str, is_transposed: bool, n_values: int) -> None:
    blob = made(dtype, is_transposed=is_transposed, n_values=n_values).encode()
    state = inspect(blob)
    assert state.tokens == (7, 8, 9, 10, 11)
    assert (state.n_tokens, state.n_layer, state.n_stream) == (5, 2, 1)
    assert state.kv_type == {"<f2": "f16", "<f4": "f32"}[dtype]
    assert state.flash_attn is not is_transposed
    assert (state.n_bytes, state.kv_bytes) == (len(blob), len(blob) - 28)


def test_cells_with_extras_and_other_streams_are_found() -> None:
    blob = made()
    blob.n_stream, blob.i_stream = 4, 2
    encoded = blob.encode()
    assert inspect(encoded).n_stream == 4
    plain = made(n=3).encode()
    at = ses1.offsets(plain)["position"]
    cells = b"".join(struct.pack("<iIiiii", i, 1, i, i, 7 + i, 0) for i in range(3))
    assert inspect(plain[:at] + cells + plain[at + 36 :]).n_layer == 2


def test_empty_slot_has_no_layers() -> None:
    blob = ses1.Blob([], [], [], False).encode()
    state = inspect(blob)
    assert (state.tokens, state.n_layer, state.kv_type, state.flash_attn) == ((), 0, "", None)


def test_every_shorter_blob_is_refused() -> None:
    for blob in (made().encode(), made(is_transposed=True).encode()):
        # Between the layers of V it looks like one of a model that keeps fewer of them.
        first = ses1.offsets(blob)["v_type"]
        ends = {first, first + (len(blob) - first) // 2}
        for n in sorted(set(range(len(blob))) - ends):
            with pytest.raises(errors.StateFormatError, match="byte"):
                inspect(blob[:n])
        with pytest.raises(errors.StateFormatError, match="byte"):
            inspect(blob + b"\0")


@pytest.mark.parametrize(
    ("field", "form", "value"),
    [
        ("magic", "<I", 0),
        ("n_tokens", "<I", 2**32 - 1),
        ("kv_magic", "<I", 1),
        ("n_stream", "<I", 2**32 - 1),
        ("n_cells", "<I", 2**32 - 1),
        ("n_layer", "<I", 2**32 - 1),
        ("v_trans", "<I", 7),
        ("k_type", "<i", 5),
        ("k_row_bytes", "<Q", 0),
        ("k_row_bytes", "<Q", 2**64 - 1),
    ],
)
def test_field_out_of_range_is_refused(field: str, form: str, value: int) -> None:
    blob = made().encode()
    changed = bytearray(blob)
    struct.pack_into(form, changed, ses1.offsets(blob)[field], value)
    with pytest.raises(errors.StateFormatError):
        inspect(bytes(changed))
