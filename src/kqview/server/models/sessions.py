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
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kqview.durable import remove_leftovers
from kqview.errors import CapacityError, RequestError, StateError
from kqview.server.errors import NotFound, NotSupported, StorageFailed, StorageFull
from kqview.server.live_config import LiveConfig
from kqview.server.web.access import Caller
from kqview.slot import Slot
from kqview.state.files import SlotMarks, StateFacts, read_marked, write_marked
from kqview.state.store import (
    NAME_BYTES_MAX,
    SavedSlot,
    SessionInfo,
    SessionStore,
    is_plain_name,
)

_FOLDER_LETTERS: Final = 32  # of a key's digest
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_A_FILE: Final = (errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)


class Sessions:
    """Sessions in memory, up to the settings' ``max_sessions`` and ``max_session_bytes``.

    On a server with several keys none has more than half of either, so that one key cannot fill the
    memory for all.
    """

    def __init__(self, live: LiveConfig) -> None:
        self._live = live
        settings = live.settings  # sizes that need a restart to change
        self._most_of_key = max(1, settings.max_sessions // 2)
        self._most_bytes_of_key = settings.max_session_bytes // 2
        self._saving = threading.Lock()  # counting a key's sessions, and adding one
        self._store = SessionStore(
            max_sessions=settings.max_sessions, max_bytes=settings.max_session_bytes
        )

    def save(self, caller: Caller, session_id: int, saved: SavedSlot) -> SessionInfo:
        """Keep *saved* as a session of *caller*, in place of an older one.

        Raises:
            StorageFull: It does not fit; the older one stays.
        """
        key = _key(caller.owner, session_id)
        try:
            with self._saving:
                self._check_share(caller.owner, key, saved.n_bytes)
                return self._store.save(key, saved)
        except CapacityError:
            s = self._live.settings
            raise StorageFull(
                f"no room for a session of {saved.n_bytes} bytes: the server keeps up to "
                f"{s.max_sessions} sessions (max_sessions) and {s.max_session_bytes} bytes "
                "(max_session_bytes) in memory; remove a session, or move one to a file"
            ) from None

    def _check_share(self, owner: str, key: str, n_bytes: int) -> None:
        """Raise StorageFull if a session of this size is more than *owner* may have."""
        settings = self._live.settings
        if len(settings.api_keys) + len(settings.admin_keys) <= 1:
            return  # the limits are those of everybody
        sizes = [
            info.n_bytes
            for info in self._store.sessions()
            if info.name != key and _parts(info.name)[1] == owner
        ]
        if len(sizes) < self._most_of_key and sum(sizes) + n_bytes <= self._most_bytes_of_key:
            return
        raise StorageFull(
            f"no room for a session of {n_bytes} bytes: one key may have {self._most_of_key} "
            f"sessions and {self._most_bytes_of_key} bytes in memory, from max_sessions and "
            "max_session_bytes; remove a session, or move one to a file"
        )

    def restore(self, caller: Caller, session_id: int, slot: Slot) -> int:
        """Restore a session into *slot*; returns the size of its blob.

        Raises:
            NotFound: *caller* has no such session.
            StateError: It does not fit the model that serves.
        """
        with _unknown(session_id):
            return self._store.restore(self._known(caller, session_id), slot)

    def remove(self, caller: Caller, session_id: int) -> None:
        """Forget a session; raises NotFound."""
        with _unknown(session_id):
            self._store.remove(self._known(caller, session_id))

    def move_to_file(self, caller: Caller, session_id: int, files: "StateFiles", name: str) -> int:
        """Write a session to a file, then forget it; returns the size of its blob.

        Raises:
            NotFound: *caller* has no such session.
            KqviewError: As `StateFiles.write`; the session stays.
        """
        key = self._known(caller, session_id)
        with files.place(caller, name, self._size_of(key)) as path, _unknown(session_id):
            return self._store.move_to_file(key, path)

    def list(self, caller: Caller) -> list[tuple[int, SessionInfo]]:
        """Numbers and sessions that *caller* may see, by number."""
        found = [(*_parts(info.name), info) for info in self._store.sessions()]
        return [(number, info) for number, owner, info in sorted(found, key=lambda one: one[:2])
                if caller.may_see(owner)]  # fmt: skip

    def _known(self, caller: Caller, session_id: int) -> str:
        """Key of the session; for an admin without one of this number, that of another key."""
        infos = [info for number, info in self.list(caller) if number == session_id]
        own = _key(caller.owner, session_id)
        if not infos:
            raise _no_session(session_id)
        return own if any(info.name == own for info in infos) else infos[0].name

    def _size_of(self, key: str) -> int:
        return next((one.n_bytes for one in self._store.sessions() if one.name == key), 0)


def _key(owner: str, session_id: int) -> str:
    return f"{session_id}-{owner}"


def _parts(key: str) -> tuple[int, str]:
    number, _, owner = key.partition("-")
    return int(number), owner


def _no_session(session_id: int) -> NotFound:
    return NotFound(f"there is no session {session_id}; GET /sessions lists them")


@contextmanager
def _unknown(session_id: int) -> Generator[None]:
    try:
        yield
    except RequestError:  # another request removed it meanwhile
        raise _no_session(session_id) from None


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
        with self.place(caller, name, saved.n_bytes) as path:
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

    @contextmanager
    def place(self, caller: Caller, name: str, n_bytes: int) -> Generator[Path]:
        """Where to write a file with a blob of *n_bytes*, one at a time; raises as `write`."""
        path = self._path(caller, name)
        limit = self._live.settings.max_saved_bytes
        with self._lock, _named(path, name):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            held = self._held_bytes() - _size(path)
            if held + n_bytes > limit:
                raise StorageFull(
                    f"no room for a file of {n_bytes} bytes: the files have {held} bytes, the "
                    f"limit is {limit} (max_saved_bytes); delete some"
                )
            yield path

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
