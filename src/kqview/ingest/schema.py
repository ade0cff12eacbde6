"""Schema: a trace as engines post it and as it is read back, and the replies of lists; pure data.

The fields are those that inference engines post to ``/ingest``: a request with its events, the
calls of mods for them, and the logs and actions of those calls. Unknown fields are ignored. JSON of
any shape (``details``, ``top_tokens``) is kept as received and never decoded.
"""

from datetime import datetime
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from kqview.trace.record import ActionType, EventType, LogLevel

I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
RequestId = Annotated[str, Meta(min_length=1, max_length=512)]
"""No longer than an index of PostgreSQL takes; other texts may be of any length."""
Time = Annotated[datetime, Meta(tz=True)] | int | float | None
"""RFC 3339 with an offset, or seconds since 1970; always a datetime in replies."""

TIMES: Final = frozenset({"created_at", "completed_at", "stored_at"})
"""Fields of type `Time`, in every struct."""

_ABSENT: Final[Any] = None  # of JSON of any shape, whose null is JSON too


def _info() -> LogLevel:
    return "INFO"


class Request(msgspec.Struct, omit_defaults=True):
    """The request and its result."""

    request_id: RequestId
    created_at: Time = None
    completed_at: Time = None
    model: str | None = None
    user_api_key: str | None = None
    max_tokens: I32 | None = None
    temperature: float | None = None
    mod_text: str | None = None
    active_mod_name: str | None = None
    system_prompt: str | None = None
    user_prompt: str | None = None
    user_prompt_token_ids: list[I32] | None = None
    final_token_ids: list[I32] | None = None
    final_text: str | None = None
    inference_stats: Raw = _ABSENT


class Event(msgspec.Struct, omit_defaults=True):
    """One event of a step; ``sequence_order`` is unique within the trace."""

    event_type: EventType
    step: I32
    sequence_order: I32
    created_at: Time = None
    prompt_length: I32 | None = None
    tokens_so_far_len: I32 | None = None
    max_steps: I32 | None = None
    input_text: str | None = None
    top_tokens: Raw = _ABSENT
    sampled_token: I32 | None = None
    token_text: str | None = None
    added_tokens: list[I32] | None = None
    added_token_count: I32 | None = None
    forced: bool | None = None
    details: Raw = _ABSENT


class ModCall(msgspec.Struct, omit_defaults=True):
    """One call of a mod, for the event whose ``sequence_order`` it names."""

    event_sequence_order: I32
    mod_name: str
    event_type: EventType
    step: I32
    created_at: Time = None
    execution_time_ms: float | None = None
    # A factory, for msgspec leaves out what equals a plain default.
    exception_occurred: bool = msgspec.field(default_factory=bool)
    exception_message: str | None = None
    exception_traceback: str | None = None


class ModLog(msgspec.Struct, omit_defaults=True):
    """One line that a mod printed or logged; ``mod_call_sequence`` is an index of ``mod_calls``."""

    mod_call_sequence: I32
    mod_name: str
    log_message: str
    log_level: LogLevel = msgspec.field(default_factory=_info)
    created_at: Time = None


class Action(msgspec.Struct, omit_defaults=True):
    """What a mod's call returned; ``mod_call_sequence`` is an index of ``mod_calls``."""

    mod_call_sequence: I32
    action_type: ActionType
    action_order: I32
    created_at: Time = None
    new_prompt: str | None = None
    new_length: I32 | None = None
    adjusted_max_steps: I32 | None = None
    token_count: I32 | None = None
    tokens_preview: str | None = None
    tokens: list[I32] | None = None
    tokens_as_text: list[str] | None = None
    backtrack_steps: I32 | None = None
    backtrack_token_count: I32 | None = None
    logits_shape: str | None = None
    temperature: float | None = None
    has_tool_calls: bool | None = None
    tool_calls: Raw = _ABSENT
    error_message: str | None = None
    details: Raw = _ABSENT


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


class Trace(msgspec.Struct):
    """Reply of ``GET /v1/traces/{request_id}``: what was posted, and can be posted again."""

    request: Request
    events: list[Event]
    mod_calls: list[ModCall]
    mod_logs: list[ModLog]
    actions: list[Action]


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
