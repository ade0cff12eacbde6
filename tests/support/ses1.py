"""SES1 blobs written by hand, and where each field of a blob lies: a second reading of the format.

Independent of `kqview.state` and of the core's parser, so that a mistake in one of them shows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace

import numpy as np

KV_MAGIC = 0xAF143CD8
F32, F16 = 0, 1


@dataclass
class Rows:
    """K or V of a layer: values of shape (n_tokens, n_columns), float32 or float16."""

    values: np.ndarray

    @property
    def type_id(self) -> int:
        """ggml's number of the type."""
        return F16 if self.values.dtype == np.float16 else F32


@dataclass
class Blob:
    """A whole blob in parts; `encode` writes it, `decode` reads one of a plain cache."""

    tokens: list[int]
    keys: list[Rows]
    values: list[Rows]
    is_transposed: bool
    positions: list[int] = field(default_factory=list)
    sequence: int = 0
    n_stream: int = 1
    i_stream: int = 0

    def encode(self) -> bytes:
        """The bytes, as the seed and llama.cpp's source give them."""
        n = len(self.tokens)
        out = b"SES1" + struct.pack(f"<I{n}i", n, *self.tokens)
        out += struct.pack("<IiI", KV_MAGIC, self.sequence, self.n_stream)
        for stream in range(self.n_stream):
            if stream != self.i_stream or not self.positions:
                out += struct.pack("<I", 0)
                continue
            out += struct.pack("<I", len(self.positions))
            for position in self.positions:
                out += struct.pack("<iIi", position, 1, self.sequence)
            out += struct.pack("<II", self.is_transposed, len(self.keys))
            for rows in self.keys:
                out += _encode_rows(rows)
            for rows in self.values:
                out += _encode_columns(rows) if self.is_transposed else _encode_rows(rows)
        return out

    def reordered(self, order: list[int]) -> Blob:
        """The same slot with its cells in another order."""
        return replace(
            self,
            positions=[self.positions[i] for i in order],
            keys=[Rows(rows.values[order]) for rows in self.keys],
            values=[Rows(rows.values[order]) for rows in self.values],
        )


def _encode_rows(rows: Rows) -> bytes:
    row_bytes = rows.values.shape[1] * rows.values.itemsize
    return struct.pack("<iQ", rows.type_id, row_bytes) + rows.values.tobytes()


def _encode_columns(rows: Rows) -> bytes:
    head = struct.pack("<iII", rows.type_id, rows.values.itemsize, rows.values.shape[1])
    return head + np.ascontiguousarray(rows.values.T).tobytes()


def decode(blob: bytes) -> Blob:
    """Read a blob of one stream with tokens, F16 or F32."""
    (n,) = struct.unpack_from("<I", blob, 4)
    tokens = list(struct.unpack_from(f"<{n}i", blob, 8))
    at = 8 + 4 * n
    magic, sequence, n_stream, n_cells = struct.unpack_from("<IiII", blob, at)
    assert (blob[:4], magic, n_stream, n_cells) == (b"SES1", KV_MAGIC, 1, n)
    at += 16
    cells = np.frombuffer(blob, "<i4", 3 * n, at).reshape(n, 3)
    at += 12 * n
    is_transposed, n_layer = struct.unpack_from("<II", blob, at)
    at += 8
    blocks: list[Rows] = []
    while at < len(blob):
        type_id, unit, width = struct.unpack_from("<iII", blob, at)
        dtype = np.dtype("<f2" if type_id == F16 else "<f4")
        is_column = is_transposed and len(blocks) >= n_layer
        if not is_column:
            width = unit // dtype.itemsize
        at += 12
        values = np.frombuffer(blob, dtype, n * width, at)
        at += values.nbytes
        blocks.append(Rows(values.reshape(width, n).T if is_column else values.reshape(n, width)))
    return Blob(
        tokens=tokens,
        keys=blocks[:n_layer],
        values=blocks[n_layer:],
        is_transposed=bool(is_transposed),
        positions=cells[:, 0].tolist(),
        sequence=sequence,
    )


def offsets(blob: bytes) -> dict[str, int]:
    """Where the fields of a blob of one stream with tokens lie, the first of each name."""
    (n,) = struct.unpack_from("<I", blob, 4)
    kv = 8 + 4 * n
    layers = kv + 16 + 12 * n
    (row_bytes,) = struct.unpack_from("<Q", blob, layers + 12)
    (n_layer,) = struct.unpack_from("<I", blob, layers + 4)
    v_block = layers + 8 + n_layer * (12 + n * row_bytes)
    return {
        **{"magic": 0, "n_tokens": 4, "token": 8},
        **{"kv_magic": kv, "sequence": kv + 4, "n_stream": kv + 8, "n_cells": kv + 12},
        **{"position": kv + 16, "n_seq_id": kv + 20},
        **{"v_trans": layers, "n_layer": layers + 4, "k_type": layers + 8},
        **{"k_row_bytes": layers + 12, "k_value": layers + 20},
        **{"v_type": v_block, "v_unit": v_block + 4, "v_width": v_block + 8},
        "v_value": v_block + 12,
    }
