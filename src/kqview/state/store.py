"""SessionStore: saved slots by name, in memory up to two limits, beyond them in files."""

import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from kqview.errors import CapacityError, RequestError
from kqview.state.files import read_marked, write_state
from kqview.state.trailer import SlotMarks, StateFacts, check_facts

_NAME_BYTES_MAX: Final = 200  # leaves room for the ending in a file name of 255
_NAME_EXCLUDED: Final = frozenset('/\\:*?"<>|\uff0e\u2215\u2216\ufffd\ufeff')
_ENDING: Final = ".ses1"


class SavesState(Protocol):
    """What the store needs of a Slot."""

    def save_marked(self) -> tuple[bytes, SlotMarks]: ...
    def restore_marked(self, blob: bytes, marks: SlotMarks, /) -> int: ...
    def state_facts(self) -> StateFacts: ...


@dataclass(frozen=True, slots=True)
class _Held:
    """A session in memory."""

    blob: bytes
    facts: StateFacts
    marks: SlotMarks


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """One saved session.

    Attributes:
        name: Its name.
        n_bytes: Size of its blob.
        created_s: When the name was first saved, in seconds since 1970.
        updated_s: When it was saved last.
        path: File that holds it; None while it is in memory.
    """

    name: str
    n_bytes: int
    created_s: float
    updated_s: float
    path: Path | None = None


class SessionStore:
    """Named sessions; use from any thread.

    The sessions used last stay in memory. One that has to leave goes to a file of *directory*, and
    leaves memory only once that file is on the disk; without a directory saving is refused instead.
    Files that another store left in the directory are found by their name.

    Args:
        directory: Folder for files, which must exist; None for memory alone.
        max_sessions: Most sessions in memory.
        max_bytes: Most bytes of blobs in memory.
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
                f"SessionStore: max_sessions is {max_sessions}, max_bytes {max_bytes}; "
                "0 and above are allowed"
            )
        self._directory = None if directory is None else Path(directory)
        if self._directory is not None and not self._directory.is_dir():
            raise RequestError(f"SessionStore: {os.fspath(self._directory)!r} is no folder")
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._held: OrderedDict[str, _Held] = OrderedDict()  # oldest use first
        self._infos: dict[str, SessionInfo] = {}

    def save(self, name: str, slot: SavesState) -> SessionInfo:
        """Save *slot* under *name*, in place of what had that name.

        Raises:
            RequestError: The name cannot be one of a file.
            CapacityError: It does not fit, and there is no directory.
            StateError: Or another error of `Slot.save`.
        """
        self._check_name(name)
        blob, marks = slot.save_marked()
        held = _Held(blob, slot.state_facts(), marks)
        with self._lock:
            known = self._find(name)
            now = time.time()
            info = SessionInfo(name, len(blob), known.created_s if known else now, now)
            self._make_room(name, len(blob))
            if not self._fits(name, len(blob)):
                info = self._spill(info, held)
                self._held.pop(name, None)
            else:
                self._held[name] = held
                self._held.move_to_end(name)
                self._unlink(name)  # what a file holds is out of date
            self._infos[name] = info
            return info

    def restore(self, name: str, slot: SavesState) -> int:
        """Restore session *name* into *slot*; returns the size of its blob.

        Raises:
            RequestError: There is no such session.
            StateError: It does not fit the slot, or its file was altered.
        """
        facts = slot.state_facts()
        with self._lock:
            info = self._known("restore", name)
            if name in self._held:
                self._held.move_to_end(name)
                held = self._held[name]
                check_facts(held.facts, facts)
                blob, marks = held.blob, held.marks
            else:
                assert info.path is not None
                blob, marks = read_marked(info.path, facts)
        return slot.restore_marked(blob, marks)

    def remove(self, name: str) -> None:
        """Forget session *name*, its file too.

        Raises:
            RequestError: There is no such session.
        """
        with self._lock:
            self._known("remove", name)
            self._unlink(name)
            self._held.pop(name, None)
            self._infos.pop(name, None)

    def flush(self) -> None:
        """Write every session in memory to its file; they stay in memory too.

        Raises:
            RequestError: There is no directory.
        """
        with self._lock:
            for name, held in self._held.items():
                self._write(self._infos[name], held)

    def sessions(self) -> list[SessionInfo]:
        """Every session, by name."""
        with self._lock:
            if self._directory is not None:
                for path in self._directory.glob(f"*{_ENDING}"):
                    self._find(path.name.removesuffix(_ENDING))
            return [self._infos[name] for name in sorted(self._infos)]

    # ---- under the lock

    def _fits(self, name: str, n_bytes: int) -> bool:
        others = [len(held.blob) for other, held in self._held.items() if other != name]
        return len(others) < self._max_sessions and sum(others) + n_bytes <= self._max_bytes

    def _make_room(self, name: str, n_bytes: int) -> None:
        if self._directory is None:
            if self._fits(name, n_bytes):
                return
            raise CapacityError(
                f"SessionStore.save: {n_bytes} bytes more than fit beside {len(self._held)} "
                f"sessions, the limits are {self._max_sessions} sessions and {self._max_bytes} "
                "bytes; remove one or give the store a directory"
            )
        if n_bytes > self._max_bytes or self._max_sessions == 0:
            return  # it goes to a file itself
        while not self._fits(name, n_bytes):
            oldest = next(other for other in self._held if other != name)
            self._infos[oldest] = self._spill(self._infos[oldest], self._held[oldest])
            del self._held[oldest]

    def _spill(self, info: SessionInfo, held: _Held) -> SessionInfo:
        return replace(info, path=self._write(info, held))

    def _write(self, info: SessionInfo, held: _Held) -> Path:
        if self._directory is None:
            raise RequestError("SessionStore.flush: the store has no directory; give it one")
        path = self._directory / f"{info.name}{_ENDING}"
        write_state(path, held.blob, held.facts, held.marks)
        return path

    def _unlink(self, name: str) -> None:
        if self._directory is not None:
            (self._directory / f"{name}{_ENDING}").unlink(missing_ok=True)

    def _find(self, name: str) -> SessionInfo | None:
        if name not in self._infos and self._directory is not None:
            path = self._directory / f"{name}{_ENDING}"
            if path.is_file():
                status = path.stat()
                self._infos[name] = SessionInfo(
                    name, status.st_size, status.st_mtime, status.st_mtime, path
                )
        return self._infos.get(name)

    def _known(self, verb: str, name: str) -> SessionInfo:
        self._check_name(name)
        info = self._find(name)
        if info is None:
            raise RequestError(f"SessionStore.{verb}: there is no session {name!r}")
        return info

    def _check_name(self, name: str) -> None:
        """Refuse what some file system takes for more than a name."""
        try:
            n_bytes = len(name.encode())
        except UnicodeEncodeError:
            n_bytes = 0
        is_plain = (
            0 < n_bytes <= _NAME_BYTES_MAX
            and not _NAME_EXCLUDED & set(name)
            and not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in name)
            and name == name.strip(" ")
            and not name.startswith(".")
            and not name.endswith(".")
            and ".." not in name
        )
        if not is_plain:
            raise RequestError(
                f"SessionStore: {name!r} is no name for a session; use 1..{_NAME_BYTES_MAX} bytes "
                "of letters, digits, '-' and '_'"
            )
