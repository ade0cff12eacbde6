"""Tables: where traces are stored, for SQLAlchemy Core; `create` makes them.

Columns have the names of the payload's fields. Times are microseconds since 1970, lists and JSON of
any shape are JSON text, so that both databases hold the same. A part's key is the trace and the
number by which other parts refer to it, so that references are foreign keys and rows need no ids of
their own.
"""

from typing import Final

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

from kqview.errors import RequestError

VERSION: Final = 1
"""Version of the schema."""

_LOCK: Final = 0x6B717669  # "kqvi": of this program, among PostgreSQL's advisory locks

metadata: Final = MetaData()

requests: Final = Table(
    "requests",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("created_at", BigInteger, nullable=False),
    Column("completed_at", BigInteger),
    Column("model", Text),
    Column("user_key_sha256", Text),
    Column("max_tokens", Integer),
    Column("temperature", Double),
    Column("mod_text", Text),
    Column("active_mod_name", Text),
    Column("system_prompt", Text),
    Column("user_prompt", Text),
    Column("user_prompt_token_ids", Text),
    Column("final_token_ids", Text),
    Column("final_text", Text),
    Column("inference_stats", Text),
    # What lists show and filter by, counted once when the trace is stored.
    Column("stored_at", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("n_bytes", BigInteger, nullable=False),
    Column("n_events", Integer, nullable=False),
    Column("n_steps", Integer, nullable=False),
    Column("n_added_tokens", Integer, nullable=False),
    Column("n_forced_tokens", Integer, nullable=False),
    Column("n_mod_calls", Integer, nullable=False),
    Column("n_mod_logs", Integer, nullable=False),
    Column("n_actions", Integer, nullable=False),
    Column("n_exceptions", Integer, nullable=False),
    Column("mods", Text, nullable=False),
    Column("finish_reason", Text),
    Column("text", Text),
    Column("search_text", Text, nullable=False),
    Index("requests_created_at", "created_at", "id"),
    Index("requests_revision", "revision", "n_bytes"),  # retention adds up sizes
    Index("requests_user_key", "user_key_sha256"),
)

events: Final = Table(
    "events",
    metadata,
    Column("trace", BigInteger, ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True),
    Column("sequence_order", Integer, primary_key=True),
    Column("event_type", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("created_at", BigInteger),
    Column("prompt_length", Integer),
    Column("tokens_so_far_len", Integer),
    Column("max_steps", Integer),
    Column("input_text", Text),
    Column("top_tokens", Text),
    Column("sampled_token", Integer),
    Column("token_text", Text),
    Column("added_tokens", Text),
    Column("added_token_count", Integer),
    Column("forced", Boolean),
    Column("details", Text),
    sqlite_with_rowid=False,
)

# Each mod of a trace once, in the order of their first calls: filtering by the calls would read all
# of them.
request_mods: Final = Table(
    "request_mods",
    metadata,
    Column("trace", BigInteger, ForeignKey("requests.id", ondelete="CASCADE"), primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("mod_name", Text, nullable=False),
    sqlite_with_rowid=False,
)

mod_calls: Final = Table(
    "mod_calls",
    metadata,
    Column("trace", BigInteger, primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("event_sequence_order", Integer, nullable=False),
    Column("mod_name", Text, nullable=False),
    Column("event_type", Text, nullable=False),
    Column("step", Integer, nullable=False),
    Column("created_at", BigInteger),
    Column("execution_time_ms", Double),
    Column("exception_occurred", Boolean, nullable=False),
    Column("exception_message", Text),
    Column("exception_traceback", Text),
    ForeignKeyConstraint(
        ["trace", "event_sequence_order"],
        ["events.trace", "events.sequence_order"],
        ondelete="CASCADE",
    ),
    Index("mod_calls_event", "trace", "event_sequence_order"),
    sqlite_with_rowid=False,
)

mod_logs: Final = Table(
    "mod_logs",
    metadata,
    Column("trace", BigInteger, primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("mod_call_sequence", Integer, nullable=False),
    Column("mod_name", Text, nullable=False),
    Column("log_message", Text, nullable=False),
    Column("log_level", Text, nullable=False),
    Column("created_at", BigInteger),
    ForeignKeyConstraint(
        ["trace", "mod_call_sequence"],
        ["mod_calls.trace", "mod_calls.sequence"],
        ondelete="CASCADE",
    ),
    Index("mod_logs_mod_call", "trace", "mod_call_sequence"),
    sqlite_with_rowid=False,
)

actions: Final = Table(
    "actions",
    metadata,
    Column("trace", BigInteger, primary_key=True),
    Column("sequence", Integer, primary_key=True),
    Column("mod_call_sequence", Integer, nullable=False),
    Column("action_type", Text, nullable=False),
    Column("action_order", Integer, nullable=False),
    Column("created_at", BigInteger),
    Column("new_prompt", Text),
    Column("new_length", Integer),
    Column("adjusted_max_steps", Integer),
    Column("token_count", Integer),
    Column("tokens_preview", Text),
    Column("tokens", Text),
    Column("tokens_as_text", Text),
    Column("backtrack_steps", Integer),
    Column("backtrack_token_count", Integer),
    Column("logits_shape", Text),
    Column("temperature", Double),
    Column("has_tool_calls", Boolean),
    Column("tool_calls", Text),
    Column("error_message", Text),
    Column("details", Text),
    ForeignKeyConstraint(
        ["trace", "mod_call_sequence"],
        ["mod_calls.trace", "mod_calls.sequence"],
        ondelete="CASCADE",
    ),
    Index("actions_mod_call", "trace", "mod_call_sequence"),
    sqlite_with_rowid=False,
)

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
