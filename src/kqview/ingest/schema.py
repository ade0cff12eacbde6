"""Schema: a trace as engines post it and as it is read back, and the replies of lists; pure data.

The fields are those of `kqview.trace.record`, which inference engines post to ``/ingest``: a
request with its events, the calls of mods for them, and the logs and actions of those calls.
Unknown fields are ignored. JSON of any shape (``details``, ``top_tokens``) is kept as received and
never decoded.
"""

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from types import NoneType
from typing import Annotated, Any, Final, get_args, get_type_hints

import msgspec
from msgspec import Meta, Raw

from kqview.trace import record
from kqview.trace.record import TraceAction, TraceEvent, TraceRequest

I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
RequestId = Annotated[str, Meta(min_length=1, max_length=512)]
"""No longer than an index of PostgreSQL takes; other texts may be of any length."""
Time = Annotated[datetime, Meta(tz=True)] | int | float | None
"""RFC 3339 with an offset, or seconds since 1970; always a datetime in replies."""

TIMES: Final = frozenset({"created_at", "completed_at", "stored_at"})
"""Fields of type `Time`, in every struct."""

_WIRE: Final[Mapping[Any, Any]] = {
    str: str, bool: bool, float: float, int: I32, datetime: Time,
    list[str]: list[str], list[int]: list[I32],
}  # fmt: skip
"""Types of a record as they are checked; any other is JSON of any shape."""


def _posted(name: str, record: type[Any], about: str, **own: Any) -> Any:
    """The struct of *record* in JSON; *own* are fields with other types, or that it lacks.

    Of those, what may be null may also be missing.
    """
    types = get_type_hints(record)
    fields: dict[str, Any] = {}
    for one in dataclasses.fields(record):
        kind = types[one.name]
        if one.default is dataclasses.MISSING:
            fields[one.name] = (_WIRE.get(kind, kind),)
        elif one.default is None:
            known = _WIRE.get(next(iter(get_args(kind)), kind))
            # Null of any shape is JSON too, and kept.
            fields[one.name] = (Raw if known is None else known | None, None)
        else:
            # A factory, for msgspec leaves out what equals a plain default.
            fields[one.name] = (kind, msgspec.field(default_factory=partial(_same, one.default)))
    for key, kind in own.items():
        fields[key] = (kind, None) if NoneType in get_args(kind) else (kind,)
    return msgspec.defstruct(
        name, [(key, *spec) for key, spec in fields.items()],
        namespace={"__doc__": about}, module=__name__, omit_defaults=True, kw_only=True,
    )  # fmt: skip


def _same(value: Any) -> Any:
    return value


Request: Any = _posted(
    "Request", TraceRequest, "The request and its result.",
    request_id=RequestId, system_prompt=str | None,
)  # fmt: skip
Event: Any = _posted(
    "Event", TraceEvent, "One event of a step; ``sequence_order`` is unique within the trace.",
    sequence_order=I32,
)  # fmt: skip
ModCall: Any = _posted(
    "ModCall", record.ModCall, "One call of a mod, for the event whose ``sequence_order`` it names."
)
ModLog: Any = _posted(
    "ModLog", record.ModLog,
    "One line that a mod printed or logged; ``mod_call_sequence`` is an index of ``mod_calls``.",
)  # fmt: skip
Action: Any = _posted(
    "Action", TraceAction,
    "What a mod's call returned; ``mod_call_sequence`` is an index of ``mod_calls``.",
    action_order=I32,
)  # fmt: skip


class Payload(msgspec.Struct):
    """The body of ``POST /ingest``, its parts not decoded yet: there may be 100,000 events."""

    request: Raw
    events: list[Raw] = []
    mod_calls: list[Raw] = []
    mod_logs: list[Raw] = []
    actions: list[Raw] = []


class Summary(msgspec.Struct, omit_defaults=True):
    """One trace in a list."""

    request_id: str
    created_at: Time
    stored_at: Time
    n_bytes: int
    n_events: int
    n_steps: int
    n_added_tokens: int
    n_forced_tokens: int
    n_mod_calls: int
    n_mod_logs: int
    n_actions: int
    n_exceptions: int
    mods: list[str]
    completed_at: Time = None
    duration_ms: float | None = None
    model: str | None = None
    active_mod_name: str | None = None
    finish_reason: str | None = None
    user_api_key: str | None = None
    text: str | None = None


class TraceList(msgspec.Struct):
    """Reply of ``GET /v1/traces``: newest first; ``next_cursor`` leads to older ones."""

    traces: list[Summary]
    next_cursor: str | None


_LISTS: Final = {"events": Event, "mod_calls": ModCall, "mod_logs": ModLog, "actions": Action}
Trace: Any = msgspec.defstruct(
    "Trace",
    [("request", Request), *((name, list[kind]) for name, kind in _LISTS.items())],
    namespace={"__doc__": "Reply of ``GET /v1/traces/{request_id}``: can be posted again."},
    module=__name__,
)


class FilterValues(msgspec.Struct):
    """Reply of ``GET /v1/values``: what lists can be filtered by."""

    models: list[str]
    mods: list[str]
    finish_reasons: list[str]


class Health(msgspec.Struct):
    """Reply of ``GET /health``."""

    status: str
    database: str
    schema_version: int
    error: str | msgspec.UnsetType = msgspec.UNSET


class IngestFailure(msgspec.Struct):
    """What went wrong."""

    error: str
