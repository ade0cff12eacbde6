"""ConversationStore: the turns of conversations, in a SQLite database or in memory.

A conversation belongs to the key that made it (`Caller.owner`); two keys may use one id. It is a
list of turns, each a prompt and its answer. System prompts, personas and dropped reasoning are no
part of it.

In memory it is SQLite as well, so that both keep the same rules. A file has a write-ahead log that
is synced at each commit: after a crash or a power failure there are all turns whose `append`
returned. One process has it open at a time.

One thread at a time; methods block.
"""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from kqview.errors import RequestError
from kqview.server.config import ChatSessions
from kqview.server.errors import StorageFailed, StorageFull
from kqview.server.web.described import about

_APPLICATION: Final = 0x6B716373  # "kqcs", which tells the file from other databases
_VERSION: Final = 1
_OPENS_WITHIN_S: Final = 5.0  # a process that ends may still have the file
_TURN_BYTES: Final = 200  # of a turn and of a conversation, besides their texts
_SESSION_BYTES: Final = 600
_SHARE: Final = 8  # a conversation may have the 8th part of all bytes
_TITLE_CHARACTERS: Final = 80
_TABLES: Final = """
CREATE TABLE sessions (
    id INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    title TEXT NOT NULL,
    model TEXT NOT NULL,
    created_s REAL NOT NULL,
    used_s REAL NOT NULL,
    first INTEGER NOT NULL,
    n_turns INTEGER NOT NULL,
    n_bytes INTEGER NOT NULL,
    UNIQUE (owner, name)
);
CREATE INDEX sessions_used ON sessions (used_s);
CREATE TABLE turns (
    session INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    prompt TEXT NOT NULL,
    answer TEXT NOT NULL,
    n_bytes INTEGER NOT NULL,
    PRIMARY KEY (session, number)
) WITHOUT ROWID;
"""
# Removes the oldest turns of a conversation, so that there are at most so many, of so many bytes.
_CUT: Final = """
DELETE FROM turns WHERE session = ?1 AND number IN (
    SELECT number FROM (
        SELECT number, count(*) OVER newest AS n, sum(n_bytes) OVER newest AS n_bytes
        FROM turns WHERE session = ?1 WINDOW newest AS (ORDER BY number DESC)
    ) WHERE n > ?2 OR n_bytes > ?3
)
"""


class Key(NamedTuple):
    """What names a conversation: whose it is, and the id that the client gave it."""

    owner: str
    session_id: str


class TurnMessage(msgspec.Struct, frozen=True):
    """What the user said, or what was answered."""

    role: Annotated[
        Literal["user", "assistant"], about('Who speaks: "user" or "assistant".', "user")
    ]
    content: Annotated[str, about("What was said.", "Who is Anna?")]


class ConversationInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that the server keeps, without its messages."""

    session_id: Annotated[str, about("Its name, as the client chose it.", "s1")]
    title: Annotated[str, about("How it begins.", "Who is Anna?")]
    model: Annotated[str, about("Model that answered last.", "demo")]
    n_messages: Annotated[int, about("Messages in it.", 2)]
    created_s: Annotated[float, about("When it began, in seconds since 1970.", 1767225600.0)]
    used_s: Annotated[float, about("When it was last used, the same.", 1767225600.0)]


class History(NamedTuple):
    """What is stored of a conversation; empty if nothing is.

    Attributes:
        messages: Prompts and answers in turn, oldest first.
        n_skipped: How many of them, from the start, are no part of prompts any more.
        n_bytes: Size of their texts in UTF-8.
    """

    messages: Sequence[TurnMessage] = ()
    n_skipped: int = 0
    n_bytes: int = 0


class ConversationStore:
    """All conversations."""

    def __init__(
        self,
        limits: Callable[[], ChatSessions],
        *,
        clock: Callable[[], float] = time.time,
        fits: Callable[[int], bool] | None = None,
    ) -> None:
        """Open the database, or make it.

        Args:
            limits: Table ``[sessions]`` of the configuration, which may change; ``database`` counts
                at the start only.
            clock: Seconds since 1970.
            fits: Counts so many bytes of conversations in memory, if they fit; False if not. Called
                after each change where there is no database.

        Raises:
            RequestError: The database cannot be opened: another process has it, it is damaged, or
                is not one of conversations.
        """
        self._limits = limits
        self._clock = clock
        self._fits = fits if limits().database is None else None
        self._db = _opened(limits().database)

    def close(self) -> None:
        """Close the database; idempotent."""
        self._db.close()

    # ---- a conversation

    def read(self, key: Key) -> History:
        """What is stored of a conversation.

        Raises:
            StorageFailed: The database cannot be read.
        """
        with _failures():
            row = self._db.execute(
                "SELECT id, first, n_bytes FROM sessions "
                "WHERE owner = ? AND name = ? AND used_s >= ?",
                (*key, self._expired_s),
            ).fetchone()
            if row is None:
                return History()
            session, first, n_bytes = row
            turns = self._db.execute(
                "SELECT number, prompt, answer FROM turns WHERE session = ? ORDER BY number",
                (session,),
            ).fetchall()
        messages = [
            message
            for _, prompt, answer in turns
            for message in (TurnMessage("user", prompt), TurnMessage("assistant", answer))
        ]
        return History(messages, 2 * sum(number < first for number, _, _ in turns), n_bytes)

    def append(
        self,
        key: Key,
        prompt: str,
        answer: str,
        *,
        model: str,
        n_skipped: int = 0,
        n_replaced: int = 0,
        in_use: Collection[Key] = (),
    ) -> set[Key]:
        """Add a turn to a conversation, or begin one with it; it is synced when this returns.

        What is over a limit leaves: the oldest turns of the conversation, and of all conversations
        the least recently used one of the owner who has most. If turns leave that were in prompts,
        prompts leave out a quarter of ``max_messages`` more, so that those of the next turns begin
        alike and reuse the cache.

        Args:
            key: The conversation.
            prompt: What the user wrote.
            answer: What the model answered, without dropped reasoning.
            model: Id of the model.
            n_skipped: As of `History`: messages of what `read` returned that prompts leave out.
            n_replaced: So many of the last messages leave first; even.
            in_use: Conversations that do not expire yet.

        Returns:
            The conversations that left.

        Raises:
            StorageFull: There is no room for it: on the disk, or in memory.
            StorageFailed: The database cannot be written.
        """
        n_most, most_bytes = self.limits.max_messages // 2, self.limits.max_bytes // _SHARE
        n_bytes = _n_bytes(prompt) + _n_bytes(answer) + _TURN_BYTES
        if n_most < 1:
            return set()
        if _SESSION_BYTES + n_bytes > most_bytes:
            raise StorageFull(
                f"the turn has {n_bytes} bytes, a session may have {most_bytes}, an eighth of "
                "max_bytes; send a shorter message"
            )
        now_s = self._clock()
        with self._transaction() as db:
            gone = self._sweep({*in_use, key})
            session, first, oldest, number = self._session(key, _title(prompt), now_s)
            if n_replaced:
                number = max(oldest, number - n_replaced // 2)
                db.execute("DELETE FROM turns WHERE session = ? AND number >= ?", (session, number))
                if number <= first:  # prompts begin with the oldest turn again
                    first = oldest
                if number == oldest:
                    title = _title(prompt)
                    db.execute("UPDATE sessions SET title = ? WHERE id = ?", (title, session))
            first = max(first, min(oldest + n_skipped // 2, number))
            db.execute(
                "INSERT INTO turns VALUES (?, ?, ?, ?, ?)",
                (session, number, prompt, answer, n_bytes),
            )
            db.execute(_CUT, (session, n_most, most_bytes - _SESSION_BYTES))
            n_turns, n_bytes, oldest = db.execute(
                "SELECT count(*), sum(n_bytes), min(number) FROM turns WHERE session = ?",
                (session,),
            ).fetchone()
            if oldest > first:
                first = min(number, oldest + n_most // 4)
            db.execute(
                "UPDATE sessions SET model = ?, used_s = ?, first = ?, n_turns = ?, n_bytes = ? "
                "WHERE id = ?",
                (model, now_s, first, n_turns, n_bytes + _SESSION_BYTES, session),
            )
            return gone | self._make_room(session)

    def _session(self, key: Key, title: str, now_s: float) -> tuple[int, int, int, int]:
        """Number of the conversation, made if need be, and those of its first turn in prompts, its
        oldest turn and the next one; turns are numbered without gaps.
        """
        self._db.execute(
            "INSERT INTO sessions (owner, name, title, model, created_s, used_s, first, n_turns,"
            " n_bytes) VALUES (?, ?, ?, '', ?, ?, 0, 0, 0) ON CONFLICT (owner, name) DO NOTHING",
            (*key, title, now_s, now_s),
        )
        return self._db.execute(
            "SELECT id, first, ifnull(min(number), 0), ifnull(max(number) + 1, 0) FROM sessions "
            "LEFT JOIN turns ON session = id WHERE owner = ? AND name = ?",
            key,
        ).fetchone()

    def _make_room(self, session: int) -> set[Key]:
        """Remove other conversations until all limits hold."""
        gone: set[Key] = set()
        while True:
            (n_sessions,) = self._db.execute("SELECT count(*) FROM sessions").fetchone()
            n_bytes = self._total_bytes()
            is_many = n_sessions > self.limits.max_sessions
            is_large = n_bytes > self.limits.max_bytes
            if not is_many and not is_large and (self._fits is None or self._fits(n_bytes)):
                return gone
            most = "count(*)" if is_many else "sum(n_bytes)"
            row = self._db.execute(
                "SELECT id, owner, name FROM sessions WHERE id != ?1 AND owner = (SELECT owner "
                f"FROM sessions WHERE id != ?1 GROUP BY owner ORDER BY {most} DESC LIMIT 1) "
                "ORDER BY used_s, id LIMIT 1",
                (session,),
            ).fetchone()
            if row is None:
                raise StorageFull(
                    f"no room for a session of {n_bytes} bytes: the server keeps "
                    f"{self.limits.max_sessions} sessions (max_sessions) and "
                    f"{self.limits.max_bytes} bytes of them (max_bytes); send shorter messages"
                )
            self._db.execute("DELETE FROM sessions WHERE id = ?", row[:1])
            gone.add(Key(*row[1:]))

    def delete(self, key: Key) -> set[Key]:
        """Forget a conversation; returns it, or nothing if there is none.

        Raises:
            StorageFailed: The database cannot be written.
        """
        with self._transaction() as db:
            done = db.execute("DELETE FROM sessions WHERE owner = ? AND name = ?", key)
            return {key} if done.rowcount else set()

    # ---- all of them

    def list(self, owner: str) -> list[ConversationInfo]:
        """Sessions of *owner*, the one used last first; raises as `read`."""
        with _failures():
            rows = self._db.execute(
                "SELECT name, title, model, 2 * n_turns, created_s, used_s FROM sessions "
                "WHERE owner = ? AND used_s >= ? ORDER BY used_s DESC, id DESC",
                (owner, self._expired_s),
            ).fetchall()
        names = ConversationInfo.__struct_fields__
        return [ConversationInfo(**dict(zip(names, row, strict=True))) for row in rows]

    def info(self, key: Key) -> ConversationInfo | None:
        """The conversation without its messages; None if there is none. Raises as `read`."""
        return next((one for one in self.list(key.owner) if one.session_id == key.session_id), None)

    def keys(self) -> set[Key]:
        """Every conversation; raises as `read`."""
        with _failures():
            return {Key(*row) for row in self._db.execute("SELECT owner, name FROM sessions")}

    def sweep(self, in_use: Collection[Key] = ()) -> set[Key]:
        """Forget what nobody used for ``ttl_s``, but those *in_use*; returns the conversations.

        Raises:
            StorageFailed: The database cannot be written.
        """
        with self._transaction():
            return self._sweep(in_use)

    def _sweep(self, in_use: Collection[Key]) -> set[Key]:
        rows = self._db.execute(
            "SELECT id, owner, name FROM sessions WHERE used_s < ?", (self._expired_s,)
        ).fetchall()
        old = {Key(owner, name): number for number, owner, name in rows}
        gone = old.keys() - set(in_use)
        self._db.executemany("DELETE FROM sessions WHERE id = ?", [(old[key],) for key in gone])
        return set(gone)

    @property
    def limits(self) -> ChatSessions:
        """The limits in effect."""
        return self._limits()

    @property
    def _expired_s(self) -> float:
        return self._clock() - self.limits.ttl_s

    def _total_bytes(self) -> int:
        (n_bytes,) = self._db.execute("SELECT total(n_bytes) FROM sessions").fetchone()
        return int(n_bytes)

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection]:
        with _failures():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # SQLite may have rolled it back
                    self._db.execute("ROLLBACK")
                raise
            finally:
                if self._fits is not None:
                    self._fits(self._total_bytes())


def _n_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _title(prompt: str) -> str:
    words = " ".join(prompt[: 4 * _TITLE_CHARACTERS].split())
    return words if len(words) <= _TITLE_CHARACTERS else f"{words[: _TITLE_CHARACTERS - 1]}…"


# ---- the database


def _opened(path: str | None) -> sqlite3.Connection:
    try:
        with _failures():
            if path is not None:
                Path(path).touch(mode=0o600)  # a new one: only its owner may read chats
            db = sqlite3.connect(
                path or ":memory:",
                timeout=_OPENS_WITHIN_S,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                _prepare(db)
            except BaseException:
                db.close()
                raise
    except (StorageFailed, StorageFull, OSError) as error:
        reason = getattr(error, "strerror", "") or str(error)
        raise RequestError(
            f"the sessions' database {str(path)!r} cannot be used: {reason}; move it away, or name "
            "another one ([sessions] database)"
        ) from error
    return db


def _prepare(db: sqlite3.Connection) -> None:
    """Take the database for this process, check it, and make its tables if it is new."""
    db.execute("PRAGMA locking_mode = EXCLUSIVE")
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA secure_delete = ON")
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (n_tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if n_tables and application != _APPLICATION:
        raise StorageFailed("it is a database of another program")
    if version > _VERSION:
        raise StorageFailed(f"it has version {version}, this kqview reads {_VERSION}")
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise StorageFailed(f"it is damaged: {found}")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("BEGIN IMMEDIATE")
    if not n_tables:
        for statement in _TABLES.split(";"):
            db.execute(statement)
        db.execute(f"PRAGMA application_id = {_APPLICATION}")
        db.execute(f"PRAGMA user_version = {_VERSION}")
    db.execute("COMMIT")


@contextlib.contextmanager
def _failures() -> Generator[None]:
    """Turn errors of SQLite into ours."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith("SQLITE_FULL"):
            raise StorageFull(
                "no room for the session on the server's disk; it keeps what it had before"
            ) from error
        if name.startswith("SQLITE_BUSY"):
            raise StorageFailed("another process has it open") from error
        raise StorageFailed(f"the sessions' database failed: {error}") from error
