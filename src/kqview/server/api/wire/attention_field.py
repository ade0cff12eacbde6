"""The field ``attention`` of OpenAI's and Anthropic's APIs, and what it puts into replies. Pure."""

from collections.abc import Mapping, Set
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Struct

from kqview.errors import RequestError
from kqview.server.api.wire.event_parts import (
    AttentionObject,
    PromptAttention,
    TokenAttention,
)
from kqview.server.api.wire.fields import Indices, Spans, Weights, first, tuple_of
from kqview.server.api.wire.rows import RowWriter, event_pieces
from kqview.server.errors import TooLarge
from kqview.server.models.request import (
    DEFAULT_TOP_K,
    Aggregation,
    AttentionWanted,
)
from kqview.server.models.row_cache import CachedRow, PromptText, RowCache
from kqview.server.models.run import Removal, Run, Step
from kqview.server.settings import AttentionValues, Settings
from kqview.server.web.budget import Reservation
from kqview.server.web.described import example
from kqview.types import ModelInfo, PromptBlock

Object = dict[str, Any]

DEFAULT_VALUES: Final[AttentionValues] = "probs"
"""Values of rows if neither the request nor the settings say."""


# ---- requests


class Attention(Struct, kw_only=True):
    """What attention to send with each token; `models.attention` describes the formats.

    Attributes:
        values: What rows hold: logits before the softmax, scores with the mask, or probabilities;
            "probs" if not given, unless the server was started with another default.
        format: "per_layer" has a row for each head of each layer; "aggregated" one row of them all;
            "sparse" the columns with the largest weights; "viz" a summary of each layer.
            "per_layer" if not given.
        reduce: "mean_heads" and "max_heads" make one row of each layer; the others one row of all
            layers, which is the format "aggregated".
        layers: Layers to send; all if not given.
        heads: Heads to send; all if not given.
        spans: Ranges of columns, whose sums are sent in place of columns; a range that ends with
            null grows with the context.
        layer_weights: Weight of each layer for "weighted_layers".
        top_k: Columns of "sparse"; 50 if not given.
        dtype: Type of the values; "float32" if not given.
        prompt: Whether rows of the prompt's own tokens are sent as well; false if not given.
        delivery: "inline" puts rows into the reply; "id" keeps them for ``GET
            /v1/attention/{id}/{n}``, where id is the reply's own. "inline" if not given.
    """

    values: Annotated[AttentionValues | None, example(default="probs")] = None
    format: Annotated[
        Literal["per_layer", "aggregated", "sparse", "viz"] | None, example(default="per_layer")
    ] = None
    reduce: (
        Literal["mean_heads", "max_heads", "mean", "max", "last_layer", "weighted_layers"] | None
    ) = None
    layers: Annotated[Indices | None, example([0, 3])] = None
    heads: Annotated[Indices | None, example([0, 5])] = None
    spans: Annotated[Spans | None, example([[0, 5], [5, None]])] = None
    layer_weights: Annotated[Weights | None, example([0, 0, 1, 1])] = None
    top_k: Annotated[int | None, example(10, default=50)] = None
    dtype: Annotated[Literal["float32", "float16"] | None, example(default="float32")] = None
    prompt: Annotated[bool | None, example(default=False)] = None
    delivery: Annotated[Literal["inline", "id"] | None, example(default="inline")] = None


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
        layers=tuple_of(given.layers),
        heads=tuple_of(given.heads),
        spans=tuple_of(given.spans),
        layer_weights=tuple_of(given.layer_weights),
        prompt=bool(given.prompt),
    )


def keeps(wanted: Attention | bool | None) -> bool:
    """Whether attention is kept for ``GET /v1/attention/{id}/{n}`` instead of sent."""
    return isinstance(wanted, Attention) and wanted.delivery == "id"


# ---- replies


class AttentionWriter:
    """Writes the attention objects of a run, or keeps its rows for whoever fetches them."""

    def __init__(
        self,
        run: Run,
        model: ModelInfo,
        kept: RowCache | None = None,
        prompt: PromptText | None = None,
        hidden: Set[int] = frozenset(),
    ) -> None:
        """Keep rows in *kept*, if it is given, instead of writing them; the others are as there."""
        wanted = run.request.attention
        self._rows = None if wanted is None else RowWriter.of(wanted, model)
        self._kept = kept
        if wanted is not None and kept is not None:
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

    def __init__(self, hold: Reservation, most_bytes: int) -> None:
        """Take up to *most_bytes*, counted in *hold*."""
        self._hold = hold
        self._most_bytes = most_bytes
        self.n_bytes = 0
        self._elements: dict[tuple[int, str], list[bytes]] = {}

    def prompt(self, writer: AttentionWriter, run: Run, block: PromptBlock) -> None:
        """Append the attention object of rows of the prompt."""
        self.add(0, "prompt_attention", *writer.prompt(run, block))

    def add(self, sample: int, name: str, value: Any, data: bytes | None = None) -> None:
        """Append *value*, with *data* at its `DATA_HERE`; None is nothing.

        Raises:
            TooLarge: The reply would be larger than allowed.
        """
        if value is None:
            return
        element = b"".join(event_pieces(value, data))
        n_bytes = len(element) + _ELEMENT_BYTES
        self._hold.take(n_bytes)
        self.n_bytes += n_bytes
        if self.n_bytes > self._most_bytes:
            raise TooLarge(
                f"the reply has more than {self._most_bytes} bytes, the limit of max_reply_bytes; "
                "stream it, or ask for less attention"
            )
        self._elements.setdefault((sample, name), []).append(element)

    def of(self, sample: int) -> dict[str, msgspec.Raw]:
        """The lists of a sample by name, as JSON."""
        return {
            name: msgspec.Raw(b"[" + b",".join(elements) + b"]")
            for (i, name), elements in self._elements.items()
            if i == sample
        }


_ELEMENT_BYTES: Final = 64  # of an element, besides its text
