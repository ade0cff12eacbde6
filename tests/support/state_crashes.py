"""Ways in which a SessionStore changes its folder, to be cut off in the middle.

``python -m tests.support.state_crashes FOLDER`` does each of them in processes that are killed at
every call, and prints a JSON list of what was found afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kqview.errors import RequestError
from kqview.state import SessionStore, durable
from tests.support.crash_disk import SeenOs
from tests.support.fake_slot import FakeSlot, blob_of

if TYPE_CHECKING:
    from collections.abc import Callable

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
