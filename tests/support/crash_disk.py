"""A disk that loses things: each call of `kqview.state.durable` is seen and may be a crash.

`SeenOs` stands in for the module ``os`` there. A process that dies keeps what it has written; a
machine that dies keeps what was synced, and of the rest anything: `Disk.states_after_power_loss`
lists what may be found. Stricter than any real file system: names that were not synced are lost or
kept one by one, whatever their order was.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# What leaves the disk as it is.
HARMLESS = {
    *("access", "close", "fspath", "fstat", "fchown", "fchmod", "path", "pread", "scandir", "stat"),
    *("stat_result", "strerror", "W_OK"),
}


class SeenOs:
    """The module ``os``, whose calls that change a disk are told to *tell* before and after.

    ``tell(moment, call, *arguments)``: moment is "before", "half" (of a write, which is done then)
    or "after". Calls that this does not know fail, so that no new one goes unseen.
    """

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        if name in HARMLESS or name.startswith("O_"):
            return getattr(os, name)
        raise AssertionError(f"durable calls os.{name}, which crash_disk does not know")

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if not flags & os.O_CREAT:
            return os.open(path, flags, mode)
        assert flags & os.O_EXCL, "a file that exists is never opened to be written"
        self._tell("before", "create", path)
        handle = os.open(path, flags, mode)
        self._tell("after", "create", path, handle)
        return handle

    def write(self, handle: int, data: Any) -> int:
        data = bytes(data)
        self._tell("before", "write", handle, data)
        n_half = len(data) // 2
        n_written = os.write(handle, data[:n_half]) if n_half else 0
        self._tell("half", "write", handle, data[:n_half])
        n_written += os.write(handle, data[n_half:])
        self._tell("after", "write", handle, data)
        return n_written

    def fsync(self, handle: int) -> None:
        self._tell("before", "fsync", handle)
        os.fsync(handle)
        self._tell("after", "fsync", handle)

    def replace(self, source: str, target: str) -> None:
        self._tell("before", "replace", source, target)
        os.replace(source, target)
        self._tell("after", "replace", source, target)

    def unlink(self, path: str) -> None:
        self._tell("before", "unlink", path)
        os.unlink(path)
        self._tell("after", "unlink", path)


@dataclass
class _File:
    synced: bytes = b""
    written: bytes = b""


@dataclass
class Disk:
    """What is on a disk for certain, and what may be, from the calls that it is told."""

    folder: Path
    _files: dict[int, _File] = field(default_factory=dict)
    _names: dict[str, int] = field(default_factory=dict)  # synced
    _changes: list[tuple[str | None, str | None, int]] = field(default_factory=list)  # not synced

    def __post_init__(self) -> None:
        for path in self.folder.iterdir():
            data = path.read_bytes()
            inode = path.stat().st_ino
            self._files[inode] = _File(data, data)
            self._names[path.name] = inode

    def apply(self, call: str, *arguments: Any) -> None:
        """Note one call, which is done."""
        match call, arguments:
            case "create", (path, handle):
                inode = os.fstat(handle).st_ino
                self._files[inode] = _File()
                self._changes.append((None, os.path.basename(path), inode))
            case "write", (handle, data):
                self._files[os.fstat(handle).st_ino].written += data
            case "fsync", (handle,):
                status = os.fstat(handle)
                if stat.S_ISDIR(status.st_mode):
                    self._names = self._named_after(self._changes)
                    self._changes = []
                else:
                    file = self._files[status.st_ino]
                    file.synced = file.written
            case "replace", (source, target):
                old, new = os.path.basename(source), os.path.basename(target)
                self._changes.append((old, new, self._named_after(self._changes)[old]))
            case "unlink", (path,):
                self._changes.append((os.path.basename(path), None, 0))
            case _:
                raise AssertionError(call)

    def states_after_power_loss(self) -> Iterator[dict[str, bytes]]:
        """Each folder, name to content, that the next start may find."""
        seen: set[tuple[tuple[str, bytes], ...]] = set()
        subsets = chain.from_iterable(
            combinations(self._changes, n) for n in range(len(self._changes) + 1)
        )
        for changes in subsets:
            names = self._named_after(changes)
            contents = [sorted(_remains(self._files[inode])) for inode in names.values()]
            for found in product(*contents):
                state = dict(zip(names, found, strict=True))
                key = tuple(sorted(state.items()))
                if key not in seen:
                    seen.add(key)
                    yield state

    def _named_after(
        self, changes: list[tuple[str | None, str | None, int]] | tuple[Any, ...]
    ) -> dict[str, int]:
        names = dict(self._names)
        for old, new, inode in changes:
            if old is not None:
                names.pop(old, None)
            if new is not None:
                names[new] = inode
        return names


def _remains(file: _File) -> set[bytes]:
    """What may be left of a file's content: of what was not synced none, some, all, or zeros."""
    n = len(file.written)
    if file.synced == file.written:
        return {file.synced}
    return {file.synced, file.written, file.written[: n // 2], file.written[:-1], bytes(n)}
