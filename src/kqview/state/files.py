"""Files of saved slots: written so that a reader sees the old one or the whole new one."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

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

    The bytes go to a temporary name in the same folder, readable by the owner alone, because they
    hold the prompt; then to the disk; then to their name.

    Raises:
        StateFormatError: *blob* is no SES1 blob.
        OSError: The file cannot be written; what was there before still is.
    """
    if blob[: len(MAGIC)] != MAGIC:
        raise StateFormatError("state.write: the magic at byte 0 is not 'SES1'; pass Slot.save()")
    path = Path(path)
    trailer = make_trailer(blob, facts, marks) if facts else b""
    # mkstemp makes it with mode 0600.
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(blob)
            stream.write(trailer)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path.parent)
    return len(blob) + len(trailer)


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
    # Not blocking: a named pipe would keep the caller until somebody writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise StateFormatError(f"state.read: {os.fspath(path)!r} is no regular file")
        n_bytes = status.st_size
        stream.seek(max(n_bytes - FOOTER_BYTES, 0))
        n_trailer = trailer_bytes(stream.read(FOOTER_BYTES), n_bytes)
        stream.seek(0)
        blob = stream.read(n_bytes - n_trailer)
        trailer = stream.read(n_trailer)
    return blob, check_trailer(blob, trailer, facts) if n_trailer else NO_MARKS


def _sync_folder(folder: Path) -> None:
    # The name is in the folder, which has a buffer of its own; some systems cannot sync folders.
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
