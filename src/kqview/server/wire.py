"""Rows as bytes for a transport: the one place where the server copies attention, and counts it.

One copy a row is the least: ASGI takes ``bytes``, which own their memory, and views of the engine
are not theirs. base64 is that one copy too: it reads the view and writes text.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

# In JSON made by an encoder a control character is always escaped, so this is found nowhere else.
_MARK: Final = b'"\x00"'
DATA_HERE: Final = msgspec.Raw(_MARK)
"""Stands for a long text in a value that `split_json` encodes."""


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
