"""state files and SessionStore: what is written when, and what is refused when read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import threading
from typing import TYPE_CHECKING

import pytest

from kqview import errors
from kqview.state import SessionStore, files, read_state, write_state
from kqview.state.trailer import NO_MARKS, SlotMarks, StateFacts

if TYPE_CHECKING:
    from pathlib import Path

FACTS = StateFacts("model", "f16")
BLOB = b"SES1" + bytes(100)


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


def blob_of(value: int, n: int = 100) -> bytes:
    return b"SES1" + bytes([value]) * (n - 4)


# ---- files


def test_file_is_the_blob_and_a_trailer_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "slot.ses1"
    n_bytes = write_state(path, BLOB, FACTS)
    data = path.read_bytes()
    assert len(data) == n_bytes
    assert data.startswith(BLOB)
    assert data.endswith(b"KQVIEW01")
    (n_text,) = struct.unpack("<I", data[-12:-8])
    text = json.loads(data[-12 - n_text : -12])
    assert (text["model"], text["kv_type"]) == ("model", "f16")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["slot.ses1"]
    assert read_state(path, FACTS) == read_state(path) == BLOB


def test_file_without_a_trailer_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "slot.ses1"
    assert write_state(path, BLOB) == len(BLOB)
    assert path.read_bytes() == read_state(path, FACTS) == BLOB


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "slot.ses1"
    write_state(path, BLOB, FACTS, SlotMarks(n_exact=12))
    data = path.read_bytes()
    for at in range(len(data) - 8):  # without the mark at the end it is a file without a trailer
        changed = bytearray(data)
        changed[at] ^= 1
        path.write_bytes(changed)
        with pytest.raises(errors.StateError):
            read_state(path, FACTS)


@pytest.mark.parametrize("facts", [StateFacts("other", "f16"), StateFacts("model", "f32")])
def test_file_of_another_model_or_type_is_a_mismatch(tmp_path: Path, facts: StateFacts) -> None:
    write_state(tmp_path / "slot", BLOB, FACTS)
    with pytest.raises(errors.StateMismatch, match=r"another model|kv_type='f16'"):
        read_state(tmp_path / "slot", facts)


def trailer_of(content: dict[str, object]) -> bytes:
    text = json.dumps(content, separators=(",", ":")).encode()
    return text + struct.pack("<I", len(text)) + b"KQVIEW01"


def test_trailer_of_version_1_is_read_with_its_own_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "old"
    content = {"version": 1, "model": "sampled", "kv_type": "f16"}
    path.write_bytes(BLOB + trailer_of({**content, "sha256": hashlib.sha256(BLOB).hexdigest()}))
    assert read_state(path) == read_state(path, StateFacts("whole", "f16", "sampled")) == BLOB
    for facts in (StateFacts("sampled", "f16", "other"), StateFacts("sampled", "f16")):
        with pytest.raises(errors.StateMismatch, match="another model"):
            read_state(path, facts)
    path.write_bytes(BLOB + trailer_of({**content, "sha256": hashlib.sha256(b"").hexdigest()}))
    with pytest.raises(errors.StateFormatError, match="checksum"):
        read_state(path)


def test_checksum_covers_the_fields_of_the_trailer(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    write_state(path, BLOB, FACTS, SlotMarks(n_exact=12))
    data = path.read_bytes()
    for old, new in ((b'"n_exact":12', b'"n_exact":99'), (b'"n_exact":12', b'"n_other":12')):
        assert old in data
        path.write_bytes(data.replace(old, new))
        with pytest.raises(errors.StateFormatError, match="checksum"):
            read_state(path)


@pytest.mark.parametrize("n_exact", [-1, True, 1.5, "1"])
def test_mark_that_is_no_count_is_refused(tmp_path: Path, n_exact: object) -> None:
    path = tmp_path / "slot"
    write_state(path, BLOB, FACTS, SlotMarks(n_exact=n_exact))  # type: ignore[arg-type]
    with pytest.raises(errors.StateFormatError, match="n_exact"):
        read_state(path)


@pytest.mark.parametrize(
    "content", [[], 1, None, {"version": 2, "x": []}, {"version": 2, "x": {}}, {"version": 3}, {}]
)
def test_trailer_of_another_kind_is_refused(tmp_path: Path, content: object) -> None:
    path = tmp_path / "slot"
    path.write_bytes(BLOB + trailer_of(content))  # type: ignore[arg-type]
    with pytest.raises(errors.StateFormatError, match="trailer"):
        read_state(path)


def test_old_file_stays_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slot"
    write_state(path, BLOB)
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise OSError("disk full")

            patch.setattr(files.os, name, fail)
            with pytest.raises(OSError, match="disk full"):
                write_state(path, blob_of(1))
        assert path.read_bytes() == BLOB
        assert os.listdir(tmp_path) == ["slot"]


def test_bytes_are_on_the_disk_before_they_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def note(*args: object, name: str = name, real: object = real) -> None:
            calls.append(name)
            real(*args)  # type: ignore[operator]

        monkeypatch.setattr(files.os, name, note)
    write_state(tmp_path / "slot", BLOB)
    assert calls[:2] == ["fsync", "replace"]


def test_what_is_no_blob_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.StateFormatError, match="magic"):
        write_state(tmp_path / "slot", b"GGSQ")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(errors.StateFormatError, match="regular file"):
        read_state(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such file"):
        read_state(tmp_path / "missing")


# ---- sessions


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
    # Saved again it is in memory, and its file is gone with what it held.
    store.save("b", FakeSlot(blob_of(9)))
    assert "b.ses1" not in os.listdir(tmp_path)


def test_session_larger_than_memory_goes_to_a_file_itself(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, max_bytes=250)
    store.save("small", FakeSlot(blob_of(1)))
    info = store.save("large", FakeSlot(blob_of(2, 1000)))
    assert info.path == tmp_path / "large.ses1"
    assert os.listdir(tmp_path) == ["large.ses1"]


def test_session_stays_in_memory_when_its_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SessionStore(tmp_path, max_sessions=1)
    store.save("a", FakeSlot(blob_of(1)))

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            store.save("b", FakeSlot(blob_of(2)))
    slot = FakeSlot()
    store.restore("a", slot)
    assert slot.blob == blob_of(1)


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
        with pytest.raises(errors.RequestError, match="no name for a session"):
            call()


def test_store_needs_a_folder_and_limits(tmp_path: Path) -> None:
    with pytest.raises(errors.RequestError, match="no folder"):
        SessionStore(tmp_path / "missing")
    with pytest.raises(errors.RequestError, match="0 and above"):
        SessionStore(max_bytes=-1)
    store = SessionStore()
    store.save("a", FakeSlot())
    with pytest.raises(errors.RequestError, match="no directory"):
        store.flush()


def test_store_is_used_from_many_threads(tmp_path: Path) -> None:
    store = SessionStore(tmp_path, max_sessions=3)
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for round_ in range(20):
                store.save(f"s{i}", FakeSlot(blob_of(i + round_)))
                slot = FakeSlot()
                store.restore(f"s{i}", slot)
                assert slot.blob == blob_of(i + round_)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store.sessions()) == 6
