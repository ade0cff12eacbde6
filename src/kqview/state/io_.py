"""Files of saved slots: a SES1 blob each, and a trailer that says whose it is."""

import contextlib
import os
import stat
from collections.abc import Generator
from typing import BinaryIO

from kqview.durable import FileIdentity, write_whole
from kqview.errors import StateFormatError
from kqview.state.ses1 import MAGIC
from kqview.state.trailer import (
    FOOTER_BYTES,
    NO_MARKS,
    SlotMarks,
    StateFacts,
    check_trailer,
    make_trailer,
    trailer_bytes,
)


def write_state(
    path: str | os.PathLike[str],
    blob: bytes,
    facts: StateFacts | None = None,
    marks: SlotMarks = NO_MARKS,
) -> int:
    """Write *blob* to *path*; returns the file's size.

    With *facts* a trailer follows the blob, which holds them, *marks* and a checksum.

    The file appears whole, on the disk and readable by its owner alone, because it holds the
    prompt.

    Raises:
        StateFormatError: *blob* is no SES1 blob.
        OSError: The file cannot be written; what was there before still is.
    """
    return write_marked(path, blob, facts, marks).n_bytes


def write_marked(
    path: str | os.PathLike[str], blob: bytes, facts: StateFacts | None, marks: SlotMarks
) -> FileIdentity:
    """As `write_state`; returns what the file can be recognised by."""
    if blob[: len(MAGIC)] != MAGIC:
        raise StateFormatError("state.write: the magic at byte 0 is not 'SES1'; pass Slot.save()")
    trailer = make_trailer(blob, facts, marks) if facts else b""
    return write_whole(path, blob, trailer, is_private=True)


def read_state(path: str | os.PathLike[str], facts: StateFacts | None = None) -> bytes:
    """The blob in a state file; its trailer, where it has one, is checked.

    Raises:
        StateFormatError: It is no regular file, or its bytes are not those that were written.
        StateMismatch: *facts* are given and those of the trailer are others.
        OSError: The file cannot be read.
    """
    return read_marked(path, facts)[0]


def read_marked(
    path: str | os.PathLike[str], facts: StateFacts | None = None
) -> tuple[bytes, SlotMarks]:
    """As `read_state`, and what the trailer says of the slot."""
    blob, trailer = read_parts(path)
    return blob, check_trailer(blob, trailer, facts) if trailer else NO_MARKS


def read_parts(path: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    """(blob, trailer) of a state file, unchecked; the trailer is b"" where there is none.

    Raises:
        StateFormatError: It is no regular file, or its trailer cannot be as long as it says.
        OSError: The file cannot be read.
    """
    with _opened(path) as (stream, status):
        n_trailer = _trailer_bytes(stream, status.st_size)
        stream.seek(0)
        blob = stream.read(status.st_size - n_trailer)
        return blob, stream.read(n_trailer)


def blob_bytes(path: str | os.PathLike[str]) -> int:
    """Size of the blob in a state file, of the whole file where that cannot be told; reads its end.

    Raises:
        OSError: The file cannot be read.
    """
    with _opened(path) as (stream, status):
        try:
            return status.st_size - _trailer_bytes(stream, status.st_size)
        except StateFormatError:
            return status.st_size


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Generator[tuple[BinaryIO, os.stat_result]]:
    # Not blocking: a named pipe would keep the caller until somebody writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise StateFormatError(f"state.read: {os.fspath(path)!r} is no regular file")
        yield stream, status


def _trailer_bytes(stream: BinaryIO, n_bytes: int) -> int:
    stream.seek(max(n_bytes - FOOTER_BYTES, 0))
    return trailer_bytes(stream.read(FOOTER_BYTES), n_bytes)
