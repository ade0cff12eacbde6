"""How tokens are chosen: a model's passport, a preset and a request's overrides as one. Pure.

And hashes of what shapes answers: a passport, a system prompt, the persona. A hash is ``sha256:``
and the digest of canonical JSON: UTF-8, keys sorted, no white space, whole numbers without a
fraction, nothing for what is not set. Configurations that say the same thus have the same hash,
whatever their order, spacing and comments.

Levels are merged field by field: ``default < passport < preset < custom``. A field that kqview does
not have, or that others make meaningless, is left out and named in ``filtered_out``; a value that
no mode allows is refused.

Known fields are `Sampling`'s numbers and flags, except those that only report (``top_logprobs``),
and ``max_output_tokens``, also called ``max_tokens``. Of ``penalize_nl`` only true is supported:
llama.cpp penalizes line ends like any token.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import msgspec

from kqview.arguments import INT32_MAX, whole_number
from kqview.errors import RequestError, shown
from kqview.server.config import Passport
from kqview.server.errors import Unprocessable
from kqview.types import Sampling
from kqview.types.sampling import OPTIONS, TRUNCATIONS

Origin = Literal["passport", "preset", "custom", "default"]

MAX_TOKENS: Final = "max_tokens"
REASONING_MAX_TOKENS: Final = "reasoning_max_tokens"
FIELDS: Final = (
    "temperature", "top_p", "top_k", "repeat_penalty", "min_p", "typical_p", "presence_penalty",
    "frequency_penalty", "repeat_last_n", "penalize_nl", "seed", "mirostat", "mirostat_tau",
    "mirostat_eta", MAX_TOKENS,
)  # fmt: skip
"""What ``sampling`` of an event always has, in this order."""

_MAX_OUTPUT_TOKENS: Final = "max_output_tokens"
_PENALIZE_NL: Final = "penalize_nl"
_RANDOM_SEED: Final = -1
_UNLIMITED: Final = -1
_WHOLE: Final = 2.0**53  # up to here a float is exact as a whole number
_MOST_FILTERED: Final = 64  # names of which a client chooses number and length
_MOST_CHARACTERS: Final = 80
_REPORTS: Final = frozenset({"top_logprobs", "post_sampling_probs"})
_ENGINE: Final = {
    name: row for name, row in OPTIONS.items() if row.is_plain and name not in _REPORTS
}

# ---- what other fields make meaningless

_MIROSTAT: Final = ("mirostat_tau", "mirostat_eta")
_PENALTIES: Final = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_DRY: Final = ("dry_base", "dry_allowed_length", "dry_penalty_last_n")


def _meaningless(sampling: Sampling) -> frozenset[str]:
    """Fields that do not change the text, whatever their value."""
    names: list[str] = []
    if sampling.temperature == 0 and sampling.dynatemp_range == 0:  # the most probable token
        names += [*TRUNCATIONS, "seed", "mirostat", *_MIROSTAT]
    elif sampling.mirostat:
        names += TRUNCATIONS
    else:
        names += _MIROSTAT
        names += ["xtc_threshold"] if sampling.xtc_probability == 0 else []
        names += ["dynatemp_exponent"] if sampling.dynatemp_range == 0 else []
    if sampling.repeat_last_n == 0:
        names += [*_PENALTIES, _PENALIZE_NL]
    elif all(getattr(sampling, name) == OPTIONS[name].default for name in _PENALTIES):
        names += ["repeat_last_n", _PENALIZE_NL]
    if sampling.dry_multiplier == 0 or sampling.dry_penalty_last_n == 0:
        names += _DRY
    return frozenset(names)


# ---- merging


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The levels of a request's sampling as one.

    Attributes:
        sampling: For the engine.
        max_tokens: Most tokens to generate, None for as many as fit.
        reasoning_max_tokens: Most tokens of reasoning, None for no limit.
        values: The value of each of `FIELDS` and of each other known field that was given.
        origin: The level that each of *values* comes from.
        filtered_out: Fields that were given and have no effect, sorted.
    """

    sampling: Sampling
    max_tokens: int | None
    reasoning_max_tokens: int | None
    values: dict[str, Any]
    origin: dict[str, Origin]
    filtered_out: list[str]

    def as_object(self) -> dict[str, Any]:
        """``sampling`` of an event: *values*, and ``filtered_out`` unless it is empty."""
        return self.values | ({"filtered_out": self.filtered_out} if self.filtered_out else {})


def merge(
    passport: Mapping[str, Any],
    preset: Mapping[str, Any],
    custom: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> Merged:
    """*custom* over *preset* over *passport* over *defaults* over those of `Sampling`.

    Args:
        passport: The model's own values, which have passed `check_sampling`.
        preset: Those of the preset that was asked for; the same.
        custom: The request's own; a null counts as absent.
        defaults: Those of the server's settings.

    Raises:
        Unprocessable: A value of *custom* is impossible; it names the field.
    """
    levels: list[tuple[Origin, Mapping[str, Any]]] = [
        ("default", defaults or {}), ("passport", passport), ("preset", preset), ("custom", custom),
    ]  # fmt: skip
    values: dict[str, Any] = {
        **{name: row.default for name, row in _ENGINE.items()},
        _PENALIZE_NL: True,
        MAX_TOKENS: None,
        REASONING_MAX_TOKENS: None,
    }
    origin: dict[str, Origin] = {}
    filtered: set[str] = set()
    for level, given in levels:
        try:
            known = _checked(given, filtered)
        except RequestError as error:
            raise Unprocessable(str(error), parameter=error.parameter) from None
        values |= known
        origin |= dict.fromkeys(known, level)
    sampling = Sampling(**{name: values[name] for name in _ENGINE})
    given_names = {name for name, level in origin.items() if level != "default"}
    filtered |= _meaningless(sampling) & given_names
    if values[_PENALIZE_NL] is False:
        filtered |= {_PENALIZE_NL} & given_names
        values[_PENALIZE_NL] = True  # which is what happens
    shown_names = [*FIELDS, *(name for name in _ENGINE if name in origin and name not in FIELDS)]
    return Merged(
        sampling=sampling,
        max_tokens=values[MAX_TOKENS],
        reasoning_max_tokens=values[REASONING_MAX_TOKENS],
        values={name: values[name] for name in shown_names},
        origin={name: origin.get(name, "default") for name in shown_names},
        filtered_out=sorted(name[:_MOST_CHARACTERS] for name in filtered)[:_MOST_FILTERED],
    )


def check_sampling(name: str, value: Any) -> None:
    """Check a field of the sampling of a passport or a preset, when a configuration is read.

    Raises:
        RequestError: It is unknown, or its value impossible.
    """
    unknown: set[str] = set()
    _checked({name: value}, unknown)
    if unknown:
        known = ", ".join([*FIELDS, _MAX_OUTPUT_TOKENS, *sorted(set(_ENGINE) - set(FIELDS))])
        raise RequestError(f"{name} is no field of sampling; leave it out, or write one of {known}")


def _checked(given: Mapping[str, Any], unknown: set[str]) -> dict[str, Any]:
    """The known fields of *given* in the form of `Sampling`; adds the others to *unknown*."""
    known: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name == "seed" and value == _RANDOM_SEED:
            known[name] = None
        elif name in _ENGINE:
            known[name] = _ENGINE[name].checked(value)
        elif name == _PENALIZE_NL:
            if not isinstance(value, bool):
                raise RequestError(f"{name} must be true or false, got {shown(value)}",
                    parameter=name)  # fmt: skip
            known[name] = value
        elif name in (MAX_TOKENS, _MAX_OUTPUT_TOKENS):
            number = whole_number(name, value)
            if known.setdefault(MAX_TOKENS, number) != number:
                raise RequestError(
                    f"max_output_tokens and max_tokens differ: {known[MAX_TOKENS]} and {number}; "
                    "send one of them",
                    parameter=_MAX_OUTPUT_TOKENS,
                )
        elif name == REASONING_MAX_TOKENS:
            number = whole_number(name, value, low=_UNLIMITED, high=INT32_MAX)
            known[name] = None if number == _UNLIMITED else number
        else:
            unknown.add(name)
    return known


# ---- hashes


class Known(msgspec.Struct, frozen=True):
    """Hash and version of a passport, a system prompt or a persona, as clients see them."""

    hash: str
    version: int


def hash_of(value: object) -> str:
    """``sha256:...`` of *value*, plain data or a table of `Config`, as canonical JSON.

    Raises:
        RequestError: It has a number that JSON does not have, a surrogate, or a type of its own.
    """
    try:
        plain = _plain(msgspec.to_builtins(value))
        text = json.dumps(
            plain, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
        )
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    except (TypeError, ValueError) as error:
        raise RequestError(f"the value cannot be written as JSON: {error}") from None


def _plain(value: object) -> object:
    if isinstance(value, dict):
        given = cast("dict[str, object]", value)
        return {key: _plain(one) for key, one in given.items() if one is not None}
    if isinstance(value, list):
        return [_plain(one) for one in cast("list[object]", value)]
    if isinstance(value, float) and value.is_integer() and abs(value) <= _WHOLE:
        return int(value)
    return value


def passport_of(passport: Passport) -> Known:
    """Hash and version of a model's passport.

    The version is not part of the hash, which thus says whether the content differs.
    """
    content: dict[str, Any] = {"sampling": passport.sampling, "postproc": passport.postproc}
    return Known(hash_of(content), passport.version)


def text_of(text: str, version: int) -> Known:
    """Hash and version of a system prompt or a persona: the hash is that of the text."""
    return Known(hash_of(text), version)
