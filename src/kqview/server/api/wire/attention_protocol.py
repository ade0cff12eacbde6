"""What the two attention protocols, kobold and dream, share: request fields, attention, logprobs.

Pure. A body becomes the neutral parts of a `GenerateRequest`; each protocol accepts the other's
names. Absent and null fields take the defaults in `DEFAULTS`. Unknown names are ignored, as are
samplers that llama.cpp does not have (``tfs``, ``top_a``, ``smoothing_factor``) and
``sampler_order``: llama.cpp's order is fixed. Replies name them in ``ignored``. Values are read as
KoboldCpp reads them: ``top_k`` -1 and ``top_p`` 0 work, a seed may have any size, and empty stop
sequences count as none.

The values of an attention object may be megabytes of base64, so they stay a separate piece from the
encoder to the transport: `event_pieces` assembles an event without joining them.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Struct

from kqview.engine import Engine
from kqview.errors import (
    InvalidSampling,
    InvalidToken,
    KqviewError,
    PromptTooLong,
    RequestError,
)
from kqview.server.api.wire.mods_field import ModsField
from kqview.server.api.wire.rows import DATA_HERE, Dense, Encoder, Shaped, Sparse, Viz, split_json
from kqview.server.errors import renamed
from kqview.server.models.request import DEFAULT_TOP_K, AttentionWanted
from kqview.server.models.run import Run, TokenLogprobs
from kqview.server.settings import AttentionValues, Settings
from kqview.server.web.described import example
from kqview.server.web.lenient import shown_names
from kqview.types import ModelInfo, Sampling
from kqview.types.capture import MOST_SPANS

DEFAULTS: Final[dict[str, Any]] = {
    "max_tokens": 50,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
}
"""What a request that says nothing gets."""

_SAMPLING_DEFAULTS: Final = {n: v for n, v in DEFAULTS.items() if n != "max_tokens"}

MOST_LOGPROBS: Final = 1000
"""Most top_logprobs: their texts are looked up on the event loop."""
_MOST_TOKEN_TEXT: Final = 128  # characters of a text that may be one token
_MOST_PHRASES: Final = 256  # each is searched for in every step
_MOST_PHRASE: Final = 1000  # characters
_N_SEEDS: Final = 2**32 - 1  # llama.cpp has no more
_LEAST_TOP_P: Final = 1e-6  # keeps one token

Object = dict[str, Any]

_SOME_LOGPROBS: Final = 5  # if a client says no more than that it wants some

# ---- requests

# Lists are searched for every token, or checked on the event loop: long ones hold others up.
Stops = Annotated[list[Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(max_length=256)]
Ids = Annotated[list[int], msgspec.Meta(max_length=65_536)]
IdsOrTexts = Annotated[list[int | str], msgspec.Meta(max_length=65_536)]
Biases = Annotated[dict[str, float], msgspec.Meta(max_length=2**18)]
Indices = Annotated[list[int], msgspec.Meta(max_length=4096)]
Spans = Annotated[list[tuple[int, int | None]], msgspec.Meta(max_length=MOST_SPANS)]
Weights = Annotated[list[float], msgspec.Meta(max_length=4096)]


class AttentionFields(msgspec.Struct, kw_only=True):
    """Fields of a generation in both protocols; names of the same thing stand together.

    Attributes:
        prompt: Text to continue. If it is too long it loses its beginning, so that max_length
            tokens, but no more than half of the context, are left for the reply.
        memory: Text before the prompt, which then stays.
        input_ids: Ids of tokens to continue; they win over the prompt. More than the context are
            refused, in the dream API also more than the model was trained for.
        model: Id of a configured model; the default model if not given.
        request_id: Label of the request in events, and for ending it; several requests may have the
            same.
        genkey: KoboldAI's name of the request, for checking and aborting it.
        mods: Mods of the server's folder that steer it.
        max_length, max_new_tokens: Most tokens to generate; 50 if neither is given.
        max_context_length: Most tokens of prompt and reply that the client allows.
        temperature: Divides the logits; 0 takes the most probable token. 0.7 if not given.
        top_p: Keeps the most probable tokens that together have this probability. 0.9 if not given.
        top_k: Keeps so many of the most probable tokens, 0 all of them. 40 if not given.
        min_p: Drops tokens less probable than this part of the most probable one. 0 if not given.
        typical: Keeps the tokens nearest to the expected information, of this probability together;
            1 if not given, which is off.
        nsigma: Keeps tokens whose logits are within so many standard deviations of the largest; 0
            if not given, which is off.
        rep_pen, repetition_penalty: Divides the logits of tokens that were there lately. 1 if
            neither is given, which changes nothing.
        rep_pen_range: Of how many of the last tokens; 64 if not given.
        sampler_seed, seed: Makes the choice repeatable; -1, or none, is another one each time,
            which the reply tells.
        grammar: Grammar in GBNF that the text follows.
        json_schema: JSON schema that it follows; an object, or a text.
        regex: Regular expression that it matches. Only one of these three may be given.
        stop_sequence: Texts that end the generation; empty ones do not count.
        stop_tokens: Ids that do.
        banned_tokens, banned_strings: Ids that are never chosen, and texts that the generated text
            never has, such as ["old bridge"], in capitals or not and whatever their tokens are:
            where one is complete, the generation goes back to its beginning and chooses another
            token there. The text of a control token, such as "<|im_start|>", is its id.
        ban_eos_token, bypass_eos: Whether the model cannot end the text itself.
        trim_stop: Whether the text leaves out the stop sequence that ended it.
        num_samples: Texts to generate from the prompt; 1 if not given.
        logprobs, top_logprobs: Logprobs of each token and of so many of the most probable ones;
            ``true`` is 5. They are before bias, grammar and samplers.
        output_attentions, return_attention: Whether tokens come with their attention.
        prompt_attention: Whether rows of the prompt's own tokens are sent as well.
        attention_values: What rows hold: logits before the softmax, scores with the mask, or
            probabilities.
        attention_format: "per_layer" has a row for each head of each layer; "aggregated" one row of
            them all; "sparse" the columns with the largest weights; "viz" a summary of each layer.
            "per_layer" if not given.
        aggregation_mode: How "aggregated" makes one row of many; "mean" if not given.
        layer_weights: Weight of each layer for "weighted_layers".
        sparse_top_k, attention_top_k: Columns of "sparse"; 50 if not given.
        attention_layers: Layers to send; all if not given.
        attention_heads: Heads to send; all if not given.
        attention_spans: Ranges of columns, whose sums are sent in place of columns.
        dtype: Type of the values; "float32" if not given.
        start_event: Whether a stream begins with an event "start", which has the ids of the prompt,
            the seed, and what the rows are.
    """

    prompt: Annotated[str | None, example("Anna is a")] = None
    memory: Annotated[str | None, example("A story about Anna.")] = None
    input_ids: Annotated[list[int] | None, example([1, 557, 13])] = None
    model: Annotated[str | None, example("demo")] = None
    request_id: Annotated[str | None, example("r1")] = None
    genkey: Annotated[str | None, example("KCPP1234")] = None
    mods: Annotated[ModsField | None, example(["stop_early"])] = None

    max_length: Annotated[int | None, example(128, default=50)] = None
    max_new_tokens: Annotated[int | None, example(128, default=50)] = None
    max_context_length: Annotated[int | None, example(2048)] = None

    temperature: Annotated[float | None, example(1.0, default=0.7)] = None
    top_p: Annotated[float | None, example(0.95, default=0.9)] = None
    top_k: Annotated[int | None, example(20, default=40)] = None
    min_p: Annotated[float | None, example(0.05, default=0)] = None
    typical: Annotated[float | None, example(0.9, default=1)] = None
    nsigma: Annotated[float | None, example(1.5, default=0)] = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    rep_pen: Annotated[float | None, example(1.1, default=1)] = None
    repetition_penalty: Annotated[float | None, example(1.1, default=1)] = None
    rep_pen_range: Annotated[int | None, example(256, default=64)] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Stops | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    sampler_seed: Annotated[int | None, example(7)] = None
    seed: Annotated[int | None, example(7)] = None
    grammar: Annotated[str | None, example("root ::= ")] = None
    json_schema: Annotated[dict[str, Any] | str | None, example({"type": "object"})] = None
    regex: Annotated[str | None, example("yes|no")] = None
    logit_bias: Biases | None = None

    stop_sequence: Annotated[Stops | None, example(["\n\n"])] = None
    stop_tokens: Annotated[Ids | None, example([2])] = None
    banned_tokens: Annotated[IdsOrTexts | None, example([13])] = None
    banned_strings: Annotated[IdsOrTexts | None, example([13])] = None
    ban_eos_token: bool | None = None
    bypass_eos: bool | None = None
    trim_stop: bool | None = None
    num_samples: Annotated[int | None, example(2, default=1)] = None
    logprobs: Annotated[bool | int | None, example(3)] = None
    top_logprobs: Annotated[int | None, example(3)] = None

    output_attentions: bool | None = None
    return_attention: bool | None = None
    prompt_attention: bool | None = None
    attention_values: AttentionValues | None = None
    attention_format: Annotated[
        Literal["per_layer", "aggregated", "sparse", "viz"] | None, example(default="per_layer")
    ] = None
    aggregation_mode: Annotated[
        Literal["mean", "max", "last_layer", "weighted_layers"] | None, example(default="mean")
    ] = None
    layer_weights: Annotated[Weights | None, example([0, 0, 1, 1])] = None
    sparse_top_k: Annotated[int | None, example(10, default=50)] = None
    attention_top_k: Annotated[int | None, example(10, default=50)] = None
    attention_layers: Annotated[Indices | None, example([0, 3])] = None
    attention_heads: Annotated[Indices | None, example([0, 5])] = None
    attention_spans: Annotated[Spans | None, example([[0, 5], [5, None]])] = None
    dtype: Annotated[Literal["float32", "float16"] | None, example(default="float32")] = None
    start_event: bool | None = None


SAMPLING_FIELDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{
            name: (name,)
            for name in (
                "temperature", "top_p", "top_k", "min_p", "dynatemp_range", "dynatemp_exponent",
                "presence_penalty", "frequency_penalty",
                "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base",
                "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
                "xtc_probability", "xtc_threshold", "grammar", "json_schema", "regex", "logit_bias",
                "stop_tokens",
            )
        },
        "banned_tokens": ("banned_tokens", "banned_strings"),
        "typical_p": ("typical",),
        "top_n_sigma": ("nsigma",),
        "repeat_penalty": ("rep_pen", "repetition_penalty"),
        "repeat_last_n": ("rep_pen_range",),
        "seed": ("sampler_seed", "seed"),
        "stop": ("stop_sequence",),
        "ignore_eos": ("ban_eos_token", "bypass_eos"),
        "top_logprobs": ("top_logprobs", "logprobs"),
    }
)  # fmt: skip
"""Option of `Sampling` -> the fields for it; the first one that is given wins."""

_OTHER_FIELDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "prompt": ("input_ids", "prompt"),
        "max_tokens": ("max_length", "max_new_tokens"),
        "max_context": ("max_context_length",),
        "n_samples": ("num_samples",),
        "kind": ("attention_values",),
        "layers": ("attention_layers",),
        "heads": ("attention_heads",),
        "spans": ("attention_spans",),
        "top_k": ("sparse_top_k", "attention_top_k"),
    }
)


def first(*values: Any) -> Any:
    """The first value that is not None, None if all are."""
    return next((value for value in values if value is not None), None)


def names_of(fields: AttentionFields) -> dict[str, str]:
    """Parameter of the core -> the field that the client gave it by, for `GenerateRequest`."""
    tables = {**SAMPLING_FIELDS, **_OTHER_FIELDS}
    return {parameter: _given(fields, names) for parameter, names in tables.items()}


def _given(fields: AttentionFields, names: Sequence[str]) -> str:
    return next((name for name in names if getattr(fields, name) is not None), names[0])


def max_tokens_of(fields: AttentionFields) -> int:
    """Most tokens to generate."""
    return first(fields.max_length, fields.max_new_tokens, DEFAULTS["max_tokens"])


def prompt_of(fields: AttentionFields) -> str | Sequence[int]:
    """The prompt: ``input_ids`` win over text; ``memory`` precedes the text.

    Raises:
        RequestError: There is neither.
    """
    if fields.input_ids is not None:
        return fields.input_ids
    if fields.prompt is None:
        raise RequestError("there is neither prompt nor input_ids; send one of them")
    return (fields.memory or "") + fields.prompt


def check_ids_fit(
    ids: Sequence[int], fields: AttentionFields, most: int, n_trained: int | None = None
) -> None:
    """Refuse ``input_ids`` that are too many: only text is truncated.

    Args:
        ids: The ids.
        fields: The request.
        most: Longest prompt in tokens that the server allows.
        n_trained: What the model was trained for, if that counts.

    Raises:
        PromptTooLong: There are more than one of these, or than the client allows.
    """
    limits = {
        "the limit is {}": min(most, fields.max_context_length or most),
        "the model was trained for {} (max_position_embeddings)": n_trained or most,
    }
    for why, limit in limits.items():
        if len(ids) > limit:
            raise PromptTooLong(
                f"input_ids has {len(ids)} tokens, {why.format(limit)}; shorten it",
                parameter="input_ids",
                n_tokens=len(ids),
                n_max=limit,
            )


def sampling_for(
    fields: AttentionFields, *, control_token: Callable[[str], int | None], seed: int
) -> Sampling:
    """How tokens are chosen.

    Args:
        fields: The request.
        control_token: The id of a text that is a control token, else None; for ``banned_tokens``.
        seed: That of a request that gives none.

    Raises:
        InvalidSampling: A value is out of its range; the message names the client's field.
        InvalidToken: A key of ``logit_bias`` is not an id.
    """
    given = {
        option: first(*(getattr(fields, name) for name in names))
        for option, names in SAMPLING_FIELDS.items()
    }
    for name in ("grammar", "json_schema", "regex"):
        if given[name] == "":
            given[name] = None
    for name in ("stop", "dry_sequence_breakers"):
        given[name] = given[name] and [text for text in given[name] if text]
    given["banned_tokens"] = _banned_ids(fields, control_token)
    given["logit_bias"] = _bias(fields.logit_bias)
    given["top_logprobs"] = _top_logprobs(fields)
    if given["top_k"] is not None:
        given["top_k"] = max(0, given["top_k"])
    if given["top_p"] == 0:
        given["top_p"] = _LEAST_TOP_P
    wanted: int | None = given["seed"]
    # KoboldAI's clients send -1 for "any".
    given["seed"] = seed if wanted is None or wanted < 0 else wanted % _N_SEEDS
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        return Sampling(**{**_SAMPLING_DEFAULTS, **chosen})
    except InvalidSampling as error:
        names = SAMPLING_FIELDS.get(error.parameter or "", ("",))
        raise renamed(error, {str(error.parameter): _given(fields, names)}) from None


def random_seed() -> int:
    """A seed for a request that gives none, so that its reply can tell it."""
    return secrets.randbelow(_N_SEEDS)


def phrases_of(
    fields: AttentionFields, *, control_token: Callable[[str], int | None]
) -> tuple[str, ...]:
    """Texts that must not be generated; *control_token* is as in `sampling_for`.

    Raises:
        RequestError: There are too many, or one is too long.
    """
    texts = [one for one in _banned(fields) if isinstance(one, str) and one]
    name = _given(fields, SAMPLING_FIELDS["banned_tokens"])
    if len(texts) > _MOST_PHRASES:
        raise RequestError(
            f"{name} has {len(texts)} texts, the limit is {_MOST_PHRASES}; send fewer, or ids"
        )
    longest = max(map(len, texts), default=0)
    if longest > _MOST_PHRASE:
        raise RequestError(
            f"{name} has a text of {longest} characters, the limit is {_MOST_PHRASE}; shorten it"
        )
    return tuple(text for text in texts if control_token(text) is None)


def control_token_of(engine: Engine) -> Callable[[str], int | None]:
    """A function for the id of a text that is a control token of *engine*'s model, else None."""

    @cache
    def control_token(text: str) -> int | None:
        if len(text) > _MOST_TOKEN_TEXT:
            return None
        try:
            ids = engine.tokenize(text, add_special=False)
            plain = engine.tokenize(text, add_special=False, parse_special=False)
        except KqviewError:  # a model without a vocabulary
            return None
        return ids[0] if len(ids) == 1 and ids != plain else None

    return control_token


def attention_of(
    fields: AttentionFields, settings: Settings, *, default: AttentionValues, asked: bool
) -> AttentionWanted | None:
    """What attention to send, None for none.

    Args:
        fields: The request.
        settings: For the server's defaults.
        default: Values of this protocol if neither the request nor the settings say.
        asked: Whether attention is sent if the request does not say.
    """
    if not first(fields.output_attentions, fields.return_attention, asked):
        return None
    implied = None if fields.attention_spans is None else "probs"
    return AttentionWanted(
        kind=first(fields.attention_values, implied, settings.attention_values, default),
        format=fields.attention_format or settings.attention_format,
        aggregation=fields.aggregation_mode or "mean",
        top_k=first(fields.sparse_top_k, fields.attention_top_k, DEFAULT_TOP_K),
        dtype=fields.dtype or "float32",
        layers=_tuple(fields.attention_layers),
        heads=_tuple(fields.attention_heads),
        spans=_tuple(fields.attention_spans),
        layer_weights=_tuple(fields.layer_weights),
        prompt=bool(fields.prompt_attention),
    )


_OF_ATTENTION: Final = (
    "prompt_attention", "attention_values", "attention_format", "aggregation_mode",
    "layer_weights", "sparse_top_k", "attention_top_k", "attention_layers", "attention_heads",
    "attention_spans", "dtype",
)  # fmt: skip
_OF_FORMAT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "aggregation_mode": "aggregated",
        "layer_weights": "aggregated",
        "sparse_top_k": "sparse",
        "attention_top_k": "sparse",
    }
)


def ignored_of(
    fields: AttentionFields,
    unknown: Sequence[str],
    wanted: AttentionWanted | None,
    *,
    of_attention: Sequence[str] = (),
) -> tuple[str, ...]:
    """Names of what a request has to no effect, for its reply.

    Args:
        fields: The request.
        unknown: Its names that the protocol does not have.
        wanted: The attention to send, None for none.
        of_attention: Further fields that have no effect without attention.
    """
    ignored = list(unknown)
    if fields.input_ids is not None:
        ignored += [name for name in ("prompt", "memory") if _has(fields, name)]
    for names in (*SAMPLING_FIELDS.values(), *_OTHER_FIELDS.values()):
        used = _given(fields, names)
        if names != SAMPLING_FIELDS["banned_tokens"]:  # these add up
            ignored += [name for name in names if name != used and _has(fields, name)]
    if wanted is None:
        names = (*_OF_ATTENTION, *of_attention)
        ignored += [name for name in names if _has(fields, name)]
    else:
        ignored += [
            name
            for name, form in _OF_FORMAT.items()
            if wanted.format != form and _has(fields, name)
        ]
        is_weighted = wanted.aggregation == "weighted_layers"
        if wanted.format == "aggregated" and not is_weighted and _has(fields, "layer_weights"):
            ignored.append("layer_weights")
    return shown_names(dict.fromkeys(ignored))


def _has(fields: AttentionFields, name: str) -> bool:
    return getattr(fields, name) is not None


def asks_for_logprobs(fields: AttentionFields) -> bool:
    """Whether the client wants logprobs at all."""
    return first(fields.top_logprobs, fields.logprobs, False) is not False


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _top_logprobs(fields: AttentionFields) -> int | None:
    name = _given(fields, SAMPLING_FIELDS["top_logprobs"])
    wanted: bool | int | None = getattr(fields, name)
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return _SOME_LOGPROBS
    if wanted > MOST_LOGPROBS:
        raise RequestError(f"{name} is {wanted}, the limit is {MOST_LOGPROBS}; ask for fewer")
    return wanted


def _banned(fields: AttentionFields) -> Sequence[int | str]:
    return [*(fields.banned_tokens or ()), *(fields.banned_strings or ())]


def _banned_ids(
    fields: AttentionFields, control_token: Callable[[str], int | None]
) -> list[int] | None:
    found = [one if isinstance(one, int) else control_token(one) for one in _banned(fields)]
    return [id_ for id_ in found if id_ is not None] or None


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(id_): value for id_, value in bias.items()}
    except ValueError:
        raise InvalidToken(
            "logit_bias has a key that is not a token id; send ids as the object's keys",
            parameter="logit_bias",
        ) from None


# ---- attention objects


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What the rows of a request are, besides their shape.

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
    def of(cls, wanted: AttentionWanted, model: ModelInfo) -> "RowFacts":
        """Those of *wanted* from *model*."""
        layers = model.attention_layers if wanted.layers is None else wanted.layers
        is_usual = wanted.format == "aggregated" or layers == tuple(range(model.n_layer))
        return cls(
            wanted,
            None if is_usual else layers,
            len(layers),
            model.n_head if wanted.heads is None else len(wanted.heads),
            model.has_attention_sinks and wanted.kind == "probs",
        )

    @property
    def fields(self) -> Object:
        """What every attention object says."""
        fields: Object = {"values": self.wanted.kind}
        if self.has_sinks:
            fields["sinks"] = True
        return fields

    @property
    def row_sum(self) -> str | None:
        """What the values of a row of one head add up to; None for what is not normalized."""
        if self.wanted.kind != "probs":
            return None
        return "less than 1: the rest goes to attention sinks" if self.has_sinks else "1"

    @property
    def described(self) -> Object:
        """What a start event says of all rows of the request."""
        wanted = self.wanted
        fields: Object = {"format": wanted.format, **self.fields, "row_sum": self.row_sum}
        if wanted.format in ("per_layer", "aggregated"):
            columns = None if wanted.spans is None else len(wanted.spans)
            sizes = [self.n_layers, self.n_heads] if wanted.format == "per_layer" else []
            fields |= {"dtype": wanted.dtype, "shape": [*sizes, columns]}
        if wanted.format == "aggregated":
            fields["aggregation_mode"] = wanted.aggregation
        if wanted.spans is None:
            fields["columns"] = "the prompt, then the tokens before this one"
        return fields


def attention_object(
    shaped: Shaped,
    encoder: Encoder,
    *,
    as_list: bool = False,
    facts: RowFacts,
) -> tuple[Object, bytes | None]:
    """The object for JSON, and the base64 of its values if it has any.

    Args:
        shaped: What `kqview.server.models.attention.shaped` returned.
        encoder: The run's.
        as_list: Write the values of "aggregated" as a list of numbers instead of base64.
        facts: Of the request's rows.

    Returns:
        The object, with `DATA_HERE` as ``data`` if the second value belongs there; None as second
        value if the object is complete.
    """
    if isinstance(shaped, Dense):
        fields = _dense(shaped, facts)
        if as_list and shaped.format == "aggregated":
            return {**fields, **facts.fields, "data": encoder.numbers(shaped.values)}, None
        fields |= {"encoding": "base64", "dtype": shaped.values.dtype.name, **facts.fields}
        return {**fields, "data": DATA_HERE}, encoder.base64(shaped.values)
    return _small(shaped, encoder, facts), None


def attention_frame(shaped: Shaped, encoder: Encoder, *, facts: RowFacts) -> tuple[Object, bytes]:
    """The object without ``data``, and its values as little-endian bytes for a separate frame.

    Formats without an array of values are complete in the object; their frame is empty.
    """
    if isinstance(shaped, Dense):
        fields = _dense(shaped, facts)
        fields |= {"encoding": "binary", "dtype": shaped.values.dtype.name, **facts.fields}
        return fields, encoder.raw(shaped.values)
    return _small(shaped, encoder, facts), b""


def event_pieces(event: Any, data: bytes | None) -> list[bytes]:
    """JSON of *event* in pieces, with *data* at its `DATA_HERE`."""
    return [msgspec.json.encode(event)] if data is None else split_json(event, data)


def _dense(dense: Dense, facts: RowFacts) -> Object:
    fields: Object = {
        "format": dense.format,
        "shape": list(dense.values.shape),
    }
    if dense.spans is None:
        fields["context_length"] = dense.n_context
    else:
        fields["spans"] = dense.spans
    if dense.heads_by_layer is not None:
        fields["heads_by_layer"] = dense.heads_by_layer
    if facts.layers is not None:
        fields["layers"] = facts.layers
    return fields


def _small(shaped: Sparse | Viz, encoder: Encoder, facts: RowFacts) -> Object:
    fields: Object = dict(facts.fields)
    if facts.layers is not None:
        fields["layers"] = facts.layers
    if isinstance(shaped, Sparse):
        by_layer = encoder.numbers(shaped.by_layer)
        positions = shaped.positions.tolist()
        return {
            "format": "sparse",
            "top_k": len(positions),
            "context_length": shaped.n_context,
            "data": [
                {"position": position, "layers": values}
                for position, values in zip(positions, by_layer, strict=True)
            ],
            **fields,
        }
    return {
        "format": "viz",
        "context_length": shaped.n_context,
        "mean_by_layer": encoder.numbers(shaped.mean_by_layer),
        "max_by_layer": encoder.numbers(shaped.max_by_layer),
        "entropy": shaped.entropy,
        **fields,
    }


def with_lists(
    head: dict[str, Any], lists: Sequence[tuple[str, Sequence[bytes]]], *, packs: bool
) -> bytes:
    """An encoded object: *head*, then lists whose elements are already encoded.

    Elements may be megabytes each; they are copied once, into the result.

    Args:
        head: Fields that precede the lists.
        lists: Name and elements of each; with *head* 1 to 15 fields.
        packs: MessagePack instead of JSON.
    """
    if not packs:
        parts = [msgspec.json.encode(head)[:-1]]
        for name, elements in lists:
            parts.append(b'%s"%s":[' % (b"," if len(parts) > 1 or head else b"", name.encode()))
            for i, element in enumerate(elements):
                parts += [b",", element] if i else [element]
            parts.append(b"]")
        return b"".join([*parts, b"}"])
    # A map of up to 15 fields begins with one byte, a long array with its size in four.
    n_fields = len(head) + len(lists)
    assert 0 < n_fields < 16
    parts = [bytes([0x80 | n_fields]), msgspec.msgpack.encode(head)[1:]]
    for name, elements in lists:
        parts += [msgspec.msgpack.encode(name), b"\xdd" + len(elements).to_bytes(4, "big")]
        parts += elements
    return b"".join(parts)


# ---- what is told of a run


def start_event(run: Run, facts: RowFacts | None, ignored: Sequence[str]) -> Object:
    """The event that a stream begins with if the client asks for it."""
    event: Object = {
        "type": "start",
        "request_id": run.label,
        "prompt_tokens": run.usage.prompt_tokens,
        "cached_tokens": run.usage.cached_tokens,
        "prompt_ids": run.generations[0].prompt_ids,
        "seed": run.request.sampling.seed,
        **left_out(run, ignored),
    }
    return event if facts is None else {**event, "attention": facts.described}


def details_of(run: Run, ignored: Sequence[str]) -> Object:
    """What the end of a reply says of the run, for the clients of both protocols."""
    usage = run.usage
    return {
        "seed": run.request.sampling.seed,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "queue_ms": _milliseconds(usage.queue_s),
        "prompt_ms": _milliseconds(usage.prefill_s),
        "generation_ms": _milliseconds(usage.decode_s),
        **left_out(run, ignored),
    }


def left_out(run: Run, ignored: Sequence[str]) -> Object:
    """What the server left out of a request: tokens of its text, and fields; empty if nothing."""
    told: Object = {}
    if run.n_truncated:
        told["truncated_tokens"] = run.n_truncated
    if ignored:
        told["ignored"] = ignored
    return told


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)


# ---- logprobs

LOGPROB_BYTES: Final = 2048
"""About the size of the JSON of a token's logprobs, with as many as a run keeps."""


class TopLogprob(Struct):
    """A token that could have been chosen.

    Attributes:
        token: Its text; U+FFFD for bytes that are not UTF-8.
        logprob: Its logprob before bias, grammar and samplers.
        bytes: Its bytes.
    """

    token: Annotated[str, example(" the")]
    logprob: Annotated[float, example(-1.5)]
    bytes: Annotated[list[int], example([32, 116, 104, 101])]


class TokenLogprob(Struct, kw_only=True):
    """A token that was chosen, and those that could have been.

    Attributes:
        token: Its text; U+FFFD for bytes that are not UTF-8.
        logprob: Its logprob before bias, grammar and samplers.
        bytes: Its bytes.
        top_logprobs: The most probable tokens at its place, the most probable first.
    """

    token: Annotated[str, example(" a")]
    logprob: Annotated[float, example(-0.6)]
    bytes: Annotated[list[int], example([32, 97])]
    top_logprobs: list[TopLogprob]


class Logprobs(Struct, kw_only=True):
    """Logprobs of a generation as KoboldCpp sends them, in both of OpenAI's forms.

    Attributes:
        content: Each token with those that could have been, as in chat completions.
        tokens: Text of each token.
        token_logprobs: Logprob of each.
        top_logprobs: The most probable tokens at each place by their texts.
        text_offset: Character of the text at which each token begins.
    """

    content: list[TokenLogprob]
    tokens: Annotated[list[str], example([" a"])]
    token_logprobs: Annotated[list[float], example([-0.6])]
    top_logprobs: Annotated[list[dict[str, float]], example([{" a": -0.6, " the": -1.5}])]
    text_offset: Annotated[list[int], example([0])]


def logprobs_of(
    tokens: Sequence[TokenLogprobs], bytes_of: Callable[[int], bytes]
) -> Logprobs | None:
    """Logprobs of a generation's tokens; None if none were asked for."""
    if not tokens:
        return None
    content = [token_logprob(one, bytes_of) for one in tokens]
    ends = accumulate((len(one.token) for one in content), initial=0)
    return Logprobs(
        content=content,
        tokens=[one.token for one in content],
        token_logprobs=[one.logprob for one in content],
        top_logprobs=[{top.token: top.logprob for top in one.top_logprobs} for one in content],
        text_offset=list(ends)[:-1],
    )


class LogprobsWriter:
    """`logprobs_of` while the tokens come; keeps the bytes of the reply, no objects."""

    def __init__(self, *, packs: bool) -> None:
        """Write JSON, or MessagePack if *packs*."""
        self._packs = packs
        self._encode = msgspec.msgpack.encode if packs else msgspec.json.encode
        self._lists: dict[str, list[bytes]] = {name: [] for name in Logprobs.__struct_fields__}
        self._offset = 0

    def add(self, one: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> int:
        """Write one token's logprobs; returns their size in bytes."""
        content = token_logprob(one, bytes_of)
        values = {
            "content": content,
            "tokens": content.token,
            "token_logprobs": one.logprob,
            "top_logprobs": {top.token: top.logprob for top in content.top_logprobs},
            "text_offset": self._offset,
        }
        self._offset += len(content.token)
        n_bytes = 0
        for name, value in values.items():
            encoded = self._encode(value)
            self._lists[name].append(encoded)
            n_bytes += len(encoded)
        return n_bytes

    def whole(self) -> msgspec.Raw | None:
        """What `logprobs_of` returns, encoded."""
        if not self._lists["tokens"]:
            return None
        return msgspec.Raw(with_lists({}, [*self._lists.items()], packs=self._packs))


def token_logprob(one: TokenLogprobs, bytes_of: Callable[[int], bytes]) -> TokenLogprob:
    """Logprobs of one token with the texts; *bytes_of* gives the bytes of an id."""

    def written(id_: int) -> tuple[str, list[int]]:
        data = bytes_of(id_)
        return data.decode("utf-8", "replace"), list(data)

    def top(id_: int, logprob: float) -> TopLogprob:
        text, data = written(id_)
        return TopLogprob(text, logprob, data)

    text, data = written(one.token_id)
    return TokenLogprob(
        token=text, logprob=one.logprob, bytes=data, top_logprobs=[top(*pair) for pair in one.top]
    )
