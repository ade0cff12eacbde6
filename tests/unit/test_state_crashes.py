"""A crash at any call of a SessionStore leaves the old version of a session or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from kqview import durable
from tests.support.crash_disk import Disk, SeenOs
from tests.support.state_crashes import SCENARIOS, version_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_process_killed_at_any_call_leaves_one_whole_version(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.state_crashes", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    versions: dict[str, list[object]] = defaultdict(list)
    for found in json.loads(done.stdout):
        versions[found["name"]].append(found["version"])
    for name, scenario in SCENARIOS.items():
        if scenario.before == scenario.after:  # nothing is written
            assert versions[name] == []
            continue
        # The old one up to some call, from there on the new one.
        n_old = versions[name].count(scenario.before)
        n_new = versions[name].count(scenario.after)
        assert versions[name] == [scenario.before] * n_old + [scenario.after] * n_new
        assert n_old > 0
        assert n_new > 0


def states_after_power_loss(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[bool, dict[str, bytes]]]:
    """(Is the action over?, a folder that may be found) for a loss of power at every call."""
    folder = root / "disk"
    folder.mkdir()
    store = SCENARIOS[name].prepare(folder)
    disk = Disk(folder)
    states = [*disk.states_after_power_loss()]

    def tell(moment: str, call: str, *arguments: Any) -> None:
        if moment == "after":
            disk.apply(call, *arguments)
            states.extend(disk.states_after_power_loss())

    monkeypatch.setattr(durable, "os", SeenOs(tell))
    SCENARIOS[name].act(store)
    monkeypatch.setattr(durable, "os", os)
    for state in states:
        yield False, state
    for state in disk.states_after_power_loss():
        yield True, state


def versions_after_power_loss(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[object], set[object]]:
    """Versions found after a loss of power at any call, and after the action was over."""
    found: tuple[set[object], set[object]] = set(), set()
    for i, (is_over, state) in enumerate(states_after_power_loss(name, root, monkeypatch)):
        folder = root / f"state-{i}"
        folder.mkdir()
        for file, content in state.items():
            (folder / file).write_bytes(content)
        found[is_over].add(version_in(folder))
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_power_lost_at_any_call_leaves_one_whole_version(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = SCENARIOS[name]
    during, after = versions_after_power_loss(name, tmp_path, monkeypatch)
    assert during == {scenario.before, scenario.after}
    assert after == {scenario.after}


def test_disk_finds_a_writer_that_does_not_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model itself: without the sync of the file parts of it are found, without that of the
    # folder the old version although the call was over.
    name = "flush of a second version"
    real = SeenOs.fsync
    for what in ("file", "folder"):
        (tmp_path / what).mkdir()

        def fsync(self: SeenOs, handle: int, what: str = what) -> None:
            if os.path.isdir(f"/proc/self/fd/{handle}") is (what == "file"):
                real(self, handle)

        with monkeypatch.context() as patch:
            patch.setattr(SeenOs, "fsync", fsync)
            during, after = versions_after_power_loss(name, tmp_path / what, patch)
        expected = {SCENARIOS[name].before, SCENARIOS[name].after}
        assert not during <= expected if what == "file" else after == expected
