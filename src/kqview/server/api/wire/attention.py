"""Attention on the wire: what requests ask for, and rows as replies have them.

The functions over arrays know no dialect and copy no more than they return. One copy of a row is
the least possible: ASGI takes ``bytes``, which own their memory, and a zero-copy view does not.
base64 is that one copy too: it reads the view and writes text. It may be megabytes, so it stays a
separate piece from there to the transport: `event_pieces` assembles an event without joining them.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
import numpy as np
import pybase64
from msgspec import UNSET, Struct

from kqview.errors import RequestError
from kqview.server.api.wire.event_parts import (
    FORMATS,
    AttentionObject,
    PromptAttention,
    RowsDescribed,
    TokenAttention,
)
from kqview.server.api.wire.fields import Indices, Spans, Weights, first
from kqview.server.errors import TooLarge
from kqview.server.models.row_cache import CachedRow, PromptText, RowCache
from kqview.server.models.run import (
    DEFAULT_TOP_K,
    Aggregation,
    AttentionWanted,
    Format,
    Removal,
    Run,
    Step,
)
from kqview.server.settings import AttentionValues, Settings
from kqview.server.web.budget import Reservation
from kqview.server.web.described import about
from kqview.types import ModelInfo, PromptBlock
from kqview.types.token import Array, Attention as Rows

DEFAULT_VALUES: Final[AttentionValues] = "probs"
"""Values of rows if neither the request nor the settings say."""
_ELEMENT_BYTES: Final = 64  # of an element in a list, besides its text


# ---- requests


# Fields that dialects have under names of their own.
FormatField = Annotated[Format | None, about(FORMATS, default="per_layer")]
LayersField = Annotated[Indices | None, about("Layers to send; all if not given.", [0, 3])]
HeadsField = Annotated[Indices | None, about("Heads to send; all if not given.", [0, 5])]
SpansField = Annotated[
    Spans | None,
    about(
        "Ranges of columns, whose sums are sent in place of columns; a range that ends "
        "with null grows with the context.",
        [[0, 5], [5, None]],
    ),
]
LayerWeightsField = Annotated[
    Weights | None, about('Weight of each layer for "weighted_layers".', [0, 0, 1, 1])
]
TopKField = Annotated[int | None, about('Columns of "sparse".', 10, default=50)]
DTypeField = Annotated[
    Literal["float32", "float16"] | None, about("Type of the values.", default="float32")
]
PromptField = Annotated[
    bool | None, about("Whether rows of the prompt's own tokens are sent as well.", default=False)
]


class Attention(Struct, kw_only=True):
    """What attention to send with each token; `models.attention` describes the formats."""

    values: Annotated[
        AttentionValues | None,
        about(
            "What rows hold: logits before the softmax, scores with the mask, or "
            "probabilities; the server may have been started with another default.",
            default="probs",
        ),
    ] = None
    format: FormatField = None
    reduce: Annotated[
        (Literal["mean_heads", "max_heads", "mean", "max", "last_layer", "weighted_layers"] | None),
        about(
            '"mean_heads" and "max_heads" make one row of each layer; the others one row of'
            ' all layers, which is the format "aggregated".'
        ),
    ] = None
    layers: LayersField = None
    heads: HeadsField = None
    spans: SpansField = None
    layer_weights: LayerWeightsField = None
    top_k: TopKField = None
    dtype: DTypeField = None
    prompt: PromptField = None
    delivery: Annotated[
        Literal["inline", "id"] | None,
        about(
            '"inline" puts rows into the reply; "id" keeps them for ``GET '
            "/v1/attention/{id}/{n}``, where id is the reply's own.",
            default="inline",
        ),
    ] = None


AttentionField = Annotated[
    Attention | bool | None,
    about("Which attention to send with each token; true for all defaults."),
]

ATTENTION_NAMES: Final[Mapping[str, str]] = {
    "capture": "attention",
    "kind": "attention.values",
    "layers": "attention.layers",
    "heads": "attention.heads",
    "spans": "attention.spans",
    "layer_weights": "attention.layer_weights",
}
"""Parameter of the core -> the field, for `GenerateRequest.names`."""


def attention_of(wanted: Attention | bool | None, settings: Settings) -> AttentionWanted | None:
    """What attention to capture, None for none.

    Raises:
        RequestError: Format, reduction and delivery do not go together.
    """
    if wanted is None or wanted is False:
        return None
    given = Attention() if wanted is True else wanted
    reduces_heads = given.reduce in ("mean_heads", "max_heads")
    implied = None
    if given.reduce is not None:
        implied = "per_layer" if reduces_heads else "aggregated"
    form = given.format or implied or settings.attention_format
    if implied is not None and form != implied:
        raise RequestError(
            f"attention.reduce is {given.reduce!r}, which makes rows of the format {implied}, and "
            f"attention.format is {form!r}; leave one of them out",
            parameter="attention",
        )
    if given.top_k is not None and given.top_k < 1:
        raise RequestError(
            f"attention.top_k is {given.top_k}, the least is 1", parameter="attention.top_k"
        )
    if given.delivery == "id" and given.prompt:
        raise RequestError(
            "rows of the prompt are only sent with the reply; leave attention.prompt or "
            "attention.delivery out",
            parameter="attention",
        )
    if given.delivery == "id" and settings.kept_attention_bytes == 0:
        raise RequestError(
            "attention.delivery is 'id', but this server keeps no rows, because its "
            "kept_attention_bytes is 0; leave it out",
            parameter="attention",
        )
    summed = None if given.spans is None else "probs"
    return AttentionWanted(
        kind=first(given.values, summed, settings.attention_values, DEFAULT_VALUES),
        format=form,
        reduce_heads=cast("Any", given.reduce) if reduces_heads else None,
        aggregation="mean" if reduces_heads else cast("Aggregation", given.reduce or "mean"),
        top_k=first(given.top_k, DEFAULT_TOP_K),
        dtype=given.dtype or "float32",
        layers=given.layers,
        heads=given.heads,
        spans=given.spans,
        layer_weights=given.layer_weights,
        prompt=bool(given.prompt),
        is_kept=given.delivery == "id",
    )


# ---- rows

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
        attention: Rows,
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


def dense(wanted: AttentionWanted, rows: Rows) -> tuple[Array, tuple[int, ...] | None]:
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


def _stacked(rows: Rows) -> Array:
    # With a reduction every layer has one row, however many heads it has.
    return np.stack(rows) if isinstance(rows, tuple) else rows


def _sparse(
    wanted: AttentionWanted, rows: Rows, count_copied: Callable[[int], None]
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
    wanted: AttentionWanted, rows: Rows, count_copied: Callable[[int], None]
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


# ---- replies


def index_of(text: str) -> int:
    """The index that *text*, a part of a path, is; -1, which nothing has, if it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


class AttentionWriter:
    """Writes the attention objects of a run, or keeps its rows for whoever fetches them."""

    def __init__(
        self,
        run: Run,
        model: ModelInfo,
        kept: RowCache,
        prompt: PromptText | None = None,
        hidden: Set[int] = frozenset(),
    ) -> None:
        """Keep rows in *kept* instead of writing them, if the request says so.

        The others are as there.
        """
        wanted = run.request.attention
        self._rows = None if wanted is None else RowWriter.of(wanted, model)
        self._kept = kept if wanted is not None and wanted.is_kept else None
        if wanted is not None and self._kept is not None:
            layers = model.attention_layers if wanted.layers is None else wanted.layers
            kept.open(
                run.owner, run.request_id, wanted, layers,
                n_choices=len(run.generations), prompt=prompt, hidden=hidden,
            )  # fmt: skip

    def token(self, run: Run, step: Step) -> tuple[AttentionObject | None, bytes | None]:
        """The attention object of a token, and the base64 that belongs at its `DATA_HERE`."""
        token, rows = step.token, step.token.attention
        if self._rows is None or rows is None:
            return None, None
        if self._kept is None:
            return self._rows.write(
                rows, run.count_copied, TokenAttention, n=token.index, token_id=token.id
            )
        shown, data = self._rows.write(rows, run.count_copied, data="binary")
        if data is None:
            row = CachedRow(
                token.id, token.text, (), msgspec.json.encode(shown), "application/json"
            )
        else:
            row = CachedRow(token.id, token.text, cast("tuple[int, ...]", shown.shape), data)
        self._kept.add(run.owner, run.request_id, step.sample, token.index, row)
        return None, None

    def removed(self, run: Run, removal: Removal) -> None:
        """Forget kept rows of tokens that mods have taken back."""
        if self._kept is not None:
            self._kept.take_back(run.owner, run.request_id, removal.sample, removal.n_left)

    def prompt(self, run: Run, block: PromptBlock) -> tuple[AttentionObject | None, bytes | None]:
        """The attention object of rows of the prompt."""
        if self._rows is None or block.rows is None:
            return None, None
        return self._rows.write(
            block.rows, run.count_copied, PromptAttention, start=block.start, rows=block.n_rows
        )


class ReplyLists:
    """Lists of one reply, whose elements are encoded when they come.

    The engine gets the memory of a row back before the reply is complete.
    """

    def __init__(
        self, hold: Reservation, most_bytes: float = math.inf, *, packs: bool = False
    ) -> None:
        """Take up to *most_bytes*, counted in *hold*, of JSON, or MessagePack if *packs*."""
        self._hold = hold
        self._most_bytes = most_bytes
        self._packs = packs
        self.n_bytes = 0
        self._lists: dict[tuple[int, str], dict[str, list[msgspec.Raw]]] = {}

    def prompt(self, writer: AttentionWriter, run: Run, block: PromptBlock) -> None:
        """Append the attention object of rows of the prompt."""
        self.add(0, "prompt_attention", *writer.prompt(run, block))

    def add(
        self, sample: int, name: str, value: Any, data: bytes | None = None, *, within: str = ""
    ) -> None:
        """Append *value*, with *data* at its `DATA_HERE`; None is nothing.

        Args:
            sample: Whose list it is.
            name: Name of the list.
            value: What msgspec can encode.
            data: As of `event_pieces`.
            within: Name of the object that has the list; "" for the sample itself.

        Raises:
            TooLarge: The reply would be larger than allowed.
        """
        if value is None:
            return
        pieces = [msgspec.msgpack.encode(value)] if self._packs else event_pieces(value, data)
        element = msgspec.Raw(b"".join(pieces))
        n_bytes = len(element) + _ELEMENT_BYTES
        self._hold.take(n_bytes)
        self.n_bytes += n_bytes
        if self.n_bytes > self._most_bytes:
            raise TooLarge(
                f"the reply has more than {self._most_bytes} bytes, the limit of max_reply_bytes; "
                "stream it, or ask for less attention"
            )
        self._lists.setdefault((sample, within), {}).setdefault(name, []).append(element)

    def add_each(self, sample: int, within: str, lists: Struct) -> None:
        """Append the elements of all *lists* to those of the same names."""
        for name in lists.__struct_fields__:
            for value in getattr(lists, name):
                self.add(sample, name, value, within=within)

    def of(self, sample: int, within: str = "") -> dict[str, list[msgspec.Raw]]:
        """The lists of a sample by name, encoded."""
        return self._lists.get((sample, within), {})
