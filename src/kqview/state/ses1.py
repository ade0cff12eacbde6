"""SES1, the format of a saved slot, parsed without an engine.

    "SES1" | u32 n_tokens | n_tokens x i32 id | kv_data

``kv_data`` is what ``llama_state_seq_get_data`` writes; ``cpp/state/ses1.h`` describes it. This
module only inspects blobs: whether one fits an engine is checked by that engine.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kqview.errors import StateFormatError

MAGIC: Final = b"SES1"
KV_MAGIC: Final = 0xAF143CD8
HEADER_BYTES: Final = 8

_TYPE_NAMES: Final = {
    **{0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0"},
    **{20: "iq4_nl", 30: "bf16"},
}
# A cell is (position, 1, sequence), and for some models (position, 1, x, y, token, sequence).
_CELL_BYTES: Final = (12, 24)


@dataclass(frozen=True, slots=True)
class SavedState:
    """Contents of a SES1 blob, without the values of the cache.

    Attributes:
        tokens: Ids in the slot, in order.
        n_bytes: Size of the blob.
        kv_bytes: Size of ``kv_data``, llama.cpp's part.
        n_stream: Number of streams in ``kv_data``; 1 in blobs of kqview.
        n_layer: Number of layers with keys; 0 in a blob without tokens.
        kv_type: Type of the keys of the first layer, such as "f16"; "" in a blob without tokens.
        flash_attn: Whether the engine used flash attention; None in a blob without tokens.
    """

    tokens: tuple[int, ...]
    n_bytes: int
    kv_bytes: int
    n_stream: int
    n_layer: int
    kv_type: str
    flash_attn: bool | None

    @property
    def n_tokens(self) -> int:
        """Number of ids."""
        return len(self.tokens)


def inspect(blob: bytes) -> SavedState:
    """Parse the structure of *blob*; the values of the cache are skipped.

    Raises:
        StateFormatError: *blob* is not a SES1 blob, or is truncated.
    """
    if blob[: len(MAGIC)] != MAGIC:
        raise StateFormatError("blob does not start with 'SES1'")
    n_tokens = _take("<I", blob, len(MAGIC), "n_tokens")
    kv_at = HEADER_BYTES + 4 * n_tokens
    if kv_at > len(blob):
        raise StateFormatError(
            f"the {n_tokens} ids of blob end at byte {kv_at}, but blob ends at {len(blob)}"
        )
    tokens = np.frombuffer(blob, "<i4", n_tokens, HEADER_BYTES)
    if _take("<I", blob, kv_at, "kv magic") != KV_MAGIC:
        raise StateFormatError(f"the cache magic at byte {kv_at} of blob is not llama.cpp's")
    n_stream = _take("<I", blob, kv_at + 8, "n_stream")
    layers = _layers(blob, kv_at + 12, n_stream, n_tokens)
    return SavedState(
        tokens=tuple(tokens.tolist()),
        n_bytes=len(blob),
        kv_bytes=len(blob) - kv_at,
        n_stream=n_stream,
        n_layer=layers[0],
        kv_type=layers[1],
        flash_attn=layers[2],
    )


def _layers(blob: bytes, at: int, n_stream: int, n_tokens: int) -> tuple[int, str, bool | None]:
    """(n_layer, type, flash_attn) from the stream that has cells."""
    for i in range(n_stream):
        n_cells = _take("<I", blob, at, "n_cells")
        at += 4
        if n_cells == 0:
            continue
        if n_cells != n_tokens:
            break
        n_behind = 4 * (n_stream - i - 1)
        for found in _walks(blob, at, n_cells, len(blob) - n_behind):
            return found
        break
    else:
        if n_tokens == 0 and at == len(blob):
            return 0, "", None
    raise StateFormatError(
        f"the cells of blob from byte {at} on are not those of {n_tokens} tokens"
    )


def _walks(blob: bytes, at: int, n_cells: int, end: int) -> Iterator[tuple[int, str, bool]]:
    # Only with the right cell size does the rest of the blob end where it must.
    for cell_bytes in _CELL_BYTES:
        try:
            yield _walk(blob, at + n_cells * cell_bytes, n_cells, end)
        except StateFormatError:
            continue


def _walk(blob: bytes, at: int, n_cells: int, end: int) -> tuple[int, str, bool]:
    transposed = _take("<I", blob, at, "V transposed")
    n_layer = _take("<I", blob, at + 4, "n_layer")
    at += 8
    first = _take("<i", blob, at, "K type")
    if transposed > 1 or first not in _TYPE_NAMES:
        raise StateFormatError(f"blob has no layers at byte {at}")
    i_block = 0
    while at < end and i_block < 2 * n_layer:
        is_column = transposed and i_block >= n_layer
        if is_column:
            unit, width = struct.unpack_from("<II", blob, at + 4) if at + 12 <= end else (0, 0)
        else:
            unit, width = _take("<Q", blob, at + 4, "row size"), 1
        if unit == 0 or width == 0:
            raise StateFormatError(f"blob has no rows at byte {at}")
        at += 12 + n_cells * unit * width
        i_block += 1
    if at != end or not n_layer <= i_block <= 2 * n_layer:
        raise StateFormatError(f"the layers of blob end at byte {at}, but must end at {end}")
    return n_layer, _TYPE_NAMES[first], not transposed


def _take(form: str, blob: bytes, at: int, field: str) -> int:
    try:
        return struct.unpack_from(form, blob, at)[0]
    except struct.error:
        raise StateFormatError(
            f"{field} at byte {at} lies beyond the {len(blob)} bytes of blob"
        ) from None
