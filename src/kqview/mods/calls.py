"""Calls of mods: on the caller's thread, on a thread of the request with a time limit, or awaited.

A call never raises what the mod raised: the `Outcome` has it. On the caller's thread,
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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, cast

from kqview.errors import RequestError
from kqview.mods.actions import ActionBuilder
from kqview.mods.decorator import BoundMod
from kqview.mods.events import Event, RequestEnd
from kqview.mods.failures import describe, traceback_of
from kqview.mods.logs import Captured, Log
from kqview.mods.tokenizer import ModTokenizer

_IDLE_S: Final = 10.0  # an idle thread of a request ends after this, and a new one starts if needed


@dataclass(frozen=True, slots=True)
class Call:
    """A mod to be called with an event.

    Attributes:
        mod: The mod.
        event: The event.
        log: Takes what the mod prints and logs.
    """

    mod: BoundMod
    event: Event
    log: Log


@dataclass(frozen=True, slots=True)
class Outcome:
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
    exception: BaseException | None = field(default=None, compare=False)


def failure(error: BaseException, time_ms: float = 0.0) -> Outcome:
    """The outcome of a call that raised *error*."""
    return Outcome(None, time_ms, describe(error), traceback_of(error), error)


class _Running(Protocol):
    """A call that may outlast its time limit."""

    def has_returned(self) -> bool: ...
    def when_returned(self, then: Callable[[], object]) -> None:
        """Call *then* when the call returns, at once if it has."""
        ...


class Caller:
    """Calls the mods of one request; one call at a time.

    Args:
        tokenizer: Passed to the mods.
        time_limit_s: Most seconds that a call may take; None for no limit.
        note: Called on the thread or task of a call, before the mod, where that is not the
            consumer's own.
    """

    def __init__(
        self,
        tokenizer: ModTokenizer,
        *,
        time_limit_s: float | None = None,
        note: Callable[[], object] = lambda: None,
    ) -> None:
        self._tokenizer = tokenizer
        self._limit_s = time_limit_s
        self._note = note
        self._thread: _CallThread | None = None
        self._late: dict[int, _Running] = {}  # by id of the mod

    # ---- with a synchronous consumer

    def call(self, call: Call) -> Outcome:
        """Call a mod and wait for its answer."""
        if call.mod.is_async:
            return failure(
                RequestError(
                    f"mod {call.mod.name} is async; iterate the generation with async for",
                    parameter="mods",
                )
            )
        late = self._still_late(call.mod)
        if late is not None:
            return late
        if self._limit_s is None:
            return self._run(call)
        job = self._job(lambda: self._run_elsewhere(call))
        try:
            has_returned = job.done.wait(self._limit_s)
        except BaseException:  # KeyboardInterrupt
            self._abandon(call.mod, job)
            raise
        return job.result() if has_returned else self._abandon(call.mod, job)

    # ---- with an asynchronous one

    async def acall(self, call: Call) -> Outcome:
        """Like `call`, on an event loop: awaits an async mod, runs others as `call` does."""
        late = self._still_late(call.mod)
        if late is not None:
            return late
        if self._limit_s is None:
            return await self._arun(call) if call.mod.is_async else self._run(call)
        if call.mod.is_async:
            running = _Task(asyncio.ensure_future(self._arun_elsewhere(call)))
            wanted: asyncio.Future[Any] = running.task
        else:
            running = self._job(lambda: self._run_elsewhere(call))
            wanted = _future_of(running)
        try:
            done, _ = await asyncio.wait({wanted}, timeout=self._limit_s)
        except BaseException:  # the consumer's task was cancelled
            self._abandon(call.mod, running)
            raise
        return running.result() if done else self._abandon(call.mod, running)

    # ---- common

    def end(self, mod: BoundMod, end: RequestEnd) -> None:
        """Call the end hook of *mod*: behind a call of it that still runs, else at once."""
        if mod.on_end is None:
            return
        late = self._late.get(id(mod))
        if late is not None:
            late.when_returned(lambda: mod.end(end))
        elif self._limit_s is None:
            mod.end(end)
        else:
            self._job(lambda: mod.end(end))  # a hook that hangs holds up nobody

    def close(self) -> None:
        """Let the thread of the request end."""
        if self._thread is not None:
            self._thread.put(None)
            self._thread = None

    def _run(self, call: Call) -> Outcome:
        started = time.perf_counter()
        try:
            with Captured(call.log):
                answer = call.mod.call(*self._arguments(call))
                if answer is not None and inspect.isawaitable(answer):
                    _close(answer)
                    raise RequestError(
                        f"mod {call.mod.name} returned an awaitable; declare it with async def",
                        parameter="mods",
                    )
        except Exception as error:
            return failure(error, _ms_since(started))
        return Outcome(answer, _ms_since(started))

    def _run_elsewhere(self, call: Call) -> Outcome:
        self._note()
        try:
            return self._run(call)
        except BaseException as error:  # the thread is the mod's own: no signal is raised there
            return failure(error)

    async def _arun_elsewhere(self, call: Call) -> Outcome:
        self._note()
        try:
            return await self._arun(call)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:
            return failure(error)

    async def _arun(self, call: Call) -> Outcome:
        started = time.perf_counter()
        try:
            with Captured(call.log):
                answer: object = call.mod.call(*self._arguments(call))
                if inspect.isawaitable(answer):
                    answer = await cast("Awaitable[object]", answer)
        except Exception as error:
            return failure(error, _ms_since(started))
        return Outcome(answer, _ms_since(started))

    def _arguments(self, call: Call) -> tuple[Any, ...]:
        arguments = (call.event, ActionBuilder(call.event), self._tokenizer)
        return arguments[: call.mod.n_arguments]

    def _job(self, work: "Callable[[], Outcome | None]") -> "_Job":
        job = _Job(work)
        if self._thread is None or not self._thread.try_put(job):
            self._thread = _CallThread()
            self._thread.put(job)
        return job

    def _still_late(self, mod: BoundMod) -> Outcome | None:
        late = self._late.get(id(mod))
        if late is None:
            return None
        if late.has_returned():
            del self._late[id(mod)]
            return None
        return Outcome(None, 0.0, f"TimeoutError: an earlier call of {mod.name} still runs")

    def _abandon(self, mod: BoundMod, running: "_Job | _Task") -> Outcome:
        assert self._limit_s is not None
        self._late[id(mod)] = running
        if isinstance(running, _Task):
            running.task.cancel()
        else:
            self.close()  # the thread ends when the mod returns
        return Outcome(
            None,
            self._limit_s * 1000,
            f"TimeoutError: {mod.name} took more than the {self._limit_s:g} s of mod_time_limit_s",
        )


class _Task:
    """A call of an async mod."""

    def __init__(self, task: asyncio.Task[Outcome]) -> None:
        self.task = task
        self._loop = asyncio.get_running_loop()

    def has_returned(self) -> bool:
        return self.task.done()

    def when_returned(self, then: Callable[[], object]) -> None:
        if self.task.done() or self._loop.is_closed():
            then()
            return

        def add() -> None:
            self.task.add_done_callback(lambda _task: then())

        self._loop.call_soon_threadsafe(add)

    def result(self) -> Outcome:
        try:
            return self.task.result()
        except asyncio.CancelledError as error:  # raised by the mod: nobody has cancelled the task
            return failure(error)


class _Job:
    """Work for a `_CallThread`."""

    def __init__(self, work: Callable[[], Outcome | None]) -> None:
        self.done = threading.Event()
        self._work = work
        self._lock = threading.Lock()
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._then: Callable[[], object] | None = None

    def run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:  # such as SystemExit: it belongs to the consumer
            self._error = error
        with self._lock:
            self.done.set()
            then = self._then
        if then is not None:
            then()

    def has_returned(self) -> bool:
        return self.done.is_set()

    def when_returned(self, then: Callable[[], object]) -> None:
        with self._lock:
            if not self.done.is_set():
                self._then = then
                return
        then()

    def result(self) -> Outcome:
        if self._error is not None:
            raise self._error
        return self._outcome or Outcome()


class _CallThread:
    """A thread that runs jobs one after another, and ends when it is told to or idle."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._has_ended = False
        threading.Thread(target=self._work, name="kqview mods", daemon=True).start()

    def try_put(self, job: _Job) -> bool:
        """Queue *job*; False if the thread has ended."""
        with self._lock:
            if not self._has_ended:
                self._jobs.put(job)
            return not self._has_ended

    def put(self, job: _Job | None) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        while True:
            job = self._next()
            if job is None:
                return
            job.run()
            del job  # an idle thread keeps nothing of the last call alive

    def _next(self) -> _Job | None:
        try:
            return self._jobs.get(timeout=_IDLE_S)
        except Empty:
            with self._lock:
                self._has_ended = self._jobs.empty()
                return None if self._has_ended else self._jobs.get()


def _future_of(job: _Job) -> asyncio.Future[None]:
    """A future of the running loop that is done when *job* is."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    def then() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, and nobody waits
            loop.call_soon_threadsafe(wake)

    job.when_returned(then)
    return future


def _close(answer: object) -> None:
    close = getattr(answer, "close", None)
    if close is not None:
        close()


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
