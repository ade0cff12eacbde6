"""SteeredSource: the tokens of a generation whose forward passes wait for mods or for callables.

The core hands out each forward pass as a ForwardEvent and leaves the slot out of its steps until it
is answered. `Steering` decides; here its decision becomes the answer, the text and the tokens. All
tokens of a decision are yielded before the next forward pass is taken.

A request with mods is submitted at the first iteration: its mods see the prompt first, and async
mods need the consumer's event loop for that.
"""

import asyncio
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from kqview import _core
from kqview.arguments import flag, invalid, seconds
from kqview.errors import BusyError, ClosedError, RequestError, shown
from kqview.generation.source import Event, PlainSource
from kqview.mods.calls import at_once
from kqview.mods.decorator import check_mods
from kqview.mods.events import ForwardPass
from kqview.mods.failures import ModFailure
from kqview.mods.steering import Decision, Forcing, LogitsProcessor, Steering, Steps, Stopping
from kqview.trace import Trace
from kqview.trace.attention import top_columns
from kqview.trace.record import Object
from kqview.types import Capture, PromptBlock, Token, Usage
from kqview.types.token import Context

_READY_AT_ONCE: Final = 32  # tokens between which other tasks run
_CORE_ENDS: Final = {"stop", "length", "stop_token", "error"}


@dataclass(frozen=True, slots=True)
class SteeringOptions:
    """What steers a request, checked; see `Engine.generate`."""

    mods: Sequence[Any]
    logits_processor: LogitsProcessor | None
    stopping: Stopping | None
    forcing: Forcing | None
    mod_time_limit_s: float | None
    mods_strict: bool
    has_trace: bool
    on_trace: Callable[[Trace], object] | None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "SteeringOptions | None":
        """Check the options of `Engine.generate` that steer; None if nothing does.

        Raises:
            RequestError: An argument is invalid.
        """
        checked, trace = check_mods(given["mods"]), given["trace"]
        callables = {name: given[name] for name in ("logits_processor", "stopping", "forcing")}
        processors = callables["logits_processor"]
        if not callable(processors) and isinstance(processors, list | tuple):
            callables["logits_processor"] = _in_turn(cast("Sequence[object]", processors))
        for name, value in callables.items():
            if value is not None:
                _check_function(name, value)
        if not callable(trace) and not isinstance(trace, bool | None):
            raise invalid("trace", "True, False, a function or None", shown(trace))
        limit_s = given["mod_time_limit_s"]
        if limit_s is not None:
            limit_s = seconds("mod_time_limit_s", limit_s, high=threading.TIMEOUT_MAX)
        is_strict = flag("mods_strict", given["mods_strict"])
        has_trace = bool(checked) if trace is None else trace is not False
        if not checked and not has_trace and all(one is None for one in callables.values()):
            return None
        return cls(
            checked,
            **callables,
            mod_time_limit_s=limit_s,
            mods_strict=is_strict,
            has_trace=has_trace,
            on_trace=trace if callable(trace) else None,
        )


def _check_function(name: str, value: object) -> None:
    if not callable(value):
        raise invalid(name, "a function or None", shown(value))
    if inspect.iscoroutinefunction(value):
        raise invalid(name, "a function that is not async, or None", shown(value))


def _in_turn(processors: Sequence[object]) -> LogitsProcessor | None:
    """One function that calls *processors*, each with the logits that the one before it left."""
    for i, one in enumerate(processors):
        _check_function(f"logits_processor[{i}]", one)

    def processed(ids: list[int], logits: Any) -> Any:
        for one in cast("Sequence[LogitsProcessor]", processors):
            returned = one(ids, logits)
            logits = logits if returned is None else returned
        return logits

    return processed if processors else None


class SteeredSource:
    """What mods, a logits processor or a stopping rule make of a generation.

    Args:
        plain: Its events and transcript; the request is not submitted yet.
        prefill: What its mods do before the first step.
        submit: Submits the request with the prompt, limit and edits as its mods leave them; no
            edits: its own.
        context_of: The context of a prompt that its mods have changed.
    """

    def __init__(
        self,
        plain: PlainSource,
        steering: Steering,
        *,
        prefill: Callable[[], Steps],
        submit: Callable[[list[int], int, _core.EditPlan | None], _core.Generation],
        context_of: Callable[[list[int]], Context],
    ) -> None:
        self.transcript = plain.transcript
        self.tool_calls: Any = None
        self._plain = plain
        self._steering = steering
        self._prefill = prefill
        self._is_submitted = False
        self._submit = submit
        self._context_of = context_of
        self._ready: deque[Token] = deque()
        self._is_left = False  # whether the consumer has left before the end
        self._decided: str | None = None

    def begin(self, generation: object) -> None:
        """As `PlainSource.begin`."""
        self._generation = weakref.ref(generation)
        weakref.finalize(generation, self._steering.drop).atexit = False

    # ---- iteration

    def check_sync(self) -> None:
        """Refuse to be taken from without an event loop if mods are async."""
        if self._has_ready or self.transcript.reason is not None:
            return
        self._steering.check_idle()
        if self._steering.is_async:
            name = self._plain.consumer.request_id
            raise RequestError(
                f"{name} has async mods; iterate it with async for", parameter="mods"
            )

    def take(self) -> Token | PromptBlock | None:
        """As `PlainSource.take`."""
        return at_once(self._taken(is_async=False))

    async def atake(self) -> Token | PromptBlock | None:
        """As `PlainSource.atake`."""
        if self._has_ready and len(self._ready) % _READY_AT_ONCE == 1:
            await asyncio.sleep(0)  # a mod may force thousands
        return await self._taken(is_async=True)

    async def _taken(self, *, is_async: bool) -> Token | PromptBlock | None:
        plain, steering = self._plain, self._steering
        task = asyncio.current_task() if is_async else None
        try:
            while not self._has_ready and self.transcript.reason is None:
                event = None
                if self._is_submitted:
                    event = await plain.anext_event() if is_async else plain.next_event()
                    if event is None:
                        break
                    if not isinstance(event, _core.ForwardEvent):
                        return self._receive(event)
                    plain.consumer.has_taken = True
                else:
                    plain.consumer.note(task)
                try:
                    if event is None:
                        decision = await steering.run(self._prefill(), is_async=is_async)
                    elif steering.is_direct:
                        decision = steering.direct(event, self.transcript.cut)
                    else:
                        steps = steering.step(event, self.transcript.cut)
                        decision = await steering.run(steps, is_async=is_async)
                except BusyError as error:  # of a callable: its forward pass is gone
                    self.stop("error", error)
                    raise
                finally:
                    if not steering.is_direct:  # a mod with a time limit has its own thread
                        plain.consumer.note(task)
                self._decide(event, decision)
        except ClosedError:
            if self.transcript.reason is None:
                raise  # else it was cancelled during the step
        return self._ready.popleft() if self._has_ready else None

    def peek(self, within_s: float) -> None:
        """Nothing: its mods run only as it is iterated."""

    @property
    def _has_ready(self) -> bool:
        return bool(self._ready) and not self._is_left

    def _receive(self, event: Event) -> Token | PromptBlock | None:
        if isinstance(event, _core.EndEvent):
            self._end(self._decided or event.finish_reason)
            return None
        return self._plain.receive(event)

    # ---- what the mods decide

    def _decide(self, event: _core.ForwardEvent | None, decision: Decision | None) -> None:
        """Answer *event*, or submit the request as the mods leave it, and update the text."""
        if decision is None:  # it was cancelled meanwhile
            return
        if event is None:
            self._is_submitted = True
            if decision.prompt != self.transcript.context.ids:
                self.transcript.context = self._context_of(decision.prompt)
            if decision.end is None:
                self._plain.handle = self._submit(
                    decision.prompt, decision.max_tokens, decision.edits
                )
                self._plain.begin(self._generation())
                if self.transcript.reason is not None:  # cancelled while it was submitted
                    self._plain.handle.cancel()
                return
        elif not self._answer(event, decision):
            return  # the next event says why
        self._commit(event, decision)
        self._decided = decision.end
        if decision.error is not None:
            raise decision.error
        if event is None and decision.end is not None:
            self._end(decision.end)

    def _answer(self, event: _core.ForwardEvent, decision: Decision) -> bool:
        end = decision.end
        if end is not None and end not in _CORE_ENDS:
            end = "stop"
        try:
            if decision.replaces_all:
                event.answer(0, [], end)
            else:
                event.answer(decision.n_removed, decision.ids, end, decision.edits)
        except BaseException as error:
            self._steering.void()
            if isinstance(error, ClosedError):
                return False
            raise
        return True

    def _commit(self, event: _core.ForwardEvent | None, decision: Decision) -> None:
        transcript, picked = self.transcript, decision.picked
        if decision.n_removed:
            transcript.remove(decision.n_removed)
        self.tool_calls = decision.tool_calls
        for i, token_id in enumerate(decision.ids):
            if self._steering.mods:  # else nothing is taken back
                transcript.mark()
            is_forced = i >= decision.n_sampled
            # What the forward pass knows is about the token that follows it.
            own = event if i == 0 and not decision.n_removed else None
            token = transcript.add(token_id, own, forced=is_forced)
            token._has_pass = own is not None  # pyright: ignore[reportPrivateUsage]
            if own is not None and picked is not None and not is_forced:
                token.logprob, token.top_logprobs = picked.logprob, picked.top_logprobs
            self._ready.append(token)
        if decision.end is not None and decision.ids:
            self._ready[-1].text += transcript.text.flush()

    # ---- ending

    def stop(self, reason: str, error: BaseException | None = None) -> None:
        """As `PlainSource.stop`."""
        if self.transcript.reason is None:
            self._is_left = True
            if self._decided is not None and reason == "cancelled":
                reason = self._decided  # a consumer that leaves does not cancel what has ended
            self.handle.cancel()
            self._end(reason, error)

    def _end(self, reason: str, error: BaseException | None = None) -> None:
        if self.transcript.reason is None:
            self.transcript.end(reason)
            self._steering.finish(reason, usage=self.usage, error=error)

    # ---- facts

    @property
    def handle(self) -> _core.Generation:
        """As of `PlainSource`, as are the following ones."""
        return self._plain.handle

    @property
    def usage(self) -> Usage:
        return self._plain.usage

    @property
    def trace(self) -> Trace | None:
        recorder = self._steering.recorder
        return None if recorder is None else recorder.trace

    @property
    def mods(self) -> tuple[Any, ...]:
        return tuple(one.mod for one in self._steering.mods)

    @property
    def mod_errors(self) -> tuple[ModFailure, ...]:
        return self._steering.failures


def traced_attention(capture: Capture | None, scale: float, event: ForwardPass) -> Object | None:
    """Of the attention of a forward pass, what a trace keeps."""
    if event.attention is None or capture is None:
        return None
    # The mean of means is that of all; no other reduction has weights of single columns.
    is_mean = capture.kind == "probs" and capture.reduce in ("mean", "mean_heads")
    if (capture.reduce is not None and not is_mean) or capture.spans is not None:
        return None
    return top_columns(
        event.attention,
        capture,
        positions=event.attention_positions,
        scale=scale,
        n_columns=event.n_tokens,
    )
