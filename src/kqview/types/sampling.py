"""Sampling: how the next token is chosen, and the table of its options.

Each field of `Sampling` is a row of the table: name, type, default, range and description.
`OPTIONS` provides the rows to other modules, such as the schemas of the server's dialects. The C++
core has its own list (cpp/sample/params.h); tests/engine/test_sampling_table.py compares the two.
Limits that depend on the model, such as the largest token id, are checked only in the core.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial
from inspect import cleandoc
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, TypedDict, Unpack, cast

import numpy as np

from kqview.arguments import (
    INT32_MAX,
    checked_id,
    checked_ids,
    choice,
    encode,
    flag,
    invalid,
    to_index,
    to_number,
)
from kqview.errors import InvalidSampling, RequestError, shown
from kqview.option_names import lists_options, unknown_option
from kqview.types.json_schema import Parsed, SchemaLike, schema_text
from kqview.types.regex import regex_text
from kqview.types.text import Ids

_FLOAT_MAX: Final = 3.4028234663852886e38  # the core computes in float32
N_SEEDS: Final = 2**32 - 1  # from 0 on
_SEED_MAX: Final = N_SEEDS - 1
_RANDOM_SEEDS: Final = (-1, N_SEEDS)  # llama.cpp takes them as "choose a random seed"


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """One row of the table.

    Attributes:
        name: The option's name.
        type: The annotation of its field, such as ``int | None``.
        default: Its value if the caller gives none.
        doc: Its description.
        low: The smallest number allowed; None for options that are not numbers.
        high: The largest number allowed; None for options that are not numbers.
        low_excluded: Whether *low* itself is excluded.
        example: A value that changes something, None for options that are on or off.
        convert: A number from the value, None if it is none. Or, for options that are not numbers,
            what `Sampling` stores, from the option's name and the value.
    """

    name: str
    type: Any
    default: Any
    doc: str
    convert: Callable[..., Any]
    low: float | None = None
    high: float | None = None
    low_excluded: bool = False
    example: Any = None

    def checked(self, value: object) -> Any:
        """*value* in the form that `Sampling` stores; None stands for the default.

        Raises:
            InvalidSampling: *value* is out of range or has the wrong type.
        """
        low, high = self.low, self.high
        if value is None:
            return self.default
        if low is None or high is None:
            return self.convert(self.name, value)
        number = self.convert(value)
        if self.name == "seed" and number in _RANDOM_SEEDS:
            return None
        is_within = number is not None and low <= number <= high
        # The core computes in float32, where the smallest numbers are 0.
        if not is_within or (self.low_excluded and np.float32(number) == low):
            raise _invalid(self.name, value, self.allowed, self.doc)
        return number

    @property
    def is_plain(self) -> bool:
        """Whether it is a number or a flag; the others are texts and lists."""
        return self.low is not None or isinstance(self.default, bool)

    @property
    def allowed(self) -> str:
        """The range in words, such as "a number from 0 to 1"."""
        assert self.low is not None
        assert self.high is not None
        noun = "a number" if self.convert is to_number else "a whole number"
        if self.low == -self.high:
            return "a finite number"
        if self.high == _FLOAT_MAX:
            limit = f"{'above' if self.low_excluded else 'of at least'} {self.low:g}"
            return f"{noun} {limit} and at most {_FLOAT_MAX:.2g}"
        if self.low_excluded:
            return f"{noun} above {self.low:g} and at most {self.high:.10g}"
        return f"{noun} from {self.low:g} to {self.high:.10g}"


def _row(default: object, doc: str, *, convert: Callable[..., Any], **more: Any) -> Any:
    """A field of `Sampling`, with the rest of its row of the table."""
    value: Any = {"default": default}
    if default == {}:
        value = {"default_factory": dict[int, float]}
    return field(**value, metadata={"doc": doc, "convert": convert, **more})


_number: Final = partial(_row, convert=to_number, low=-_FLOAT_MAX, high=_FLOAT_MAX)
_integer: Final = partial(_row, convert=to_index, low=0, high=INT32_MAX)


# ---- values that are not numbers


_to_flag: Final = partial(flag, error=InvalidSampling)
_to_finish: Final = partial(choice, choices=Literal["cut", "close"], error=InvalidSampling)


def _to_grammar(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _invalid(name, value, "a str or None")
    return _constraint(name, value)


def _to_schema(name: str, schema: object) -> str:
    return _constraint(name, schema_text(schema))


def _to_regex(name: str, regex: object) -> str:
    if isinstance(regex, re.Pattern):
        return _constraint(name, regex_text(cast("re.Pattern[str]", regex)))
    if not isinstance(regex, str):
        raise _invalid(name, regex, "a str, a compiled pattern or None")
    return _constraint(name, regex)


def _constraint(name: str, text: str) -> str:
    """*text* that the output must follow; the core, or llguidance, checks whether it is valid."""
    if not text:  # it would allow nothing
        raise InvalidSampling(f"{name} is empty; pass None for no {name}", parameter=name)
    encode(name, text, InvalidSampling)
    return text


def _to_token_ids(name: str, values: object) -> tuple[int, ...]:
    return tuple(checked_ids(name, values, InvalidSampling))


def _to_bias(name: str, bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise _invalid(name, bias, "a mapping of token id to number")
    checked: dict[int, float] = {}
    for token_id, value in cast("Mapping[object, object]", bias).items():
        number = to_number(value)
        if number is None or not (number == -math.inf or abs(number) <= _FLOAT_MAX):
            item = f"{name}[{shown(token_id)}]"
            raise _invalid(item, value, "a finite number or -inf", "-inf bans the token.")
        checked[checked_id(f"a key of {name}", token_id, InvalidSampling)] = number
    return checked


def _to_strings(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, Iterable):
        raise _invalid(name, values, "a str or a sequence of str")
    wanted = cast("Iterable[object]", (values,) if isinstance(values, str) else values)
    strings: list[str] = []
    for value in wanted:
        if not isinstance(value, str) or not value:
            raise _invalid(f"an item of {name}", value, "a str of at least one character")
        strings.append(value)
    return tuple(strings)


def _to_breakers(name: str, values: object) -> tuple[str, ...]:
    strings = _to_strings(name, values)
    for value in strings:
        encode(name, value, InvalidSampling)
    return strings


def _invalid(name: str, value: object, allowed: str, doc: str = "") -> RequestError:
    return invalid(name, allowed, shown(value) + (f". {doc}" if doc else ""), InvalidSampling)


# ---- the table


class SamplingOptions(TypedDict, Generic[Parsed], total=False):
    """The fields of Sampling as keyword arguments of `Engine.generate`; None is "not given".

    ``json_schema`` says what `Generation.parsed` is.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    top_n_sigma: float | None
    min_keep: int | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    repeat_penalty: float | None
    repeat_last_n: int | None
    presence_penalty: float | None
    frequency_penalty: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    xtc_probability: float | None
    xtc_threshold: float | None
    mirostat: int | None
    mirostat_tau: float | None
    mirostat_eta: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    banned_tokens: Ids | None
    stop: str | Sequence[str] | None
    stop_tokens: Ids | None
    ignore_eos: bool | None
    min_tokens: int | None
    begin_suppress: Ids | None
    grammar: str | None
    json_schema: SchemaLike[Parsed] | None
    regex: str | re.Pattern[str] | None
    finish_on_length: Literal["cut", "close"] | None
    top_logprobs: int | None
    post_sampling_probs: bool | None


@dataclass(frozen=True, slots=True, init=False)
class Sampling:
    """How the next token is chosen from the model's logits.

    At most one of ``grammar``, ``json_schema`` and ``regex`` may be given. ``json_schema`` takes
    text, a mapping, or a type of which pydantic makes a schema, such as a pydantic model, a
    dataclass or a TypeAdapter: `Generation.parsed` is then a value of it. ``regex`` takes text, or
    a compiled pattern, which means what it means in Python, flags included. Both are stored as
    text, sequences as tuples and ``logit_bias`` as a copied dict; None stands for an empty one.
    """

    temperature: float = _number(0.8, "Divides the logits; 0 is greedy.", low=0, example=0.7)
    top_k: int = _integer(40, "Keep the k most probable tokens; 0 keeps all.", example=20)
    top_p: float = _number(
        0.95,
        "Keep the fewest tokens whose probabilities add up to this; 1 keeps all.",
        low=0, low_excluded=True, high=1,
        example=0.9,
    )  # fmt: skip
    min_p: float = _number(
        0.05,
        "Drop tokens below this share of the largest probability; 0 keeps all.",
        low=0, high=1,
        example=0.1,
    )  # fmt: skip
    typical_p: float = _number(
        1.0,
        "Locally typical sampling; 1 is off.",
        low=0,
        low_excluded=True,
        high=1,
        example=0.9,
    )
    top_n_sigma: float = _number(
        0.0,
        "Drop tokens whose logit is more than this many standard deviations (of all logits) below "
        "the largest, before the truncations above; 0 is off.",
        low=0,
        example=1.5,
    )
    min_keep: int = _integer(
        0,
        "Minimum number of tokens that top-p, min-p, typical and XTC sampling keep.",
        example=2,
    )
    dynatemp_range: float = _number(
        0.0,
        "Dynamic temperature: from this far below ``temperature`` to this far above it, rising "
        "with the entropy of the remaining tokens; 0 is off.",
        low=0, high=1000,
        example=0.3,
    )  # fmt: skip
    dynatemp_exponent: float = _number(
        1.0,
        "Exponent of the normalized entropy in dynamic temperature.",
        low=0, high=1000,
        example=1.5,
    )  # fmt: skip
    repeat_penalty: float = _number(
        1.0,
        "Divides the logits of tokens seen before; 1 is off.",
        low=0,
        low_excluded=True,
        example=1.1,
    )
    repeat_last_n: int = _integer(
        64,
        "How many tokens the three penalties look back; 0 is off, -1 is the whole context.",
        low=-1,
        example=256,
    )
    presence_penalty: float = _number(
        0.0,
        "Subtracted once from the logits of tokens seen before; 0 is off.",
        example=0.5,
    )
    frequency_penalty: float = _number(
        0.0,
        "Subtracted from a token's logit for each time it was seen; 0 is off.",
        example=0.5,
    )
    dry_multiplier: float = _number(
        0.0,
        "Strength of the DRY penalty on repeated sequences; 0 is off.",
        low=0,
        example=0.8,
    )
    dry_base: float = _number(
        1.75, "Growth of the DRY penalty with each further token.", low=1, example=2.0
    )
    dry_allowed_length: int = _integer(2, "Longest repetition without a DRY penalty.", example=3)
    dry_penalty_last_n: int = _integer(
        64,
        "How many tokens DRY looks back; 0 is off, -1 is the whole context.",
        low=-1,
        example=-1,
    )
    dry_sequence_breakers: Sequence[str] = _row(
        ("\n", ":", '"', "*"),
        "Strings that end a sequence for DRY; at most 64.",
        example=["\n"],
        convert=_to_breakers,
    )
    xtc_probability: float = _number(
        0.0,
        "Chance that XTC leaves out the most probable tokens; 0 is off.",
        low=0,
        high=1,
        example=0.5,
    )
    xtc_threshold: float = _number(
        0.1,
        "Minimum probability of a token that XTC may leave out; above 0.5 is off.",
        low=0, high=1,
        example=0.2,
    )  # fmt: skip
    mirostat: int = _integer(
        0,
        "Version of Mirostat, 1 or 2, which replaces the truncations above; 0 is off.",
        high=2,
        example=2,
    )
    mirostat_tau: float = _number(
        5.0, "Mirostat's target entropy.", low=0, low_excluded=True, example=4.0
    )
    mirostat_eta: float = _number(
        0.1, "Mirostat's learning rate.", low=0, low_excluded=True, example=0.2
    )
    seed: int | None = _row(
        None,
        "Makes a run repeatable on one machine and build; None or -1 uses a random seed.",
        low=0, high=_SEED_MAX,
        example=7,
        convert=to_index,
    )  # fmt: skip
    logit_bias: Mapping[int, float] = _row(
        {},
        "Added to the logit of each token id; -inf bans it.",
        example={"13": -5.0},
        convert=_to_bias,
    )
    banned_tokens: Ids = _row(
        (), "Token ids that are never sampled.", example=[13], convert=_to_token_ids
    )
    stop: str | Sequence[str] = _row(
        (),
        "Strings that end the generation; a str is one stop string.",
        example=["\n\n"],
        convert=_to_strings,
    )
    stop_tokens: Ids = _row(
        (), "Token ids that end the generation.", example=[2], convert=_to_token_ids
    )
    ignore_eos: bool = _row(False, "Never sample a token that ends the text.", convert=_to_flag)
    min_tokens: int = _integer(
        0,
        "Sample no token that ends the text before this many tokens; stop strings and stop_tokens "
        "still end it.",
        example=8,
    )
    begin_suppress: Ids = _row(
        (),
        "Token ids that are not sampled as the first token.",
        example=[13],
        convert=_to_token_ids,
    )
    grammar: str | None = _row(
        None,
        "Grammar in llama.cpp's GBNF that the output must follow, of at most 1 MiB of text and a "
        'million elements; or, if it begins with "%llguidance", one in the language of llguidance, '
        "a variant of Lark. One that takes more than 2 s of CPU time for a token, or 0.1 s on "
        "average, 20,000 simultaneous parses or 32 MiB ends its generation with "
        "InvalidSampling; other generations continue.",
        example='root ::= "yes" | "no"',
        convert=_to_grammar,
    )
    json_schema: SchemaLike | None = _row(
        None,
        "JSON schema that the output must follow. An object that lists its properties has no "
        "others, unless it says ``additionalProperties: true``, and there is no white space "
        'between values, unless the key "x-guidance" sets it. Integers are within an int64, and '
        "other numbers have at most 17 significant digits. Needs llguidance, ``pip install "
        "'kqview[constraints]'``, whose documentation lists what it supports.",
        convert=_to_schema,
    )
    regex: str | re.Pattern[str] | None = _row(
        None,
        "Regular expression, in the syntax of Rust's regex crate, whose ``\\w`` takes combining "
        "marks, that the whole output must match; also needs llguidance.",
        convert=_to_regex,
    )
    finish_on_length: Literal["cut", "close"] = _row(
        "cut",
        'What becomes of a constrained text that reaches its limit of tokens: "cut" ends it '
        'anywhere; "close" ends it as json_schema, regex or a grammar of llguidance allows, while '
        "there are tokens for that.",
        example="close",
        convert=_to_finish,
    )
    top_logprobs: int | None = _integer(
        None,
        "How many of the most probable tokens to report with their logprobs; 0 reports only the "
        "chosen token's logprob, None reports nothing. They are the model's own, before bias, "
        "penalties, grammar and samplers, unless post_sampling_probs is set.",
        example=3,
    )
    post_sampling_probs: bool = _row(
        False,
        "Report the probabilities that the token was drawn from, after all samplers, instead of "
        "the model's own.",
        convert=_to_flag,
    )

    def __init__(self, **options: Unpack[SamplingOptions]) -> None:
        """Check every option that is given.

        Raises:
            InvalidSampling: A field is out of range or has the wrong type, or more than one of
                grammar, json_schema and regex is given.
        """
        for name in options.keys() - OPTIONS.keys():
            raise unknown_option("Sampling", name, OPTIONS)
        for name, option in OPTIONS.items():
            value = options.get(name)
            if value is None or value is option.default:
                value = dict[int, float]() if option.default == {} else option.default
            else:
                value = option.checked(value)
            object.__setattr__(self, name, value)
        both = [n for n in ("grammar", "json_schema", "regex") if getattr(self, n) is not None]
        if len(both) > 1:
            raise InvalidSampling(
                f"{' and '.join(both)} cannot be combined; give one of them", parameter=both[0]
            )


OPTIONS: Final[Mapping[str, SamplingOption]] = MappingProxyType(
    {
        one.name: SamplingOption(
            name=one.name,
            type=one.type,
            default={} if one.default is MISSING else one.default,
            **one.metadata,
        )
        for one in fields(Sampling)
    }
)
"""Every option of `Sampling` by name, in the order of the fields."""

Sampling.__doc__ = f"{cleandoc(Sampling.__doc__ or '')}\n\nAttributes:\n" + "".join(
    f"    {option.name}: {option.doc}\n" for option in OPTIONS.values()
)
lists_options("Sampling", {name: option.default for name, option in OPTIONS.items()})(Sampling)

SAMPLERS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        "dry": {"dry_multiplier": 0.0},
        "top_n_sigma": {"top_n_sigma": 0.0},
        "top_k": {"top_k": 0},
        "typ_p": {"typical_p": 1.0},
        "top_p": {"top_p": 1.0},
        "min_p": {"min_p": 0.0},
        "xtc": {"xtc_probability": 0.0},
        "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
    }
)
"""Sampler, as llama.cpp calls it -> the options that turn it off; in the order in which the engine
applies them."""

TRUNCATIONS: Final = (
    "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "min_keep", "xtc_probability",
    "xtc_threshold", "dynatemp_range", "dynatemp_exponent",
)  # fmt: skip
"""Options that narrow or widen the choice; greedy sampling and mirostat do without."""
