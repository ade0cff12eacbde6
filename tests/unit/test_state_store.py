"""Sessions in memory and in files, and what crashes of the process or the machine leave of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies as st

from kqview import durable, errors
from kqview.state import SessionStore, read_state
from kqview.state.files import SlotMarks, StateFacts
from tests.support.sessions import BLOB, SCENARIOS, Disk, FakeSlot, SeenOs, blob_of, version_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_marks_of_a_slot_stay_with_its_blob(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, max_sessions=1)
    store.save("file", FakeSlot(marks=SlotMarks(n_exact=7)))
    store.save("memory", FakeSlot(marks=SlotMarks(n_exact=0)))
    store.save("unknown", FakeSlot())
    for again in (store, SessionStore(tmp_path)):
        for name, n_exact in (("file", 7), ("memory", 0), ("unknown", None)):
            slot = FakeSlot(marks=SlotMarks(n_exact=99))
            again.restore(name, slot)
            assert slot.marks == SlotMarks(n_exact)
        store.flush()


def test_name_that_is_no_text_is_refused() -> None:
    store = SessionStore()
    for call in (store.save, store.restore):
        with pytest.raises(errors.RequestError, match="5 cannot be the name of a session"):
            call(5, FakeSlot())  # type: ignore[arg-type]


def test_session_is_saved_restored_listed_and_removed() -> None:
    store = SessionStore()
    info = store.save("a", FakeSlot())
    assert (info.name, info.n_bytes, info.path) == ("a", 104, None)
    assert store.sessions() == [info]
    slot = FakeSlot(b"")
    assert store.restore("a", slot) == 104
    assert slot.blob == BLOB
    again = store.save("a", FakeSlot(blob_of(2)))
    assert again.created_s == info.created_s
    assert again.updated_s >= info.updated_s
    store.remove("a")
    assert store.sessions() == []
    for call in (lambda: store.remove("a"), lambda: store.restore("a", slot)):
        with pytest.raises(errors.RequestError, match="no session 'a'"):
            call()


def test_checkpoints_count_towards_the_size_and_stay_with_their_blob(tmp_path: Path) -> None:
    marks = SlotMarks(3, checkpoints=b"SCP1" + b"\0" * 96)
    store = SessionStore(tmp_path, max_bytes=250)
    infos = [store.save(name, FakeSlot(marks=marks)) for name in "ab"]
    assert [info.n_bytes for info in infos] == [204, 204]
    assert [info.path is None for info in store.sessions()] == [False, True]
    store.flush()
    for again in (store, SessionStore(tmp_path)):
        assert [info.n_bytes for info in again.sessions()] == [204, 204]
        for name in "ab":
            slot = FakeSlot()
            assert again.restore(name, slot) == 104
            assert slot.marks == marks


@pytest.mark.parametrize("limits", [{"max_sessions": 2}, {"max_bytes": 250}])
def test_full_store_without_a_folder_refuses(limits: dict[str, int]) -> None:
    store = SessionStore(**limits)
    store.save("a", FakeSlot(blob_of(1)))
    store.save("b", FakeSlot(blob_of(2)))
    with pytest.raises(errors.CapacityError, match="give the store a directory"):
        store.save("c", FakeSlot(blob_of(3)))
    store.save("a", FakeSlot(blob_of(4)))  # in place of its own
    assert [info.name for info in store.sessions()] == ["a", "b"]


@pytest.mark.parametrize("limits", [{"max_sessions": 2}, {"max_bytes": 250}])
def test_session_used_longest_ago_goes_to_a_file(tmp_path: Path, limits: dict[str, int]) -> None:
    store = SessionStore(tmp_path, **limits)
    for i, name in enumerate("ab"):
        store.save(name, FakeSlot(blob_of(i)))
    store.restore("a", FakeSlot())
    store.save("c", FakeSlot(blob_of(2)))
    assert os.listdir(tmp_path) == ["b.ses1"]
    for i, name in enumerate("abc"):
        slot = FakeSlot()
        store.restore(name, slot)
        assert slot.blob == blob_of(i)
    # Saved again it is in memory; its file keeps the version before until the next one is written.
    assert store.save("b", FakeSlot(blob_of(9))).path is None
    assert read_state(tmp_path / "b.ses1") == blob_of(1)
    slot = FakeSlot()
    store.restore("b", slot)
    assert slot.blob == blob_of(9)
    store.flush()
    assert read_state(tmp_path / "b.ses1") == blob_of(9)


def test_session_moved_to_a_file_leaves_memory_once_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore()
    store.save("a", FakeSlot(blob_of(1)))
    path = tmp_path / "mine"
    for call in ("open", "write", "fsync", "replace"):

        def fail(*_: object) -> None:
            raise OSError("disk failed")

        with monkeypatch.context() as patch:
            patch.setattr(durable.os, call, fail)
            with pytest.raises(OSError, match="disk failed"):
                store.move_to_file("a", path)
        assert [info.name for info in store.sessions()] == ["a"]
        assert os.listdir(tmp_path) == []
    assert store.move_to_file("a", path) == len(blob_of(1))
    assert store.sessions() == []
    assert read_state(path) == blob_of(1)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    store.save("a", FakeSlot(blob_of(2)))
    with pytest.raises(OSError, match="not a regular file"):
        store.move_to_file("a", path)
    assert [info.name for info in store.sessions()] == ["a"]
    assert os.listdir(tmp_path) == ["mine"]


def test_session_larger_than_memory_goes_to_a_file_itself(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, max_bytes=250)
    store.save("small", FakeSlot(blob_of(1)))
    info = store.save("large", FakeSlot(blob_of(2, 1000)))
    assert info.path == tmp_path / "large.ses1"
    assert os.listdir(tmp_path) == ["large.ses1"]


def test_files_of_another_store_are_found_and_checked(tmp_path: Path) -> None:
    first = SessionStore(tmp_path)
    first.save("a", FakeSlot(blob_of(1)))
    first.flush()
    second = SessionStore(tmp_path)
    assert [info.name for info in second.sessions()] == ["a"]
    slot = FakeSlot()
    second.restore("a", slot)
    assert slot.blob == blob_of(1)
    with pytest.raises(errors.StateMismatch):
        second.restore("a", FakeSlot(facts=StateFacts("other", "f16")))
    with pytest.raises(errors.StateMismatch):
        first.restore("a", FakeSlot(facts=StateFacts("model", "f32")))
    second.remove("a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        *("", "a/b", "..", "a..b", ".hidden", "a\\b", "a\0", " a", "a ", "a.", "\ud800", "x" * 201),
        *("C:x", "a\x85b", "\uff0e", "*", "\ufeffa"),
    ],
)
def test_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    store = SessionStore(tmp_path)
    for call in (
        lambda: store.save(name, FakeSlot()),
        lambda: store.restore(name, FakeSlot()),
        lambda: store.remove(name),
    ):
        with pytest.raises(errors.RequestError, match="the name of a session"):
            call()


def test_store_needs_a_folder_and_limits(tmp_path: Path) -> None:
    with pytest.raises(errors.RequestError, match="folder"):
        SessionStore(tmp_path / "missing")
    with pytest.raises(errors.RequestError, match="max_bytes -1"):
        SessionStore(max_bytes=-1)
    store = SessionStore()
    store.save("a", FakeSlot())
    with pytest.raises(errors.RequestError, match="directory"):
        store.flush()


# ---- what was saved stays


def restored(store: SessionStore, name: str) -> bytes:
    slot = FakeSlot(b"")
    store.restore(name, slot)
    return slot.blob


def test_flush_writes_what_it_can_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(tmp_path)
    for i, name in enumerate("abcd"):
        store.save(name, FakeSlot(blob_of(i)))
    store.flush()
    for i, name in enumerate("abcd"):
        store.save(name, FakeSlot(blob_of(10 + i)))
    real = os.replace

    def fail_for_b(source: str, target: str) -> None:
        if target.endswith("b.ses1"):
            raise OSError(28, "No space left on device")
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "replace", fail_for_b)
        with pytest.raises(OSError, match=r"No space left.*nothing was changed.*b\.ses1"):
            store.flush()
    again = SessionStore(tmp_path)
    assert [restored(again, name) for name in "abcd"] == [blob_of(i) for i in (10, 1, 12, 13)]
    assert [restored(store, name) for name in "abcd"] == [blob_of(i) for i in (10, 11, 12, 13)]
    assert [info.path is None for info in store.sessions()] == [False, True, False, False]
    n_written: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "replace", lambda a, b: (n_written.append(b), real(a, b)))
        store.flush()
    assert n_written == [str(tmp_path / "b.ses1")]
    assert restored(SessionStore(tmp_path), "b") == blob_of(11)


def test_save_that_finds_no_room_changes_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(tmp_path, max_bytes=250)
    store.save("a", FakeSlot(blob_of(1)))
    store.save("b", FakeSlot(blob_of(2)))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "fsync", fail)
        for n_bytes in (100, 1000):
            with pytest.raises(OSError, match="No space left"):
                store.save("c", FakeSlot(blob_of(3, n_bytes)))
        with pytest.raises(OSError, match="No space left"):
            store.save("a", FakeSlot(blob_of(4, 1000)))
    assert [info.name for info in store.sessions()] == ["a", "b"]
    assert [restored(store, name) for name in "ab"] == [blob_of(1), blob_of(2)]
    assert os.listdir(tmp_path) == []


def test_session_that_cannot_be_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(tmp_path)
    store.save("a", FakeSlot(blob_of(1)))
    store.flush()

    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(durable.os, "unlink", fail)
        with pytest.raises(PermissionError, match=r"a\.ses1"):
            store.remove("a")
    assert restored(store, "a") == restored(SessionStore(tmp_path), "a") == blob_of(1)


def test_what_another_store_wrote_counts(tmp_path: Path) -> None:
    first, second = (SessionStore(tmp_path, max_sessions=1) for _ in range(2))
    first.save("a", FakeSlot(blob_of(1)))
    first.flush()
    second.save("a", FakeSlot(blob_of(2, 200)))
    assert restored(first, "a") == blob_of(1)  # the second one has not written it
    second.flush()
    assert restored(first, "a") == blob_of(2, 200)
    (info,) = first.sessions()
    assert info.n_bytes == 200
    # Leaving the memory of the first one, its old version replaces nothing.
    first.save("b", FakeSlot(blob_of(3)))
    first.save("c", FakeSlot(blob_of(4)))
    assert restored(second, "a") == blob_of(2, 200)
    # A later version in memory is another matter.
    first.save("a", FakeSlot(blob_of(5)))
    assert restored(first, "a") == blob_of(5)
    second.remove("b")
    assert [info.name for info in first.sessions()] == ["a", "c"]
    with pytest.raises(errors.RequestError, match="no session 'b'"):
        first.restore("b", FakeSlot())


def test_damaged_file_is_listed_refused_and_removed(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    for name, at in (("length", -12), ("blob", 50)):
        store.save(name, FakeSlot())
        store.flush()
        data = bytearray((tmp_path / f"{name}.ses1").read_bytes())
        data[at] ^= 0x7F
        (tmp_path / f"{name}.ses1").write_bytes(data)
    for each in (store, SessionStore(tmp_path)):
        assert [info.name for info in each.sessions()] == ["blob", "length"]
        for name in ("length", "blob"):
            with pytest.raises(errors.StateFormatError, match="altered"):
                each.restore(name, FakeSlot())
    for name in ("length", "blob"):
        store.remove(name)
    assert os.listdir(tmp_path) == []


def test_only_files_that_are_sessions_are_listed(tmp_path: Path) -> None:
    for name in (".hidden.ses1", ".ses1", "a.ses1.bak", ".kqview-0123456789abcdef.part"):
        (tmp_path / name).write_bytes(BLOB)
    (tmp_path / "folder.ses1").mkdir()
    (tmp_path / "good.ses1").write_bytes(BLOB)
    assert [info.name for info in SessionStore(tmp_path).sessions()] == ["good"]
    # Only what our own writers leave is removed.
    left = {".hidden.ses1", ".ses1", "a.ses1.bak", "folder.ses1", "good.ses1"}
    assert set(os.listdir(tmp_path)) == left


def test_two_processes_on_one_folder_do_no_harm(tmp_path: Path) -> None:
    script = """
import sys
from kqview.errors import RequestError
from kqview.state import SessionStore
from tests.support.sessions import FakeSlot, blob_of
folder, who = sys.argv[1], int(sys.argv[2])
for i in range(40):
    store = SessionStore(folder, max_sessions=i % 3)  # opening cleans up, too
    for name in "ab":
        store.save(name, FakeSlot(blob_of(who, 20_000 * who)))
    store.flush()
    for info in store.sessions():
        slot = FakeSlot(b"")
        try:
            store.restore(info.name, slot)
        except RequestError:
            continue  # the other one has removed it
        value = slot.blob[-1]
        assert slot.blob == blob_of(value, 20_000 * value), info
    if i % 5 == 0:
        try:
            store.remove("b")
        except RequestError:
            pass
"""
    commands = [[sys.executable, "-c", script, str(tmp_path), who] for who in "12"]
    running = [subprocess.Popen(c, stderr=subprocess.PIPE, text=True) for c in commands]
    for process in running:
        _, trouble = process.communicate(timeout=60)
        assert process.returncode == 0, trouble
    assert {path.suffix for path in tmp_path.iterdir()} == {".ses1"}


STEPS = st.one_of(
    st.tuples(st.just("save"), st.sampled_from("abc"), st.integers(10, 400)),
    st.tuples(st.just("remove"), st.sampled_from("abc"), st.just(0)),
    st.tuples(st.sampled_from(["flush", "crash", "restore"]), st.sampled_from("abc"), st.just(0)),
)


@given(
    steps=st.lists(STEPS, max_size=40),
    limits=st.fixed_dictionaries({"max_sessions": st.integers(0, 3), "max_bytes": st.just(500)}),
)
@settings(max_examples=60, deadline=None)
def test_any_run_of_calls_and_crashes_loses_nothing_that_was_flushed(
    steps: list[tuple[str, str, int]], limits: dict[str, int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = SessionStore(folder, **limits)
        # What may be found after a crash: what was flushed and what was saved since; b"": nothing.
        versions: dict[str, list[bytes]] = {name: [b""] for name in "abc"}
        for i, (step, name, n_bytes) in enumerate(steps):
            known = [info.name for info in store.sessions()]
            assert known == [other for other in "abc" if versions[other][-1]]
            if step == "save":
                blob = blob_of(i, n_bytes)
                assert store.save(name, FakeSlot(blob)).n_bytes == n_bytes
                versions[name].append(blob)
            elif step == "flush":
                store.flush()
                versions = {each: [found[-1]] for each, found in versions.items()}
            elif step == "crash":
                store = SessionStore(folder, **limits)
                for each, found in versions.items():
                    there = [info.name for info in store.sessions()]
                    now = restored(store, each) if each in there else b""
                    assert now in found
                    versions[each] = [now]
            elif name in known:
                assert restored(store, name) == versions[name][-1]
                if step == "remove":
                    store.remove(name)
                    versions[name] = [b""]
        in_memory = [info for info in store.sessions() if info.path is None]
        assert len(in_memory) <= limits["max_sessions"]
        assert sum(info.n_bytes for info in in_memory) <= limits["max_bytes"]


# ---- crashes


def test_process_killed_at_any_call_leaves_one_whole_version(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.sessions", str(tmp_path)]
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
