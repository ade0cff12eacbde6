"""The request names of the two attention protocols, kobold and dream: each takes the other's too.

Pure: a body becomes the neutral parts of a `GenerateRequest`. Fields that are absent or null take
the defaults of `DEFAULTS`, which both protocols' documents give alike. Names that neither knows are
ignored, and so are samplers that llama.cpp has not (``tfs``, ``top_a``, ``smoothing_factor``,
``dynatemp_*``) and its fixed order of samplers (``sampler_order``).
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec

from kqview.errors import InvalidToken, RequestError
from kqview.server.attention import DEFAULT_TOP_K, AttentionWanted
from kqview.server.settings import AttentionValues, Settings
from kqview.types import Sampling

DEFAULTS: Final[dict[str, Any]] = {
    "max_tokens": 50,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
}
"""Sampling of a request that says nothing (seed 000, and the example values of seed 001)."""

MOST_LOGPROBS: Final = 1000
"""Most top_logprobs: their texts are looked up on the event loop."""
MOST_TOKEN_TEXT: Final = 4096
"""Characters of a text that may be one token."""

_SOME_LOGPROBS: Final = 5  # where a client says no more than that it wants some


# Lists are looked through for every token, or checked on the event loop: long ones hold others up.
Stops = Annotated[list[Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(max_length=256)]
Ids = Annotated[list[int], msgspec.Meta(max_length=65_536)]
IdsOrTexts = Annotated[list[int | str], msgspec.Meta(max_length=65_536)]
Biases = Annotated[dict[str, float], msgspec.Meta(max_length=2**18)]
Indices = Annotated[list[int], msgspec.Meta(max_length=4096)]
Weights = Annotated[list[float], msgspec.Meta(max_length=4096)]


class AttentionFields(msgspec.Struct, kw_only=True):
    """What both protocols' requests for text may say; names of the same thing stand together."""

    prompt: str | None = None
    memory: str | None = None
    input_ids: list[int] | None = None
    request_id: str | None = None
    genkey: str | None = None

    max_length: int | None = None
    max_new_tokens: int | None = None
    max_context_length: int | None = None

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical: float | None = None
    rep_pen: float | None = None
    repetition_penalty: float | None = None
    rep_pen_range: int | None = None
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
    sampler_seed: int | None = None
    seed: int | None = None
    grammar: str | None = None
    logit_bias: Biases | None = None

    stop_sequence: Stops | None = None
    stop_tokens: Ids | None = None
    banned_tokens: IdsOrTexts | None = None
    ban_eos_token: bool | None = None
    bypass_eos: bool | None = None
    trim_stop: bool | None = None
    num_samples: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None

    output_attentions: bool | None = None
    return_attention: bool | None = None
    prompt_attention: bool | None = None
    attention_values: AttentionValues | None = None
    attention_format: Literal["per_layer", "aggregated", "sparse", "viz"] | None = None
    aggregation_mode: Literal["mean", "max", "last_layer", "weighted_layers"] | None = None
    layer_weights: Weights | None = None
    sparse_top_k: int | None = None
    attention_top_k: int | None = None
    attention_layers: Indices | None = None
    attention_heads: Indices | None = None
    dtype: Literal["float32", "float16"] | None = None


def first(*values: Any) -> Any:
    """The first value that is not None, None where all are."""
    return next((value for value in values if value is not None), None)


def max_tokens_of(fields: AttentionFields) -> int:
    """Most tokens to generate."""
    return first(fields.max_length, fields.max_new_tokens, DEFAULTS["max_tokens"])


def prompt_of(fields: AttentionFields) -> str | Sequence[int]:
    """The prompt: ids as they are, they win over text; ``memory`` stands before the text.

    Raises:
        RequestError: There is neither.
    """
    if fields.input_ids is not None:
        return fields.input_ids
    if fields.prompt is None:
        raise RequestError("request.prompt: neither prompt nor input_ids; send one of them")
    return (fields.memory or "") + fields.prompt


def sampling_of(fields: AttentionFields, *, one_token: Callable[[str], int | None]) -> Sampling:
    """How tokens are chosen.

    Args:
        fields: The request.
        one_token: The id of a text that is one token, else None; for ``banned_tokens`` given as
            texts.

    Raises:
        InvalidSampling: A value is out of its range.
        InvalidToken: A banned text is no single token, or a key of logit_bias is no id.
    """
    given: dict[str, Any] = {
        "temperature": fields.temperature,
        "top_p": fields.top_p,
        "top_k": fields.top_k,
        "min_p": fields.min_p,
        "typical_p": fields.typical,
        "repeat_penalty": first(fields.rep_pen, fields.repetition_penalty),
        "repeat_last_n": fields.rep_pen_range,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "mirostat": fields.mirostat,
        "mirostat_tau": fields.mirostat_tau,
        "mirostat_eta": fields.mirostat_eta,
        "dry_multiplier": fields.dry_multiplier,
        "dry_base": fields.dry_base,
        "dry_allowed_length": fields.dry_allowed_length,
        "dry_penalty_last_n": fields.dry_penalty_last_n,
        "dry_sequence_breakers": fields.dry_sequence_breakers,
        "xtc_probability": fields.xtc_probability,
        "xtc_threshold": fields.xtc_threshold,
        "grammar": fields.grammar or None,
        "seed": _seed(first(fields.sampler_seed, fields.seed)),
        "stop": fields.stop_sequence,
        "stop_tokens": fields.stop_tokens,
        "banned_tokens": _banned(fields.banned_tokens, one_token),
        "logit_bias": _bias(fields.logit_bias),
        "ignore_eos": first(fields.ban_eos_token, fields.bypass_eos),
        "top_logprobs": _top_logprobs(fields),
    }
    neutral = {name: value for name, value in DEFAULTS.items() if name != "max_tokens"}
    return Sampling(**{**neutral, **{n: v for n, v in given.items() if v is not None}})


def attention_of(
    fields: AttentionFields, settings: Settings, *, default: AttentionValues, asked: bool
) -> AttentionWanted | None:
    """What attention to send, None for none.

    Args:
        fields: The request.
        settings: For the server's defaults.
        default: Values of this protocol where nobody says.
        asked: Whether attention is sent where the request does not say.
    """
    if not first(fields.output_attentions, fields.return_attention, asked):
        return None
    return AttentionWanted(
        kind=first(fields.attention_values, settings.attention_values, default),
        format=fields.attention_format or settings.attention_format,
        aggregation=fields.aggregation_mode or "mean",
        top_k=first(fields.sparse_top_k, fields.attention_top_k, DEFAULT_TOP_K),
        dtype=fields.dtype or "float32",
        layers=_tuple(fields.attention_layers),
        heads=_tuple(fields.attention_heads),
        layer_weights=_tuple(fields.layer_weights),
        prompt=bool(fields.prompt_attention),
    )


def asks_for_logprobs(fields: AttentionFields) -> bool:
    """Whether the client wants logprobs at all."""
    return first(fields.top_logprobs, fields.logprobs, False) is not False


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _seed(seed: int | None) -> int | None:
    # KoboldAI's clients send -1 for "choose one".
    return None if seed is None or seed < 0 else seed


def _top_logprobs(fields: AttentionFields) -> int | None:
    wanted = first(fields.top_logprobs, fields.logprobs)
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        return _SOME_LOGPROBS
    if wanted > MOST_LOGPROBS:
        raise RequestError(
            f"request.top_logprobs: {wanted}, the limit is {MOST_LOGPROBS}; ask for fewer"
        )
    return wanted


def _banned(
    banned: Sequence[int | str] | None, one_token: Callable[[str], int | None]
) -> list[int] | None:
    if banned is None:
        return None
    ids: list[int] = []
    for one in banned:
        if isinstance(one, int):
            ids.append(one)
            continue
        found = one_token(one)
        if found is None:
            raise InvalidToken(
                f"request.banned_tokens: {one!r} is not one token of the vocabulary; "
                "ban ids or texts that are one token"
            )
        ids.append(found)
    return ids


def _bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if bias is None:
        return None
    try:
        return {int(id_): value for id_, value in bias.items()}
    except ValueError:
        raise InvalidToken(
            "request.logit_bias: a key is no token id; send ids as the object's keys"
        ) from None
