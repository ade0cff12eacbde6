"""Checks of arguments: texts, whole numbers, seconds and token ids. Knows only the errors."""

import operator
from collections.abc import Iterable, Sequence
from typing import Final, cast

from kqview.errors import InvalidToken, RequestError, shown

INT32_MAX: Final = 2**31 - 1
INT64_MAX: Final = 2**63 - 1


def encode(name: str, text: str) -> bytes:
    """*text*, the argument *name*, as UTF-8; RequestError if it has surrogates."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid(name, "a str", type(text).__name__)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has a surrogate at index {error.start}, which UTF-8 cannot express; decode "
            "its source with errors='replace'",
            parameter=parameter_of(name),
        ) from None


def whole_number(name: str, value: object, low: int = 1, high: int = INT32_MAX) -> int:
    """*value* as an int from *low* to *high*; RequestError otherwise."""
    number = to_index(value)
    if number is None or not low <= number <= high:
        raise invalid(name, f"a whole number from {low} to {high}", shown(value))
    return number


def seconds(name: str, value: object) -> float:
    """*value* as a number of seconds, at least 0; RequestError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise invalid(name, "a number of seconds, at least 0", shown(value))
    return float(value)


def checked_ids(name: str, ids: Iterable[object]) -> list[int]:
    """*ids* as ints that fit the core, which checks them against the vocabulary."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid(name, "a sequence of token ids", type(ids).__name__)
    given = list(ids)
    if are_ids(given):
        return cast("list[int]", given)
    checked: list[int] = []
    for value in given:
        token_id = to_index(value)
        if token_id is None or not 0 <= token_id <= INT32_MAX:
            raise InvalidToken(
                f"{name} has {shown(value)}, which is not a token id; take ids from tokenize()",
                parameter=parameter_of(name),
            )
        checked.append(token_id)
    return checked


def are_ids(values: Sequence[object]) -> bool:
    """Whether all *values* can be token ids and are plain ints, as they usually are; fast."""
    if set(map(type, values)) != {int}:
        return not values
    ids = cast("Sequence[int]", values)
    return min(ids) >= 0 and max(ids) <= INT32_MAX


def to_index(value: object) -> int | None:
    """*value* as an int; None if it is not a whole number."""
    # True would count as 1, which is never intended.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def invalid(name: str, allowed: str, got: str) -> RequestError:
    """The error for an argument that has the wrong type or is out of range."""
    return RequestError(f"{name} must be {allowed}, got {got}", parameter=parameter_of(name))


def parameter_of(name: str) -> str:
    """The parameter to which *name*, such as "texts[3]", belongs."""
    return name.partition("[")[0]
