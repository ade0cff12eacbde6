"""Wire: values as bytes for a transport; the one place where the server copies attention.

One copy of a row is the least possible: ASGI takes ``bytes``, which own their memory, and a
zero-copy view does not. base64 is that one copy too: it reads the view and writes text.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from kqview._core import count_values
from kqview.server.errors import TooLarge

# An encoder escapes control characters in JSON, so this occurs nowhere else.
_MARK: Final = b'"\x00"'
DATA_HERE: Final = msgspec.Raw(_MARK)
"""Placeholder for a long text in a value that `split_json` encodes."""

_MOST_VALUES: Final = 2**20
_MOST_MEMBERS: Final = 2**18
_SLICE: Final = 4096  # elements of a list that are encoded in one call
_FEW_BYTES: Final = 32 * 1024  # too short to have too many


def check_values(raw: bytes | str, *, packs: bool = False) -> None:
    """Refuse input that would decode to more objects than can be made in the time of a few tokens.

    Making them holds the GIL, in any thread. A text of any length is one value.

    Raises:
        TooLarge: The JSON, or with *packs* the MessagePack, has too many values.
    """
    if len(raw) < _FEW_BYTES:
        return
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    n_values, n_members = count_values(data, packs)
    if n_values > _MOST_VALUES or n_members > _MOST_MEMBERS:
        raise TooLarge(
            f"the request has {n_values} values, {n_members} of them members of objects; limits "
            f"are {_MOST_VALUES} and {_MOST_MEMBERS}; send shorter lists"
        )


class Encoder:
    """Turns rows into bytes and tells the engine how many; any thread."""

    def __init__(self, count_copied: Callable[[int], None]) -> None:
        """Report to *count_copied* what is copied out of views."""
        self._count = count_copied

    def raw(self, values: NDArray[Any]) -> bytes:
        """The values, little-endian, in C order."""
        self._count(values.nbytes)
        return values.tobytes()

    def base64(self, values: NDArray[Any]) -> bytes:
        """`raw` in base64 (RFC 4648, padded), as ASCII bytes."""
        self._count(values.nbytes)
        return pybase64.b64encode(_bytes_of(values))

    def numbers(self, values: NDArray[Any]) -> list[Any]:
        """Values as nested lists of numbers for JSON; for small arrays."""
        self._count(values.nbytes)
        return values.tolist()


def _bytes_of(values: NDArray[Any]) -> memoryview:
    # The engine's rows are contiguous, so this is no copy.
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")


def split_json(value: object, data: bytes) -> list[bytes]:
    """JSON of *value* in pieces, with *data* at `DATA_HERE`; megabytes are not moved again.

    Args:
        value: What msgspec can encode, with `DATA_HERE` in it exactly once.
        data: ASCII that needs no escaping, such as base64.
    """
    head, _, tail = msgspec.json.encode(value).partition(_MARK)
    return [head + b'"', data, b'"' + tail]


def joined_text(pieces: Sequence[bytes]) -> str:
    """Pieces of `split_json` as one text."""
    return b"".join(pieces).decode("ascii" if all(map(bytes.isascii, pieces)) else "utf-8")


def json_in_slices(value: msgspec.Struct) -> bytes:
    """JSON of *value*, whose lists may be long, slice by slice.

    One call for everything would hold the GIL for all of it.
    """
    parts: list[bytes] = []
    for name in value.__struct_encode_fields__:
        field = getattr(value, name)
        parts += [b"," if parts else b"{", msgspec.json.encode(name), b":"]
        if not isinstance(field, list):
            parts.append(msgspec.json.encode(field))
            continue
        items = cast("list[Any]", field)
        parts.append(b"[")
        for start in range(0, len(items), _SLICE):
            parts += [b","] if start else []
            parts.append(msgspec.json.encode(items[start : start + _SLICE])[1:-1])
        parts.append(b"]")
    return b"".join([*parts, b"}"])


def with_lists(
    head: dict[str, Any], lists: Sequence[tuple[str, Sequence[bytes]]], *, packs: bool
) -> bytes:
    """An encoded object: *head*, then lists whose elements are already encoded.

    Elements may be megabytes each; they are copied once, into the result.

    Args:
        head: Fields that precede the lists.
        lists: Name and elements of each; with *head* 1 to 15 fields.
        packs: MessagePack instead of JSON.
    """
    if not packs:
        parts = [msgspec.json.encode(head)[:-1]]
        for name, elements in lists:
            parts.append(b'%s"%s":[' % (b"," if len(parts) > 1 or head else b"", name.encode()))
            for i, element in enumerate(elements):
                parts += [b",", element] if i else [element]
            parts.append(b"]")
        return b"".join([*parts, b"}"])
    # A map of up to 15 fields begins with one byte, a long array with its size in four.
    n_fields = len(head) + len(lists)
    assert 0 < n_fields < 16
    parts = [bytes([0x80 | n_fields]), msgspec.msgpack.encode(head)[1:]]
    for name, elements in lists:
        parts += [msgspec.msgpack.encode(name), b"\xdd" + len(elements).to_bytes(4, "big")]
        parts += elements
    return b"".join(parts)
