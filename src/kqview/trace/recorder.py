"""Recorder: writes the trace of one request, within limits.

It belongs to whoever consumes the request, never to the engine's thread; only logs may come from
any thread. Once a limit is reached, events are left out together with the calls, logs and actions
that belong to them. What was recorded before stays, and the trace says that it was cut.
"""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass
from typing import Any, Final

from kqview.trace.record import (
    ActionType,
    EventType,
    LogLevel,
    ModCall,
    ModLog,
    Object,
    Trace,
    TraceAction,
    TraceEvent,
    TraceRequest,
    now,
)
from kqview.types import Usage

_log: Final = logging.getLogger("kqview.trace")

MAX_EVENTS: Final = 60_000
"""Default limit of events: three for each of 20,000 tokens."""
MAX_BYTES: Final = 32 * 2**20
"""Approximate default limit of a trace's JSON; receivers accept 75 MiB."""
INPUT_CHARACTERS: Final = 70
"""Length of ``input_text``."""
_PREVIEW_TOKENS: Final = 10
_MOST_PROMPT_TEXTS: Final = 4096  # a few milliseconds of work
# Estimates of what a record adds to the JSON, besides its texts.
_RECORD_BYTES: Final = 200
_ID_BYTES: Final = 8
_TOP_TOKEN_BYTES: Final = 90


@dataclass(eq=False, repr=False)
class TraceRecorder:
    """Appends to a `Trace`; every method is cheap enough to run between two tokens.

    Methods that record an event or a call return its index, or None once the trace is full. None is
    also accepted wherever such an index is expected, and records nothing.

    Attributes:
        request: What is known of the request.
        text_of: Text of a token.
        max_events: Maximum number of events to record.
        max_bytes: Approximate maximum size of the JSON.
        on_finish: Called with the finished trace, such as `Poster.post`.
        trace: The trace so far.
    """

    request: InitVar[TraceRequest]
    _: KW_ONLY
    text_of: Callable[[int], str]
    max_events: int = MAX_EVENTS
    max_bytes: int = MAX_BYTES
    on_finish: Callable[[Trace], object] | None = None

    def __post_init__(self, request: TraceRequest) -> None:
        self.trace = Trace(request)
        self._lock = threading.Lock()
        self._n_bytes = 0
        if request.created_at is None:
            request.created_at = now()

    def set_prompt(self, ids: Sequence[int], text: str) -> None:
        """Note the prompt to evaluate, after Prefilled; one that exceeds the limit is left out."""
        if self._takes(2 * (len(ids) * _ID_BYTES + len(text))):
            self.trace.request.user_prompt = text
            self.trace.request.user_prompt_token_ids = list(ids)
            for event in self.trace.events[:1]:
                if event.event_type == "Prefilled" and len(ids) <= _MOST_PROMPT_TEXTS:
                    event.details = {"tokens_as_text": [self.text_of(one) for one in ids]}
        else:
            self._cut()

    def edited(self, start: int, keys: Sequence[tuple[str, int]]) -> None:
        """Note the edits in force from token *start* of the text on, by hash, never their values.

        *keys*: The hash of each, and the first position at which it acts.
        """
        if not self._takes(_RECORD_BYTES * (1 + len(keys))):
            return self._cut()
        stats = self.trace.request.inference_stats or {}
        edits = [{"hash": digest, "first": first} for digest, first in keys]
        stats.setdefault("edits", []).append({"start": start, "edits": edits})
        self.trace.request.inference_stats = stats

    # ---- events

    def prefilled(self, *, prompt_length: int, max_steps: int) -> int | None:
        """The prompt is known; the first event of a request."""
        return self._event(
            "Prefilled", 0, 0,
            prompt_length=prompt_length, max_steps=max_steps, tokens_so_far_len=0,
        )  # fmt: skip

    def forward_pass(
        self,
        step: int,
        *,
        n_generated: int,
        input_text: str,
        top_tokens: Sequence[tuple[int, float]] = (),
        entropy: float | None = None,
        attention: Object | None = None,
    ) -> int | None:
        """The logits of the next token are known.

        Args:
            step: Step of the token, from 1.
            n_generated: Tokens of the output so far.
            input_text: End of the text so far, of which the last 70 characters are kept.
            top_tokens: The most probable ids with their logprobs, best first.
            entropy: Of the distribution, in nats.
            attention: From `kqview.trace.attention.top_columns`.
        """
        text_of = self.text_of
        top: list[Object] = [
            {
                "token": token,
                "token_str": text_of(token),
                "logprob": logprob,
                "prob": math.exp(logprob),
            }
            for token, logprob in top_tokens
        ]
        more: Object = {}
        if entropy is not None:
            more["entropy"] = round(entropy, 4)
        if attention is not None:
            more["attention"] = attention
        n_columns = len(attention["positions"]) if attention is not None else 0
        return self._event(
            "ForwardPass", step, _TOP_TOKEN_BYTES * len(top) + 2 * _ID_BYTES * n_columns,
            tokens_so_far_len=n_generated, input_text=input_text[-INPUT_CHARACTERS:],
            top_tokens=top or None, details=more or None,
        )  # fmt: skip

    def sampled(self, step: int, token: int, *, n_generated: int) -> int | None:
        """A token was picked."""
        return self._event(
            "Sampled", step, 0,
            sampled_token=token, token_text=self.text_of(token), tokens_so_far_len=n_generated,
        )  # fmt: skip

    def added(
        self,
        step: int,
        tokens: Sequence[int],
        *,
        n_generated: int,
        forced: bool,
    ) -> int | None:
        """Tokens became part of the output."""
        details: Object = {"tokens_as_text": [self.text_of(token) for token in tokens]}
        return self._event(
            "Added", step, 2 * _ID_BYTES * len(tokens),
            added_tokens=list(tokens), added_token_count=len(tokens), forced=forced,
            tokens_so_far_len=n_generated, details=details,
        )  # fmt: skip

    def _event(self, kind: EventType, step: int, n_bytes: int, **known: Any) -> int | None:
        events = self.trace.events
        if len(events) >= self.max_events or not self._takes(_RECORD_BYTES + n_bytes):
            return self._cut("n_cut_events")
        events.append(TraceEvent(event_type=kind, step=step, created_at=now(), **known))
        return len(events) - 1

    # ---- mods

    def call(self, event: int | None, mod_name: str) -> int | None:
        """A mod is about to be called with *event*; `end_call` notes how it went."""
        if event is None or not self._takes(_RECORD_BYTES):
            return self._cut()
        about = self.trace.events[event]
        calls = self.trace.mod_calls
        calls.append(
            ModCall(
                event_sequence_order=event, mod_name=mod_name, event_type=about.event_type,
                step=about.step, created_at=now(),
            )
        )  # fmt: skip
        return len(calls) - 1

    def end_call(
        self, call: int | None, *, time_ms: float, error: str | None = None, traceback: str = ""
    ) -> None:
        """The call returned after *time_ms*, or failed with *error* ("ValueError: ...")."""
        if call is None:
            return
        one = self.trace.mod_calls[call]
        one.execution_time_ms = round(time_ms, 4)
        if error is not None:
            one.exception_occurred = True
            one.exception_message = error
            one.exception_traceback = traceback
            self._takes(len(error) + len(traceback), is_forced=True)

    def log(self, call: int | None, message: str, level: LogLevel = "INFO") -> None:
        """A mod printed or logged *message* during *call*; any thread."""
        if call is None or not self._takes(_RECORD_BYTES + len(message)):
            return self._cut("n_cut_logs")
        name = self.trace.mod_calls[call].mod_name
        self.trace.mod_logs.append(
            ModLog(
                mod_call_sequence=call, mod_name=name, log_message=message, log_level=level,
                created_at=now(),
            )
        )  # fmt: skip

    def action(
        self,
        call: int | None,
        kind: ActionType,
        *,
        tokens: Sequence[int] | None = None,
        is_applied: bool = True,
        **known: Any,
    ) -> TraceAction | None:
        """A call returned an action.

        Args:
            call: Index of the call.
            kind: Which action.
            tokens: Ids that it carries; their number, texts and preview follow from them.
            is_applied: False if another mod's action came first.
            **known: Further fields of `TraceAction`.
        """
        if call is None:
            return None
        details: Object = {}
        if tokens is not None:
            texts = [self.text_of(token) for token in tokens]
            details |= {"tokens": list(tokens), "tokens_as_text": texts}
            known["tokens"], known["tokens_as_text"] = list(tokens), texts
            known["token_count"] = len(tokens)
            known["tokens_preview"] = "".join(texts[:_PREVIEW_TOKENS])
            if kind == "Backtrack":
                known["backtrack_token_count"] = len(tokens)
        if not is_applied:
            details["is_applied"] = False
        self._takes(_RECORD_BYTES + 4 * _ID_BYTES * len(tokens or ()), is_forced=True)
        one = TraceAction(
            mod_call_sequence=call, action_type=kind, created_at=now(), details=details or None,
            **known,
        )  # fmt: skip
        self.trace.actions.append(one)
        return one

    # ---- the end

    def finish(
        self,
        finish_reason: str,
        *,
        ids: Sequence[int],
        text: str,
        usage: Usage | None = None,
        error: str | None = None,
    ) -> None:
        """The request has ended, for whatever reason; *ids* and *text* are its output."""
        request = self.trace.request
        request.completed_at = now()
        request.final_token_ids = list(ids)
        request.final_text = text
        stats = request.inference_stats or {}
        stats["finish_reason"] = finish_reason
        if error is not None:
            stats["error"] = error
        if usage is not None:
            stats |= asdict(usage)
            stats["tokens_per_s"] = usage.tokens_per_s
        request.inference_stats = stats
        if self.on_finish is not None:
            try:
                self.on_finish(self.trace)
            except Exception:  # the request has ended well
                _log.exception("the trace of %s cannot be passed on", request.request_id)

    # ---- limits

    def _takes(self, n_bytes: int, *, is_forced: bool = False) -> bool:
        """Return whether *n_bytes* more fit; if so, or if *is_forced*, count them."""
        with self._lock:
            if not is_forced and self._n_bytes + n_bytes > self.max_bytes:
                return False
            self._n_bytes += n_bytes
            return True

    def _cut(self, counter: str = "") -> None:
        """Note that the trace is cut, and one more of what *counter* counts."""
        stats = self.trace.request.inference_stats or {}
        limits = {"max_events": self.max_events, "max_bytes": self.max_bytes}
        cut = {"is_cut": True, "n_cut_events": 0, "n_cut_logs": 0, **limits}
        cut = stats.setdefault("trace", cut)
        if counter:
            cut[counter] += 1
        self.trace.request.inference_stats = stats
