"""Hashes of what shapes a model's answers: its passport, its system prompt, the persona. Pure.

A hash is ``sha256:`` and the digest of canonical JSON: UTF-8, keys sorted, no white space, whole
numbers without a fraction, nothing for what is not set. Configurations that say the same thus have
the same hash, whatever their order, spacing and comments.
"""

import hashlib
import json
from typing import Any, Final, cast

import msgspec

from kqview.errors import RequestError
from kqview.server.config import Passport

_WHOLE: Final = 2.0**53  # up to here a float is exact as a whole number


class Known(msgspec.Struct, frozen=True):
    """Hash and version of a passport, a system prompt or a persona, as clients see them."""

    hash: str
    version: int


def canonical(value: object) -> bytes:
    """*value* as canonical JSON.

    Raises:
        RequestError: It has a number that JSON does not have, a surrogate, or a type of its own.
    """
    try:
        plain = _plain(msgspec.to_builtins(value))
        text = json.dumps(
            plain, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
        )
        return text.encode()
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


def hash_of(value: object) -> str:
    """``sha256:...`` of *value*, plain data or a table of `Config`; raises as `canonical`."""
    return f"sha256:{hashlib.sha256(canonical(value)).hexdigest()}"


def passport_of(passport: Passport) -> Known:
    """Hash and version of a model's passport.

    The version is not part of the hash, which thus says whether the content differs.
    """
    content: dict[str, Any] = {"sampling": passport.sampling, "postproc": passport.postproc}
    return Known(hash_of(content), passport.version)


def text_of(text: str, version: int) -> Known:
    """Hash and version of a system prompt or a persona: the hash is that of the text."""
    return Known(hash_of(text), version)
