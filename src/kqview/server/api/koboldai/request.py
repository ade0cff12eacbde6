"""Requests for text in the KoboldAI API: fields in the words of both its dialects, and their plan.

Each dialect takes the other's names. Absent and null fields take the defaults in `DEFAULTS`.
Unknown names are ignored, as are samplers that llama.cpp does not have (``tfs``, ``top_a``,
``smoothing_factor``) and ``sampler_order``: llama.cpp's order is fixed. Replies name them in
``ignored``. Values are read as KoboldCpp reads them: ``top_k`` -1 and ``top_p`` 0 work, a seed may
have any size, and empty stop sequences count as none.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Struct

from kqview.engine import Engine
from kqview.errors import InvalidToken, KqviewError, PromptTooLong, RequestError
from kqview.server.api.koboldai.pruning import Sentence, SentenceScores, check_sentences, watched
from kqview.server.api.wire import attention
from kqview.server.api.wire.fields import FieldTable, ModelField, SamplingFields, Stops, first
from kqview.server.api.wire.mods_field import ModsField, mods_of
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.run import DEFAULT_TOP_K, Aggregation, AttentionWanted, GenerateRequest
from kqview.server.settings import AttentionValues, Settings
from kqview.server.web.described import about, example
from kqview.server.web.lenient import shown_names
from kqview.types import ModelInfo, Sampling
from kqview.types.sampling import N_SEEDS

DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "max_tokens": 50, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.0,
        "repeat_penalty": 1.0,
    }
)  # fmt: skip
"""What a request that says nothing gets."""

_MOST_TOKEN_TEXT: Final = 128  # characters of a text that may be one token
_MOST_PHRASES: Final = 256  # each is searched for in every step
_MOST_PHRASE: Final = 1000  # characters
_LEAST_TOP_P: Final = 1e-6  # keeps one token
_SOME_LOGPROBS: Final = 5  # if a client says no more than that it wants some

Encoding = Literal["base64", "binary"]
# Long lists, which are checked on the event loop, hold others up.
Ids = Annotated[list[int], msgspec.Meta(max_length=65_536)]
IdsOrTexts = Annotated[list[int | str], msgspec.Meta(max_length=65_536)]
Biases = Annotated[dict[str, float], msgspec.Meta(max_length=2**18)]


# Fields that have two names.
MaxTokens = Annotated[int | None, about("Most tokens to generate.", 128, default=50)]
RepeatPenalty = Annotated[
    float | None,
    about(
        "Divides the logits of tokens that were there lately. 1 if neither is given, which "
        "changes nothing.",
        1.1,
        default=1,
    ),
]
Seed = Annotated[
    int | None,
    about(
        "Makes the choice repeatable; -1, or none, is another one each time, which the "
        "reply tells.",
        7,
    ),
]
Banned = Annotated[
    IdsOrTexts | None,
    about(
        "Ids that are never chosen, and texts that the generated text never has, such as "
        '["old bridge"], in capitals or not and whatever their tokens are: where one is '
        "complete, the generation goes back to its beginning and chooses another token "
        'there. The text of a control token, such as "<|im_start|>", is its id.',
        [13],
    ),
]


class KoboldFields(SamplingFields, kw_only=True):
    """Fields of a generation; names of the same thing stand together."""

    prompt: Annotated[
        str | None,
        about(
            "Text to continue. If it is too long it loses its beginning, so that max_length "
            "tokens, but no more than half of the context, are left for the reply.",
            "Anna is a",
        ),
    ] = None
    memory: Annotated[
        str | None, about("Text before the prompt, which then stays.", "A story about Anna.")
    ] = None
    input_ids: Annotated[
        list[int] | None,
        about(
            "Ids of tokens to continue; they win over the prompt. More than the context are "
            "refused, in the dream API also more than the model was trained for.",
            [1, 557, 13],
        ),
    ] = None
    model: ModelField = None
    request_id: Annotated[
        str | None,
        about(
            "Label of the request in events, and for ending it; several requests may have the "
            "same.",
            "r1",
        ),
    ] = None
    genkey: Annotated[
        str | None,
        about("KoboldAI's name of the request, for checking and aborting it.", "KCPP1234"),
    ] = None
    mods: Annotated[
        ModsField | None, about("Mods of the server's folder that steer it.", ["stop_early"])
    ] = None

    max_length: MaxTokens = None
    max_new_tokens: MaxTokens = None
    max_context_length: Annotated[
        int | None, about("Most tokens of prompt and reply that the client allows.", 2048)
    ] = None

    temperature: Annotated[float | None, example(1.0, default=0.7)] = None
    top_p: Annotated[float | None, example(0.95, default=0.9)] = None
    top_k: Annotated[int | None, example(20, default=40)] = None
    min_p: Annotated[float | None, example(0.05, default=0)] = None
    typical: Annotated[
        float | None,
        about(
            "Keeps the tokens nearest to the expected information, of this probability "
            "together; 1 is off.",
            0.9,
            default=1,
        ),
    ] = None
    nsigma: Annotated[
        float | None,
        about(
            "Keeps tokens whose logits are within so many standard deviations of the largest; "
            "0 is off.",
            1.5,
            default=0,
        ),
    ] = None
    rep_pen: RepeatPenalty = None
    repetition_penalty: RepeatPenalty = None
    rep_pen_range: Annotated[
        int | None, about("Of how many of the last tokens.", 256, default=64)
    ] = None
    sampler_seed: Seed = None
    seed: Seed = None
    json_schema: Annotated[
        dict[str, Any] | str | None,
        about("JSON schema that it follows; an object, or a text.", {"type": "object"}),
    ] = None
    regex: Annotated[
        str | None,
        about(
            "Regular expression that it matches. Only one of these three may be given.", "yes|no"
        ),
    ] = None
    logit_bias: Biases | None = None

    stop_sequence: Annotated[
        Stops | None, about("Texts that end the generation; empty ones do not count.", ["\n\n"])
    ] = None
    stop_tokens: Annotated[Ids | None, about("Ids that do.", [2])] = None
    banned_tokens: Banned = None
    banned_strings: Banned = None
    ban_eos_token: Annotated[
        bool | None, about("Whether the model cannot end the text itself.")
    ] = None
    bypass_eos: Annotated[bool | None, about("Another name for ``ban_eos_token``.")] = None
    trim_stop: Annotated[
        bool | None, about("Whether the text leaves out the stop sequence that ended it.")
    ] = None
    num_samples: Annotated[
        int | None, about("Texts to generate from the prompt.", 2, default=1)
    ] = None
    logprobs: Annotated[
        bool | int | None,
        about(
            "Logprobs of each token and of so many of the most probable ones; ``true`` is 5. "
            "They are before bias, grammar and samplers.",
            3,
        ),
    ] = None
    top_logprobs: Annotated[int | None, about("Another name for ``logprobs``.", 3)] = None

    output_attentions: Annotated[
        bool | None, about("Whether tokens come with their attention.")
    ] = None
    return_attention: Annotated[bool | None, about("Another name for ``output_attentions``.")] = (
        None
    )
    prompt_attention: attention.PromptField = None
    attention_values: Annotated[
        AttentionValues | None,
        about("What rows hold: logits before the softmax, scores with the mask, or probabilities."),
    ] = None
    attention_format: attention.FormatField = None
    aggregation_mode: Annotated[
        Aggregation | None, about('How "aggregated" makes one row of many.', default="mean")
    ] = None
    layer_weights: attention.LayerWeightsField = None
    sparse_top_k: attention.TopKField = None
    attention_top_k: attention.TopKField = None
    attention_layers: attention.LayersField = None
    attention_heads: attention.HeadsField = None
    attention_spans: attention.SpansField = None
    dtype: attention.DTypeField = None
    start_event: Annotated[
        bool | None,
        about(
            'Whether a stream begins with an event "start", which has the ids of the prompt, '
            "the seed, and what the rows are."
        ),
    ] = None


class StreamBody(KoboldFields):
    """A generation that is streamed; see `KoboldFields`."""


class DreamFields(KoboldFields, kw_only=True):
    """Fields of a generation in the dream dialect, besides those of both dialects."""

    encoding: Annotated[
        Encoding | None,
        about(
            'How values of "per_layer" and "aggregated" are sent: base64 in the JSON, or as a '
            'binary frame after it. Without it "aggregated" is a list of numbers, the others '
            "are base64."
        ),
    ] = None
    sentences: Annotated[
        list[Sentence] | None,
        about(
            "Ranges of the prompt to watch; those that get little attention are named at the end."
        ),
    ] = None
    prune_below: Annotated[
        float | None,
        about(
            "Attention below which a sentence is named; 1 / tokens of the prompt if not given.",
            0.01,
        ),
    ] = None


class KoboldGenerateBody(DreamFields, kw_only=True):
    """Body of ``POST /api/v1/generate``."""

    compression: Annotated[
        Literal["gzip", "none"] | None,
        about('"gzip" packs the reply for clients that accept it.', default="none"),
    ] = None


class Generate(DreamFields, kw_only=True, tag_field="type", tag="generate"):
    """Starts a generation; one at a time on a socket."""


class Cancel(Struct, kw_only=True, tag_field="type", tag="cancel"):
    """Ends the generation of that name, or whichever runs; what was generated stays."""

    request_id: Annotated[
        str | None, about("The generation to end; whichever runs if not given.", "r1")
    ] = None


FIELDS: Final = FieldTable(
    KoboldFields,
    {
        "banned_tokens": ("banned_tokens", "banned_strings"),
        "typical_p": ("typical",),
        "top_n_sigma": ("nsigma",),
        "repeat_penalty": ("rep_pen", "repetition_penalty"),
        "repeat_last_n": ("rep_pen_range",),
        "seed": ("sampler_seed", "seed"),
        "stop": ("stop_sequence",),
        "ignore_eos": ("ban_eos_token", "bypass_eos"),
        "top_logprobs": ("top_logprobs", "logprobs"),
    },
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
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KoboldPlan:
    """A request, and what its client sees of it.

    Attributes:
        request: For the service; its attention is what is captured.
        rows: Writes the attention to send, None for none.
        ignored: Names of fields without effect, which the reply tells.
        has_start: Whether a stream begins with an event that tells of the request.
        encoding: As asked for; None leaves short rows as lists of numbers.
        scores: Of the sentences to watch, None for none.
        token_bytes: Bytes of an id, b"" once the engine is closed; any thread.
    """

    request: GenerateRequest
    rows: attention.RowWriter | None
    ignored: Sequence[str] = ()
    has_start: bool = False
    encoding: Encoding | None = None
    scores: SentenceScores | None = None
    token_bytes: Callable[[int], bytes] = field(default=bytes, compare=False)


def plan_of(
    body: KoboldFields,
    model: ModelEntry,
    settings: Settings,
    *,
    request_id: str,
    unknown: Sequence[str] = (),
    asked: bool = False,
) -> KoboldPlan:
    """What *body* asks of *model*; in the dream dialect ids and positions are checked, too.

    Args:
        body: The request.
        model: The model that will answer.
        settings: For the server's defaults.
        request_id: Its name if it gives none.
        unknown: Names in the request that the dialect does not have.
        asked: Whether attention is sent if the request does not say.

    Raises:
        NoModel: The model is being switched.
        PromptTooLong: There are more ``input_ids`` than allowed.
        InvalidToken: An id is not in the vocabulary; the message names field and index.
        RequestError: Or one of its kinds: a value is out of its range.
    """
    engine = model.engine
    dream = body if isinstance(body, DreamFields) else None
    if dream is None and body.num_samples not in (None, 1):
        raise RequestError(
            f"num_samples is {body.num_samples}, a stream has 1; ask /api/v1/generate for several"
        )
    if body.input_ids is None and body.prompt is None:
        raise RequestError("there is neither prompt nor input_ids; send one of them")
    _check_ids(body, engine.model, model.max_context, is_dream=dream is not None)
    banned_ids: list[int] = []
    phrases: tuple[str, ...] = ()
    if body.banned_tokens or body.banned_strings:
        banned_ids, phrases = _banned(body, engine)
    shown = _attention(body, settings, "logits" if dream is None else "probs", asked=asked)
    captured, scores = shown, None
    if dream is not None and dream.sentences is not None:
        n_prompt = None if body.input_ids is None else len(body.input_ids)
        check_sentences(dream.sentences, dream.prune_below, n_prompt)
        captured = watched(shown)
        scores = SentenceScores(dream.sentences, n_prompt or 1, dream.prune_below)
    text = (body.memory or "") + (body.prompt or "")
    request = GenerateRequest(
        prompt=text if body.input_ids is None else body.input_ids,
        truncates=True,
        memory=body.memory or "",
        max_tokens=first(FIELDS.value(body, "max_tokens"), DEFAULTS["max_tokens"]),
        sampling=_sampling(body, banned_ids),
        banned_phrases=phrases,
        request_id=body.request_id or request_id,
        shares_name=True,
        attention=captured,
        n_samples=first(body.num_samples, 1),
        key=body.genkey or "",
        max_context=body.max_context_length,
        keeps_logprobs=first(FIELDS.value(body, "top_logprobs"), False) is not False,
        names=FIELDS.names(body),
        mods=mods_of(body.mods) if body.mods else (),
    )
    return KoboldPlan(
        request=request,
        rows=None if shown is None else attention.RowWriter.of(shown, engine.model),
        ignored=_ignored(body, unknown, shown),
        has_start=bool(body.start_event),
        encoding=None if dream is None else dream.encoding,
        scores=scores,
        token_bytes=_token_bytes_of(engine),
    )


def _token_bytes_of(engine: Engine) -> Callable[[int], bytes]:
    @cache  # of a vocabulary's size at most
    def token_bytes(id_: int) -> bytes:
        try:
            return engine.token_bytes(id_)
        except KqviewError:
            return b""

    return token_bytes


def _check_ids(body: KoboldFields, model: ModelInfo, max_context: int, *, is_dream: bool) -> None:
    """Refuse ``input_ids`` that are too many, since only text is truncated, and unknown ids."""
    limits = {"the limit is {}": min(max_context, body.max_context_length or max_context)}
    if is_dream:
        trained = "the model was trained for {} (max_position_embeddings)"
        limits[trained] = model.n_ctx_train or max_context
    n = len(body.input_ids or ())
    for why, limit in limits.items():
        if n > limit:
            raise PromptTooLong(
                f"input_ids has {n} tokens, {why.format(limit)}; shorten it",
                parameter="input_ids",
                n_tokens=n,
                n_max=limit,
            )
    if not is_dream:
        return
    for name in ("input_ids", "stop_tokens", "banned_tokens", "banned_strings"):
        ids: Sequence[int | str] = getattr(body, name) or ()
        for i, id_ in enumerate(ids):
            if isinstance(id_, int) and not 0 <= id_ < model.n_vocab:
                raise InvalidToken(
                    f"{name}[{i}]: token ID {id_} not in vocabulary (vocab_size={model.n_vocab}); "
                    "take ids from /api/v1/tokenize"
                )


def _sampling(body: KoboldFields, banned_ids: list[int]) -> Sampling:
    options = FIELDS.options(body)
    for name in ("grammar", "json_schema", "regex"):
        options[name] = None if options[name] == "" else options[name]
    for name in ("stop", "dry_sequence_breakers"):
        options[name] = options[name] and [text for text in options[name] if text]
    options["banned_tokens"] = banned_ids or None
    if body.logit_bias is not None:
        options["logit_bias"] = _bias(body.logit_bias)
    options["top_logprobs"] = FIELDS.n_logprobs(body, if_true=_SOME_LOGPROBS)
    if options["top_logprobs"] is None and isinstance(body, Generate):
        options["top_logprobs"] = 0  # each token carries its own
    if options["top_k"] is not None:
        options["top_k"] = max(0, options["top_k"])
    if options["top_p"] == 0:
        options["top_p"] = _LEAST_TOP_P
    seed: int | None = options["seed"]
    # KoboldAI's clients send -1 for "any". The reply tells the one that is drawn.
    if seed is None or seed < 0:
        seed = secrets.randbelow(N_SEEDS)
    options["seed"] = seed % N_SEEDS
    for name, value in DEFAULTS.items():
        if name in FIELDS.sampling and options[name] is None:
            options[name] = value
    return FIELDS.sampling_of(body, options)


def _bias(bias: dict[str, float]) -> dict[int, float]:
    try:
        return {int(id_): value for id_, value in bias.items()}
    except ValueError:
        raise InvalidToken(
            "logit_bias has a key that is not a token id; send ids as the object's keys",
            parameter="logit_bias",
        ) from None


def _banned(body: KoboldFields, engine: Engine) -> tuple[list[int], tuple[str, ...]]:
    """Ids that are banned, those of control tokens' texts among them, and the other texts."""
    banned: list[int | str] = [*(body.banned_tokens or ()), *(body.banned_strings or ())]
    texts = [one for one in banned if isinstance(one, str) and one]
    if len(texts) > _MOST_PHRASES:
        raise RequestError(
            f"{FIELDS.name(body, 'banned_tokens')} has {len(texts)} texts, the limit is "
            f"{_MOST_PHRASES}; send fewer, or ids"
        )
    longest = max(map(len, texts), default=0)
    if longest > _MOST_PHRASE:
        raise RequestError(
            f"{FIELDS.name(body, 'banned_tokens')} has a text of {longest} characters, the limit "
            f"is {_MOST_PHRASE}; shorten it"
        )
    known = {text: control_token(engine, text) for text in texts}
    ids = [one if isinstance(one, int) else known.get(one) for one in banned]
    phrases = tuple(text for text in texts if known[text] is None)
    return [id_ for id_ in ids if id_ is not None], phrases


def control_token(engine: Engine, text: str) -> int | None:
    """The id of *text* if it is that of one control token of the vocabulary, else None."""
    if len(text) > _MOST_TOKEN_TEXT:
        return None
    try:
        ids = engine.tokenize(text, add_special=False)
        plain = engine.tokenize(text, add_special=False, parse_special=False)
    except KqviewError:  # a model without a vocabulary
        return None
    return ids[0] if len(ids) == 1 and ids != plain else None


def _attention(
    body: KoboldFields, settings: Settings, default: AttentionValues, *, asked: bool
) -> AttentionWanted | None:
    """What attention to send, None for none; *default* is what rows hold if nobody says."""
    if not first(body.output_attentions, body.return_attention, asked):
        return None
    implied = None if body.attention_spans is None else "probs"
    return AttentionWanted(
        kind=first(body.attention_values, implied, settings.attention_values, default),
        format=body.attention_format or settings.attention_format,
        aggregation=body.aggregation_mode or "mean",
        top_k=first(FIELDS.value(body, "top_k"), DEFAULT_TOP_K),
        dtype=body.dtype or "float32",
        layers=body.attention_layers,
        heads=body.attention_heads,
        spans=body.attention_spans,
        layer_weights=body.layer_weights,
        prompt=bool(body.prompt_attention),
    )


# Fields that have an effect only with attention, or in one format of it.
_OF_ATTENTION: Final = (
    "prompt_attention", "attention_values", "attention_format", "aggregation_mode",
    "layer_weights", "sparse_top_k", "attention_top_k", "attention_layers", "attention_heads",
    "attention_spans", "dtype", "encoding",
)  # fmt: skip
_OF_FORMAT: Final = {
    "aggregation_mode": "aggregated", "layer_weights": "aggregated", "sparse_top_k": "sparse",
    "attention_top_k": "sparse",
}  # fmt: skip


def _ignored(
    body: KoboldFields, unknown: Sequence[str], shown: AttentionWanted | None
) -> tuple[str, ...]:
    """Names of what the request has to no effect; *unknown* are those that nothing reads."""
    spare: list[str] = [] if body.input_ids is None else ["prompt", "memory"]
    for parameter, names in FIELDS.fields.items():
        if len(names) > 1 and parameter != "banned_tokens":  # these add up
            used = next((name for name in names if getattr(body, name) is not None), None)
            spare += [name for name in names if name != used]
    if shown is None:
        spare += _OF_ATTENTION
    else:
        spare += [name for name, form in _OF_FORMAT.items() if shown.format != form]
        if shown.format == "aggregated" and shown.aggregation != "weighted_layers":
            spare.append("layer_weights")
    given = [name for name in spare if getattr(body, name, None) is not None]
    return shown_names(dict.fromkeys([*unknown, *given]))
