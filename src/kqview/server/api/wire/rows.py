"""Rows as replies have them: reduced to the format that a request asks for, then bytes or JSON.

Functions over arrays that know no dialect and copy no more than they return. One copy of a row is
the least possible: ASGI takes ``bytes``, which own their memory, and a zero-copy view does not.
base64 is that one copy too: it reads the view and writes text. It may be megabytes, so it stays a
separate piece from there to the transport: `event_pieces` assembles an event without joining them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal, TypeVar, cast

import msgspec
import numpy as np
import pybase64
from msgspec import UNSET

from kqview.server.api.wire.event_parts import AttentionObject, RowsDescribed
from kqview.server.models.request import AttentionWanted
from kqview.types import ModelInfo
from kqview.types.token import Array, Attention

_FLOAT16_MAX: Final = 65504.0
# An encoder escapes control characters in JSON, so this occurs nowhere else.
_MARK: Final = b'"\x00"'
DATA_HERE: Final = msgspec.Raw(_MARK)
"""Placeholder for a long text in a value that `event_pieces` encodes."""

_Object = TypeVar("_Object", bound=AttentionObject)


@dataclass(frozen=True)
class RowWriter:
    """Writes rows of one request as attention objects.

    Attributes:
        wanted: As the request asks for them.
        layers: Layers in the order of the layer axis; None if that says nothing new. It does if
            there is such an axis and the layers are not all of the model's.
        n_layers: How many there are.
        n_heads: Heads of each layer.
        has_sinks: Whether part of each softmax goes to attention sinks.
    """

    wanted: AttentionWanted
    layers: tuple[int, ...] | None
    n_layers: int
    n_heads: int
    has_sinks: bool

    @classmethod
    def of(cls, wanted: AttentionWanted, model: ModelInfo) -> "RowWriter":
        """That of *wanted* from *model*."""
        layers = model.attention_layers if wanted.layers is None else wanted.layers
        is_usual = wanted.format == "aggregated" or layers == tuple(range(model.n_layer))
        return cls(
            wanted,
            None if is_usual else layers,
            len(layers),
            model.n_head if wanted.heads is None else len(wanted.heads),
            model.has_attention_sinks and wanted.kind == "probs",
        )

    @cached_property
    def is_plain(self) -> bool:
        """Whether rows are float32 of all layers and heads, with a value for each column."""
        wanted = self.wanted
        is_whole = wanted.heads is wanted.spans is wanted.reduce_heads is self.layers is None
        return is_whole and (wanted.format, wanted.dtype) == ("per_layer", "float32")

    def described(self) -> RowsDescribed:
        """What a start event says of all rows of the request."""
        wanted, is_dense = self.wanted, self.wanted.format in ("per_layer", "aggregated")
        row_sum = None
        if wanted.kind == "probs":
            row_sum = "less than 1: the rest goes to attention sinks" if self.has_sinks else "1"
        sizes = [self.n_layers, self.n_heads] if wanted.format == "per_layer" else []
        columns = None if wanted.spans is None else len(wanted.spans)
        return RowsDescribed(
            format=wanted.format,
            values=cast("Any", wanted.kind),
            row_sum=row_sum,
            sinks=self.has_sinks or UNSET,
            dtype=wanted.dtype if is_dense else UNSET,
            shape=[*sizes, columns] if is_dense else UNSET,
            aggregation_mode=wanted.aggregation if wanted.format == "aggregated" else UNSET,
            columns="the prompt, then the tokens before this one" if columns is None else UNSET,
        )

    def write(
        self,
        attention: Attention,
        count_copied: Callable[[int], None],
        kind: type[_Object] = AttentionObject,
        *,
        data: Literal["base64", "binary", "list"] = "base64",
        **more: Any,
    ) -> tuple[_Object, bytes | None]:
        """The object of *attention*, and its values if they are bytes.

        Args:
            attention: Rows of a token, or a block of the prompt, as captured.
            count_copied: The run's.
            kind: Type of the object.
            data: "base64" belongs at the object's `DATA_HERE`; "binary" is little-endian, for a
                frame of its own; "list" is base64, but numbers in the object for "aggregated".
            **more: Further fields of *kind*.
        """
        more["values"] = self.wanted.kind
        if self.has_sinks:
            more["sinks"] = True
        if self.layers is not None:
            more["layers"] = self.layers
        if self.wanted.format in ("per_layer", "aggregated"):
            values, heads_by_layer = dense(self.wanted, attention)
            more |= {"format": self.wanted.format, "shape": values.shape}
            if self.wanted.spans is None:
                more["context_length"] = values.shape[-1]
            else:
                more["spans"] = self.wanted.spans
            if heads_by_layer is not None:
                more["heads_by_layer"] = heads_by_layer
            count_copied(values.nbytes)
            if data == "list" and self.wanted.format == "aggregated":
                return kind(data=values.tolist(), **more), None
            more["dtype"] = self.wanted.dtype
            if data == "binary":
                return kind(encoding="binary", **more), values.tobytes()
            # The engine's rows are contiguous, so this is no copy.
            view = np.ascontiguousarray(values).data.cast("B") if values.size else b""
            here = cast("str", DATA_HERE)
            return kind(encoding="base64", data=here, **more), pybase64.b64encode(view)
        summary = _sparse if self.wanted.format == "sparse" else _viz
        more |= summary(self.wanted, attention, count_copied)
        return kind(format=self.wanted.format, **more), None


def dense(wanted: AttentionWanted, rows: Attention) -> tuple[Array, tuple[int, ...] | None]:
    """The array of values to send for "per_layer" and "aggregated".

    Args:
        wanted: What was asked for.
        rows: ``token.attention`` of a generation with ``wanted.capture(model)``; also rows of a
            prompt, with an axis of queries before the last.

    Returns:
        Values of shape ``(n_layers, n_heads, n_context)``, ``(n_layers, n_context)`` or
        ``(n_context,)``, with an axis of ``n_rows`` before the last for rows of a prompt;
        little-endian float32 or float16; the engine's own view if nothing had to be computed. If
        layers differ in heads, the layers' heads follow each other: ``(1, sum of heads,
        n_context)``, and the second value is the heads of each layer; else it is None.
    """
    if wanted.format == "per_layer":
        if not isinstance(rows, tuple):
            return rows, None
        if wanted.reduce_heads is None:
            return np.concatenate(rows)[None], tuple(map(len, rows))
        return np.stack(rows), None
    stacked = _stacked(rows)
    if wanted.aggregation == "weighted_layers":
        stacked = np.tensordot(wanted.weights(len(stacked)), stacked, axes=1)
    if wanted.dtype == "float32":
        return np.ascontiguousarray(stacked, np.float32), None
    # Like the engine: beyond its range a float16 would be infinite and read as masked.
    finite = np.clip(stacked, -_FLOAT16_MAX, _FLOAT16_MAX)
    values = np.where(np.isneginf(stacked), stacked, finite)
    return np.ascontiguousarray(values, np.float16), None


def _stacked(rows: Attention) -> Array:
    # With a reduction every layer has one row, however many heads it has.
    return np.stack(rows) if isinstance(rows, tuple) else rows


def _sparse(
    wanted: AttentionWanted, rows: Attention, count_copied: Callable[[int], None]
) -> dict[str, Any]:
    """The positions with the largest mean over layers and heads, the largest first."""
    by_layer = _stacked(rows)
    mean = by_layer.mean(axis=0)
    # A stable sort puts the earlier of equal positions first.
    positions = np.argsort(-mean, kind="stable")[: wanted.top_k]
    weights = np.ascontiguousarray(by_layer[:, positions].T, np.float32)
    count_copied(weights.nbytes)
    pairs = zip(positions.tolist(), weights.tolist(), strict=True)
    return {
        "context_length": len(mean),
        "top_k": len(positions),
        "data": [{"position": position, "layers": layers} for position, layers in pairs],
    }


def _viz(
    wanted: AttentionWanted, rows: Attention, count_copied: Callable[[int], None]
) -> dict[str, Any]:
    """Figures of each layer, and the entropy of the mean row, scaled to sum 1.

    For values other than probabilities that is the entropy of the softmax of that row.
    """
    layers = rows if isinstance(rows, tuple) else tuple(rows)
    means = np.array([layer.mean() for layer in layers], np.float32)
    largest = np.array([layer.max() for layer in layers], np.float32)
    count_copied(means.nbytes + largest.nbytes)
    row = np.asarray(np.mean([layer.mean(axis=0) for layer in layers], axis=0, dtype=np.float64))
    p = row if wanted.kind == "probs" else np.exp(row - row.max())
    p = p[p > 0] / p.sum()
    return {
        "context_length": row.size,
        "mean_by_layer": means.tolist(),
        "max_by_layer": largest.tolist(),
        "entropy": float(-(p * np.log(p)).sum()),
    }


def event_pieces(event: Any, data: bytes | None = None) -> list[bytes]:
    """JSON of *event* in pieces, with *data* at its `DATA_HERE`; megabytes are not moved again.

    Args:
        event: What msgspec can encode, with `DATA_HERE` in it exactly once if there is *data*.
        data: ASCII that needs no escaping, such as base64.
    """
    encoded = msgspec.json.encode(event)
    if data is None:
        return [encoded]
    head, _, tail = encoded.partition(_MARK)
    return [head + b'"', data, b'"' + tail]


def joined_text(pieces: Sequence[bytes]) -> str:
    """Pieces of `event_pieces` as one text."""
    return b"".join(pieces).decode("ascii" if all(map(bytes.isascii, pieces)) else "utf-8")
