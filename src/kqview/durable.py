"""Atomic file writes: a crash, a full disk or Ctrl-C leaves either the old file or the new one.

A file is written under a temporary name in its own folder, synced and renamed, and the folder is
synced. Its writer locks it meanwhile, so `remove_leftovers` can tell the files of dead processes
from those that another process is writing.

Writing a whole file never opens an existing regular file for writing, and never reuses an existing
temporary name.
"""

import contextlib
import errno
import io
import os
import secrets
import stat
from collections.abc import Generator
from typing import Any, BinaryIO, Final, NamedTuple, Self, cast

from kqview import system

_PREFIX: Final = ".kqview-"
_SUFFIX: Final = ".part"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Errors of file systems that cannot sync a folder, or need not.
_NO_SYNC: Final = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


class FileIdentity(NamedTuple):
    """Identifies a file and its content without reading it."""

    device: int
    inode: int
    n_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Self:
        """The identity of a file with *status*."""
        return cls(
            status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        )

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> Self | None:
        """The identity of the regular file at *path*; None if there is none."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        return cls.of(status) if stat.S_ISREG(status.st_mode) else None

    def has_content_of(self, other: "FileIdentity") -> bool:
        """Whether it is the same unmodified file; a new link or new permissions do not count."""
        return self[:4] == other[:4]


class WholeFile:
    """A file that appears under its name only at `commit`, complete and synced.

    A context manager: commits at the end of the block, discards after an exception. A symbolic link
    is followed, and its target is replaced. The permissions and owner of an old file are kept; a
    file without write permission is not replaced. What is not a regular file, such as
    ``/dev/stdout``, is written to directly.

    Args:
        path: Name of the file.
        is_private: Whether only the owner may read it, whatever the old file allowed.
        follows: Whether links and special files are written to as described; if not, they are
            refused. A link that appears meanwhile is replaced, and its target stays as it is.

    Attributes:
        stream: Buffered stream to write to; seekable if *path* is a regular file.

    Raises:
        OSError: The folder or the old file cannot be written to. All methods raise it as well; it
            names *path*.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, is_private: bool = False, follows: bool = True
    ) -> None:
        self._path = os.fspath(path)
        self._temporary: str | None = None
        with _naming(self._path):
            self._target = os.path.realpath(self._path) if follows else self._path
            old = _status(self._path, follows=follows)
            if not follows and old is not None and not stat.S_ISREG(old.st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            if old is None or stat.S_ISREG(old.st_mode):
                handle = self._open_temporary(old, is_private)
            else:
                handle = os.open(self._path, os.O_WRONLY | system.OPEN)
            self._raw = _Target(handle, self._path)
        self.stream = cast("BinaryIO", io.BufferedWriter(self._raw, 1 << 16))

    def _open_temporary(self, old: os.stat_result | None, is_private: bool) -> int:
        if old is not None and not os.access(self._target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        folder = os.path.dirname(os.path.abspath(self._target))
        mode = 0o600 if is_private or old is not None else 0o666  # less the umask
        handle, self._temporary = _create_locked(folder, mode)
        if old is not None and not is_private:
            _take_rights(handle, old)
        return handle

    def commit(self) -> FileIdentity:
        """Give the file its name and return its identity.

        After an error the old file is still there, except if syncing the folder failed: then the
        new file is there, and a power loss may undo it.
        """
        with _naming(self._path):
            try:
                self.stream.flush()
                handle = self._raw.fileno()
                if self._temporary is None:
                    return FileIdentity.of(os.fstat(handle))
                os.fsync(handle)
                identity = FileIdentity.of(os.fstat(handle))
                if not system.MOVES_OPEN_FILES:
                    self._raw.close()
                os.replace(self._temporary, self._target)
                self._temporary = None
                sync_folder(os.path.dirname(os.path.abspath(self._target)))
                return identity
            finally:
                self.discard()

    def discard(self) -> None:
        """Drop what was written and keep the old file; no effect after `commit`."""
        # Not the stream: closing it would flush its buffer.
        with contextlib.suppress(OSError):  # synced or discarded
            self._raw.close()
        if self._temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
            self._temporary = None

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        """Commit, or discard after an exception."""
        if error_type is None:
            self.identity = self.commit()
        else:
            self.discard()


class _Target(io.FileIO):
    """Writes to a handle; errors name the file of the caller."""

    def __init__(self, handle: int, path: str) -> None:
        super().__init__(handle, "wb")
        self._path = path

    def write(self, data: Any, /) -> int:
        with _naming(self._path):
            return os.write(self.fileno(), data)


def write_whole(
    path: str | os.PathLike[str], *parts: bytes, is_private: bool = False, follows: bool = True
) -> FileIdentity:
    """Write *parts*, concatenated, as the file *path*; arguments as of `WholeFile`.

    Raises:
        OSError: The file cannot be written; an old file stays.
    """
    with WholeFile(path, is_private=is_private, follows=follows) as file:
        for part in parts:
            file.stream.write(part)
    return file.identity


def append_line(path: str | os.PathLike[str], line: str) -> None:
    """Append *line* and a newline to *path* and sync it.

    An unfinished line of a dead process is ended first. Several processes may append to one file.

    Raises:
        OSError: The file cannot be written; it stays as it was.
    """
    path = os.fspath(path)
    with _naming(path):
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | system.OPEN, 0o666)
        try:
            _lock(handle)
            status = os.fstat(handle)
            is_regular = stat.S_ISREG(status.st_mode)
            n_before = status.st_size if is_regular else 0
            is_unfinished = n_before > 0 and system.read_at(handle, 1, n_before - 1) != b"\n"
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
    """Remove the file *path* if it exists, and sync its folder.

    Raises:
        OSError: It cannot be removed, or the folder cannot be synced.
    """
    path = os.fspath(path)
    with contextlib.suppress(FileNotFoundError), _naming(path):
        os.unlink(path)
        sync_folder(os.path.dirname(os.path.abspath(path)))


def move(path: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give the file *path* the name *target*, in the same file system; replaces a file there.

    Raises:
        OSError: It cannot be moved, or a folder cannot be synced.
    """
    path, target = os.fspath(path), os.fspath(target)
    with _naming(path):
        os.replace(path, target)
        for folder in {os.path.dirname(os.path.abspath(one)) for one in (target, path)}:
            sync_folder(folder)


def remove_leftovers(folder: str | os.PathLike[str]) -> int:
    """Remove the temporary files of dead processes from *folder*; return their number.

    Files that another process is writing stay, and so do files that cannot be removed.
    """
    n_removed = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX):
                n_removed += _remove_dead(entry.path)
    return n_removed


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make the names in *folder* survive a power loss.

    Raises:
        OSError: The disk failed. Not raised if the folder cannot be read, or synced at all, as on
            Windows.
    """
    if not hasattr(os, "O_DIRECTORY"):
        return
    try:
        handle = system.open_folder(folder)
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
    """(handle, name) of a new, locked temporary file."""
    while True:
        name = os.path.join(folder, f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
        try:
            handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | system.OPEN, mode)
        except FileExistsError:
            continue
        try:
            _lock(handle)
            # Before it was locked, another process may have removed it as a leftover.
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
        if not system.MOVES_OPEN_FILES:
            os.unlink(name)  # fails while it has a writer
            return True
        handle = os.open(name, os.O_WRONLY | system.NO_LINK | system.NO_WAIT | system.OPEN)
    except OSError:
        return False
    try:
        system.lock(handle)
        os.unlink(name)
    except OSError:  # its writer is alive or just done, or files cannot be locked
        return False
    finally:
        os.close(handle)
    return True


def _lock(handle: int) -> None:
    # Without locks nothing is cleaned up either: `_remove_dead` needs one.
    with contextlib.suppress(OSError):
        system.lock(handle, waits=True)


def _take_rights(handle: int, old: os.stat_result) -> None:
    """Give the new file the owner and permissions of the old one, as far as this user may."""
    if not hasattr(os, "fchown"):  # Windows: those of the folder
        return
    mode = stat.S_IMODE(old.st_mode) & 0o777
    own = os.fstat(handle)
    if (own.st_uid, own.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(handle, old.st_uid, old.st_gid)
        except OSError:
            mode &= ~0o070  # they are meant for the old group
    with contextlib.suppress(OSError):
        os.fchmod(handle, mode)


def _status(path: str, *, follows: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follows)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _naming(path: str) -> Generator[None]:
    """Let an OSError name the file of the caller; after a full disk, say that nothing changed."""
    try:
        yield
    except OSError as error:
        if error.filename == path and error.filename2 is None:
            raise
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            reason += "; nothing was changed, free some space"
        raise OSError(error.errno, reason, path) from error
