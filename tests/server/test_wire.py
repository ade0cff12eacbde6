"""Rows as bytes: exactly the values, copied once, and counted."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from kqview.server.wire import DATA_HERE, Encoder, joined_text, split_json

ROWS = [
    np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    np.arange(24, dtype=np.float16).reshape(2, 3, 4),
    np.arange(24, dtype=np.float32).reshape(4, 6)[::2, ::3],  # not contiguous
    np.zeros((2, 0), np.float32),
    np.float32([np.nan, np.inf, -0.0, 1e-45]),
]


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{rows.dtype}{list(rows.shape)}")
def test_bytes_are_the_values_and_each_copy_is_counted(rows: np.ndarray[Any, Any]):
    counted: list[int] = []
    encoder = Encoder(counted.append)
    expected = rows.astype(rows.dtype.newbyteorder("<")).tobytes(order="C")
    assert encoder.raw(rows) == expected
    assert base64.b64decode(encoder.base64(rows), validate=True) == expected
    assert counted == [rows.nbytes] * 3


def test_read_only_views_are_encoded():
    rows = np.arange(4, dtype=np.float32)
    rows.flags.writeable = False
    assert len(Encoder(lambda n: None).raw(rows)) == 16


@pytest.mark.parametrize("text", ["", "plain", '"\\\u0000\n', "é🙂", '"\u0000"'])
def test_pieces_of_json_are_the_json(text: str):
    data = base64.b64encode(bytes(range(256)))
    pieces = split_json({"text": text, "data": DATA_HERE, "after": [text, 1]}, data)
    expected = {"text": text, "data": data.decode(), "after": [text, 1]}
    assert json.loads(b"".join(pieces)) == expected
    assert json.loads(joined_text(pieces)) == expected
    assert pieces[1] is data
