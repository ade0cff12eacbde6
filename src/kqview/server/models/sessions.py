"""Sessions: saved slots that the server keeps, in memory by number and in files by name.

Both belong to the key that saved them: to another key they do not exist, and two keys may use one
number or name. Files of a key lie in a folder of its own below ``slot_save_path``; without keys
they lie in ``slot_save_path`` itself. A file is a SES1 blob and a trailer that names its model and
has a checksum (`kqview.state.files`).

Any thread.
"""

import errno
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kqview.durable import remove_leftovers
from kqview.errors import RequestError, StateError
from kqview.server.errors import NotFound, NotSupported, StorageFailed, StorageFull
from kqview.server.live_config import LiveConfig
from kqview.server.web.access import Caller
from kqview.slot import Slot
from kqview.state.files import SlotMarks, StateFacts, check_facts, read_marked, write_marked
from kqview.state.store import NAME_BYTES_MAX, SavedSlot, is_plain_name

_FOLDER_LETTERS: Final = 32  # of a key's digest
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_A_FILE: Final = (errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session.

    Attributes:
        saved: The slot that was saved.
        created_s: When its number was first saved, in seconds since 1970.
        updated_s: When it was last saved.
    """

    saved: SavedSlot
    created_s: float
    updated_s: float

    @property
    def n_bytes(self) -> int:
        """What it takes in memory."""
        return self.saved.n_bytes


class Sessions:
    """Sessions in memory, up to the settings' ``max_sessions`` and ``max_session_bytes``.

    On a server with several keys none has more than half of either, so that one key cannot fill the
    memory for all.
    """

    def __init__(self, live: LiveConfig) -> None:
        self._live = live
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str], SavedSession] = {}  # by number and owner

    def save(self, caller: Caller, session_id: int, saved: SavedSlot) -> SavedSession:
        """Keep *saved* as a session of *caller*, in place of an older one.

        Raises:
            StorageFull: It does not fit; the older one stays.
        """
        key, s, n_bytes = (session_id, caller.owner), self._live.settings, saved.n_bytes
        with self._lock:
            others = {one: kept.n_bytes for one, kept in self._kept.items() if one != key}
            own = [size for (_, owner), size in others.items() if owner == caller.owner]
            most, most_bytes = max(1, s.max_sessions // 2), s.max_session_bytes // 2
            has_share = len(own) < most and sum(own) + n_bytes <= most_bytes
            if len(s.api_keys) + len(s.admin_keys) > 1 and not has_share:
                raise StorageFull(
                    f"no room for a session of {n_bytes} bytes: one key may have {most} sessions "
                    f"and {most_bytes} bytes in memory, from max_sessions and max_session_bytes; "
                    "remove a session, or move one to a file"
                )
            if len(others) >= s.max_sessions or (
                sum(others.values()) + n_bytes > s.max_session_bytes
            ):
                raise StorageFull(
                    f"no room for a session of {n_bytes} bytes: the server keeps up to "
                    f"{s.max_sessions} sessions (max_sessions) and {s.max_session_bytes} bytes "
                    "(max_session_bytes) in memory; remove a session, or move one to a file"
                )
            now_s, old = time.time(), self._kept.get(key)
            self._kept[key] = SavedSession(saved, old.created_s if old else now_s, now_s)
            return self._kept[key]

    def restore(self, caller: Caller, session_id: int, slot: Slot) -> int:
        """Restore a session into *slot*; returns the size of its blob.

        Raises:
            NotFound: *caller* has no such session.
            StateError: It does not fit the model that serves.
        """
        saved = self._find(caller, session_id)[1].saved
        check_facts(saved.facts, slot.state_facts())
        return slot.restore_marked(saved.blob, saved.marks)

    def remove(self, caller: Caller, session_id: int) -> None:
        """Forget a session; raises NotFound."""
        key, _ = self._find(caller, session_id)
        with self._lock:
            self._kept.pop(key, None)

    def move_to_file(self, caller: Caller, session_id: int, files: "StateFiles", name: str) -> int:
        """Write a session to a file, then forget it; returns the size of its blob.

        Raises:
            NotFound: *caller* has no such session.
            KqviewError: As `StateFiles.write`; the session stays.
        """
        key, session = self._find(caller, session_id)
        n_bytes = files.write(caller, name, session.saved)
        with self._lock:
            if self._kept.get(key) is session:  # and not a newer one
                del self._kept[key]
        return n_bytes

    def list(self, caller: Caller) -> list[tuple[int, SavedSession]]:
        """Numbers and sessions that *caller* may see, by number."""
        with self._lock:
            found = sorted(self._kept.items(), key=lambda one: one[0])
        return [(number, one) for (number, owner), one in found if caller.may_see(owner)]

    def _find(self, caller: Caller, session_id: int) -> tuple[tuple[int, str], SavedSession]:
        """The session and its key; for an admin without one of this number, that of another key."""
        with self._lock:
            found = {
                key: one
                for key, one in self._kept.items()
                if key[0] == session_id and caller.may_see(key[1])
            }
        if not found:
            raise NotFound(f"there is no session {session_id}; GET /sessions lists them")
        own = session_id, caller.owner
        key = own if own in found else min(found)
        return key, found[key]


# ---- files


class StateFiles:
    """Files of saved slots in the settings' ``slot_save_path``, ``max_saved_bytes`` at most."""

    def __init__(self, live: LiveConfig) -> None:
        """Remove what dead processes left half-written.

        Raises:
            RequestError: ``slot_save_path`` is not a folder.
        """
        self._live = live
        self._lock = threading.Lock()
        settings = live.settings
        self._root = None if settings.slot_save_path is None else Path(settings.slot_save_path)
        if self._root is not None:
            if not self._root.is_dir():
                raise RequestError(
                    f"slot_save_path {settings.slot_save_path!r} is not an existing folder; "
                    "create it, or name another one (--slot-save-path)"
                )
            for folder in (self._root, *(one for one in self._root.iterdir() if one.is_dir())):
                remove_leftovers(folder)

    def write(self, caller: Caller, name: str, saved: SavedSlot) -> int:
        """Write *saved* as the file *name*; returns the size of its blob.

        After a crash there is the old file or the new one, complete.

        Raises:
            NotSupported: The server has no ``slot_save_path``.
            RequestError: *name* cannot be the name of a file, or is something else than a file.
            StorageFull: The disk is full, or the files would have more than ``max_saved_bytes``.
            StorageFailed: It cannot be written for another reason.
        """
        path = self._path(caller, name)
        limit = self._live.settings.max_saved_bytes
        with self._lock, _named(path, name):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            held = self._held_bytes() - _size(path)
            if held + saved.n_bytes > limit:
                raise StorageFull(
                    f"no room for a file of {saved.n_bytes} bytes: the files have {held} bytes, "
                    f"the limit is {limit} (max_saved_bytes); delete some"
                )
            write_marked(path, saved.blob, saved.facts, saved.marks, follows=False)
        return len(saved.blob)

    def read(self, caller: Caller, name: str, facts: StateFacts) -> tuple[bytes, SlotMarks]:
        """Blob and marks of the file *name*.

        Raises:
            NotSupported: The server has no ``slot_save_path``.
            RequestError: *name* cannot be the name of a file, or is something else than a file.
            NotFound: There is no such file.
            StateError: It was altered, or does not fit *facts*.
            StorageFailed: It cannot be read.
        """
        path = self._path(caller, name)
        with _named(path, name):
            return read_marked(path, facts, follows=False)

    def check(self, name: str) -> None:
        """Raise NotSupported or RequestError unless there can be a file *name*."""
        if self._root is None:
            raise NotSupported(
                "this server does not save slots to files; start it with --slot-save-path"
            )
        if not is_plain_name(name):
            raise RequestError(
                f"Invalid filename {name[:80]!r}; use up to {NAME_BYTES_MAX} bytes of letters, "
                "digits, '-', '_' and '.', without '..' and not beginning or ending with '.'"
            )

    def _path(self, caller: Caller, name: str) -> Path:
        self.check(name)
        assert self._root is not None
        return self._root / caller.owner[:_FOLDER_LETTERS] / name

    def _held_bytes(self) -> int:
        assert self._root is not None
        folders = [self._root, *(one for one in self._root.iterdir() if one.is_dir())]
        return sum(_size(path) for folder in folders for path in folder.iterdir())


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


@contextmanager
def _named(path: Path, name: str) -> Generator[None]:
    """Turn failures of the disk into errors that name the file as the client does."""
    try:
        yield
    except FileNotFoundError:
        raise NotFound(f"File not found: {name}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise StorageFull(f"no room for the file {name!r} on the server's disk") from None
        if error.errno in _NOT_A_FILE:
            raise RequestError(f"{name!r} is not a regular file; use another name") from None
        raise StorageFailed(f"the file {name!r} cannot be used: {reason}") from None
    except StateError as error:
        raise type(error)(str(error).replace(repr(os.fspath(path)), repr(name))) from None
