"""Fields of requests: options that dialects call by the same names, and how each names the others.

At the end stand those of replies that say what a generation cost (`Timings`), and how far a prompt
is, as llama.cpp's server has them.

Pure. A field that is absent or null is not given. Bodies of llama.cpp's server and of OpenAI's API
extend `LlamaFields`; `sampling_of` turns one into a `Sampling`. What it leaves open takes the
defaults of `OPTIONS`, which are llama.cpp's. As in llama.cpp's server, some numbers out of their
range are moved to its nearest end (`_CLAMPED`); the others are refused.

What kqview's sampler does not have is refused by name if the request turns it on, because the text
would be another one: ``adaptive_target``, ``n_indent``. The order of ``samplers`` is fixed; those
left out are off. Fields that change only how llama.cpp computes (``backend_sampling``) are ignored.
"""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.edits.objects import edits_of
from kqview.errors import InvalidSampling, InvalidToken, RequestError
from kqview.server.api.wire.mods_field import ModsField, mods_of
from kqview.server.errors import NotSupported, renamed
from kqview.server.models.run import Run
from kqview.server.settings import Settings
from kqview.server.web.described import about
from kqview.submission import N_DRAFT_MAX
from kqview.types import Sampling, Usage
from kqview.types.capture import MOST_SPANS
from kqview.types.sampling import N_SEEDS, OPTIONS, SAMPLERS, TRUNCATIONS

MOST_LOGPROBS: Final = 1000
"""Most logprobs a token: their texts are looked up on the event loop."""

# Lists are searched for every token, or checked on the event loop: long ones hold others up.
Stops = Annotated[list[Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(max_length=256)]
Indices = Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)]
Spans = Annotated[tuple[tuple[int, int | None], ...], msgspec.Meta(max_length=MOST_SPANS)]
Weights = Annotated[tuple[float, ...], msgspec.Meta(max_length=4096)]
Edits = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=256)]


class SamplingFields(Struct, kw_only=True):
    """Options of `Sampling` that KoboldAI's and llama.cpp's clients call as it does."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Stops | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    grammar: str | None = None


class FieldTable:
    """Which fields of a dialect give a parameter of the core; the first one that is given wins."""

    def __init__(
        self,
        body: type[Struct],
        sampling: Mapping[str, tuple[str, ...]],
        others: Mapping[str, tuple[str, ...]],
    ) -> None:
        """Know the fields of *body*.

        Args:
            body: Fields with the name of an option of `Sampling` give that option.
            sampling: Other options of `Sampling`, with the fields for each.
            others: Further parameters, with the fields for each.
        """
        own = {name: (name,) for name in OPTIONS if name in body.__struct_fields__}
        self.sampling: Final = {**own, **sampling}
        self.fields: Final = {**self.sampling, **others}

    def name(self, body: Struct, parameter: str) -> str:
        """The field of *body* that gives *parameter*; the first one if none does."""
        return _given(body, self.fields[parameter])

    def value(self, body: Struct, parameter: str) -> Any:
        """What *body* gives for *parameter*, None for nothing."""
        return getattr(body, _given(body, self.fields[parameter]))

    def names(self, body: Struct) -> dict[str, str]:
        """Parameter -> the field that the client gave it by, for `GenerateRequest`."""
        return {
            parameter: of[0] if len(of) == 1 else _given(body, of)
            for parameter, of in self.fields.items()
        }

    def options(self, body: Struct) -> dict[str, Any]:
        """Option of `Sampling` -> what *body* gives for it, None for nothing."""
        return {
            option: getattr(body, of[0] if len(of) == 1 else _given(body, of))
            for option, of in self.sampling.items()
        }

    def n_logprobs(self, body: Struct, *, if_true: int) -> int | None:
        """How many top logprobs are wanted, None for none; ``true`` is *if_true*.

        Raises:
            RequestError: It is above `MOST_LOGPROBS`.
        """
        n: bool | int | None = getattr(body, _given(body, self.fields["top_logprobs"]))
        if n is None or n is False:
            return None
        if n > MOST_LOGPROBS:
            name = self.name(body, "top_logprobs")
            raise RequestError(f"{name} is {n}, the limit is {MOST_LOGPROBS}; ask for fewer")
        return if_true if n is True else n

    def sampling_of(self, body: Struct, options: Mapping[str, Any]) -> Sampling:
        """*options* without those that are None.

        Raises:
            InvalidSampling: A value is out of its range; the message names the client's field.
        """
        try:
            return Sampling(**{name: one for name, one in options.items() if one is not None})
        except InvalidSampling as error:
            # Another parameter may have the name of an option.
            names = {option: _given(body, of) for option, of in self.sampling.items()}
            raise renamed(error, names) from None


def first(*values: Any) -> Any:
    """The first value that is not None, None if all are."""
    for value in values:
        if value is not None:
            return value
    return None


def _given(body: Struct, names: tuple[str, ...]) -> str:
    for name in names:
        if getattr(body, name) is not None:
            return name
    return names[0]


# Long lists, which are checked on the event loop, hold others up.
BiasPairs = Annotated[list[Any], msgspec.Meta(max_length=2**16)]
BiasObject = Annotated[dict[str, float | bool], msgspec.Meta(max_length=2**16)]
Names = Annotated[list[Annotated[str, msgspec.Meta(max_length=1000)]], msgspec.Meta(max_length=256)]


# ---- llama.cpp's server and OpenAI's API


ModelField = Annotated[
    str | None, about("Id of a configured model; the default model if not given.", "demo")
]


class LoraScale(Struct):
    """A LoRA adapter, by its index, and its scale."""

    id: Annotated[int, about("Index of the adapter in ``GET /lora-adapters``.", 0)]
    scale: Annotated[float, about("Its strength.", 0.5)] = 0.0


class PredictionPart(Struct):
    """A part of a predicted text."""

    text: Annotated[str, about("Its text.", "def add(a, b):")]
    type: Literal["text"] = "text"


class Prediction(Struct):
    """A text that an answer will largely repeat."""

    content: Annotated[
        str | Annotated[list[PredictionPart], msgspec.Meta(max_length=4096)],
        about("The text, or its parts.", "def add(a, b):"),
    ]
    type: Literal["content"] = "content"


class LlamaFields(SamplingFields, kw_only=True):
    """Fields of a generation in llama.cpp's server, in any of its routes; all may be null."""

    model: ModelField = None
    n_predict: Annotated[
        int | None,
        about(
            "Most tokens to generate; as many as fit the context if not given. -1 is the "
            "same, 0 evaluates the prompt only.",
            128,
        ),
    ] = None
    max_completion_tokens: Annotated[int | None, about("Another name for ``n_predict``.", 128)] = (
        None
    )
    max_tokens: Annotated[int | None, about("Another name for ``n_predict``.", 128)] = None
    n_cmpl: Annotated[int | None, about("Texts to generate from each prompt.", 2, default=1)] = None
    n: Annotated[int | None, about("Another name for ``n_cmpl``.", 2, default=1)] = None
    stream: Annotated[
        bool | None, about("Whether the reply is a stream of Server-Sent Events.", default=False)
    ] = None

    typical_p: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    samplers: Annotated[
        Names | str | None,
        about(
            'Samplers that are on, or a letter for each, such as "kt"; all if not given. '
            "Their order is fixed.",
            ["top_k", "temperature"],
        ),
    ] = None
    min_keep: int | None = None
    min_tokens: int | None = None
    top_n_sigma: float | None = None
    adaptive_target: Annotated[
        float | None, about("Has to be negative: this sampler does not exist here.", default=-1)
    ] = None
    adaptive_decay: Annotated[
        float | None, about("Not read, as that sampler does not exist here; anything.", 0.9)
    ] = None

    stop: Annotated[
        Stops | str | None, about("Texts that end the generation, or one text.", ["\n\n"])
    ] = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[
        BiasObject | BiasPairs | None,
        about(
            "Added to logits: an object by id or text, or pairs [id or text, number]; false bans.",
            {"13": -5},
        ),
    ] = None
    json_schema: Annotated[
        dict[str, Any] | None, about("JSON schema that the text follows.", {"type": "object"})
    ] = None
    finish_on_length: Literal["cut", "close"] | None = None

    n_probs: Annotated[
        int | None,
        about(
            "Report the logprobs of each token and of so many of the most probable ones. "
            "They are the model's own, before bias, grammar and samplers; see "
            "``post_sampling_probs``.",
            3,
        ),
    ] = None
    logprobs: Annotated[
        bool | int | None, about("Another name for ``n_probs``; true reports one.", 3)
    ] = None
    post_sampling_probs: bool | None = None

    id_slot: Annotated[int | None, about("The slot to use; -1, which is any, if not given.", 0)] = (
        None
    )
    cache_prompt: Annotated[
        bool | None,
        about("Whether tokens of the prompt that a slot holds are reused.", default=True),
    ] = None
    n_cache_reuse: Annotated[
        int | None,
        about(
            "Least number of tokens to reuse in a piece from elsewhere in the slot; 0, "
            "which is never, if not given.",
            256,
        ),
    ] = None
    n_keep: Annotated[
        int | None,
        about(
            "Tokens at the start that stay when the context is shifted; -1 for the whole prompt.",
            4,
            default=0,
        ),
    ] = None
    n_discard: Annotated[
        int | None,
        about(
            "Tokens that a shift of the context removes; half of those that may go if 0 or "
            "not given.",
            100,
        ),
    ] = None
    n_indent: Annotated[int | None, about("Has to be 0: it is not supported.", 0)] = None
    lora: Annotated[
        Annotated[list[LoraScale], msgspec.Meta(max_length=256)] | None,
        about(
            "Scales of LoRA adapters for this request; those left out are off. The server's"
            " if not given."
        ),
    ] = None

    prediction: Annotated[
        Prediction | str | None,
        about(
            "A text that the answer will largely repeat, such as a file that is edited: its "
            "tokens are tried several at once. The answer is the same without.",
            {"type": "content", "content": "def add(a, b):"},
        ),
    ] = None
    n_draft: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=N_DRAFT_MAX)] | None,
        about(
            "Most tokens to guess at once; 0 for none. On a server with ``draft`` 16 if not given.",
            16,
        ),
    ] = msgspec.field(default=None, name="speculative.n_max")

    edits: Annotated[
        Edits | None,
        about(
            "What to change in the model for this request, on a server that allows it.",
            [{"type": "attention_bias", "spans": [[0, 25]], "log_factor": 1.5}],
        ),
    ] = None

    mods: Annotated[
        ModsField | None,
        about("Mods of the server's folder that steer the answer.", ["stop_early"]),
    ] = None

    reasoning_budget_tokens: Annotated[
        int | None,
        about(
            "Most tokens of reasoning; 0 for none. -1, which is the server's limit, if not given.",
            256,
        ),
    ] = None
    thinking_budget_tokens: Annotated[
        int | None, about("Another name for ``reasoning_budget_tokens``.", 256)
    ] = None

    verbose: Annotated[
        bool | None,
        about(
            "Whether the reply of a chat has its prompt, as ``__verbose``; what the "
            "server's setting says if not given."
        ),
    ] = None
    timings_per_token: Annotated[
        bool | None, about("Whether each event of a stream has timings so far.", default=False)
    ] = None
    return_tokens: Annotated[
        bool | None, about("Whether the reply has the ids of the text.", default=False)
    ] = None
    return_progress: Annotated[
        bool | None,
        about(
            "Whether a stream begins with two events about the prompt: how much of it was "
            "cached, and that it is evaluated.",
            default=False,
        ),
    ] = None
    response_fields: Annotated[
        Names | None,
        about("Names of the fields that the reply keeps; all if not given.", ["content"]),
    ] = None


FIELDS: Final = FieldTable(
    LlamaFields,
    {"top_logprobs": ("n_probs", "logprobs")},
    {
        "max_tokens": ("n_predict", "max_completion_tokens", "max_tokens"),
        "n_samples": ("n_cmpl", "n"),
        "slot": ("id_slot",),
        "reuse_min_tokens": ("n_cache_reuse",),
        "reasoning_budget": ("reasoning_budget_tokens", "thinking_budget_tokens"),
    },
)
"""Names of llama.cpp's server."""
names_of: Final = FIELDS.names
_LEAST: Final = 1e-6  # stands for 0 where the option has to be above it
# Numbers out of range are moved into it, as llama.cpp's server does: to these ends.
_CLAMPED: Final = {
    name: (_LEAST if OPTIONS[name].low_excluded else OPTIONS[name].low, OPTIONS[name].high)
    for name in ("temperature", "mirostat", *TRUNCATIONS)
}
_LACKING: Final = (("adaptive_target", 0), ("n_indent", 1))  # what is not here, and from what on
_CONSTRAINTS: Final = frozenset({"grammar", "json_schema", "regex"})  # at most one may be given
_ID: Final = re.compile("-?[0-9]+")
_ID_DIGITS: Final = 20  # more than any id has: longer numbers are slow to read

_SAMPLER_NAMES: Final = MappingProxyType(
    {
        **{name.replace("_", ""): name for name in SAMPLERS},
        "nucleus": "top_p", "typ": "typ_p", "typical": "typ_p", "typicalp": "typ_p",
        "temp": "temperature",
    }
)  # fmt: skip
"""A sampler's names, without dashes and underscores, which llama.cpp's server takes or leaves."""
_SAMPLER_LETTERS: Final = MappingProxyType(
    {
        "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typ_p", "p": "top_p",
        "m": "min_p", "x": "xtc", "t": "temperature",
    }
)  # fmt: skip


_Body = TypeVar("_Body", bound=LlamaFields)


def with_defaults(body: _Body, settings: Settings) -> _Body:
    """*body*, with the operator's values in fields that it leaves open."""
    defaults = settings.sampling_defaults if settings.sampling else {}
    defaults = {**defaults, "max_tokens": settings.default_max_tokens}
    missing = {
        FIELDS.fields[option][0]: value
        for option, value in defaults.items()
        if option in FIELDS.fields and getattr(body, _given(body, FIELDS.fields[option])) is None
    }
    return msgspec.structs.replace(body, **missing) if missing else body


def sampling_of(
    fields: LlamaFields, *, tokenize: Callable[[str], Sequence[int]], **chosen: Any
) -> Sampling:
    """How tokens are chosen.

    Args:
        fields: The request.
        tokenize: Ids of a text without special ones, for texts in ``logit_bias``.
        **chosen: Options of `Sampling` that the dialect decides itself; None for the request's.

    Raises:
        InvalidSampling: A value is out of its range; the message names the client's field.
        InvalidToken: ``logit_bias`` has an entry that is not a token with a bias.
        NotSupported: The request turns on a sampler that kqview does not have.
    """
    for name, least in _LACKING:
        if (value := getattr(fields, name)) is not None and value >= least:
            raise NotSupported(
                f"{name} is {value!r}, which this server does not support; leave it out"
            )
    given = FIELDS.options(fields)
    for option, (low, high) in _CLAMPED.items():
        if (value := given[option]) is not None:
            given[option] = type(value)(min(max(value, low), high))
    if fields.seed is not None and fields.seed > N_SEEDS:  # OpenAI's have 64 bits
        given["seed"] = fields.seed % N_SEEDS
    if (stop := fields.stop) is not None:
        given["stop"] = [one for one in ([stop] if isinstance(stop, str) else stop) if one]
    if fields.logit_bias is not None:
        given["logit_bias"] = _bias(fields.logit_bias, tokenize)
    if given["top_logprobs"] is not None:
        given["top_logprobs"] = FIELDS.n_logprobs(fields, if_true=1) or None
    given["grammar"] = fields.grammar or None
    if given["grammar"]:
        given["json_schema"] = None
    elif fields.json_schema == {}:
        given["json_schema"] = {"type": "object"}
    if fields.dry_base is not None and fields.dry_base < 1:
        given["dry_base"] = None
    if fields.dry_sequence_breakers is not None and not fields.dry_sequence_breakers:
        raise InvalidSampling(
            "dry_sequence_breakers is empty; send at least one text, or leave it out",
            parameter="dry_sequence_breakers",
        )
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if not _CONSTRAINTS.isdisjoint(chosen):
        given |= dict.fromkeys(_CONSTRAINTS)
    given |= chosen
    if fields.samplers is not None:
        wanted = _sampler_names(fields.samplers)
        for name in SAMPLERS.keys() - wanted:
            given |= SAMPLERS[name]
    return FIELDS.sampling_of(fields, given)


_NO_TOKENS: Final = MappingProxyType(
    {
        "max_tokens": "-1 for as many as fit, 0 to evaluate the prompt",
        "reasoning_budget": "-1 for the server's default, 0 for no reasoning",
    }
)
"""What the least numbers of a limit of tokens mean."""


def most_tokens_of(
    fields: LlamaFields, of: Literal["max_tokens", "reasoning_budget"]
) -> int | None:
    """Most tokens to generate, or of reasoning among them; None for -1 or nothing.

    Raises:
        RequestError: It is below -1.
    """
    name = _given(fields, FIELDS.fields[of])
    n: int | None = getattr(fields, name)
    if n is not None and n < -1:
        raise RequestError(f"{name} is {n}; send {_NO_TOKENS[of]}, or more", parameter=name)
    return None if n == -1 else n


def options_of(fields: LlamaFields, settings: Settings) -> dict[str, Any]:
    """Further fields of a `GenerateRequest`: slot, adapters, mods, and what moves positions."""
    return {
        "slot": None if fields.id_slot == -1 else fields.id_slot,
        # Adapters that are left out have 0.
        "lora": None if fields.lora is None else {one.id: one.scale for one in fields.lora},
        "context_shift": settings.context_shift,
        "n_keep": first(fields.n_keep, 0),
        "n_discard": fields.n_discard or None,
        "n_reuse_min": first(fields.n_cache_reuse, 0),
        "cache_prompt": fields.cache_prompt is not False,
        "mods": mods_of(fields.mods) if fields.mods else (),
        # Making them may read files.
        "edits": partial(edits_of, fields.edits, settings.control_vectors_dir)
        if fields.edits
        else None,
        "drafting": _drafting_of(fields) if fields.prediction or fields.n_draft is not None else {},
    }


def _drafting_of(fields: LlamaFields) -> dict[str, Any]:
    """What of a request says how its text may go on, as options of `Engine.generate`."""
    found: dict[str, Any] = {}
    if fields.n_draft is not None:
        found["speculate"] = fields.n_draft
    if (prediction := fields.prediction) is not None:
        text = prediction if isinstance(prediction, str) else prediction.content
        found["prediction"] = text if isinstance(text, str) else "".join(one.text for one in text)
    return found


def active_samplers(fields: LlamaFields) -> list[str]:
    """Samplers that are applied, in their order."""
    if fields.samplers is None:
        return [*SAMPLERS]
    wanted = _sampler_names(fields.samplers)
    return [name for name in SAMPLERS if name in wanted]


def _bias(
    bias: dict[str, float | bool] | list[Any], tokenize: Callable[[str], Sequence[int]]
) -> dict[int, float]:
    """Every form of llama.cpp's server: pairs or an object, ids or texts, false for a ban."""
    found: dict[int, float] = {}
    for token, value in _bias_pairs(bias):
        number = -math.inf if value is False else float(value)
        for id_ in [token] if isinstance(token, int) else tokenize(token):
            found[id_] = number
    return found


def _bias_pairs(bias: dict[str, float | bool] | list[Any]) -> list[tuple[int | str, float | bool]]:
    if isinstance(bias, dict):
        pairs: list[Any] = [
            (int(key[:_ID_DIGITS]) if _ID.fullmatch(key) else key, value)
            for key, value in bias.items()
        ]
    else:
        pairs = bias
    try:
        checked = msgspec.convert(pairs, list[tuple[int | str, float | bool]])
    except msgspec.ValidationError as error:
        raise InvalidToken(
            f"logit_bias has an entry that is not a token and its bias: {error}; send "
            "[id or text, number or false], or an object of them",
            parameter="logit_bias",
        ) from None
    if any(value is True for _, value in checked):
        raise InvalidToken(
            "logit_bias has true as a bias; send a number, or false to ban the token",
            parameter="logit_bias",
        )
    return checked


def _sampler_names(samplers: Sequence[str] | str) -> frozenset[str]:
    """Names of `SAMPLERS`; unknown ones are ignored later."""
    if isinstance(samplers, str):
        return frozenset(_SAMPLER_LETTERS.get(letter, letter) for letter in samplers)
    plain = (name.replace("-", "").replace("_", "") for name in samplers)
    return frozenset(_SAMPLER_NAMES.get(name, name) for name in plain)


# ---- what a reply says of its cost, as llama.cpp's server does


class Timings(Struct, kw_only=True):
    """What a generation cost; rates are 0 where nothing was computed."""

    cache_n: Annotated[int, about("Tokens of the prompt that were in the cache.", 0)]
    prompt_n: Annotated[int, about("Tokens of the prompt that were evaluated.", 12)]
    prompt_ms: Annotated[float, about("Milliseconds of that.", 8.5)]
    prompt_per_token_ms: Annotated[float, about("Milliseconds for each of them.", 0.7)]
    prompt_per_second: Annotated[float, about("Such tokens a second.", 1411.8)]
    predicted_n: Annotated[int, about("Tokens that were generated.", 20)]
    predicted_ms: Annotated[float, about("Milliseconds of that.", 40.0)]
    predicted_per_token_ms: Annotated[
        float, about("Milliseconds for each of them but the first, which the prompt gives.", 2.0)
    ]
    predicted_per_second: Annotated[float, about("Such tokens a second.", 500.0)]
    draft_n: Annotated[int | UnsetType, about("Tokens that were guessed, if any were.", 30)] = UNSET
    draft_n_accepted: Annotated[
        int | UnsetType, about("Those of them that were then generated.", 20)
    ] = UNSET


def timings(usage: Usage) -> Timings:
    """Timings of *usage*; rates are 0 where nothing was computed."""
    n_prompt = usage.prompt_tokens - usage.cached_tokens
    n = max(0, usage.completion_tokens - 1)
    prompt_ms, predicted_ms = 1000 * usage.prefill_s, 1000 * usage.decode_s
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=n_prompt,
        prompt_ms=prompt_ms,
        prompt_per_token_ms=prompt_ms / n_prompt if n_prompt > 0 else 0.0,
        prompt_per_second=n_prompt / usage.prefill_s if usage.prefill_s > 0 else 0.0,
        predicted_n=usage.completion_tokens,
        predicted_ms=predicted_ms,
        predicted_per_token_ms=predicted_ms / n if n > 0 else 0.0,
        predicted_per_second=n / usage.decode_s if usage.decode_s > 0 else 0.0,
        draft_n=usage.draft_tokens or UNSET,
        draft_n_accepted=usage.accepted_tokens if usage.draft_tokens else UNSET,
    )


class Clock:
    """Timings of a generation while it runs."""

    def __init__(self, sample: int = 0) -> None:
        """Begin with generation *sample* of a run."""
        self._sample = sample
        self.first_s: float | None = None
        """When its first token came, in seconds of ``time.monotonic``; None before."""

    def note(self) -> None:
        """Note that a token came."""
        if self.first_s is None:
            self.first_s = time.monotonic()

    def timings(self, run: Run) -> Timings:
        """So far; whole once the run has ended."""
        usage = run.generations[self._sample].usage
        if run.is_over or self.first_s is None:
            return timings(usage)
        prefill_s, decode_s = self.first_s - run.started_s, time.monotonic() - self.first_s
        return timings(replace(usage, prefill_s=prefill_s, decode_s=decode_s))


class Progress(Struct):
    """How much of a prompt is evaluated."""

    total: Annotated[int, about("Tokens of the prompt.", 12)]
    cache: Annotated[int, about("Those that were in the cache.", 0)]
    processed: Annotated[int, about("Those that are evaluated or were in the cache.", 12)]
    time_ms: Annotated[int, about("Milliseconds of that.", 8)]


def prompt_progress(spent: Timings) -> list[tuple[Progress, Timings]]:
    """How far a prompt was, and what it had cost, when its evaluation began and when it ended.

    *spent* are the timings at the first token, which is when both are known.
    """
    n, cached = spent.cache_n + spent.prompt_n, spent.cache_n
    begun = timings(Usage(prompt_tokens=cached, cached_tokens=cached))
    ended = timings(Usage(n, cached, prefill_s=spent.prompt_ms / 1000))
    return [
        (Progress(n, cached, cached, 0), begun),
        (Progress(n, cached, n, int(spent.prompt_ms)), ended),
    ]
