"""Sampling: how the next token is chosen, checked when it is built.

The C++ core checks the same limits again, for callers that come another way; the limits that need
the model, such as the largest token id, are checked only there.
"""

import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Final, NamedTuple, cast

from kqview.errors import InvalidSampling, shown

_FLOAT_MAX: Final = 3.4028234663852886e38  # the core computes in float32
_INT_MAX: Final = 2**31 - 1
_SEED_MAX: Final = 2**32 - 2  # llama.cpp reads the number after it as "choose one at random"


class _Limit(NamedTuple):
    low: float
    high: float
    remedy: str
    low_excluded: bool = False

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.low_excluded and value == self.low)

    def __str__(self) -> str:
        if self.low == -self.high:
            return "that is finite"
        least = f"above {self.low:g}" if self.low_excluded else f"from {self.low:g}"
        if self.high in (_FLOAT_MAX, _INT_MAX):
            return least
        return f"{least} to {self.high:.10g}"


_FLOATS: Final = {
    "temperature": _Limit(0, _FLOAT_MAX, "0 is greedy"),
    "top_p": _Limit(0, 1, "1 switches it off", low_excluded=True),
    "min_p": _Limit(0, 1, "0 switches it off"),
    "typical_p": _Limit(0, 1, "1 switches it off", low_excluded=True),
    "repeat_penalty": _Limit(0, _FLOAT_MAX, "1 switches it off", low_excluded=True),
    "presence_penalty": _Limit(-_FLOAT_MAX, _FLOAT_MAX, "0 switches it off"),
    "frequency_penalty": _Limit(-_FLOAT_MAX, _FLOAT_MAX, "0 switches it off"),
    "dry_multiplier": _Limit(0, _FLOAT_MAX, "0 switches it off"),
    "dry_base": _Limit(1, _FLOAT_MAX, "dry_multiplier=0 switches DRY off"),
    "xtc_probability": _Limit(0, 1, "0 switches it off"),
    "xtc_threshold": _Limit(0, 1, "above 0.5 it has no effect"),
    "mirostat_tau": _Limit(0, _FLOAT_MAX, "5 is usual", low_excluded=True),
    "mirostat_eta": _Limit(0, _FLOAT_MAX, "0.1 is usual", low_excluded=True),
}
_INTS: Final = {
    "top_k": _Limit(0, _INT_MAX, "0 switches it off"),
    "repeat_last_n": _Limit(-1, _INT_MAX, "0 switches it off, -1 is the whole context"),
    "dry_allowed_length": _Limit(0, _INT_MAX, "2 is usual"),
    "dry_penalty_last_n": _Limit(-1, _INT_MAX, "0 switches it off, -1 is the whole context"),
    "mirostat": _Limit(0, 2, "0 switches it off"),
    "seed": _Limit(0, _SEED_MAX, "None takes a random one"),
    "top_logprobs": _Limit(0, _INT_MAX, "None switches it off, 0 asks for logprob alone"),
}
_OPTIONAL: Final = frozenset({"seed", "top_logprobs"})


def _no_bias() -> Mapping[int, float]:
    return {}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the model's logits.

    Sequences become tuples, ``logit_bias`` becomes a dict of its own.

    Attributes:
        temperature: Divides the logits; 0 is greedy.
        top_k: Keep the k most probable tokens; 0 keeps all.
        top_p: Keep the fewest tokens whose probability reaches it; 1 keeps all.
        min_p: Drop tokens below this share of the best one's probability; 0 keeps all.
        typical_p: Locally typical sampling; 1 is off.
        repeat_penalty: Divides the logits of tokens seen before; 1 is off.
        repeat_last_n: Tokens that the three penalties look back on; -1 is the whole context.
        presence_penalty: Subtracted once from tokens seen before.
        frequency_penalty: Subtracted for each time that a token was seen.
        dry_multiplier: Strength of the DRY penalty on repeated sequences; 0 is off.
        dry_base: Growth of the DRY penalty for each further token.
        dry_allowed_length: Longest repetition without a DRY penalty.
        dry_penalty_last_n: Tokens that DRY looks back on; -1 is the whole context.
        dry_sequence_breakers: Strings that end a sequence for DRY.
        xtc_probability: Chance of leaving out the most probable tokens; 0 is off.
        xtc_threshold: Probability from which XTC may leave a token out.
        mirostat: Version of Mirostat, 1 or 2; 0 is off.
        mirostat_tau: Mirostat's target entropy.
        mirostat_eta: Mirostat's learning rate.
        seed: Makes a run repeatable on one machine and build; None takes a random one.
        logit_bias: Added to the logit of each token id; -inf bans it.
        banned_tokens: Token ids that are never chosen.
        stop: Strings that end the generation; a single string is taken as one.
        stop_tokens: Token ids that end the generation.
        ignore_eos: Never choose a token that ends the text.
        grammar: GBNF that the output has to follow, as llama.cpp reads it: up to 1 MiB of text and
            a million elements. One that needs more than 2 s of CPU time for a token or 0.1 s a
            token on average, 20,000 open readings or 32 MiB ends its generation with
            InvalidSampling; others go on meanwhile.
        json_schema: JSON schema, as text or mapping, that the output has to follow; kept as text.
            Needs llguidance, ``pip install "kqview[constraints]"``, which says what of JSON Schema
            it knows. Its key "x-guidance" says how much white space stands between values; left
            out, a space or a newline with up to 20 blanks.
        regex: Regular expression, in the syntax of Rust's regex crate, that all of the output has
            to match; needs llguidance too.
        top_logprobs: How many logprobs to report with each token; 0 is that of the token alone.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=_no_bias)
    banned_tokens: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] = ()
    ignore_eos: bool = False
    grammar: str | None = None
    json_schema: str | Mapping[str, object] | None = None
    regex: str | None = None
    top_logprobs: int | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidSampling: A field is out of range or not well-formed, or more than one of
                grammar, json_schema and regex is given.
        """
        for name, limit in _FLOATS.items():
            self._set(name, _to_float(name, getattr(self, name), limit))
        for name, limit in _INTS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                self._set(name, _to_int(name, value, limit))
        self._set("logit_bias", _to_bias(self.logit_bias))
        for name in ("banned_tokens", "stop_tokens"):
            self._set(name, _to_token_ids(name, getattr(self, name)))
        for name in ("stop", "dry_sequence_breakers"):
            self._set(name, _to_strings(name, getattr(self, name)))
        if not isinstance(self.ignore_eos, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _invalid("ignore_eos", self.ignore_eos, "True or False", "False is the default")
        if self.json_schema is not None:
            self._set("json_schema", _to_schema(self.json_schema))
        for name in ("grammar", "regex"):
            if not isinstance(getattr(self, name), str | None):
                raise _invalid(name, getattr(self, name), "text", "None is without")
        given = [n for n in ("grammar", "json_schema", "regex") if getattr(self, n) is not None]
        if len(given) > 1:
            raise InvalidSampling(
                f"sampling.validate: {' and '.join(given)} are given, one of them is allowed; "
                "leave the others out"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _invalid(name: str, value: object, limit: object, remedy: str) -> InvalidSampling:
    return InvalidSampling(
        f"sampling.validate: {name} is {shown(value)}, allowed is {limit}; {remedy}"
    )


def _to_float(name: str, value: object, limit: _Limit) -> float:
    if not isinstance(value, bool) and isinstance(value, Real):
        try:
            number = float(value)
        except OverflowError:  # an int beyond every float
            number = math.inf
        if limit.contains(number):
            return number
    raise _invalid(name, value, f"a number {limit}", limit.remedy)


def _to_int(name: str, value: object, limit: _Limit) -> int:
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # pyright: ignore[reportArgumentType]
        except TypeError:
            pass
        else:
            if limit.contains(number):
                return number
    raise _invalid(name, value, f"a whole number {limit}", limit.remedy)


_TOKEN_ID: Final = _Limit(0, _INT_MAX, "take ids from tokenize()")


def _to_token_ids(name: str, values: object) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise _invalid(name, values, "a sequence of token ids", _TOKEN_ID.remedy)
    given = tuple(cast("Iterable[object]", values))
    if are_ids(given):
        return cast("tuple[int, ...]", given)
    return tuple(_to_int(f"{name}[{i}]", value, _TOKEN_ID) for i, value in enumerate(given))


def are_ids(values: Sequence[object]) -> bool:
    """Whether *values* are ints that can be token ids, as nearly all are; quick for long ones."""
    if set(map(type, values)) != {int}:
        return not values
    ids = cast("Sequence[int]", values)
    return min(ids) >= 0 and max(ids) <= _INT_MAX


def _to_schema(schema: object) -> str:
    """A JSON schema as text; whether it is one is llguidance's to say."""
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        try:
            return json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidSampling(
                f"sampling.validate: json_schema cannot be written as JSON: {error}; correct it"
            ) from error
    raise _invalid("json_schema", schema, "text or a mapping", "None is without")


def _to_bias(bias: Mapping[int, float]) -> dict[int, float]:
    checked: dict[int, float] = {}
    if not isinstance(bias, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _invalid("logit_bias", bias, "a mapping of token id to number", "use {} for none")
    for token_id, value in bias.items():
        number = math.nan
        if isinstance(value, Real) and not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            number = -math.inf if value == -math.inf else _to_finite(value)
        if math.isnan(number):
            name = f"logit_bias[{shown(token_id)}]"
            raise _invalid(name, value, "a number below infinity", "-inf bans the token")
        checked[_to_int("logit_bias id", token_id, _TOKEN_ID)] = number
    return checked


def _to_finite(value: float) -> float:
    """*value* as a float32 can hold it, NaN where none can."""
    return float(value) if -_FLOAT_MAX <= value <= _FLOAT_MAX else math.nan


def _to_strings(name: str, values: object) -> tuple[str, ...]:
    if not isinstance(values, Iterable):
        raise _invalid(name, values, "text or a sequence of texts", "use () for none")
    wanted = cast("Iterable[object]", (values,) if isinstance(values, str) else values)
    strings: list[str] = []
    for value in wanted:
        if not isinstance(value, str) or not value:
            raise _invalid(name, value, "text of at least one character", "leave it out")
        strings.append(value)
    return tuple(strings)
