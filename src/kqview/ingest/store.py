"""Store: traces in a database, SQLite or PostgreSQL, through SQLAlchemy Core.

A trace is stored in one transaction or not at all, after a power failure as well. Methods block and
may be called from any thread; on SQLite one transaction writes at a time, other processes included.
"""

import contextlib
import re
import sqlite3
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from msgspec import Raw
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from kqview.errors import CapacityError, KqviewError, RequestError
from kqview.ingest import tables
from kqview.ingest.payload import Posted, moment
from kqview.ingest.schema import TIMES, FilterValues, Request, Summary
from kqview.ingest.tables import counter, request_mods, requests
from kqview.server.errors import Forbidden, StorageFailed, StorageFull

_SLICE: Final = 500  # rows in one statement
_BUSY_S: Final = 30.0  # that a writer waits for another process
_TRY_AGAIN_S: Final = 0.05
# Of SQLSTATE: a code, and classes for a connection that is lost or refused.
_DISK_FULL: Final = "53100"
_CONNECTION: Final = ("08", "57")
_MOST_VALUES: Final = 1000
_CURSOR: Final = re.compile(r"(-?[0-9]{1,18})\.([0-9]{1,18})")  # created_at and id of a trace
_PRUNED: Final = 20  # traces deleted in one transaction
_SUMMARY: Final = tuple(
    requests.c["user_key_sha256" if name == "user_api_key" else name]
    for name in Summary.__struct_fields__
    if name != "duration_ms"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Who reads: *owner* is the digest of their key, "" for none; *sees_all* is the operator."""

    owner: str = ""
    key: str | None = None
    sees_all: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFilter:
    """Which traces a list has; None or "" for no condition. Times are microseconds since 1970."""

    model: str | None = None
    mod: str | None = None
    finish_reason: str | None = None
    since: int | None = None
    until: int | None = None
    search: str | None = None


class Store:
    """Traces of one database."""

    def __init__(self, url: str) -> None:
        """Open the database at *url*, make its tables if they are missing.

        Args:
            url: ``sqlite:///FILE``, or FILE alone, or ``postgresql://USER:PASSWORD@HOST/NAME``.

        Raises:
            RequestError: The database cannot be opened, or has another version of the schema.
            StorageFailed: The database fails.
        """
        self._engine = _engine(url)
        self.url = self._engine.url
        """The database's URL, for another SQLAlchemy engine."""
        self.kind = self._engine.dialect.name
        """``sqlite`` or ``postgresql``."""
        self._insert: Any = (sqlite if self.kind == "sqlite" else postgresql).insert
        self._writing = threading.Lock() if self.kind == "sqlite" else contextlib.nullcontext()
        try:
            with self._transaction() as db:
                tables.create(db)
        except BaseException as error:
            self.close()
            if isinstance(error, (StorageFailed, CapacityError)):
                raise RequestError(f"{error}; name another database (--database)") from error
            raise

    def close(self) -> None:
        """Close its connections; idempotent."""
        self._engine.dispose()

    # ---- writing

    def put(self, body: bytes) -> int:
        """Store a posted trace, in place of an older one of the same id, whose time stays.

        Returns:
            Its revision.

        Raises:
            RequestError: It is not JSON, or refers to an event or call that does not exist.
            Unprocessable: A field is missing or of a wrong type.
            CapacityError: Another process writes for too long, or the database does not answer.
            StorageFull: There is no room for it.
            StorageFailed: The database fails.
        """
        posted = Posted(body)
        with self._transaction() as db:
            now = time.time_ns() // 1000
            row = {**posted.request_row(), "stored_at": now, "revision": 0}
            if row["created_at"] is None:
                row["created_at"] = now
            row |= dict.fromkeys((c.name for c in requests.c if c.name.startswith("n_")), 0)
            row |= {"mods": "[]", "search_text": "", "n_bytes": len(body)}
            changed = {name: value for name, value in row.items() if name != "created_at"}
            db.execute(
                self._insert(requests)
                .values(row)
                .on_conflict_do_update(index_elements=[requests.c.request_id], set_=changed)
            )
            named = sa.select(requests.c.id).where(requests.c.request_id == row["request_id"])
            trace: int = db.execute(named).scalar_one()
            # Calls, logs and actions go with the events.
            for table in (tables.events, request_mods):
                db.execute(sa.delete(table).where(table.c.trace == trace))
            for table, rows in (
                (tables.events, posted.event_rows()),
                (tables.mod_calls, posted.mod_call_rows()),
                (tables.mod_logs, posted.mod_log_rows()),
                (tables.actions, posted.action_rows()),
            ):
                while some := list(islice(rows, _SLICE)):
                    db.execute(sa.insert(table), [{**row, "trace": trace} for row in some])
            if mods := posted.mods:
                rows = [
                    {"trace": trace, "sequence": i, "mod_name": name} for i, name in enumerate(mods)
                ]
                db.execute(sa.insert(request_mods), rows)
            # The row of the counter stays locked until the commit, which is next.
            db.execute(sa.update(counter).values(revision=counter.c.revision + 1))
            revision: int = db.execute(sa.select(counter.c.revision)).scalar_one()
            db.execute(
                sa.update(requests)
                .where(requests.c.id == trace)
                .values(**posted.summary_row(), revision=revision)
            )
        return revision

    def delete(self, request_id: str) -> bool:
        """Delete a trace; returns whether there was one."""
        with self._transaction() as db:
            done = db.execute(sa.delete(requests).where(requests.c.request_id == request_id))
            return done.rowcount > 0

    def prune(self, max_traces: int, max_bytes: int, older_than: int | None) -> int:
        """Delete the traces stored first, until no more is stored than this; 0 is no limit.

        Args:
            max_traces: Traces to keep.
            max_bytes: Bytes of traces, as they were posted, to keep.
            older_than: Microseconds since 1970; what was stored before goes too.

        Returns:
            How many traces it has deleted.
        """
        newest = requests.c.revision.desc()
        with self._reading() as db:
            kept: list[Any] = []
            if max_traces:
                query = sa.select(requests.c.revision).order_by(newest).offset(max_traces).limit(1)
                kept.append(db.execute(query).scalar())
            if max_bytes:
                total = sa.func.sum(requests.c.n_bytes).over(order_by=newest).label("total")
                sums = sa.select(requests.c.revision, total).subquery()
                query = sa.select(sa.func.max(sums.c.revision)).where(sums.c.total > max_bytes)
                kept.append(db.execute(query).scalar())
            if older_than is not None:
                query = sa.select(sa.func.max(requests.c.revision))
                kept.append(db.execute(query.where(requests.c.stored_at < older_than)).scalar())
        last = max((one for one in kept if one is not None), default=0)
        n_deleted = 0
        too_old = sa.select(requests.c.revision).where(requests.c.revision <= last)
        too_old = too_old.order_by(requests.c.revision).limit(_PRUNED)
        while True:  # a few at a time, so that posts get in between
            with self._reading() as db:
                some = db.execute(too_old).scalars().all()
            if not some:
                return n_deleted
            chosen = requests.c.revision.between(some[0], some[-1])
            with self._transaction() as db:
                n_deleted += db.execute(sa.delete(requests).where(chosen)).rowcount

    # ---- reading

    def summaries(
        self, reader: Reader, chosen: TraceFilter, *, limit: int, cursor: str | None = None
    ) -> tuple[list[Summary], str | None]:
        """Traces that *reader* may see, newest first, and the cursor of the next ones.

        Raises:
            RequestError: The cursor is none of ours.
            StorageFailed: The database fails.
        """
        query = sa.select(*_SUMMARY, requests.c.id).where(*_conditions(reader, chosen))
        if cursor is not None:
            found = _CURSOR.fullmatch(cursor)
            if found is None:
                raise RequestError(
                    f"cursor is {cursor!r}; use the next_cursor of a list, or none",
                    parameter="cursor",
                )
            created_at, trace = map(int, found.groups())
            query = query.where(
                sa.tuple_(requests.c.created_at, requests.c.id)
                < sa.tuple_(sa.literal(created_at), sa.literal(trace))
            )
        query = query.order_by(requests.c.created_at.desc(), requests.c.id.desc()).limit(limit + 1)
        with self._reading() as db:
            rows = db.execute(query).mappings().all()
        more = len(rows) > limit
        last = rows[limit - 1] if more else None
        next_cursor = None if last is None else f"{last['created_at']}.{last['id']}"
        return [_summary(row, reader) for row in rows[:limit]], next_cursor

    def since(self, reader: Reader, revision: int, limit: int) -> list[tuple[int, Summary]]:
        """Traces stored after *revision*, oldest first, each with its own revision."""
        query = (
            sa.select(*_SUMMARY, requests.c.revision)
            .where(requests.c.revision > revision, *_conditions(reader, TraceFilter()))
            .order_by(requests.c.revision)
            .limit(limit)
        )
        with self._reading() as db:
            rows = db.execute(query).mappings().all()
        return [(row["revision"], _summary(row, reader)) for row in rows]

    def revision(self) -> int:
        """That of the trace stored last; 0 if none was."""
        with self._reading() as db:
            return db.execute(sa.select(counter.c.revision)).scalar_one()

    def trace(self, request_id: str, reader: Reader) -> bytes | None:
        """JSON of a whole trace, as `kqview.ingest.schema.Trace`; None without one.

        It is made slice by slice: only the text of a large trace is in memory as a whole.

        Raises:
            Forbidden: It belongs to another key.
        """
        with self._reading() as db:
            query = sa.select(requests).where(requests.c.request_id == request_id)
            row = db.execute(query).mappings().first()
            if row is None:
                return None
            if not reader.sees_all and row["user_key_sha256"] != reader.owner:
                raise Forbidden(f"the trace {request_id!r} belongs to another key")
            parts = [b'{"request":', msgspec.json.encode(_part(Request, row, reader))]
            for table, kind in tables.PARTS:
                parts.append(b',"%s":[' % table.name.encode())
                query = sa.select(table).where(table.c.trace == row["id"])
                query = query.order_by(*table.primary_key)
                rows = db.execution_options(yield_per=_SLICE).execute(query).mappings()
                is_first = True
                for some in rows.partitions():
                    items = [_part(kind, one, reader) for one in some]
                    parts += [b"" if is_first else b",", msgspec.json.encode(items)[1:-1]]
                    is_first = False
                parts.append(b"]")
        return b"".join([*parts, b"}"])

    def values(self, reader: Reader) -> FilterValues:
        """What the traces that *reader* may see can be filtered by."""
        visible = _conditions(reader, TraceFilter())

        def distinct(db: sa.Connection, column: sa.Column[Any], *conditions: Any) -> list[str]:
            query = sa.select(column).where(column.is_not(None), *visible, *conditions)
            query = query.distinct().order_by(column).limit(_MOST_VALUES)
            return list(db.execute(query).scalars())

        with self._reading() as db:
            return FilterValues(
                models=distinct(db, requests.c.model),
                mods=distinct(db, request_mods.c.mod_name, request_mods.c.trace == requests.c.id),
                finish_reasons=distinct(db, requests.c.finish_reason),
            )

    def totals(self) -> tuple[int, int]:
        """How many traces are stored, and their bytes; raises StorageFailed if that fails."""
        with self._reading() as db:
            row = db.execute(sa.select(sa.func.count(), sa.func.sum(requests.c.n_bytes))).one()
        return int(row[0]), int(row[1] or 0)

    # ---- transactions

    @contextlib.contextmanager
    def _transaction(self) -> Generator[sa.Connection]:
        with self._writing, _named_failures(), self._engine.connect() as db:
            with db.execution_options(kqview_writes=True).begin():
                yield db

    @contextlib.contextmanager
    def _reading(self) -> Generator[sa.Connection]:
        """A transaction in which the database does not change."""
        level = {} if self.kind == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        with _named_failures(), self._engine.connect() as db:
            with db.execution_options(**level).begin():
                yield db


def _engine(url: str) -> sa.Engine:
    """The engine of *url*; raises RequestError."""
    try:
        parsed = sa.make_url(url) if "://" in url else sa.URL.create("sqlite", database=url)
        kind = parsed.get_backend_name()
        if kind == "postgresql":
            return sa.create_engine(parsed.set(drivername="postgresql+psycopg"), pool_pre_ping=True)
        if kind != "sqlite":
            raise RequestError(
                f"{kind} databases are not supported; use sqlite:///FILE or "
                "postgresql://USER:PASSWORD@HOST/NAME (--database)"
            )
        if parsed.database in (None, "", ":memory:"):
            raise RequestError("traces need a database file; write sqlite:///FILE (--database)")
        engine = sa.create_engine(parsed, connect_args={"timeout": _BUSY_S})
    except (ArgumentError, NoSuchModuleError) as error:
        raise RequestError(
            "this is not the URL of a database; write sqlite:///FILE or "
            "postgresql://USER:PASSWORD@HOST/NAME (--database)"
        ) from error
    except ModuleNotFoundError as error:
        raise RequestError(
            f"PostgreSQL needs {error.name}, which is not installed; run "
            'pip install "kqview[postgres]"'
        ) from error
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    # The driver would begin transactions late and end them early.
    connection.isolation_level = None
    connection.execute("PRAGMA foreign_keys = ON")
    # Readers do not wait for the writer: a property of the file, which its first connection sets.
    end_s = time.monotonic() + _BUSY_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:  # another process does the same; this does not wait
            if time.monotonic() > end_s:
                raise
            time.sleep(_TRY_AGAIN_S)
    # Commits are on the disk before they are answered.
    connection.execute("PRAGMA synchronous = FULL")


def _begin_sqlite(db: sa.Connection) -> None:
    # A writer that begins as a reader cannot wait for another writer.
    writes = db.get_execution_options().get("kqview_writes")
    db.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextlib.contextmanager
def _named_failures() -> Generator[None]:
    """Translate failures of the database into the errors of kqview.

    Raises:
        CapacityError: Another process has written for `_BUSY_S`, or the database does not answer.
        StorageFull: There is no room for more.
        StorageFailed: Anything else.
    """
    try:
        yield
    except SQLAlchemyError as error:
        cause: BaseException | None = error.orig if isinstance(error, DBAPIError) else error
        reason = str(cause)
        first = reason.splitlines()[0] if reason else type(error).__name__
        state: str = getattr(cause, "sqlstate", None) or ""
        is_lost = isinstance(error, OperationalError) and not isinstance(cause, sqlite3.Error)
        named: KqviewError = StorageFailed(f"database error: {first}")
        if first == "database is locked":
            named = CapacityError(
                f"another process has been writing to the database for {_BUSY_S:g} s; try again"
            )
        elif first == "database or disk is full" or state == _DISK_FULL:
            named = StorageFull(f"database error: {first}; make room, or keep fewer traces")
        elif is_lost and (state[:2] in _CONNECTION or not state):
            named = CapacityError(f"the database does not answer: {first}")
        raise named from error


# ---- conditions and replies


def _conditions(reader: Reader, chosen: TraceFilter) -> list[sa.ColumnElement[bool]]:
    conditions: list[sa.ColumnElement[bool]] = []
    if not reader.sees_all:
        conditions.append(requests.c.user_key_sha256 == reader.owner)
    for column in (requests.c.model, requests.c.finish_reason):
        if value := getattr(chosen, column.name):
            conditions.append(column == value)
    if chosen.since is not None:
        conditions.append(requests.c.created_at >= chosen.since)
    if chosen.until is not None:
        conditions.append(requests.c.created_at < chosen.until)
    if chosen.search:
        text = chosen.search.casefold()
        conditions.append(requests.c.search_text.contains(text, autoescape=True))
    if chosen.mod:
        mods = request_mods.c
        named = sa.select(mods.trace).where(
            mods.mod_name == chosen.mod, mods.trace == requests.c.id
        )
        conditions.append(named.exists())
    return conditions


def _part(kind: Any, row: Any, reader: Reader) -> Any:
    """Make a struct of *kind* from a row of its table; JSON stays text."""
    values: dict[str, Any] = {}
    for name in kind.__struct_fields__:
        if name == "user_api_key":
            values[name] = _shown_key(row["user_key_sha256"], reader)
            continue
        value = row[name]
        if value is None:
            continue
        if name in TIMES:
            value = moment(value)
        elif name in tables.JSON_COLUMNS:
            value = Raw(value.encode())
        values[name] = value
    return kind(**values)


def _shown_key(digest: str | None, reader: Reader) -> str | None:
    """Return the key to readers who sent it, else its digest, which is all that is stored."""
    if digest is None:
        return None
    return reader.key if digest == reader.owner and reader.key else f"sha256:{digest}"


def _summary(row: Any, reader: Reader) -> Summary:
    values = {column.name: row[column.name] for column in _SUMMARY}
    created_at, completed_at = values["created_at"], values["completed_at"]
    values["user_api_key"] = _shown_key(values.pop("user_key_sha256"), reader)
    values["mods"] = msgspec.json.decode(values["mods"])
    if completed_at is not None:
        values["duration_ms"] = (completed_at - created_at) / 1000
    values |= {name: moment(values[name]) for name in TIMES}
    return Summary(**values)
