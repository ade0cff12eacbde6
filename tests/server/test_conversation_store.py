"""ConversationStore: what stays of chat sessions and what leaves, over restarts and failures."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview.errors import RequestError
from kqview.server.apps import conversation_store
from kqview.server.apps.conversation_store import ConversationStore, Key, TurnMessage
from kqview.server.config import ChatSessions
from kqview.server.errors import StorageFailed, StorageFull

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = Key("owner", "session")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        return self.now_s


def store(clock: Clock | None = None, fits: Any = None, **limits: Any) -> ConversationStore:
    sessions = ChatSessions(**limits)
    opened.append(ConversationStore(lambda: sessions, clock=clock or Clock(), fits=fits))
    return opened[-1]


opened: list[ConversationStore] = []


@pytest.fixture(autouse=True)
def _closed_stores() -> Iterator[None]:
    """Python 3.13 and later warn of databases that are left to the collector."""
    yield
    while opened:
        opened.pop().close()


def append(to: ConversationStore, n: int, key: Key = KEY, **options: Any) -> set[Key]:
    """Turn *n* of a session."""
    return to.append(key, f"prompt {n}", f"answer {n}", model="model", **options)


def numbers(of: ConversationStore, key: Key = KEY) -> list[int]:
    """Turns that are stored, each whole."""
    messages = of.read(key).messages
    found = [int(message.content.split()[1]) for message in messages[::2]]
    assert list(messages) == [
        message
        for n in found
        for message in (TurnMessage("user", f"prompt {n}"), TurnMessage("assistant", f"answer {n}"))
    ]
    return found


def database_of(kept: ConversationStore) -> sqlite3.Connection:
    return kept._db  # pyright: ignore[reportPrivateUsage]


# ---- limits


def test_oldest_turns_leave_in_pairs():
    kept = store(max_messages=7)
    for n in range(5):
        append(kept, n)
    assert numbers(kept) == [2, 3, 4]
    (info,) = kept.list("owner")
    assert (info.n_messages, info.title, info.model) == (6, "prompt 0", "model")


def test_prompts_begin_alike_for_some_turns_after_messages_have_left():
    kept = store(max_messages=16)
    skipped: list[tuple[int, int]] = []
    for n in range(20):
        append(kept, n, n_skipped=kept.read(KEY).n_skipped)
        history = kept.read(KEY)
        skipped.append((n, numbers(kept)[history.n_skipped // 2]))
    # First turn of the prompt after each turn: it moves by more than one at a time, seldom.
    firsts = [first for _, first in skipped]
    assert firsts == sorted(firsts)
    assert firsts[7] == 0
    assert len(set(firsts[8:])) <= 5
    assert all(n - first >= 4 for n, first in skipped[8:])


def test_prompt_that_left_turns_out_goes_on_leaving_them_out():
    kept = store()
    for n in range(4):
        append(kept, n)
    append(kept, 4, n_skipped=4)
    assert kept.read(KEY).n_skipped == 4
    append(kept, 5, n_skipped=0)  # a longer prompt again would begin differently
    assert kept.read(KEY).n_skipped == 4
    assert numbers(kept) == [0, 1, 2, 3, 4, 5]


def test_replacing_all_turns_of_prompts_brings_back_those_that_were_left_out():
    kept = store()
    for n in range(4):
        append(kept, n)
    append(kept, 4, n_skipped=6)
    append(kept, 5, n_replaced=6)
    assert numbers(kept) == [0, 1, 5]
    assert kept.read(KEY).n_skipped == 0


def test_owner_with_most_sessions_loses_the_one_unused_for_longest():
    clock = Clock()
    kept = store(clock, max_sessions=4)
    few = Key("few", "only")
    append(kept, 0, few)
    for n in range(5):
        clock.now_s += 1
        append(kept, n, Key("many", f"{n}"))
    assert kept.keys() == {few, *(Key("many", f"{n}") for n in (2, 3, 4))}


def test_bytes_of_all_sessions_are_limited_and_those_of_one_to_an_eighth():
    kept = store(max_bytes=80_000)
    for session in range(20):
        kept.append(Key("owner", f"{session}"), "x" * 5000, "y", model="m")
    assert 10 <= len(kept.keys()) <= 14
    for n in range(9):
        kept.append(KEY, f"{n}" + "é" * 1000, "y", model="m")
    assert [m.content[0] for m in kept.read(KEY).messages[::2]] == ["5", "6", "7", "8"]
    with pytest.raises(StorageFull, match="a session may have 10000"):
        kept.append(KEY, "x" * 10_000, "y", model="m")
    assert [m.content[0] for m in kept.read(KEY).messages[::2]] == ["5", "6", "7", "8"]


def test_without_messages_nothing_is_kept():
    kept = store(max_messages=1)
    append(kept, 0)
    assert kept.keys() == set()


# ---- owners and names


def test_owners_may_use_one_id():
    kept = store()
    append(kept, 1, Key("a", "same"))
    append(kept, 2, Key("b", "same"))
    assert (numbers(kept, Key("a", "same")), numbers(kept, Key("b", "same"))) == ([1], [2])
    assert kept.delete(Key("a", "same")) == {Key("a", "same")}
    assert kept.delete(Key("a", "same")) == set()
    assert kept.list("a") == []
    assert numbers(kept, Key("b", "same")) == [2]


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a' OR 1=1 --", "İstanbul", "🙂", "a\u202eb", " ", "%", "x" * 256]
)
def test_any_text_is_a_name(tmp_path: Path, name: str):
    kept = store(database=str(tmp_path / "db"))
    append(kept, 1, Key("o", name))
    append(kept, 2, Key("o", f"{name}2"))
    kept.close()
    kept = store(database=str(tmp_path / "db"))
    assert [one.session_id for one in kept.list("o")] == [f"{name}2", name]
    assert numbers(kept, Key("o", name)) == [1]
    kept.close()


def test_title_is_one_short_line():
    kept = store()
    kept.append(KEY, " a\n\n b\t" + "c" * 500, "answer", model="m")
    (info,) = kept.list("owner")
    assert info.title.startswith("a b c")
    assert len(info.title) == 80


# ---- the file


def test_sessions_are_there_after_a_restart(tmp_path: Path):
    path = tmp_path / "sessions.db"
    kept = store(database=str(path))
    for n in range(3):
        append(kept, n)
    before = kept.list("owner")
    kept.close()
    kept = store(database=str(path))
    assert numbers(kept) == [0, 1, 2]
    assert kept.list("owner") == before
    kept.close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_second_process_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = str(tmp_path / "db")
    kept = store(database=path)
    monkeypatch.setattr(conversation_store, "_OPENS_WITHIN_S", 0.0)
    with pytest.raises(RequestError, match="another process has it open"):
        store(database=path)
    append(kept, 1)
    kept.close()
    second = store(database=path)
    assert numbers(second) == [1]
    second.close()


def damaged(path: Path) -> None:
    kept = store(database=str(path))
    for n in range(3):
        kept.append(Key("owner", f"{n}"), "x" * 9000, "y", model="m")
    kept.close()
    data = bytearray(path.read_bytes())
    data[5000:9000] = bytes(range(250)) * 16
    path.write_bytes(data)


def of_another_program(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE precious (value)")
    db.commit()
    db.close()


def of_a_newer_version(path: Path) -> None:
    store(database=str(path)).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()


def of_text(path: Path) -> None:
    path.write_text("[models]\n" * 100)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (damaged, "damaged|malformed"),
        (of_another_program, "another program"),
        (of_a_newer_version, "version 99"),
        (of_text, "not a database"),
        (Path.mkdir, "unable to open"),
    ],
    ids=["damaged", "foreign", "newer", "text", "folder"],
)
def test_file_that_is_no_sound_database_is_refused_and_stays_as_it_is(
    tmp_path: Path, make: Callable[[Path], None], reason: str
):
    path = tmp_path / "db"
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(RequestError, match=reason) as caught:
        store(database=str(path))
    assert str(path) in str(caught.value)
    assert before is None or path.read_bytes() == before


def test_folder_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(RequestError, match="No such file"):
        store(database=str(tmp_path / "none" / "db"))


def test_full_disk_leaves_the_session_as_it_was(tmp_path: Path):
    kept = store(database=str(tmp_path / "db"))
    append(kept, 0)
    db = database_of(kept)
    n_pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {n_pages}")
    with pytest.raises(StorageFull, match="disk"):
        kept.append(KEY, "x" * 100_000, "y", model="m")
    assert numbers(kept) == [0]
    db.execute("PRAGMA max_page_count = 1000000")
    append(kept, 1)
    assert numbers(kept) == [0, 1]
    kept.close()


def test_database_that_breaks_while_it_is_open_is_an_error_of_ours(tmp_path: Path):
    kept = store(database=str(tmp_path / "db"))
    append(kept, 0)
    database_of(kept).execute("DROP TABLE turns")
    for use in (lambda: kept.read(KEY), lambda: append(kept, 1)):
        with pytest.raises(StorageFailed, match="turns"):
            use()
    kept.close()
