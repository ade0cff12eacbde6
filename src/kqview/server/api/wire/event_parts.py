"""What events and replies of several dialects are made of: attention objects, and mods' doings.

Types for the description of the API; `attention_protocol` and `mods_field` write such objects, and
a test compares what is sent with these types.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class AttentionObject(Struct, kw_only=True):
    """Attention of a token, or rows of the prompt; ``format`` says which fields there are.

    Attributes:
        format: "per_layer" has a row for each head of each layer; "aggregated" one row of them all;
            "sparse" the columns with the largest weights; "viz" a summary of each layer.
        shape: Of "per_layer" and "aggregated": shape of the values, such as [4, 8, 6], which is
            layers, heads and columns; rows of the prompt have an axis before the columns.
        context_length: Columns of a whole row, such as 6: the tokens before the generated one.
        spans: In place of ``context_length``: the ranges that were asked for, such as
            [[0, 5], [5, null]], of which each is one column.
        heads_by_layer: Heads of each layer, such as [8, 4], if layers differ; then the values are
            those of one layer after the other.
        layers: Layers of the first axis, in its order, such as [0, 3], if they are not all.
        encoding: "base64" if ``data`` is; "binary" if a binary frame with the values follows.
        dtype: Type of the values, such as "float32"; little-endian, in C order.
        values: What they are, such as "probs".
        sinks: True if part of each row goes to the model's attention sinks: probabilities then add
            up to less than 1.
        data: The values: base64, such as "AACAPw==", or a list of numbers; of "sparse" a list of
            objects with ``position``, a column, and ``layers``, its weight in each layer.
        top_k: Of "sparse": how many columns there are, such as 10.
        mean_by_layer: Of "viz": mean over heads and columns of each layer, such as [0.1, 0.2].
        max_by_layer: Of "viz": the largest value of each layer, such as [0.9, 0.8].
        entropy: Of "viz": entropy in nats of the mean row over layers and heads, such as 1.3.
    """

    format: Literal["per_layer", "aggregated", "sparse", "viz"]
    shape: list[int] | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    spans: list[tuple[int, int | None]] | UnsetType = UNSET
    heads_by_layer: list[int] | UnsetType = UNSET
    layers: list[int] | UnsetType = UNSET
    encoding: Literal["base64", "binary"] | UnsetType = UNSET
    dtype: str | UnsetType = UNSET
    values: Literal["logits", "scores", "probs"]
    sinks: bool | UnsetType = UNSET
    data: str | list[Any] | UnsetType = UNSET
    top_k: int | UnsetType = UNSET
    mean_by_layer: list[Any] | UnsetType = UNSET
    max_by_layer: list[Any] | UnsetType = UNSET
    entropy: float | UnsetType = UNSET


class TokenAttention(AttentionObject, kw_only=True):
    """Attention of a token of an answer.

    Attributes:
        n: Index of the token, from 0, such as 0.
        token_id: Its id, such as 259.
    """

    n: int
    token_id: int


class PromptAttention(AttentionObject, kw_only=True):
    """Rows of the prompt.

    Attributes:
        start: Position of their first token, such as 0.
        rows: How many tokens they are of, such as 6.
    """

    start: int
    rows: int


class RowsDescribed(Struct, kw_only=True):
    """What all rows of a request are.

    Attributes:
        format: As in attention objects, such as "per_layer".
        values: What they are, such as "probs".
        row_sum: What the values of one head's row add up to, such as "1"; null for what is not
            normalized.
        sinks: As in attention objects.
        dtype: Type of the values, such as "float32".
        shape: Shape of a row, such as [4, 8, null]; null is the number of columns, which grows.
        aggregation_mode: Of "aggregated": how one row is made of many, such as "mean".
        columns: What the columns are, such as "the prompt, then the tokens before this one".
    """

    format: Literal["per_layer", "aggregated", "sparse", "viz"]
    values: Literal["logits", "scores", "probs"]
    row_sum: str | None
    sinks: bool | UnsetType = UNSET
    dtype: str | UnsetType = UNSET
    shape: list[int | None] | UnsetType = UNSET
    aggregation_mode: str | UnsetType = UNSET
    columns: str | UnsetType = UNSET


class LeftOut(Struct, kw_only=True):
    """What the server left out of a request.

    Attributes:
        truncated_tokens: Tokens at the front of a text that was too long, such as 120.
        ignored: Names in the request that had no effect, such as ["max_lenght"].
    """

    truncated_tokens: int | UnsetType = UNSET
    ignored: list[str] | UnsetType = UNSET


class StartEvent(LeftOut, kw_only=True):
    """What follows, with ``start_event``.

    Attributes:
        type: Always "start".
        request_id: Label of the request, such as "r1".
        prompt_tokens: Tokens of the prompt, such as 7.
        cached_tokens: Those of them that were in a cache, such as 0; the others were evaluated.
        prompt_ids: Their ids, such as [0, 35, 444], as they are evaluated.
        seed: The seed that is used, such as 2531011, also if the request gave none.
        attention: What the rows are, if some were asked for.
    """

    type: Literal["start"]
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    prompt_ids: list[int]
    seed: int
    attention: RowsDescribed | UnsetType = UNSET


class RunDetails(LeftOut, kw_only=True):
    """What the end tells of a request; times and counts are of its first sample.

    Attributes:
        seed: The seed that was used, such as 2531011, also if the request gave none.
        prompt_tokens: Tokens of the prompt, such as 7.
        cached_tokens: Those of them that were in a cache, such as 0; the others were evaluated.
        queue_ms: Milliseconds that it waited for a slot, such as 0.1.
        prompt_ms: Milliseconds from then to the first token, such as 4.2.
        generation_ms: Milliseconds from the first token to the last, such as 1.7.
    """

    seed: int
    prompt_tokens: int
    cached_tokens: int
    queue_ms: float
    prompt_ms: float
    generation_ms: float


class LikelyToken(Struct):
    """One of the most probable tokens at a place.

    Attributes:
        token_id: Its id, such as 354.
        text: Its text, such as " the".
        logprob: Its logprob before bias, grammar and samplers, such as -1.5.
    """

    token_id: int
    text: str
    logprob: float


class Removed(Struct, kw_only=True):
    """What mods took back, which a client drops.

    Attributes:
        tokens: So many of the last tokens, such as 1.
        characters: So many of the last characters, such as 2.
    """

    tokens: int
    characters: int


class CalledFunction(Struct, kw_only=True):
    """A function that is called.

    Attributes:
        name: Its name, such as "weather".
        arguments: Its arguments as JSON, such as "{}".
    """

    name: str
    arguments: str


class ModCall(Struct, kw_only=True):
    """A call that a mod made.

    Attributes:
        id: Its id, such as "call_1".
        type: Always "function".
        function: What is called.
    """

    id: str
    type: Literal["function"]
    function: CalledFunction
