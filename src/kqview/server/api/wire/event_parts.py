"""Types of what events and replies of several dialects are made of, each encoded as it is."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.models.run import Format
from kqview.server.settings import AttentionValues
from kqview.server.web.described import about
from kqview.server.web.endpoint import Sample

ROW: Final = {
    "format": "per_layer", "shape": [4, 8, 7], "context_length": 7, "encoding": "base64",
    "dtype": "float32", "values": "probs", "data": "…",
}  # fmt: skip
"""An attention object of the description."""
FORMATS: Final = (
    '"per_layer" has a row for each head of each layer; "aggregated" one row of them all; '
    '"sparse" the columns with the largest weights; "viz" a summary of each layer.'
)
"""What each format is."""
TOKEN_ROW: Final = {**ROW, "n": 0, "token_id": 259}
PROMPT_ROWS: Final = {**ROW, "shape": [4, 8, 7, 7], "start": 0, "rows": 7}
"""The same of a token, and of a prompt."""


class AttentionObject(Struct, kw_only=True):
    """Attention of a token, or rows of the prompt; ``format`` says which fields there are."""

    format: Annotated[Format, about(FORMATS)]
    shape: Annotated[
        tuple[int, ...] | UnsetType,
        about(
            'Of "per_layer" and "aggregated": shape of the values, which is layers, heads and '
            "columns; rows of the prompt have an axis before the columns.",
            [4, 8, 6],
        ),
    ] = UNSET
    context_length: Annotated[
        int | UnsetType, about("Columns of a whole row: the tokens before the generated one.", 6)
    ] = UNSET
    spans: Annotated[
        Sequence[tuple[int, int | None]] | UnsetType,
        about(
            "In place of ``context_length``: the ranges that were asked for, of which each is "
            "one column.",
            [[0, 5], [5, None]],
        ),
    ] = UNSET
    heads_by_layer: Annotated[
        Sequence[int] | UnsetType,
        about(
            "Heads of each layer, if layers differ; then the values are those of one layer "
            "after the other.",
            [8, 4],
        ),
    ] = UNSET
    layers: Annotated[
        Sequence[int] | UnsetType,
        about("Layers of the first axis, in its order, if they are not all.", [0, 3]),
    ] = UNSET
    encoding: Annotated[
        Literal["base64", "binary"] | UnsetType,
        about('"base64" if ``data`` is; "binary" if a binary frame with the values follows.'),
    ] = UNSET
    dtype: Annotated[
        str | UnsetType, about("Type of the values; little-endian, in C order.", "float32")
    ] = UNSET
    values: Annotated[AttentionValues, about("What they are.", "probs")]
    sinks: Annotated[
        bool | UnsetType,
        about(
            "True if part of each row goes to the model's attention sinks: probabilities then "
            "add up to less than 1."
        ),
    ] = UNSET
    data: Annotated[
        str | list[Any] | UnsetType,
        about(
            'The values: base64, or a list of numbers; of "sparse" a list of objects with '
            "``position``, a column, and ``layers``, its weight in each layer.",
            "AACAPw==",
        ),
    ] = UNSET
    top_k: Annotated[int | UnsetType, about('Of "sparse": how many columns there are.', 10)] = UNSET
    mean_by_layer: Annotated[
        list[Any] | UnsetType,
        about('Of "viz": mean over heads and columns of each layer.', [0.1, 0.2]),
    ] = UNSET
    max_by_layer: Annotated[
        list[Any] | UnsetType, about('Of "viz": the largest value of each layer.', [0.9, 0.8])
    ] = UNSET
    entropy: Annotated[
        float | UnsetType,
        about('Of "viz": entropy in nats of the mean row over layers and heads.', 1.3),
    ] = UNSET


class TokenAttention(AttentionObject, kw_only=True):
    """Attention of a token of an answer."""

    n: Annotated[int, about("Index of the token, from 0.", 0)]
    token_id: Annotated[int, about("Its id.", 259)]


class PromptAttention(AttentionObject, kw_only=True):
    """Rows of the prompt."""

    start: Annotated[int, about("Position of their first token.", 0)]
    rows: Annotated[int, about("How many tokens they are of.", 6)]


TokenRows = Annotated[
    list[TokenAttention] | UnsetType, about("Attention of each token, if asked for.")
]
PromptRows = Annotated[
    list[PromptAttention] | UnsetType, about("Rows of the prompt, if asked for.")
]


class RowsDescribed(Struct, kw_only=True):
    """What all rows of a request are."""

    format: Annotated[Format, about("As in attention objects.", "per_layer")]
    values: Annotated[AttentionValues, about("What they are.", "probs")]
    row_sum: Annotated[
        str | None,
        about("What the values of one head's row add up to; null for what is not normalized.", "1"),
    ]
    sinks: Annotated[bool | UnsetType, about("As in attention objects.")] = UNSET
    dtype: Annotated[str | UnsetType, about("Type of the values.", "float32")] = UNSET
    shape: Annotated[
        Sequence[int | None] | UnsetType,
        about("Shape of a row; null is the number of columns, which grows.", [4, 8, None]),
    ] = UNSET
    aggregation_mode: Annotated[
        str | UnsetType, about('Of "aggregated": how one row is made of many.', "mean")
    ] = UNSET
    columns: Annotated[
        str | UnsetType,
        about("What the columns are.", "the prompt, then the tokens before this one"),
    ] = UNSET


class Removed(Struct, kw_only=True):
    """What mods took back, which a client drops."""

    tokens: Annotated[int, about("So many of the last tokens.", 1)]
    characters: Annotated[int, about("So many of the last characters.", 2)]


class CalledFunction(Struct, kw_only=True):
    """A function that is called."""

    name: Annotated[str, about("Its name.", "weather")]
    arguments: Annotated[str, about("Its arguments as JSON.", "{}")]


class ModCall(Struct, kw_only=True):
    """A call that a mod made."""

    id: Annotated[str, about("Its id.", "call_1")]
    type: Literal["function"]
    function: Annotated[CalledFunction, about("What is called.")]


# ---- events of described streams


def sent(kind: type[Struct], event: str = "message", about: str = "", **shown: Any) -> Sample:
    """An event of a stream.

    Args:
        kind: Its type, whose docstring says when it is sent.
        event: Its name, over SSE.
        about: When it is sent, in place of the docstring.
        **shown: Values in place of those of the type's own example.
    """
    about = about or (kind.__doc__ or "").removesuffix(".")
    return Sample("server", about, shown, event, kind)


def named(kind: type[Struct], name: str = "") -> Sample:
    """An event that is named by its type, by *name* if there are several."""
    if name:
        return sent(kind, name, type=name)
    return sent(kind, str(kind.__struct_config__.tag))
