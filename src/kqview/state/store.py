"""SessionStore: saved slots by name, in memory up to two limits, in files beyond them."""

import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from kqview.durable import FileIdentity, remove, remove_leftovers
from kqview.errors import CapacityError, RequestError, StateFormatError
from kqview.state.files import (
    SlotMarks,
    StateFacts,
    check_facts,
    read_marked,
    slot_bytes,
    write_marked,
)

NAME_BYTES_MAX: Final = 200  # leaves room for the ending in a file name of 255
_NAME_EXCLUDED: Final = frozenset('/\\:*?"<>|\uff0e\u2215\u2216\ufffd\ufeff')
_ENDING: Final = ".ses1"


class SavesState(Protocol):
    """The part of `Slot` that the store uses."""

    def save_marked(self) -> tuple[bytes, SlotMarks]: ...
    def state_facts(self) -> StateFacts: ...
    def restore_marked(self, blob: bytes, marks: SlotMarks, /) -> int: ...


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One saved session.

    Attributes:
        name: Name of the session.
        n_bytes: Size of its blob and its checkpoints.
        created_s: Time when the name was first saved, in seconds since 1970.
        updated_s: Time when it was last saved.
        path: File with the latest version; None while only memory holds it.
    """

    name: str
    n_bytes: int
    created_s: float
    updated_s: float
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A slot at one moment."""

    blob: bytes
    marks: SlotMarks
    facts: StateFacts

    @classmethod
    def of(cls, slot: SavesState) -> "SavedSlot":
        """*slot* as it is; raises as `Slot.save`."""
        facts = slot.state_facts()
        return cls(*slot.save_marked(), facts)

    @property
    def n_bytes(self) -> int:
        """What it takes in memory."""
        return len(self.blob) + len(self.marks.checkpoints)


@dataclass(slots=True)
class _Session:
    """A session of the store.

    Attributes:
        info: The public part.
        held: The slot in memory; None if only a file holds it.
        written: The file that holds it; None while only memory does.
    """

    info: SessionInfo
    held: SavedSlot | None = None
    written: FileIdentity | None = None


class SessionStore:
    """Named sessions; safe to use from several threads, and from several processes per directory.

    The most recently used sessions stay in memory. A session that is evicted is first written to a
    file in *directory*; without a directory, saving fails instead.

    Only `flush` protects against a crash, `save` does not. Files are replaced atomically: after a
    crash a file holds the version last written or the one before, never a mixture. The store sees
    what other stores write to or remove from the directory, unless it holds a later version in
    memory.

    Args:
        directory: Existing folder for the files; None to use memory only. Temporary files of dead
            processes are removed from it.
        max_sessions: Maximum number of sessions in memory.
        max_bytes: Maximum size of all blobs and checkpoints in memory.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_sessions: int = 64,
        max_bytes: int = 1 << 30,
    ) -> None:
        if max_sessions < 0 or max_bytes < 0:
            raise RequestError(
                f"max_sessions is {max_sessions} and max_bytes {max_bytes}; neither may be negative"
            )
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None:
            if not self._directory.is_dir():
                raise RequestError(
                    f"directory {os.fspath(self._directory)!r} is not an existing folder; create it"
                )
            remove_leftovers(self._directory)
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # oldest use first

    def save(self, name: str, slot: SavesState) -> SessionInfo:
        """Save *slot* as session *name*, replacing an older one.

        A session too large for memory is written to its file at once. Otherwise an existing file
        keeps the older version until `flush` or eviction.

        Raises:
            RequestError: *name* cannot be a file name.
            CapacityError: The session does not fit into memory and there is no directory.
            StateError: As of `Slot.save`.
            OSError: A file cannot be written; the sessions stay as they were.
        """
        _check_name(name)
        held = SavedSlot.of(slot)
        n_bytes = held.n_bytes
        with self._lock:
            old = self._find(name)
            now = time.time()
            session = _Session(
                SessionInfo(name, n_bytes, old.info.created_s if old else now, now), held
            )
            self._make_room(name, n_bytes)
            if not self._fits(name, n_bytes):
                self._write(session)
                session.held = None
            self._sessions[name] = session
            self._sessions.move_to_end(name)
            return session.info

    def restore(self, name: str, slot: SavesState) -> int:
        """Restore session *name* into *slot* and return the size of its blob.

        Raises:
            RequestError: There is no such session.
            StateError: The session does not fit the slot, or its file was altered.
            OSError: Its file cannot be read.
        """
        facts = slot.state_facts()
        with self._lock:
            session = self._known(name)
            self._sessions.move_to_end(name)
            held = session.held
            if held is None:
                try:
                    blob, marks = read_marked(self._path_of(name), facts)
                except FileNotFoundError:  # removed by another process
                    raise _unknown(name) from None
            else:
                check_facts(held.facts, facts)
                blob, marks = held.blob, held.marks
        return slot.restore_marked(blob, marks)

    def remove(self, name: str) -> None:
        """Delete session *name* and its file.

        Raises:
            RequestError: There is no such session.
            OSError: Its file cannot be removed; the session stays.
        """
        with self._lock:
            self._known(name)
            if self._directory is not None:
                remove(self._path_of(name))
            del self._sessions[name]

    def move_to_file(self, name: str, path: str | os.PathLike[str]) -> int:
        """Write session *name* to *path*, a file of yours, remove it and return its blob's size.

        The session is removed once its file is complete and synced. Links and special files at
        *path* are refused.

        Raises:
            RequestError: There is no such session.
            OSError: A file cannot be written or read; the session stays.
        """
        with self._lock:
            session = self._known(name)
            held = session.held
            if held is None:
                raise RequestError(
                    f"session {name!r} is in a file already: {session.info.path}", parameter="name"
                )
            write_marked(path, held.blob, held.facts, held.marks, follows=False)
            self.remove(name)
            return len(held.blob)

    def flush(self) -> None:
        """Write every session that only memory holds to its file; memory keeps them as well.

        Raises:
            RequestError: The store has no directory.
            OSError: A file cannot be written. All files are tried, the first error is raised. What
                could not be written stays in memory, and its file keeps the older version.
        """
        with self._lock:
            if self._directory is None:
                raise RequestError("flush() needs a directory; pass one to SessionStore")
            first: OSError | None = None
            for session in self._sessions.values():
                try:
                    self._write(session)
                except OSError as error:
                    first = first or error
            if first is not None:
                raise first

    def sessions(self) -> list[SessionInfo]:
        """All sessions, sorted by name."""
        with self._lock:
            names = set(self._sessions)
            if self._directory is not None:
                endings = (path.name for path in self._directory.glob(f"*{_ENDING}"))
                names |= {name.removesuffix(_ENDING) for name in endings}
            found = (self._find(name) for name in sorted(names) if is_plain_name(name))
            return [session.info for session in found if session is not None]

    # ---- under the lock

    def _find(self, name: str) -> _Session | None:
        """The latest version of the session, whichever store wrote it."""
        session = self._sessions.get(name)
        if self._directory is None or (session is not None and session.written is None):
            return session
        path = self._path_of(name)
        file = FileIdentity.at(path)
        if file is None:
            self._sessions.pop(name, None)
            return None
        written = session.written if session else None
        if session is None or written is None or not file.has_content_of(written):
            written_s = file.modified_ns / 1e9
            n_bytes = file.n_bytes
            with suppress(OSError, StateFormatError):  # restoring it reports why
                n_bytes = slot_bytes(path)
            info = SessionInfo(name, n_bytes, written_s, written_s, path)
            session = self._sessions[name] = _Session(info, written=file)
        return session

    def _fits(self, name: str, n_bytes: int) -> bool:
        others = [held.n_bytes for other, held in self._in_memory() if other != name]
        return len(others) < self._max_sessions and sum(others) + n_bytes <= self._max_bytes

    def _in_memory(self) -> list[tuple[str, SavedSlot]]:
        return [(name, s.held) for name, s in self._sessions.items() if s.held is not None]

    def _make_room(self, name: str, n_bytes: int) -> None:
        if self._directory is None:
            if self._fits(name, n_bytes):
                return
            raise CapacityError(
                f"no room for {n_bytes} bytes beside {len(self._sessions)} sessions: "
                f"max_sessions is {self._max_sessions} and max_bytes {self._max_bytes}; "
                "remove a session or give the store a directory"
            )
        if n_bytes > self._max_bytes or self._max_sessions == 0:
            return  # it goes straight to a file
        while not self._fits(name, n_bytes):
            oldest = next(other for other, _ in self._in_memory() if other != name)
            self._write(self._sessions[oldest])
            self._sessions[oldest].held = None

    def _write(self, session: _Session) -> None:
        """Write the session to its file if only memory holds it."""
        if session.written is not None or session.held is None:
            return
        path, held = self._path_of(session.info.name), session.held
        session.written = write_marked(path, held.blob, held.facts, held.marks)
        session.info = replace(session.info, path=path)

    def _path_of(self, name: str) -> Path:
        assert self._directory is not None
        return self._directory / f"{name}{_ENDING}"

    def _known(self, name: str) -> _Session:
        _check_name(name)
        session = self._find(name)
        if session is None:
            raise _unknown(name)
        return session


def _unknown(name: str) -> RequestError:
    return RequestError(f"there is no session {name!r}; sessions() lists all")


def is_plain_name(name: str) -> bool:
    """Whether *name* is an ordinary file name, with an ending of ours, everywhere."""
    try:
        n_bytes = len(name.encode())
    except UnicodeEncodeError:
        return False
    return (
        0 < n_bytes <= NAME_BYTES_MAX
        and not _NAME_EXCLUDED & set(name)
        and not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in name)
        and name == name.strip(" ")
        and not name.startswith(".")
        and not name.endswith(".")
        and ".." not in name
    )


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not is_plain_name(name):
        raise RequestError(
            f"{name!r} cannot be the name of a session; use 1 to {NAME_BYTES_MAX} bytes of "
            "letters, digits, '-' and '_'"
        )
