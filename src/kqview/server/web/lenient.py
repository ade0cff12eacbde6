"""Lenient: reads a request as KoboldCpp does, whose clients rely on it.

A number may be a text or a whole float (``80.0``); half of a surrogate pair, which JavaScript
leaves where it cuts an emoji, reads as U+FFFD. Members that the type does not have are left out,
and can be named.
"""

import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

_HALF: Final = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_BACKSLASH: Final = b"\\\\"
_MARK: Final = b"\\\x00"  # valid JSON has no such escape
_MOST_NAMED: Final = 64
_MOST_NAME: Final = 64  # characters


class LenientDecoder:
    """A decoder of msgspec for JSON, or for MessagePack if *packs*."""

    def __init__(self, kind: Any, *, packs: bool = False) -> None:
        """Read values of the type *kind*."""
        part: Any = msgspec.msgpack if packs else msgspec.json
        self._packs = packs
        self._decoder = part.Decoder(kind, strict=False)
        self._members = part.Decoder(dict[str, msgspec.Raw])

    def decode(self, raw: bytes | str) -> Any:
        """The value in *raw*; raises as a decoder of msgspec."""
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            whole = raw if self._packs else with_whole_pairs(raw)
            if whole == raw:
                raise
            return self._decoder.decode(whole)

    def unknown(self, raw: bytes | str, value: msgspec.Struct) -> tuple[str, ...]:
        """Names of the members in *raw*, from which *value* was read, that its type does not have.

        They are cut after some characters, and no more than a few dozen are named. What is not
        UTF-8 in a name reads as U+FFFD: msgspec looks at no name that the type does not have.

        Raises:
            msgspec.DecodeError: A name in MessagePack is not UTF-8.
        """
        try:
            names = self._members.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if self._packs:
                raise msgspec.DecodeError(f"a member's name cannot be read: {error}") from None
            names = self._members.decode(with_whole_pairs(raw).decode("utf-8", "replace"))
        kind = type(value)
        known = {*kind.__struct_encode_fields__, kind.__struct_config__.tag_field}
        return shown_names(name for name in names if name not in known)


def shown_names(names: Iterable[str]) -> tuple[str, ...]:
    """*names*, as far as a reply repeats them."""
    found = [name[:_MOST_NAME] for name in names]
    return tuple(found[:_MOST_NAMED])


def with_whole_pairs(raw: bytes | str) -> bytes:
    r"""JSON with ``\ufffd`` for each half of a surrogate pair."""
    data = raw.encode("utf-8", "replace") if isinstance(raw, str) else raw
    escaped = data.replace(_BACKSLASH, _MARK)
    return _HALF.sub(rb"\\ufffd", escaped).replace(_MARK, _BACKSLASH)
