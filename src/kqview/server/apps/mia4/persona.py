"""Persona: a text file that is put after the system prompt, read again when it changes.

`PersonaFile.current` never waits; `PersonaFile.refresh` reads the file, so it belongs on another
thread than the event loop's. A text is replaced as a whole: a request has the old one or the new
one. A file that cannot be read, is too large or is no UTF-8 leaves the last text in use, and the
reason is logged once.

The version is the field ``version`` of the front matter with which notes of Obsidian begin, or of a
first line ``version: N``::

    ---
    version: 3
    tags: [persona]
    ---
    You are a patient teacher.

Neither is part of the text that the model reads; the hash is that of this text.
"""

import logging
import os
import re
import stat
import threading
import time
from dataclasses import dataclass
from typing import Final

from kqview.errors import KqviewError, RequestError
from kqview.server.apps.mia4.passport import Known, text_of

MOST_BYTES: Final = 256 * 1024
"""Largest file: more text than any prompt has room for."""
CHECK_S: Final = 1.0
"""The file is looked at no more often than this."""

_log: Final = logging.getLogger("kqview.server")
_TICK_NS: Final = 2_000_000_000
_FENCE: Final = "---"
_FRONT_LINES: Final = 256  # a fence that does not close within these is a rule of the text
_VERSION: Final = re.compile(r"""version\s*:\s*(["']?)([0-9]{1,9})\1\s*(?:#.*)?""", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PersonaText:
    """A persona as it is used.

    Attributes:
        text: What the model reads.
        known: Its hash and version.
    """

    text: str
    known: Known


def parse(source: str) -> PersonaText:
    """The persona in the text of a file; version 1 if it names none."""
    lines = source.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    version = 1
    if lines[0].rstrip() == _FENCE:
        end = next(
            (i for i, line in enumerate(lines[1:_FRONT_LINES], 1) if line.rstrip() == _FENCE), None
        )
        if end is not None:
            found = [match for line in lines[1:end] if (match := _VERSION.fullmatch(line.rstrip()))]
            version = int(found[0][2]) if found else version
            del lines[: end + 1]
    elif match := _VERSION.fullmatch(lines[0].rstrip()):
        version = int(match[2])
        del lines[0]
    text = "\n".join(lines).strip()
    return PersonaText(text, text_of(text, version))


class PersonaFile:
    """The persona file of a server; any thread.

    Attributes:
        current: The persona; None before the first `refresh`, or as long as there is none.
    """

    def __init__(self, path: str, *, check_s: float = CHECK_S) -> None:
        """Watch *path*, looking at it no more often than every *check_s* seconds."""
        self.current: PersonaText | None = None
        self._path = path
        self._check_s = check_s
        self._seen: tuple[int, ...] | None = None  # of the file that was read last
        self._complaint: str | None = None
        self._next_s = 0.0
        self._lock = threading.Lock()

    @property
    def is_due(self) -> bool:
        """Whether `refresh` would look at the file; never waits."""
        return time.monotonic() >= self._next_s

    def refresh(self) -> PersonaText | None:
        """Read the file if it has changed; returns the persona. Blocks while it reads."""
        if not self.is_due:
            return self.current
        with self._lock:
            try:
                self._read()
                self._complaint = None
            except (OSError, KqviewError, ValueError) as error:
                complaint = f"{type(error).__name__}: {error}"
                if complaint != self._complaint:
                    self._complaint = complaint
                    kept = "the last one stays in use" if self.current else "there is none"
                    _log.warning("the persona %s cannot be read, %s: %s",
                        self._path, kept, complaint)  # fmt: skip
            self._next_s = time.monotonic() + self._check_s
        return self.current

    def _read(self) -> None:
        # Not blocking: a pipe of this name would hold the thread until somebody writes to it.
        def opened(path: str, flags: int) -> int:
            return os.open(path, flags | os.O_NONBLOCK)

        with open(self._path, "rb", opener=opened) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise RequestError("it is not a regular file", parameter="persona.file")
            # Editors that replace a file give it another inode.
            seen = about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns
            if seen == self._seen:
                return
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise RequestError(
                f"it has more than {MOST_BYTES} bytes; shorten it", parameter="persona.file"
            )
        text = parse(data.decode())
        # A write that follows within a tick of the file system's clock may leave no trace.
        is_settled = time.time_ns() - about.st_mtime_ns > _TICK_NS
        self._seen, self.current = (seen if is_settled else None), text
