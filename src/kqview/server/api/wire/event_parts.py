"""What events and replies of several dialects are made of, each encoded as it is. Pure.

The values of an attention object may be megabytes of base64, so they stay a separate piece from the
encoder to the transport: `event_pieces` assembles an event without joining them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.rows import DATA_HERE, Dense, Encoder, Sparse, shaped, split_json
from kqview.server.models.request import AttentionWanted
from kqview.server.settings import AttentionValues
from kqview.server.web.described import example
from kqview.types import ModelInfo
from kqview.types.token import Attention

Format = Literal["per_layer", "aggregated", "sparse", "viz"]
ROW: Final = {
    "format": "per_layer", "shape": [4, 8, 7], "context_length": 7, "encoding": "base64",
    "dtype": "float32", "values": "probs", "data": "…",
}  # fmt: skip
"""An attention object of the description."""


class AttentionObject(Struct, kw_only=True):
    """Attention of a token, or rows of the prompt; ``format`` says which fields there are.

    Attributes:
        format: "per_layer" has a row for each head of each layer; "aggregated" one row of them all;
            "sparse" the columns with the largest weights; "viz" a summary of each layer.
        shape: Of "per_layer" and "aggregated": shape of the values, which is layers, heads and
            columns; rows of the prompt have an axis before the columns.
        context_length: Columns of a whole row: the tokens before the generated one.
        spans: In place of ``context_length``: the ranges that were asked for, of which each is one
            column.
        heads_by_layer: Heads of each layer, if layers differ; then the values are those of one
            layer after the other.
        layers: Layers of the first axis, in its order, if they are not all.
        encoding: "base64" if ``data`` is; "binary" if a binary frame with the values follows.
        dtype: Type of the values; little-endian, in C order.
        values: What they are.
        sinks: True if part of each row goes to the model's attention sinks: probabilities then add
            up to less than 1.
        data: The values: base64, or a list of numbers; of "sparse" a list of objects with
            ``position``, a column, and ``layers``, its weight in each layer.
        top_k: Of "sparse": how many columns there are.
        mean_by_layer: Of "viz": mean over heads and columns of each layer.
        max_by_layer: Of "viz": the largest value of each layer.
        entropy: Of "viz": entropy in nats of the mean row over layers and heads.
    """

    format: Format
    shape: Annotated[tuple[int, ...] | UnsetType, example([4, 8, 6])] = UNSET
    context_length: Annotated[int | UnsetType, example(6)] = UNSET
    spans: Annotated[Sequence[tuple[int, int | None]] | UnsetType, example([[0, 5], [5, None]])] = (
        UNSET
    )
    heads_by_layer: Annotated[Sequence[int] | UnsetType, example([8, 4])] = UNSET
    layers: Annotated[Sequence[int] | UnsetType, example([0, 3])] = UNSET
    encoding: Literal["base64", "binary"] | UnsetType = UNSET
    dtype: Annotated[str | UnsetType, example("float32")] = UNSET
    values: Annotated[AttentionValues, example("probs")]
    sinks: bool | UnsetType = UNSET
    data: Annotated[str | list[Any] | UnsetType, example("AACAPw==")] = UNSET
    top_k: Annotated[int | UnsetType, example(10)] = UNSET
    mean_by_layer: Annotated[list[Any] | UnsetType, example([0.1, 0.2])] = UNSET
    max_by_layer: Annotated[list[Any] | UnsetType, example([0.9, 0.8])] = UNSET
    entropy: Annotated[float | UnsetType, example(1.3)] = UNSET


class TokenAttention(AttentionObject, kw_only=True):
    """Attention of a token of an answer.

    Attributes:
        n: Index of the token, from 0.
        token_id: Its id.
    """

    n: Annotated[int, example(0)]
    token_id: Annotated[int, example(259)]


class PromptAttention(AttentionObject, kw_only=True):
    """Rows of the prompt.

    Attributes:
        start: Position of their first token.
        rows: How many tokens they are of.
    """

    start: Annotated[int, example(0)]
    rows: Annotated[int, example(6)]


class RowsDescribed(Struct, kw_only=True):
    """What all rows of a request are.

    Attributes:
        format: As in attention objects.
        values: What they are.
        row_sum: What the values of one head's row add up to; null for what is not normalized.
        sinks: As in attention objects.
        dtype: Type of the values.
        shape: Shape of a row; null is the number of columns, which grows.
        aggregation_mode: Of "aggregated": how one row is made of many.
        columns: What the columns are.
    """

    format: Annotated[Format, example("per_layer")]
    values: Annotated[AttentionValues, example("probs")]
    row_sum: Annotated[str | None, example("1")]
    sinks: bool | UnsetType = UNSET
    dtype: Annotated[str | UnsetType, example("float32")] = UNSET
    shape: Annotated[Sequence[int | None] | UnsetType, example([4, 8, None])] = UNSET
    aggregation_mode: Annotated[str | UnsetType, example("mean")] = UNSET
    columns: Annotated[str | UnsetType, example("the prompt, then the tokens before this one")] = (
        UNSET
    )


_Object = TypeVar("_Object", bound=AttentionObject)


@dataclass(frozen=True, slots=True)
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
            values=cast("AttentionValues", wanted.kind),
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
        found, encoder = shaped(self.wanted, attention), Encoder(count_copied)
        if isinstance(found, Dense):
            values = found.values
            more |= {"format": found.format, "shape": values.shape}
            if found.spans is None:
                more["context_length"] = values.shape[-1]
            else:
                more["spans"] = found.spans
            if found.heads_by_layer is not None:
                more["heads_by_layer"] = found.heads_by_layer
            if data == "list" and found.format == "aggregated":
                return kind(data=encoder.numbers(values), **more), None
            more["dtype"] = self.wanted.dtype
            if data == "binary":
                return kind(encoding="binary", **more), encoder.raw(values)
            here = cast("str", DATA_HERE)
            return kind(encoding="base64", data=here, **more), encoder.base64(values)
        more["context_length"] = found.n_context
        if isinstance(found, Sparse):
            positions = found.positions.tolist()
            by_layer = encoder.numbers(found.by_layer)
            weights = [
                {"position": position, "layers": layers}
                for position, layers in zip(positions, by_layer, strict=True)
            ]
            return kind(format="sparse", top_k=len(positions), data=weights, **more), None
        more["mean_by_layer"] = encoder.numbers(found.mean_by_layer)
        more["max_by_layer"] = encoder.numbers(found.max_by_layer)
        return kind(format="viz", entropy=found.entropy, **more), None


def event_pieces(event: Any, data: bytes | None = None) -> list[bytes]:
    """JSON of *event* in pieces, with *data* at its `DATA_HERE`."""
    return [msgspec.json.encode(event)] if data is None else split_json(event, data)


class Removed(Struct, kw_only=True):
    """What mods took back, which a client drops.

    Attributes:
        tokens: So many of the last tokens.
        characters: So many of the last characters.
    """

    tokens: Annotated[int, example(1)]
    characters: Annotated[int, example(2)]


class CalledFunction(Struct, kw_only=True):
    """A function that is called.

    Attributes:
        name: Its name.
        arguments: Its arguments as JSON.
    """

    name: Annotated[str, example("weather")]
    arguments: Annotated[str, example("{}")]


class ModCall(Struct, kw_only=True):
    """A call that a mod made.

    Attributes:
        id: Its id.
        type: Always "function".
        function: What is called.
    """

    id: Annotated[str, example("call_1")]
    type: Literal["function"]
    function: CalledFunction
