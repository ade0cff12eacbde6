"""Rows as replies have them: reduced to the format that a request asks for, then bytes or JSON.

Pure functions over arrays that know no dialect and copy no more than they return.

`Encoder` is the one place where the server copies attention. One copy of a row is the least
possible: ASGI takes ``bytes``, which own their memory, and a zero-copy view does not. base64 is
that one copy too: it reads the view and writes text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from kqview.server.models.request import AttentionWanted
from kqview.server.web.endpoint import EVENT_TAIL, NAMED_HEAD
from kqview.types.capture import Kind, Span
from kqview.types.token import Array, Attention

_FLOAT16_MAX: Final = 65504.0


@dataclass(frozen=True, slots=True)
class Dense:
    """Values to send as bytes.

    Attributes:
        format: "per_layer" or "aggregated".
        values: Shape ``(n_layers, n_heads, n_context)``, ``(n_layers, n_context)`` or
            ``(n_context,)``, with an axis of ``n_rows`` before the last for rows of a prompt;
            little-endian float32 or float16, C-contiguous; the engine's own view if nothing had to
            be computed. If layers differ in heads, the layers' heads follow each other:
            ``(1, sum of heads, n_context)``. With *spans*, a sum for each instead of ``n_context``.
        heads_by_layer: Heads of each layer if they differ, else None.
        spans: The ranges of columns that the values are sums of; None: there is a value per column.
    """

    format: Literal["per_layer", "aggregated"]
    values: Array
    heads_by_layer: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None

    @property
    def n_context(self) -> int | None:
        """Columns: the tokens before the query; None with *spans*, which do not tell."""
        return self.values.shape[-1] if self.spans is None else None


@dataclass(frozen=True, slots=True)
class Sparse:
    """The positions with the most attention.

    Attributes:
        positions: int ``(top_k,)``, largest mean first; fewer if the context is shorter.
        by_layer: float32 ``(top_k, n_layers)``, mean over heads.
        n_context: Columns of the whole row.
    """

    positions: NDArray[np.intp]
    by_layer: NDArray[np.float32]
    n_context: int


@dataclass(frozen=True, slots=True)
class Viz:
    """Figures for a display.

    Attributes:
        mean_by_layer: float32 ``(n_layers,)``, over heads and positions.
        max_by_layer: float32 ``(n_layers,)``, over heads and positions.
        entropy: Shannon entropy in nats of the mean row over layers and heads, scaled to sum 1; of
            the softmax of that row for values other than probabilities.
        n_context: Columns of the whole row.
    """

    mean_by_layer: NDArray[np.float32]
    max_by_layer: NDArray[np.float32]
    entropy: float
    n_context: int


Shaped = Dense | Sparse | Viz


def shaped(wanted: AttentionWanted, rows: Attention) -> Shaped:
    """Reduce a token's rows to the format asked for.

    Args:
        wanted: What was asked for.
        rows: ``token.attention`` of a generation with ``wanted.capture(model)``; for "per_layer"
            and "aggregated" also rows of a prompt, with an axis of queries before the last.
    """
    if wanted.format == "per_layer":
        return _per_layer(wanted, _stacked(rows) if wanted.reduce_heads else rows)
    if wanted.format == "aggregated":
        values = _rounded(wanted, _aggregated(wanted, rows))
        return Dense("aggregated", values, spans=wanted.spans)
    if wanted.format == "sparse":
        return _sparse(_stacked(rows), wanted.top_k)
    return _viz(wanted.kind, rows)


def _per_layer(wanted: AttentionWanted, rows: Attention) -> Dense:
    if isinstance(rows, tuple):
        joined = np.concatenate(rows)[None]
        return Dense("per_layer", joined, tuple(len(layer) for layer in rows), wanted.spans)
    return Dense("per_layer", rows, spans=wanted.spans)


def _aggregated(wanted: AttentionWanted, rows: Attention) -> Array:
    stacked = _stacked(rows)
    if wanted.aggregation != "weighted_layers":
        return stacked
    return np.tensordot(wanted.weights(len(stacked)), stacked, axes=1)


def _stacked(rows: Attention) -> Array:
    # With a reduction every layer has one row, however many heads it has.
    return np.stack(rows) if isinstance(rows, tuple) else rows


def _rounded(wanted: AttentionWanted, values: Array) -> Array:
    if wanted.dtype == "float32":
        return np.ascontiguousarray(values, np.float32)
    # Like the engine: beyond its range a float16 would be infinite and read as masked.
    finite = np.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX)
    return np.ascontiguousarray(np.where(np.isneginf(values), values, finite), np.float16)


def _sparse(rows: Array, top_k: int) -> Sparse:
    mean = rows.mean(axis=0)
    k = min(top_k, len(mean))
    # A stable sort puts the earlier of equal positions first.
    positions = np.argsort(-mean, kind="stable")[:k]
    return Sparse(positions, np.ascontiguousarray(rows[:, positions].T, np.float32), len(mean))


def _viz(kind: Kind, rows: Attention) -> Viz:
    layers = rows if isinstance(rows, tuple) else tuple(rows)
    means = np.array([layer.mean() for layer in layers], np.float32)
    largest = np.array([layer.max() for layer in layers], np.float32)
    row = np.asarray(np.mean([layer.mean(axis=0) for layer in layers], axis=0, dtype=np.float64))
    return Viz(means, largest, _entropy(row, is_probs=kind == "probs"), row.size)


def _entropy(row: NDArray[np.float64], *, is_probs: bool) -> float:
    p = row if is_probs else np.exp(row - row.max())
    p = p[p > 0] / p.sum()
    return float(-(p * np.log(p)).sum())


# ---- as bytes

# An encoder escapes control characters in JSON, so this occurs nowhere else.
_MARK: Final = b'"\x00"'
DATA_HERE: Final = msgspec.Raw(_MARK)
"""Placeholder for a long text in a value that `split_json` encodes."""


class Encoder:
    """Turns rows into bytes and tells the engine how many; any thread."""

    def __init__(self, count_copied: Callable[[int], None]) -> None:
        """Report to *count_copied* what is copied out of views."""
        self._count = count_copied

    def raw(self, values: NDArray[Any]) -> bytes:
        """The values, little-endian, in C order."""
        self._count(values.nbytes)
        return values.tobytes()

    def base64(self, values: NDArray[Any]) -> bytes:
        """`raw` in base64 (RFC 4648, padded), as ASCII bytes."""
        self._count(values.nbytes)
        return pybase64.b64encode(_bytes_of(values))

    def numbers(self, values: NDArray[Any]) -> list[Any]:
        """Values as nested lists of numbers for JSON; for small arrays."""
        self._count(values.nbytes)
        return values.tolist()


def _bytes_of(values: NDArray[Any]) -> memoryview:
    # The engine's rows are contiguous, so this is no copy.
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")


def split_json(value: object, data: bytes) -> list[bytes]:
    """JSON of *value* in pieces, with *data* at `DATA_HERE`; megabytes are not moved again.

    Args:
        value: What msgspec can encode, with `DATA_HERE` in it exactly once.
        data: ASCII that needs no escaping, such as base64.
    """
    head, _, tail = msgspec.json.encode(value).partition(_MARK)
    return [head + b'"', data, b'"' + tail]


def joined_text(pieces: Sequence[bytes]) -> str:
    """Pieces of `split_json` as one text."""
    return b"".join(pieces).decode("ascii" if all(map(bytes.isascii, pieces)) else "utf-8")


def named_events(events: Sequence[Mapping[str, Any]], data: bytes | None = None) -> list[bytes]:
    """Pieces of events that are named by their ``type``, for a stream with `NAMED_HEAD`.

    *data* belongs at the `DATA_HERE` of the last one.
    """
    pieces: list[bytes] = []
    for i, one in enumerate(events):
        head = EVENT_TAIL + NAMED_HEAD if i else b""
        pieces.append(b"%s%s\ndata: " % (head, one["type"].encode()))
        if data is None or i < len(events) - 1:
            pieces.append(msgspec.json.encode(one))
        else:
            pieces += split_json(one, data)
    return pieces
