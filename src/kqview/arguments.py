"""Checks of arguments: texts, paths, numbers, flags and token ids. Knows only the errors."""

import math
import operator
import os
from collections.abc import Iterable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Final, TypeGuard, cast, get_args

import numpy as np

from kqview.errors import InvalidToken, RequestError, shown

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1


def encode(name: str, text: str, error: type[RequestError] = RequestError) -> bytes:
    """*text*, the argument *name*, as UTF-8; raises *error* if it has surrogates."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid(name, "a str", type(text).__name__)
    try:
        return text.encode()
    except UnicodeEncodeError as failure:
        raise error(
            f"{name} has a surrogate at index {failure.start}, which UTF-8 cannot express; decode "
            "its source with errors='replace'",
            parameter=parameter_of(name),
        ) from None


def decode(name: str, data: bytes) -> str:
    """*data*, the argument *name*, as text; RequestError if it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as failure:
        raise RequestError(
            f"{name} has a byte at index {failure.start} that is not UTF-8; pass a str",
            parameter=name,
        ) from None


def to_path(name: str, value: object) -> Path:
    """*value*, the argument *name*, as a path; "~" at its start is the home folder."""
    if not isinstance(value, str | bytes | os.PathLike):
        raise invalid(name, "a path", shown(value))
    path = os.path.expanduser(os.fsdecode(cast("str | bytes | os.PathLike[str]", value)))
    if not path:
        raise RequestError(f"{name} is empty; pass the path of a file", parameter=name)
    if "\0" in path:
        raise RequestError(
            f"{name} is {shown(path)}, which contains a null byte; pass another path",
            parameter=name,
        )
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # bytes of a file name that are not UTF-8 have surrogates of 8 bits
        encode(name, path)
    return Path(path)


def whole_number(
    name: str,
    value: object,
    low: int = 1,
    high: int = INT32_MAX,
    error: type[RequestError] = RequestError,
) -> int:
    """*value* as an int from *low* to *high*; *error* otherwise."""
    number = to_index(value)
    if number is None or not low <= number <= high:
        raise invalid(name, f"a whole number from {low} to {high}", shown(value), error)
    return number


def seconds(name: str, value: object, low: float = 0.0, high: float = math.inf) -> float:
    """*value* as a number of seconds from *low* to *high*; RequestError otherwise."""
    number = to_number(value)
    if number is None or not low <= number <= high:
        limits = f"at least {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        raise invalid(name, f"a number of seconds, {limits}", shown(value))
    return number


def checked_ids(name: str, ids: object, error: type[RequestError] = InvalidToken) -> list[int]:
    """*ids* as ints that fit the core, which checks them against the vocabulary."""
    if not isinstance(ids, list) and not is_iterable(ids):
        raise invalid(name, "a sequence of token ids", type(ids).__name__, error)
    given = list(cast("Iterable[object]", ids))
    if set(map(type, given)) == {int}:  # as usual, and fast
        plain = cast("list[int]", given)
        if min(plain) >= 0 and max(plain) <= INT32_MAX:
            return plain
    return [checked_id(f"{name}[{i}]", value, error) for i, value in enumerate(given)]


def checked_id(name: str, value: object, error: type[RequestError] = InvalidToken) -> int:
    """*value* as an int that fits the core."""
    token_id = to_index(value)
    if token_id is None or not 0 <= token_id <= INT32_MAX:
        raise invalid(name, "a token id, as tokenize() returns them", shown(value), error)
    return token_id


def choice(name: str, value: object, choices: Any, error: type[RequestError] = RequestError) -> Any:
    """*value* if it is one of the texts of *choices*, a Literal; *error* otherwise."""
    names: tuple[str, ...] = get_args(choices)
    # The type first: an array would compare element by element.
    if not isinstance(value, str) or value not in names:
        raise invalid(name, f"one of {', '.join(map(repr, names))}", shown(value), error)
    return value


def flag(name: str, value: object, error: type[RequestError] = RequestError) -> bool:
    """*value* as True or False, which numpy's may be; *error* otherwise."""
    if not isinstance(value, bool | np.bool_):
        raise invalid(name, "True or False", shown(value), error)
    return bool(cast("bool", value))


def is_iterable(value: object) -> TypeGuard[Iterable[object]]:
    """Whether it has items and is no text; an array without dimensions only looks as if it had."""
    return (
        isinstance(value, Iterable)
        and not isinstance(value, str | bytes)
        and getattr(cast("object", value), "ndim", 1) != 0
    )


def to_index(value: object) -> int | None:
    """*value* as an int; None if it is not a whole number."""
    # True would count as 1, which is never intended.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def to_number(value: object) -> float | None:
    """*value* as a float, NaN if it is too large for one; None if it is not a real number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # an int
        return math.nan


def to_pair(value: object) -> tuple[object, object] | None:
    """*value* as two items, those of a range as its start and stop; None if it is no such pair."""
    if isinstance(value, range):
        return (value.start, value.stop) if value.step == 1 else None
    if isinstance(value, np.ndarray):
        value = cast("Any", value).tolist()  # a number if it has no dimensions
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return None
    items = cast("Sequence[object]", value)
    return (items[0], items[1]) if len(items) == 2 else None


def invalid(
    name: str, allowed: str, got: str, error: type[RequestError] = RequestError
) -> RequestError:
    """The *error* for an argument that has the wrong type or is out of range."""
    return error(f"{name} must be {allowed}, got {got}", parameter=parameter_of(name))


def parameter_of(name: str) -> str:
    """The parameter to which *name*, such as "texts[3]" or "a key of logit_bias", belongs."""
    return name.rpartition(" ")[2].partition("[")[0]
