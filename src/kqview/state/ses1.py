"""SES1, the format of a saved slot, parsed without an engine.

    "SES1" | u32 n_tokens | n_tokens x i32 id | kv_data

``kv_data`` is close to what ``llama_state_seq_get_data`` writes; ``cpp/state/ses1.h`` describes it.
This module only inspects blobs: whether one fits an engine is checked by that engine.
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kqview.errors import StateFormatError

MAGIC: Final = b"SES1"
CHECKPOINT_MAGIC: Final = b"SCP1"
KV_MAGIC: Final = 0xAF143CD8
HEADER_BYTES: Final = 8

_TYPE_NAMES: Final = {
    **{0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0"},
    **{20: "iq4_nl", 30: "bf16"},
}
# A cell is (position, 1, sequence), and for some models (position, 1, x, y, token, sequence).
_CELL_BYTES: Final = (12, 24)
# Of a memory: two or three caches, or caches and a recurrent state.
_N_PARTS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class SavedState:
    """Contents of a SES1 blob, without the values of the cache.

    Attributes:
        tokens: Ids in the slot, in order.
        n_bytes: Size of the blob.
        kv_bytes: Size of ``kv_data``, llama.cpp's part.
        n_stream: Number of streams in ``kv_data``; 1 in blobs of kqview.
        n_layer: Number of layers with keys in the first cache, or of layers of a recurrent model;
            0 in a blob without tokens.
        kv_type: Type of the keys, or state, of the first layer, such as "f16"; "" in a blob without
            tokens.
        flash_attn: Whether the engine used flash attention; None in a blob without tokens or of a
            recurrent model.
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


def ids_in(blob: bytes) -> NDArray[np.int32]:
    """Ids in *blob*, or in its first bytes; shape (n_tokens,), a read-only view.

    Raises:
        StateFormatError: *blob* is not a SES1 blob, or ends before its ids do.
    """
    if blob[: len(MAGIC)] != MAGIC:
        raise StateFormatError("blob does not start with 'SES1'")
    n_tokens = _take("<I", blob, len(MAGIC), "n_tokens")
    kv_at = HEADER_BYTES + 4 * n_tokens
    if kv_at > len(blob):
        raise StateFormatError(
            f"the {n_tokens} ids of blob end at byte {kv_at}, but blob ends at {len(blob)}"
        )
    return np.frombuffer(blob, "<i4", n_tokens, HEADER_BYTES)


def inspect(blob: bytes) -> SavedState:
    """Parse the structure of *blob*; the values of the cache are skipped.

    Raises:
        StateFormatError: *blob* is not a SES1 blob, or is truncated.
    """
    tokens = ids_in(blob)
    n_tokens = len(tokens)
    kv_at = HEADER_BYTES + 4 * n_tokens
    if _take("<I", blob, kv_at, "kv magic") != KV_MAGIC:
        raise StateFormatError(f"the cache magic at byte {kv_at} of blob is not llama.cpp's")
    first = _first_part(blob, kv_at + 8, n_tokens)
    return SavedState(
        tokens=tuple(tokens.tolist()),
        n_bytes=len(blob),
        kv_bytes=len(blob) - kv_at,
        n_stream=first.n_stream,
        n_layer=first.n_layer,
        kv_type=first.kv_type,
        flash_attn=first.flash_attn,
    )


def checkpoints_in(data: bytes) -> tuple[int, ...]:
    """How many tokens each checkpoint in the trailer of a state file has; ascending.

    Raises:
        StateFormatError: *data* does not have the structure of checkpoints (``cpp/state/ses1.h``).
    """
    if not data:
        return ()
    counts: list[int] = []
    at = HEADER_BYTES
    if data[: len(CHECKPOINT_MAGIC)] == CHECKPOINT_MAGIC:
        for _ in range(_take("<I", data, len(CHECKPOINT_MAGIC), "n", of="checkpoints")):
            counts.append(_take("<I", data, at, "n_tokens", of="checkpoints"))
            at += 12 + _take("<Q", data, at + 4, "bytes", of="checkpoints")
    if at != len(data) or counts != sorted(set(counts)):
        raise StateFormatError(f"the {len(data)} bytes of checkpoints are none")
    return tuple(counts)


class _Cache(NamedTuple):
    """What one cache, or the recurrent state, of a memory says, and where it ends."""

    end: int
    n_stream: int
    n_layer: int = 0
    kv_type: str = ""
    flash_attn: bool | None = None


def _first_part(blob: bytes, at: int, n_tokens: int) -> _Cache:
    # Neither the size of a cell nor the number of layers with values is in the blob: only with the
    # right ones do the parts end where the blob does.
    _take("<I", blob, at, "n_stream")
    left = [(0, part, part.end) for part in _parts(blob, at, n_tokens, is_first=True)]
    seen: set[int] = set()
    while left:
        n_before, first, end = left.pop()
        if end == len(blob):
            return first
        if end in seen or n_before + 1 == _N_PARTS_MAX:
            continue
        seen.add(end)
        left += [(n_before + 1, first, part.end) for part in _parts(blob, end, n_tokens)]
    raise StateFormatError(f"the cache at byte {at} of blob is not one of {n_tokens} tokens")


def _parts(blob: bytes, at: int, n_tokens: int, *, is_first: bool = False) -> Iterator[_Cache]:
    """Every way in which the bytes from *at* on can be a cache or a recurrent state."""
    with suppress(StateFormatError):
        yield from _caches(blob, at, n_tokens, is_whole=is_first)
    with suppress(StateFormatError):
        n_cells = _take("<I", blob, at, "n_cells")
        if n_cells == 0 and n_tokens == 0:
            yield _Cache(at + 4, 1)
        elif n_cells == 1 and _take("<i", blob, at + 4, "position") == n_tokens - 1:
            for part in _layers(blob, at + 12, 1, is_recurrent=True):
                yield part._replace(flash_attn=None)


def _caches(blob: bytes, at: int, n_tokens: int, *, is_whole: bool) -> Iterator[_Cache]:
    """One that is not whole may be of a window, and have the last tokens alone."""
    n_stream = _take("<I", blob, at, "n_stream")
    at += 4
    n_cells, n_left = 0, n_stream
    while n_cells == 0 and n_left > 0:
        n_cells = _take("<I", blob, at, "n_cells")
        n_left -= 1
        at += 4
    if n_stream == 0 or not (n_tokens if is_whole else min(n_tokens, 1)) <= n_cells <= n_tokens:
        return
    if n_cells == 0:
        yield _Cache(at, n_stream)
        return
    for cell_bytes in _CELL_BYTES:
        with suppress(StateFormatError):
            for part in _layers(blob, at + n_cells * cell_bytes, n_cells):
                if not any(blob[part.end : part.end + 4 * n_left]):
                    yield part._replace(end=part.end + 4 * n_left, n_stream=n_stream)


def _layers(blob: bytes, at: int, n_cells: int, *, is_recurrent: bool = False) -> Iterator[_Cache]:
    """The layers from *at* on, for every number of layers that may have values, or a state."""
    transposed = _take("<I", blob, at, "V transposed")
    n_layer = _take("<I", blob, at + 4, "n_layer")
    at += 8
    first = _take("<i", blob, at, "K type")
    if transposed > 1 or first not in _TYPE_NAMES:
        return
    for i_block in range(3 * n_layer if is_recurrent else 2 * n_layer):
        # qwen4exp has blocks of a recurrent state that do not say their type.
        if is_recurrent and _take("<i", blob, at, "state type") not in _TYPE_NAMES:
            at -= 4
        if transposed and i_block >= n_layer:
            unit = _take("<I", blob, at + 4, "V element size")
            width = _take("<I", blob, at + 8, "V width")
        else:
            unit, width = _take("<Q", blob, at + 4, "row size"), 1
        at += 12 + n_cells * unit * width
        if at > len(blob) or (unit * width == 0 and not is_recurrent):
            return
        if is_recurrent or i_block + 1 >= n_layer:  # every layer of a cache has keys
            yield _Cache(at, 1, n_layer, _TYPE_NAMES[first], not transposed)


def _take(form: str, blob: bytes, at: int, field: str, of: str = "blob") -> int:
    try:
        return struct.unpack_from(form, blob, at)[0]
    except struct.error:
        raise StateFormatError(
            f"{field} at byte {at} lies beyond the {len(blob)} bytes of {of}"
        ) from None
