"""Attention: what a request asks for, how a token's rows are reduced to it, and how they are bytes.

Pure functions over arrays that know no protocol and copy no more than they return. What the engine
can reduce is reduced there (`AttentionWanted.capture`); `shaped` does the rest.

`Encoder` is the one place where the server copies attention. One copy of a row is the least
possible: ASGI takes ``bytes``, which own their memory, and a zero-copy view does not. base64 is
that one copy too: it reads the view and writes text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from kqview.errors import InvalidCapture
from kqview.types import Capture, ModelInfo
from kqview.types.capture import DType, Kind, Reduce, Span
from kqview.types.token import Array, Attention

Format = Literal["per_layer", "aggregated", "sparse", "viz"]
Aggregation = Literal["mean", "max", "last_layer", "weighted_layers"]

DEFAULT_TOP_K: Final = 50
_FLOAT16_MAX: Final = 65504.0


@dataclass(frozen=True, slots=True)
class AttentionWanted:
    """Attention as a request asks for it.

    Attributes:
        kind: As in Capture.
        format: "per_layer": all rows, ``(n_layers, n_heads, n_context)``, or with *reduce_heads*
            ``(n_layers, n_context)``. "aggregated": one value per position, ``(n_context,)``.
            "sparse": the *top_k* positions with the largest mean over layers and heads, each with
            its mean over heads in every layer. "viz": per layer the mean and the maximum of all
            heads and positions, and the entropy of the mean row.
        reduce_heads: Of "per_layer": the mean or the maximum of each layer's heads, None for all.
        aggregation: Of "aggregated": "mean" and "max" over layers and heads; "last_layer", the mean
            over the heads of the last layer with attention; "weighted_layers", the mean over
            heads of each layer, averaged with *layer_weights*.
        top_k: Of "sparse".
        dtype: Of the values, "float32" or "float16".
        layers: Layers to keep, None for all that have attention.
        heads: Heads to keep, None for all.
        spans: Of "per_layer" and "aggregated": sums over these ranges of columns, as in Capture,
            instead of a value per column; None for whole rows.
        layer_weights: Of "weighted_layers", one for each layer kept; None weighs layer i of n with
            ``(i + 1)``, so that late layers count more. Weights are divided by their sum.
        prompt: Also send the rows of the prompt's tokens.
    """

    kind: Kind = "probs"
    format: Format = "per_layer"
    reduce_heads: Literal["mean_heads", "max_heads"] | None = None
    aggregation: Aggregation = "mean"
    top_k: int = DEFAULT_TOP_K
    dtype: DType = "float32"
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None
    layer_weights: tuple[float, ...] | None = None
    prompt: bool = False

    def capture(self, model: ModelInfo) -> Capture:
        """The smallest engine capture that gives `shaped` what it needs.

        Raises:
            InvalidCapture: Layers, heads or weights do not fit *model*, *top_k* is below 1, or the
                format cannot show rows of a prompt.
        """
        if self.top_k < 1:
            raise InvalidCapture(f"top_k is {self.top_k}, the least is 1", parameter="top_k")
        if self.prompt and self.format in ("sparse", "viz"):
            raise InvalidCapture(
                f"rows of the prompt cannot be sent as {self.format}; "
                "ask for per_layer or aggregated"
            )
        if self.spans is not None and self.format in ("sparse", "viz"):
            raise InvalidCapture(
                f"spans cannot be sent as {self.format}; ask for per_layer or aggregated",
                parameter="spans",
            )
        layers = self.layers
        if self.format == "aggregated" and self.aggregation == "last_layer":
            layers = (layers or model.attention_layers)[-1:]
        if self.format == "aggregated" and self.aggregation == "weighted_layers":
            self.weights(len(layers if layers is not None else model.attention_layers))
        return Capture(
            self.kind,
            layers=layers,
            heads=self.heads,
            reduce=self._reduce(),
            spans=self.spans,
            # What is computed further here is computed from float32 and rounded once.
            dtype=self.dtype if self.format == "per_layer" else "float32",
            prompt=self.prompt,
            on_full="wait",
        )

    def _reduce(self) -> Reduce | None:
        if self.format == "sparse":
            return "mean_heads"
        if self.format == "aggregated":
            if self.aggregation in ("mean", "last_layer"):
                return "mean"
            return "max" if self.aggregation == "max" else "mean_heads"
        return self.reduce_heads if self.format == "per_layer" else None

    def weights(self, n_layers: int) -> NDArray[np.float32]:
        """The weights of *n_layers* layers, with sum 1; raises InvalidCapture."""
        given = self.layer_weights
        weights = np.arange(1, n_layers + 1) if given is None else np.asarray(given, np.float64)
        if len(weights) != n_layers or not np.isfinite(weights).all() or not weights.sum() > 0:
            raise InvalidCapture(
                f"layer_weights has {len(weights)} weights for {n_layers} layers; "
                "send one finite weight for each layer, with a sum above 0",
                parameter="layer_weights",
            )
        return np.asarray(weights / weights.sum(), np.float32)


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
