"""Files written whole: after a crash, a full disk or Ctrl-C there is the old one or the new one.

A file is written under a temporary name in its own folder, synced, given its name, and the folder
is synced. Its writer holds a lock on it meanwhile, so that `remove_leftovers` can tell what a dead
process has left from what another one is writing now.

Never: opens a file that somebody may be reading for writing, or takes a name that exists.
"""

import contextlib
import errno
import fcntl
import io
import os
import secrets
import stat
from collections.abc import Generator
from types import TracebackType
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

_PREFIX: Final = ".kqview-"
_SUFFIX: Final = ".part"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What a file system answers that cannot sync a folder, or needs no syncing.
_NO_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class FileIdentity(NamedTuple):
    """What tells whether a file is still the one that was read or written."""

    device: int
    inode: int
    n_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """Of a file with *status*."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    def has_content_of(self, other: "FileIdentity") -> bool:
        """Whether it is the same file with the same content: a link or new rights are no change."""
        return self[:4] == other[:4]


class WholeFile:
    """A file that appears under its name at `commit`, whole and on the disk; not before.

    A context manager: commits at the end of the block, discards after an exception. A symbolic link
    is followed, and the file it points to is replaced. An old file's rights and owner stay; one
    that may not be written to is not replaced. What is no regular file, such as ``/dev/stdout``,
    cannot be replaced and is written to directly.

    Args:
        path: Its name.
        is_private: Readable by the owner alone, whatever the old file was.

    Attributes:
        stream: To write to; buffered, and seekable where *path* is a regular file.

    Raises:
        OSError: The folder cannot be written to, or the old file not. So do all methods; the error
            names *path*.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_private: bool = False) -> None:
        self._path = os.fspath(path)
        self._temporary: str | None = None
        with _naming(self._path):
            self._target = os.path.realpath(self._path)
            old = _status(self._path)
            if old is None or stat.S_ISREG(old.st_mode):
                handle = self._open_temporary(old, is_private)
            else:
                handle = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            self._raw = _Target(handle, self._path)
        self.stream = cast("BinaryIO", io.BufferedWriter(self._raw, 1 << 16))

    def _open_temporary(self, old: os.stat_result | None, is_private: bool) -> int:
        if old is not None and not os.access(self._target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        folder = os.path.dirname(self._target)
        mode = 0o600 if is_private or old is not None else 0o666  # less the umask
        handle, self._temporary = _create_locked(folder, mode)
        if old is not None and not is_private:
            _take_rights(handle, old)
        return handle

    def commit(self) -> FileIdentity:
        """Give the file its name; returns what it can be recognised by.

        After an error the old file is there, unless the error is one of syncing the folder: then
        the new one is, and may be lost with the power.
        """
        with _naming(self._path):
            try:
                self.stream.flush()
                handle = self._raw.fileno()
                if self._temporary is None:
                    return FileIdentity.of(os.fstat(handle))
                os.fsync(handle)
                identity = FileIdentity.of(os.fstat(handle))
                os.replace(self._temporary, self._target)
                self._temporary = None
                sync_folder(os.path.dirname(self._target))
                return identity
            finally:
                self.discard()

    def discard(self) -> None:
        """Leave the old file as it is; nothing to do after `commit`."""
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None
        # Not the stream: it would write what it still holds.
        with contextlib.suppress(OSError):  # synced, or not wanted
            self._raw.close()

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Commit, or discard after an exception."""
        if error is None:
            self.commit()
        else:
            self.discard()


class _Target(io.FileIO):
    """Writes to a handle; an error names the file that the caller knows."""

    def __init__(self, handle: int, path: str) -> None:
        super().__init__(handle, "wb")
        self._path = path

    def write(self, data: Any, /) -> int:
        with _naming(self._path):
            return os.write(self.fileno(), data)


def write_whole(
    path: str | os.PathLike[str], *parts: bytes, is_private: bool = False
) -> FileIdentity:
    """Write *parts*, one behind the other, as the file *path*.

    Raises:
        OSError: The file cannot be written; what was there before still is.
    """
    file = WholeFile(path, is_private=is_private)
    try:
        for part in parts:
            file.stream.write(part)
    except BaseException:
        file.discard()
        raise
    return file.commit()


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Append *line* and a newline to *path*, on the disk when this returns.

    A line that a dead process has left unfinished is ended first. Two processes may append to one
    file.

    Raises:
        OSError: The file cannot be written; it is as it was.
    """
    path = os.fspath(path)
    with _naming(path):
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(handle, fcntl.LOCK_EX)
            status = os.fstat(handle)
            is_regular = stat.S_ISREG(status.st_mode)
            n_before = status.st_size if is_regular else 0
            is_unfinished = n_before > 0 and os.pread(handle, 1, n_before - 1) != b"\n"
            data = memoryview(b"\n" * is_unfinished + line.encode() + b"\n")
            try:
                while data:
                    data = data[os.write(handle, data) :]
                if is_regular:
                    os.fsync(handle)
            except BaseException:
                if is_regular:
                    os.ftruncate(handle, n_before)
                raise
        finally:
            os.close(handle)


def remove(path: str | os.PathLike[str]) -> None:
    """Remove the file *path*, for good when this returns; nothing to do where there is none.

    Raises:
        OSError: It cannot be removed, or the folder cannot be synced.
    """
    path = os.fspath(path)
    with contextlib.suppress(FileNotFoundError), _naming(path):
        os.unlink(path)
        sync_folder(os.path.dirname(os.path.abspath(path)))


def remove_leftovers(folder: str | os.PathLike[str]) -> int:
    """Remove what writers that died have left in *folder*; returns how many files it was.

    What another process writes at the moment stays, and so does what cannot be removed.
    """
    n_removed = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                n_removed += _remove_dead(entry.path)
    return n_removed


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in *folder* outlive a loss of power.

    Raises:
        OSError: The disk failed. Not raised where folders cannot be synced or read.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


# ---- temporary files


def _create_locked(folder: str, mode: int) -> tuple[int, str]:
    """(handle, name) of a new file that is locked and has its name."""
    while True:
        name = os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
        try:
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except FileExistsError:
            continue
        try:
            _lock(handle, fcntl.LOCK_EX)
            # Before the lock was there it may have been taken for a leftover.
            if os.fstat(handle).st_nlink > 0:
                return handle, name
        except BaseException:
            os.close(handle)
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        os.close(handle)


def _remove_dead(name: str) -> bool:
    try:
        handle = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name)
    except OSError:  # its writer lives, was just done, or nobody can lock here
        return False
    finally:
        os.close(handle)
    return True


def _lock(handle: int, operation: int) -> None:
    # Where files cannot be locked there is no cleaning up either: `_remove_dead` needs the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(handle, operation)


def _take_rights(handle: int, old: os.stat_result) -> None:
    """Let the new file belong to whom the old one did; as far as this user may."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    own = os.fstat(handle)
    if (own.st_uid, own.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(handle, old.st_uid, old.st_gid)
        except OSError:
            mode &= ~0o070  # they were another group's
    with contextlib.suppress(OSError):
        os.fchmod(handle, mode)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _naming(path: str) -> Generator[None]:
    """Let an OSError name the file that the caller knows, and say what a full disk has left."""
    try:
        yield
    except OSError as error:
        if error.filename == path and error.filename2 is None:
            raise
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            reason += "; nothing was changed, make room for it"
        raise OSError(error.errno, reason, path) from error
