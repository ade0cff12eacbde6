"""Rows as bytes for a transport: the one place where the server copies attention, and counts it.

One copy a row is the least: ASGI takes ``bytes``, which own their memory, and views of the engine
are not theirs. base64 is that one copy too: it reads the view and writes text.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from kqview._core import count_values
from kqview.server.errors import TooLarge

# In JSON made by an encoder a control character is always escaped, so this is found nowhere else.
_MARK: Final = b'"\x00"'
DATA_HERE: Final = msgspec.Raw(_MARK)
"""Stands for a long text in a value that `split_json` encodes."""


_MOST_VALUES: Final = 2**20
_MOST_MEMBERS: Final = 2**18
_FEW_BYTES: Final = 32 * 1024  # that cannot have too many


def check_values(raw: bytes | str, *, packs: bool = False) -> None:
    """Refuse what would become more objects than are made in the time of a few tokens.

    Whoever makes them keeps the interpreter's lock, in any thread. Texts may be as long as they
    like: they are one value.

    Raises:
        TooLarge: JSON, or MessagePack where it *packs*, has too many values.
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
    """Makes bytes of rows and tells the engine how many; any thread."""

    def __init__(self, count_copied: Callable[[int], None]) -> None:
        """Report to *count_copied*, such as ``engine.count_copied``."""
        self._count = count_copied

    def raw(self, values: NDArray[Any]) -> bytes:
        """Little-endian values in C order."""
        self._count(values.nbytes)
        return values.tobytes()

    def base64(self, values: NDArray[Any]) -> bytes:
        """`raw` in base64 (RFC 4648, with padding), as ASCII bytes."""
        self._count(values.nbytes)
        return pybase64.b64encode(_bytes_of(values))

    def base64_text(self, values: NDArray[Any]) -> str:
        """`base64` as text."""
        self._count(values.nbytes)
        return pybase64.b64encode_as_string(_bytes_of(values))

    def numbers(self, values: NDArray[Any]) -> list[Any]:
        """Values as numbers for JSON, nested as the array is; for small arrays."""
        self._count(values.nbytes)
        return values.tolist()


def _bytes_of(values: NDArray[Any]) -> memoryview:
    # Rows of the engine are contiguous already, then this is no copy.
    return np.ascontiguousarray(values).data.cast("B") if values.size else memoryview(b"")


def split_json(value: object, data: bytes) -> list[bytes]:
    """JSON of *value* in pieces, *data* as the text at `DATA_HERE`; megabytes are not moved again.

    Args:
        value: What msgspec can encode, with `DATA_HERE` in it exactly once.
        data: ASCII that needs no escaping, such as base64.
    """
    head, _, tail = msgspec.json.encode(value).partition(_MARK)
    return [head + b'"', data, b'"' + tail]


def joined_text(pieces: Sequence[bytes]) -> str:
    """Pieces of `split_json` as one text."""
    return b"".join(pieces).decode("ascii" if all(map(bytes.isascii, pieces)) else "utf-8")


_SLICE: Final = 4096


def json_in_slices(value: msgspec.Struct) -> bytes:
    """JSON of *value*, whose lists may be long: slice by slice, so that threads take turns.

    One call for all of it would keep the interpreter's lock meanwhile.
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
    """An encoded object: *head*, then each list of elements that are encoded already.

    Elements may be megabytes each; they are copied once, into the result.

    Args:
        head: Fields before them.
        lists: Name and elements; 1 to 15 fields together with the head's.
        packs: MessagePack in place of JSON.
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
