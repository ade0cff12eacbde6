"""Trace: what happened in one request, as data that becomes JSON.

The JSON is what is posted to `kqview ingest`, or any other receiver of Thunder's ingest format: an
object with ``request``, ``events``, ``mod_calls``, ``mod_logs`` and ``actions``. A call
names its event by that event's index, a log or an action names its call by the call's index; an
event's ``sequence_order`` is its own index. Fields have the names of the JSON keys.

A trace holds what was recorded, unchanged. `Trace.to_payload` makes it valid for JSON and
databases: without NUL, lone surrogates or infinities, and with names and token texts cut to the
width of receivers' columns. `kqview.trace.recorder` writes a trace, `kqview.trace.replay` rebuilds
a request's ids from one. Libraries that make dataclasses of JSON, such as msgspec, read it back.
"""

import json
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal, cast

import numpy as np

from kqview import json_input

Json = Any
"""A JSON value: None, bool, int, float, str, or a list or dict of these."""
Object = dict[str, Json]

EventType = Literal["Prefilled", "ForwardPass", "Sampled", "Added"]
ActionType = Literal[
    "Noop", "AdjustedPrefill", "ForceTokens", "ForceOutput", "Backtrack", "AdjustedLogits",
    "ToolCalls", "EmitError",
]  # fmt: skip
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]

LOWEST_LOGPROB: Final = -9999.0
"""Stands for a logprob of minus infinity, which JSON cannot express."""
_CUT_MARK: Final = "…"
_DEEPEST: Final = 32  # levels of lists and objects; a mod's payload may contain itself


def now() -> datetime:
    """The current time in UTC, as records store it."""
    return datetime.now(UTC)


# ---- records


@dataclass(slots=True, kw_only=True)
class TraceRequest:
    """The request of a trace; unknown fields are None.

    Attributes:
        request_id: Unique among all requests; a receiver replaces an older trace of the same id.
        created_at: When the request began.
        completed_at: When it ended.
        model: Name of the model.
        user_api_key: Sender of the request: a digest of the key, never the key itself.
        max_tokens: Limit of tokens to generate.
        temperature: Sampling temperature.
        mod_text: Names of its mods, joined by commas.
        active_mod_name: Name of its first mod.
        user_prompt: Text of the prompt that was evaluated, including changes by mods.
        user_prompt_token_ids: Its ids.
        final_token_ids: Ids of the output.
        final_text: Text of the output.
        inference_stats: ``finish_reason``, ``error``, the fields of `kqview.Usage`, ``edits``: by
            hash, those in force from a ``start`` of the text on, and ``trace``: limits of this
            trace and what they cut off.
    """

    request_id: str
    created_at: datetime | None = None
    completed_at: datetime | None = None
    model: str | None = None
    user_api_key: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    mod_text: str | None = None
    active_mod_name: str | None = None
    user_prompt: str | None = None
    user_prompt_token_ids: list[int] | None = None
    final_token_ids: list[int] | None = None
    final_text: str | None = None
    inference_stats: Object | None = None


@dataclass(slots=True, kw_only=True)
class TraceEvent:
    """One event. Prefilled has step 0; ForwardPass, Sampled and Added of a token share a step.

    Attributes:
        event_type: Which event; it decides which of the fields below are set.
        step: From 1, one for each forward pass whose logits were sampled; 0 for Prefilled.
        created_at: When it happened.
        prompt_length: Prefilled: number of tokens in the prompt.
        tokens_so_far_len: Number of tokens generated before the event.
        max_steps: Prefilled: limit of tokens to generate.
        input_text: ForwardPass: the last 70 characters before the next token.
        top_tokens: ForwardPass: the most probable tokens, best first, each with ``token`` (id),
            ``token_str``, ``logprob`` and ``prob``.
        sampled_token: Sampled: the id.
        token_text: Sampled: its text.
        added_tokens: Added: the ids.
        added_token_count: Added: number of ids.
        forced: Added: whether a mod forced them.
        details: Further data. ForwardPass: ``attention``, see
            `kqview.trace.attention.top_columns`; ``entropy`` in nats. Added: ``tokens_as_text``;
            ``n_kept`` if not all ids became output, such as the end-of-text token. Prefilled:
            ``tokens_as_text`` of the prompt that was evaluated, unless it is long.
    """

    event_type: EventType
    step: int
    created_at: datetime | None = None
    prompt_length: int | None = None
    tokens_so_far_len: int | None = None
    max_steps: int | None = None
    input_text: str | None = None
    top_tokens: list[Object] | None = None
    sampled_token: int | None = None
    token_text: str | None = None
    added_tokens: list[int] | None = None
    added_token_count: int | None = None
    forced: bool | None = None
    details: Object | None = None


@dataclass(slots=True, kw_only=True)
class ModCall:
    """One call of a mod.

    Attributes:
        event_sequence_order: Index of the event with which the mod was called.
        mod_name: Name of the mod.
        event_type: That of the event.
        step: That of the event.
        created_at: When the call began.
        execution_time_ms: Duration in milliseconds, at most the time limit.
        exception_occurred: Whether it raised, timed out or returned an invalid action.
        exception_message: The exception's class and message.
        exception_traceback: Its traceback.
    """

    event_sequence_order: int
    mod_name: str
    event_type: EventType
    step: int
    created_at: datetime | None = None
    execution_time_ms: float | None = None
    exception_occurred: bool = False
    exception_message: str | None = None
    exception_traceback: str | None = None


@dataclass(slots=True, kw_only=True)
class ModLog:
    """One line that a mod printed or logged during the call with index ``mod_call_sequence``."""

    mod_call_sequence: int
    mod_name: str
    log_message: str
    log_level: LogLevel = "INFO"
    created_at: datetime | None = None


@dataclass(slots=True, kw_only=True)
class TraceAction:
    """The action that a call returned.

    Attributes:
        mod_call_sequence: Index of the call.
        action_type: Which action; it decides which of the fields below are set.
        action_order: Always 0: a call returns one action.
        created_at: When it was returned.
        new_prompt: AdjustedPrefill: text of the new prompt.
        new_length: AdjustedPrefill: its number of tokens.
        adjusted_max_steps: AdjustedPrefill: the new limit of tokens, if it was changed.
        token_count: Number of ``tokens``.
        tokens: ForceTokens, ForceOutput, Backtrack, AdjustedPrefill: the ids of the action.
        tokens_as_text: The text of each.
        tokens_preview: Text of the first ten.
        backtrack_steps: Backtrack: number of ids that were removed.
        backtrack_token_count: Backtrack: number of replacement tokens.
        logits_shape: AdjustedLogits: shape as text, such as "[1, 32000]".
        temperature: AdjustedLogits: temperature of this step, if it was changed.
        has_tool_calls: ToolCalls: whether the payload is not empty.
        tool_calls: ToolCalls: the payload.
        error_message: EmitError: the message.
        details: ``is_applied`` is False for an action that had no effect, because another mod's
            came first; ``n_kept`` is how many of ``tokens`` became output, if not all; ``tokens``
            and ``tokens_as_text`` are here too for receivers that expect them.
    """

    mod_call_sequence: int
    action_type: ActionType
    action_order: int = 0
    created_at: datetime | None = None
    new_prompt: str | None = None
    new_length: int | None = None
    adjusted_max_steps: int | None = None
    token_count: int | None = None
    tokens: list[int] | None = None
    tokens_as_text: list[str] | None = None
    tokens_preview: str | None = None
    backtrack_steps: int | None = None
    backtrack_token_count: int | None = None
    logits_shape: str | None = None
    temperature: float | None = None
    has_tool_calls: bool | None = None
    tool_calls: Json = None
    error_message: str | None = None
    details: Object | None = None

    @property
    def is_applied(self) -> bool:
        """Whether it had an effect; True for traces that do not say."""
        return (self.details or {}).get("is_applied", True) is not False


# ---- the trace

_LISTS: Final = ("events", "mod_calls", "mod_logs", "actions")
"""The lists of a trace; each names what is in those before it."""


@dataclass(slots=True)
class Trace:
    """A request with its events, calls of mods, logs and actions, each list in order of time.

    While the request runs, its recorder appends to the lists; every index in them is valid at any
    moment.
    """

    request: TraceRequest
    events: list[TraceEvent] = field(default_factory=list[TraceEvent])
    mod_calls: list[ModCall] = field(default_factory=list[ModCall])
    mod_logs: list[ModLog] = field(default_factory=list[ModLog])
    actions: list[TraceAction] = field(default_factory=list[TraceAction])

    @property
    def is_cut(self) -> bool:
        """Whether a limit cut off records; `kqview.trace.replay` then cannot rebuild the ids."""
        limits = (self.request.inference_stats or {}).get("trace")
        return isinstance(limits, dict) and bool(cast("Object", limits).get("is_cut"))

    def to_payload(self) -> Object:
        """Return the trace as JSON values that every receiver accepts, see the file head."""
        return json_input.loads(self.to_json())

    def json_parts(self) -> Iterator[str]:
        """Yield `to_payload` as JSON in parts, ASCII only.

        The parts are small, so that other threads can run in between.
        """
        # Backwards, because a request may run: what a copy names is in the copies that follow.
        copies = {name: list(getattr(self, name)) for name in reversed(_LISTS)}
        yield f'{{"request":{_json(self.request)}'
        for name in _LISTS:
            yield f',"{name}":['
            for i, one in enumerate(copies[name]):
                yield ("," if i else "") + _json(one, i)
            yield "]"
        yield "}"

    def to_json(self) -> str:
        """Return `to_payload` as JSON; ASCII only, on one line."""
        return "".join(self.json_parts())


# ---- writing

# Characters that receivers keep.
_LONGEST: Final[Mapping[str, int]] = {
    **dict.fromkeys(("request_id", "model", "user_api_key", "mod_name", "active_mod_name"), 255),
    **dict.fromkeys(("token_text", "logits_shape"), 100),
}


def cleaned_text(text: str, longest: int | None = None) -> str:
    """Return *text* without what UTF-8 or a database cannot hold, cut to *longest* characters."""
    if "\0" in text:
        text = text.replace("\0", "\N{SYMBOL FOR NULL}")
    if not text.isascii():  # there may be lone surrogates
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if longest is not None and len(text) > longest:
        text = text[: longest - 1] + _CUT_MARK
    return text


def cleaned(value: object, key: str = "", depth: int = 0) -> Json:
    """Return *value* as a JSON value; anything else becomes its ``repr``."""
    if isinstance(value, np.generic):
        return cleaned(cast("object", value.item()), key, depth)
    if isinstance(value, bool | int | None):
        return value
    if isinstance(value, str):
        return cleaned_text(value, _LONGEST.get(key))
    if isinstance(value, float):
        lowest = LOWEST_LOGPROB if key == "logprob" else None
        return value if math.isfinite(value) else lowest
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if depth < _DEEPEST and isinstance(value, dict):
        pairs = cast("dict[object, object]", value).items()
        return {
            cleaned_text(name if isinstance(name, str) else _repr(name)): cleaned(
                one, name if isinstance(name, str) else "", depth + 1
            )
            for name, one in pairs
        }
    if depth < _DEEPEST and isinstance(value, list | tuple):
        return [cleaned(one, key, depth + 1) for one in cast("Sequence[object]", value)]
    return cleaned_text(_repr(value))


def _repr(value: object) -> str:
    try:
        return reprlib.repr(value)
    except Exception:  # a mod's own class
        return object.__repr__(value)


def _json(record: Any, index: int = 0) -> str:
    written = {
        name: cleaned(value, name)
        for name in record.__slots__
        if (value := getattr(record, name)) is not None
    }
    if isinstance(record, TraceEvent):
        written["sequence_order"] = index
    return json.dumps(written, allow_nan=False, separators=(",", ":"))
