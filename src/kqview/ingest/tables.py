"""Tables: where traces are stored, for SQLAlchemy Core; `create` makes them.

Columns are the fields of the structs in `schema`. Times are microseconds since 1970, lists and JSON
of any shape are JSON text, so that both databases hold the same. A part's key is the trace and the
number by which other parts refer to it, so that references are foreign keys and rows need no ids of
their own.
"""

from typing import Any, Final

import msgspec
from msgspec import inspect
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    insert,
    select,
    text,
)
from sqlalchemy.types import TypeEngine

from kqview.errors import RequestError
from kqview.ingest.schema import TIMES, Action, Event, ModCall, ModLog, Request, Summary

VERSION: Final = 1
"""Version of the schema."""

_LOCK: Final = 0x6B717669  # "kqvi": of this program, among PostgreSQL's advisory locks

_TYPES: Final[dict[type[inspect.Type], type[TypeEngine[Any]]]] = {
    inspect.StrType: Text,
    inspect.LiteralType: Text,
    inspect.IntType: Integer,
    inspect.FloatType: Double,
    inspect.BoolType: Boolean,
    inspect.ListType: Text,  # JSON
    inspect.RawType: Text,
}
_json: set[str] = set()
JSON_COLUMNS: Final = _json
"""Names of the columns that hold JSON."""


def _columns(kind: type[msgspec.Struct], *, but: tuple[str, ...] = ()) -> list[Column[Any]]:
    """A column for each field of *kind*, but some; what a struct always has is never null."""
    columns: list[Column[Any]] = []
    for field in msgspec.structs.fields(kind):
        if field.name in but:
            continue
        info = inspect.type_info(field.type)
        if isinstance(info, inspect.UnionType):
            info = next(one for one in info.types if not isinstance(one, inspect.NoneType))
        if isinstance(info, inspect.ListType | inspect.RawType):
            _json.add(field.name)
        is_given = field.required or field.default_factory is not msgspec.NODEFAULT
        sql_type = BigInteger if field.name in TIMES else _TYPES[type(info)]
        columns.append(Column(field.name, sql_type, nullable=not is_given))
    return columns


metadata: Final = MetaData()

requests: Final = Table(
    "requests",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
    Column("user_key_sha256", Text),
    *_columns(Request, but=("request_id", "created_at", "user_api_key")),
    # What lists show and filter by, counted once when the trace is stored.
    Column("n_bytes", BigInteger, nullable=False),
    *_columns(
        Summary,
        but=(*Request.__struct_fields__, "n_bytes", "duration_ms"),
    ),
    Column("revision", BigInteger, nullable=False),
    Column("search_text", Text, nullable=False),
    Index("requests_created_at", "created_at", "id"),
    Index("requests_revision", "revision", "n_bytes"),  # retention adds up sizes
    Index("requests_user_key", "user_key_sha256"),
)


def _of_trace() -> Column[Any]:
    return Column(
        "trace", BigInteger, ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True
    )


events: Final = Table(
    "events",
    metadata,
    _of_trace(),
    Column("sequence_order", Integer, primary_key=True),
    *_columns(Event, but=("sequence_order",)),
    sqlite_with_rowid=False,
)

# Each mod of a trace once, in the order of their first calls: filtering by the calls would read all
# of them.
request_mods: Final = Table(
    "request_mods",
    metadata,
    _of_trace(),
    Column("sequence", Integer, primary_key=True),
    Column("mod_name", Text, nullable=False),
    sqlite_with_rowid=False,
)


def _answers(name: str, kind: type[msgspec.Struct], reference: str, target: Column[Any]) -> Table:
    """The table of parts of *kind*, whose field *reference* is *target* of the same trace."""
    return Table(
        name,
        metadata,
        Column("trace", BigInteger, primary_key=True),
        Column("sequence", Integer, primary_key=True),
        *_columns(kind),
        ForeignKeyConstraint(
            ["trace", reference], [target.table.c.trace, target], ondelete="CASCADE"
        ),
        Index(f"{name}_{reference}", "trace", reference),
        sqlite_with_rowid=False,
    )


mod_calls: Final = _answers("mod_calls", ModCall, "event_sequence_order", events.c.sequence_order)
mod_logs: Final = _answers("mod_logs", ModLog, "mod_call_sequence", mod_calls.c.sequence)
actions: Final = _answers("actions", Action, "mod_call_sequence", mod_calls.c.sequence)

PARTS: Final = ((events, Event), (mod_calls, ModCall), (mod_logs, ModLog), (actions, Action))
"""Tables of the lists of a trace, which have their names, and what a row of each is."""

# One row. Each stored trace takes the next revision as its last statement: whoever has seen one has
# seen all before it, so that the live list asks for what came after.
counter: Final = Table("counter", metadata, Column("revision", BigInteger, nullable=False))

schema: Final = Table("schema_version", metadata, Column("version", Integer, nullable=False))


def create(db: Connection) -> None:
    """Make the tables that are missing in the database of *db*, which is in a transaction.

    Raises:
        RequestError: It holds another version of the schema.
    """
    if db.dialect.name == "postgresql":  # SQLite's transaction has locked the file
        db.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
    metadata.create_all(db)
    version: int | None = db.execute(select(schema.c.version)).scalar()
    if version is None:
        db.execute(insert(schema).values(version=VERSION))
        db.execute(insert(counter).values(revision=0))
    elif version != VERSION:
        raise RequestError(
            f"the database has schema {version}, and this kqview writes {VERSION}; name another "
            "database (--database), or use the kqview that made this one"
        )
