"""Types of what events and replies of several dialects are made of, each encoded as it is."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.models.request import Format
from kqview.server.settings import AttentionValues
from kqview.server.web.described import example

ROW: Final = {
    "format": "per_layer", "shape": [4, 8, 7], "context_length": 7, "encoding": "base64",
    "dtype": "float32", "values": "probs", "data": "…",
}  # fmt: skip
"""An attention object of the description."""
TOKEN_ROW: Final = {**ROW, "n": 0, "token_id": 259}
PROMPT_ROWS: Final = {**ROW, "shape": [4, 8, 7, 7], "start": 0, "rows": 7}
"""The same of a token, and of a prompt."""


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
