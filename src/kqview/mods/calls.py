"""Calls of mods: on the caller's thread, on a thread of the request with a time limit, or awaited.

A call never raises what the mod raised: the `CallOutcome` has it. On the caller's thread,
KeyboardInterrupt and other exceptions that are no Exception pass through, as does the cancellation
of a task. With a time limit, a mod that exits (SystemExit) has failed like any other: it must not
end the server that calls it.

A Python thread cannot be stopped. A mod that exceeds its time limit keeps its thread, and the
request continues with another one; until the mod returns, further calls of it fail at once.
"""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

from kqview.errors import RequestError
from kqview.mods.actions import ActionBuilder
from kqview.mods.decorator import BoundMod
from kqview.mods.events import Event, RequestEnd
from kqview.mods.failures import describe, traceback_of
from kqview.mods.logs import Captured, Log
from kqview.mods.tokenizer import ModTokenizer

_IDLE_S: Final = 10.0  # an idle thread of a request ends after this, and a new one starts if needed
_AS_EVER: Final = contextlib.nullcontext()
_Result = TypeVar("_Result")


def at_once(steps: Coroutine[Any, Any, _Result]) -> _Result:
    """What *steps* returns, which wait for nothing on an event loop: for consumers without one."""
    try:
        steps.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a call of a synchronous consumer waits for an event loop")


class EventCall(NamedTuple):
    """A mod to be called with an event; *log* takes what it prints and logs, if there is one."""

    mod: BoundMod
    event: Event
    log: Log | None = None


class CallOutcome(NamedTuple):
    """The result of a call.

    Attributes:
        answer: What the mod returned; None if it failed.
        time_ms: Duration in milliseconds.
        error: Why it failed, as "ValueError: text"; None if it returned.
        traceback: Traceback of the exception, "" without one.
        exception: The exception; None without one.
    """

    answer: object = None
    time_ms: float = 0.0
    error: str | None = None
    traceback: str = ""
    exception: BaseException | None = None


SILENT: Final = CallOutcome()
"""Of a mod that does nothing."""


def failure(error: BaseException, time_ms: float = 0.0) -> CallOutcome:
    """The outcome of a call that raised *error*."""
    return CallOutcome(None, time_ms, describe(error), traceback_of(error), error)


@dataclass(frozen=True, slots=True)
class _Late:
    """A call that has outlasted its time limit.

    Attributes:
        job: Is done when the call returns.
        loop: Where it runs, if its mod is async.
    """

    job: "Future[Any]"
    loop: asyncio.AbstractEventLoop | None = None


@dataclass(eq=False)
class ModCaller:
    """Calls the mods of one request; one call at a time.

    Attributes:
        tokenizer: Passed to the mods.
        time_limit_s: Most seconds that a call may take; None for no limit.
        note: Called on the thread or task of a call, before the mod, where that is not the
            consumer's own.
    """

    tokenizer: ModTokenizer
    _: KW_ONLY
    time_limit_s: float | None = None
    note: Callable[[], object] = lambda: None

    def __post_init__(self) -> None:
        self._thread: _CallThread | None = None
        self._late: dict[int, _Late] = {}  # by id of the mod

    async def call(self, call: EventCall, *, is_async: bool) -> CallOutcome:
        """Call a mod and wait for its answer: await an async mod, run others.

        Args:
            is_async: Whether the consumer has an event loop. If not, nothing is awaited.
        """
        if call.mod.is_async and not is_async:
            return failure(
                RequestError(
                    f"mod {call.mod.name} is async; iterate the generation with async for",
                    parameter="mods",
                )
            )
        if self._late and (late := self._still_late(call.mod)) is not None:
            return late
        if self.time_limit_s is None:
            return await self._outcome(call)
        loop = None
        wanted: asyncio.Future[CallOutcome] | None = None
        if call.mod.is_async:
            job: Future[Any] = Future()
            wanted = asyncio.ensure_future(self._outcome(call, is_elsewhere=True))
            wanted.add_done_callback(lambda _: job.set_result(None))
            loop = wanted.get_loop()
        else:
            job = self._job(lambda: at_once(self._outcome(call, is_elsewhere=True)))
            wanted = asyncio.wrap_future(job) if is_async else None
        try:
            if wanted is None:
                return job.result(self.time_limit_s)  # the outcome has an exception of the mod
            done, _ = await asyncio.wait({wanted}, timeout=self.time_limit_s)
        except BaseException as error:  # the consumer's task was cancelled, or KeyboardInterrupt
            if wanted is not None:
                wanted.cancel()
            outcome = self._abandon(call.mod, job, loop)
            if wanted is None and isinstance(error, TimeoutError):
                return outcome
            raise
        if not done:
            wanted.cancel()
            return self._abandon(call.mod, job, loop)
        try:
            return wanted.result()
        except asyncio.CancelledError as error:  # raised by the mod: nobody has cancelled the task
            return failure(error)

    def call_here(self, mod: BoundMod, event: Event) -> CallOutcome:
        """As `call`, of a mod that is not async, without a time limit; `SILENT` for None."""
        try:
            answer = self.answer(mod, event)
            if answer is None:
                return SILENT
            _check_answer(mod, answer)
        except Exception as error:
            return failure(error)
        return CallOutcome(answer)

    def answer(self, mod: BoundMod, event: Event) -> Any:
        """What *mod* returns; raises what it raises."""
        return mod.call(*(event, ActionBuilder(event), self.tokenizer)[: mod.n_arguments])

    def end(self, mod: BoundMod, end: RequestEnd) -> None:
        """Call the end hook of *mod*: behind a call of it that still runs, else at once."""
        if mod.on_end is None:
            return
        late = self._late.get(id(mod))
        if late is not None and not (late.loop is not None and late.loop.is_closed()):
            late.job.add_done_callback(lambda _: mod.end(end))
        elif self.time_limit_s is None:
            mod.end(end)
        else:
            self._job(partial(mod.end, end))  # a hook that hangs holds up nobody

    def close(self) -> None:
        """Let the thread of the request end."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    async def _outcome(self, call: EventCall, *, is_elsewhere: bool = False) -> CallOutcome:
        """Call a mod on this thread, and await it in this task if it is async.

        Args:
            is_elsewhere: The thread or the task is the mod's alone, not the consumer's own.
        """
        if is_elsewhere:
            self.note()
        started = time.perf_counter()
        try:
            with _AS_EVER if call.log is None else Captured(call.log):
                answer = self.answer(call.mod, call.event)
                if call.mod.is_async and inspect.isawaitable(answer):
                    answer = await answer
                _check_answer(call.mod, answer)
        except BaseException as error:
            # No signal is raised on a thread of the mod's own; a task of its own passes it on.
            is_signal = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
            is_caught = is_elsewhere and not (call.mod.is_async and is_signal)
            if is_caught or isinstance(error, Exception):
                return failure(error, _ms_since(started))
            raise
        return CallOutcome(answer, _ms_since(started))

    def _job(self, work: Callable[[], Any]) -> "Future[Any]":
        """What *work* returns, on the request's thread."""
        job = None if self._thread is None else self._thread.try_run(work)
        if job is None:
            self._thread = _CallThread()
            job = self._thread.try_run(work)
            assert job is not None
        return job

    def _still_late(self, mod: BoundMod) -> CallOutcome | None:
        late = self._late.get(id(mod))
        if late is None:
            return None
        if late.job.done():
            del self._late[id(mod)]
            return None
        return CallOutcome(None, 0.0, f"TimeoutError: an earlier call of {mod.name} still runs")

    def _abandon(
        self, mod: BoundMod, job: "Future[Any]", loop: asyncio.AbstractEventLoop | None = None
    ) -> CallOutcome:
        limit_s = self.time_limit_s
        assert limit_s is not None
        self._late[id(mod)] = _Late(job, loop)
        if loop is None:
            self.close()  # the thread ends when the mod returns
        error = f"TimeoutError: {mod.name} took more than the {limit_s:g} s of mod_time_limit_s"
        return CallOutcome(None, limit_s * 1000, error)


def _check_answer(mod: BoundMod, answer: object) -> None:
    if inspect.isawaitable(answer):
        if (close := getattr(answer, "close", None)) is not None:
            close()
        raise RequestError(
            f"mod {mod.name} returned an awaitable; declare it with async def", parameter="mods"
        )


class _CallThread:
    """A thread that runs jobs one after another, and ends when it is told to or idle."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._has_ended = False
        threading.Thread(target=self._work, name="kqview mods", daemon=True).start()

    def try_run(self, work: Callable[[], Any]) -> "Future[Any] | None":
        """Queue *work*; None if the thread has ended."""
        job: Future[Any] = Future()
        job.set_running_or_notify_cancel()  # what waits for it cannot cancel it
        with self._lock:
            if self._has_ended:
                return None
            self._jobs.put((job, work))
        return job

    def end(self) -> None:
        """Let the thread end behind its jobs."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (found := self._next()) is not None:
            job, work = found
            try:
                job.set_result(work())
            except BaseException as error:  # such as SystemExit: it belongs to the consumer
                job.set_exception(error)
            del found, job, work  # an idle thread keeps nothing of the last call alive

    def _next(self) -> "tuple[Future[Any], Callable[[], Any]] | None":
        try:
            return self._jobs.get(timeout=_IDLE_S)
        except Empty:
            with self._lock:
                self._has_ended = self._jobs.empty()
                return None if self._has_ended else self._jobs.get()


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
