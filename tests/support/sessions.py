"""Sessions without an engine, on a disk that may crash at any call.

`SeenOs` stands in for the module ``os`` of `kqview.durable`. A process that dies keeps what
it has written; a machine that dies keeps what was synced, and of the rest anything:
`Disk.states_after_power_loss` lists what may be found. Stricter than any real file system: names
that were not synced are lost or kept one by one, whatever their order was.

``python -m tests.support.sessions FOLDER`` changes a SessionStore's folder in each way of SCENARIOS
in processes that are killed at every call, and prints a JSON list of what was found afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
from dataclasses import dataclass, field
from itertools import chain, combinations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kqview import durable
from kqview.errors import RequestError
from kqview.state import SessionStore
from kqview.state.files import NO_MARKS, SlotMarks, StateFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


# ---- a slot without an engine

FACTS = StateFacts("model", "f16")
BLOB = b"SES1" + bytes(100)


def blob_of(value: int, n: int = 100) -> bytes:
    """A blob of *n* bytes that *value* tells from others; no engine would take it."""
    return b"SES1" + bytes([value]) * (n - 4)


class FakeSlot:
    """A slot whose cache is a blob."""

    def __init__(
        self, blob: bytes = BLOB, facts: StateFacts = FACTS, marks: SlotMarks = NO_MARKS
    ) -> None:
        self.blob = blob
        self.facts = facts
        self.marks = marks

    def save_marked(self) -> tuple[bytes, SlotMarks]:
        return self.blob, self.marks

    def restore_marked(self, blob: bytes, marks: SlotMarks) -> int:
        self.blob, self.marks = blob, marks
        return len(blob)

    def state_facts(self) -> StateFacts:
        return self.facts


# ---- a disk that loses things

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
        raise AssertionError(f"durable calls os.{name}, which SeenOs does not know")

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


# ---- changes of a folder, to be cut off

OLD, NEW, OTHER = 1, 2, 3
LIMIT = {"max_sessions": 1}


def _save(store: SessionStore, name: str, value: int) -> None:
    # Several writes of the stream's buffer, the last one not a whole one.
    store.save(name, FakeSlot(blob_of(value, 150_000)))


def _written(folder: Path) -> SessionStore:
    store = SessionStore(folder, **LIMIT)
    _save(store, "a", OLD)
    store.flush()
    return store


def _written_and_saved_again(folder: Path) -> SessionStore:
    store = _written(folder)
    _save(store, "a", NEW)
    return store


def _saved(folder: Path) -> SessionStore:
    store = SessionStore(folder, **LIMIT)
    _save(store, "a", NEW)
    return store


_FOLDERS: dict[SessionStore, Path] = {}


def _in_memory_beside_a_file(folder: Path) -> SessionStore:
    _written(folder)
    store = SessionStore()
    _save(store, "a", NEW)
    _FOLDERS[store] = folder / "a.ses1"
    return store


@dataclass(frozen=True)
class Scenario:
    """What is prepared, what is cut off, and the versions of "a" before and after; None: none."""

    prepare: Callable[[Path], SessionStore]
    act: Callable[[SessionStore], object]
    before: int | None
    after: int | None


SCENARIOS = {
    "flush of a second version": Scenario(
        _written_and_saved_again, lambda store: store.flush(), OLD, NEW
    ),
    "flush of a first version": Scenario(_saved, lambda store: store.flush(), None, NEW),
    "second version pushed out of memory": Scenario(
        _written_and_saved_again, lambda store: _save(store, "b", OTHER), OLD, NEW
    ),
    "second version straight to its file": Scenario(
        lambda folder: SessionStore(_written(folder)._directory, max_sessions=0),
        lambda store: _save(store, "a", NEW),
        OLD,
        NEW,
    ),
    "second version into memory": Scenario(
        _written, lambda store: _save(store, "a", NEW), OLD, OLD
    ),
    "session moved to a file": Scenario(
        _in_memory_beside_a_file, lambda store: store.move_to_file("a", _FOLDERS[store]), OLD, NEW
    ),
    "removal": Scenario(_written_and_saved_again, lambda store: store.remove("a"), OLD, None),
}


def version_in(folder: Path) -> int | str | None:
    """The version of "a" that a store finds after a crash; a text where something is wrong."""
    store = SessionStore(folder)
    slot = FakeSlot(b"")
    names = [info.name for info in store.sessions()]
    if left := [path.name for path in folder.iterdir() if path.suffix != ".ses1"]:
        return f"left over: {left}"
    if not set(names) <= {"a"}:
        return f"sessions: {names}"
    try:
        store.restore("a", slot)
    except RequestError:
        return None
    except Exception as error:
        return repr(error)
    found = max(slot.blob[-1:], default=0)
    return found if slot.blob == blob_of(found, 150_000) else "parts of two versions"


def calls_of(scenario: Scenario, folder: Path, monkeypatch_os: Callable[[object], None]) -> int:
    """Run *scenario* whole; returns at how many moments it can be cut off."""
    n = 0

    def count(*_: object) -> None:
        nonlocal n
        n += 1

    store = scenario.prepare(folder)
    monkeypatch_os(SeenOs(count))
    scenario.act(store)
    monkeypatch_os(os)
    return n


def _set_os(module: object) -> None:
    durable.os = module  # type: ignore[attr-defined]


def _killed_at(moment: int, scenario: Scenario, folder: Path) -> None:
    """In a child: run until *moment*, then be killed by SIGKILL."""
    n = 0

    def kill(*_: object) -> None:
        nonlocal n
        n += 1
        if n == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    store = scenario.prepare(folder)
    _set_os(SeenOs(kill))
    scenario.act(store)


def main(root: Path) -> None:
    """Kill at every moment of every scenario."""
    found: list[dict[str, object]] = []
    for i, (name, scenario) in enumerate(SCENARIOS.items()):
        (root / f"{i}").mkdir()
        n_moments = calls_of(scenario, root / f"{i}", _set_os)
        for moment in range(1, n_moments + 1):
            folder = root / f"{i}-{moment}"
            folder.mkdir()
            child = os.fork()
            if child == 0:
                _killed_at(moment, scenario, folder)
                os._exit(1)  # it was not killed
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status), f"{name}: moment {moment} never came"
            found.append({"name": name, "moment": moment, "version": version_in(folder)})
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
