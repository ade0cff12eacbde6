"""Where the tokens of a generation come from, and how it waits for them.

PlainSource: takes the events of one request from the core and turns them into tokens and rows of
the prompt. The synchronous wait is in C++ (without the GIL, interrupted by signals), the
asynchronous one is a LoopWaker's. A Transcript has what was taken.

LoopWaker: one file descriptor per engine and loop, with coalesced signals. The engine thread makes
it readable when an item arrives for a waiting generation; the loop then checks each waiting one.
This needs no extra thread and no polling, but for event loops that have no readers.

Consumers: the holder of a slot may itself be waiting for its consumer, and one that cannot be
parked keeps its slot until that consumer acts. If that consumer is the thread or task that waits
here, the wait would never end. Nothing here keeps a generation alive: dropping one cancels it at
once, even during a check. Such a wait is logged at once, and ends when the holders' consumers have
done nothing for BUSY_WAIT_S.
"""

import asyncio
import contextlib
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from kqview import _core, system
from kqview.errors import BusyError, KqviewError
from kqview.generation.display import N_REMEMBERED
from kqview.mods.failures import ModFailure
from kqview.stop_strings import Mark, TextStream
from kqview.trace import Trace
from kqview.types import Capture, PromptBlock, Token, Usage
from kqview.types.token import Context

_log: Final = logging.getLogger("kqview")

Event = _core.TokenEvent | _core.PromptEvent | _core.ForwardEvent | _core.EndEvent
Arm = Callable[[_core.WakeHandle], bool]
"""Requests a signal at the next change; True if there is something already."""

HANDOVER_S: Final = 2.0
"""Seconds to wait for another thread to start taking tokens of a new generation."""

BUSY_WAIT_S: Final = 10.0
"""Seconds to wait for consumers that keep their slots and do nothing."""

# How long a coroutine may take tokens without a wait before it yields to its event loop.
_TURN_S: Final = 0.002


class LoopWaker:
    """Wakes the coroutines of one event loop; used only on that loop's thread.

    It does not keep the loop alive: an engine outlives the loops that wait for it.
    """

    def __init__(self) -> None:
        self._handle = _core.WakeHandle()
        self._end_watch: Callable[[], object] | None = None  # of a loop without readers
        self._waiting: dict[_core.Generation, tuple[Arm, asyncio.Future[None]]] = {}

    async def wait(self, generation: _core.Generation, arm: Arm) -> None:
        """Return when *arm*, a method of *generation*, finds something; one wait per generation.

        Spurious returns are possible.
        """
        if arm(self._handle):
            return
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if not self._waiting:
            try:
                loop.add_reader(self._handle.fileno(), self._on_signal)
            except (NotImplementedError, ValueError):
                self._end_watch = system.watch(loop, self._handle.wait, self._on_signal)
        self._waiting[generation] = arm, future
        try:
            await future
        finally:
            del self._waiting[generation]
            generation.disarm(self._handle)
            if not self._waiting:
                if self._end_watch is None:
                    loop.remove_reader(self._handle.fileno())
                else:
                    self._end_watch()

    def _on_signal(self) -> None:
        self._handle.drain()
        for arm, future in self._waiting.values():
            if arm(self._handle) and not future.done():
                future.set_result(None)


class Consumer:
    """The last thread or task to take tokens of a generation; initially the thread that made it."""

    __slots__ = ("has_taken", "logged", "noted", "request_id", "task", "thread")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.thread = threading.get_ident()
        self.has_taken = False
        self.noted = time.monotonic()  # when it last took something
        self.logged: set[int] = set()  # holders of slots that it has waited for
        self.task: weakref.ref[asyncio.Task[Any]] | None = None

    def note_here(self) -> None:
        """`note` on the task that runs, or the thread if it has no event loop."""
        task = None
        with contextlib.suppress(RuntimeError):  # a thread without an event loop
            task = asyncio.current_task()
        self.note(task)

    def note(self, task: asyncio.Task[Any] | None = None) -> None:
        """Record that this thread takes tokens, in *task* unless that is None."""
        self.thread = threading.get_ident()
        self.noted = time.monotonic()
        self.task = weakref.ref(task) if task else None


class Consumers:
    """The consumers of an engine's generations; any thread."""

    def __init__(self) -> None:
        # By the core's id, while the generation exists.
        self._consumers: dict[int, Consumer] = {}
        self._generations: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, core_id: int, generation: object, consumer: Consumer) -> None:
        """Keep *consumer* for as long as *generation* exists."""
        self._consumers[core_id] = consumer
        self._generations[core_id] = generation
        weakref.finalize(generation, self._consumers.pop, core_id, None).atexit = False

    def generations(self) -> dict[int, Any]:
        """The generations that exist, by the core's id, in the order of their submission."""
        return dict(sorted(self._generations.items()))

    def name_of(self, core_id: int) -> str | None:
        """The ``request_id`` of a generation; None after the generation was dropped."""
        consumer = self._consumers.get(core_id)
        return consumer.request_id if consumer else None

    def of(self, core_ids: list[int]) -> dict[int, Consumer]:
        """The consumers of generations that were not dropped."""
        return {one: found for one in core_ids if (found := self._consumers.get(one))}

    def is_of_thread(self, holders: list[int], waiting: str, *, is_late: bool) -> bool:
        """Whether only this thread takes from all *holders*, for which *waiting* waits.

        Raises:
            BusyError: It does, and waiting cannot help: it has taken from each of them, or
                *is_late*.
        """
        me = threading.get_ident()
        mine = [one for one in self.of(holders).values() if one.thread == me]
        is_ours = bool(holders) and len(mine) == len(holders)
        if is_ours and (is_late or all(one.has_taken for one in mine)):
            raise _deadlock(waiting, mine)
        return is_ours

    def check_task(self, holders: list[int], waiting: str, task: asyncio.Task[Any] | None) -> None:
        """Raise BusyError if *task* is the one that takes from all *holders*."""
        found = self.of(holders).values()
        mine = [one for one in found if task and one.task and one.task() is task]
        if len(mine) == len(holders):
            raise _deadlock(waiting, mine)


def _deadlock(waiting: str, holders: list[Consumer]) -> BusyError:
    names = ", ".join(one.request_id for one in holders)
    return BusyError(
        f"{waiting} waits for a slot, and {names} keeps it until its tokens are taken by this same "
        f"thread or task; finish or close {names} first, or call engine.cancel_all()"
    )


class _Unsubmitted:
    """Stands in for the core's handle until the request is submitted."""

    end = None
    slot = -1
    is_parked = False
    n_cached = 0

    def cancel(self) -> None: ...
    def wait_settled(self) -> None: ...
    def arm_settled(self, _waiter: object) -> bool:
        return True

    def disarm(self, _waiter: object) -> None: ...


class Transcript:
    """What a generation has so far: its ids, its text, and how it ended.

    Args:
        context: The prompt; generated ids are added to it.
        capture: What is captured, with its layers filled in.
        stop: Strings that end the text.
        token_bytes: Bytes of each token id.
        n_keep: Number of tokens at the start that a context shift never discards.
        on_end: Called at the end.
    """

    def __init__(
        self,
        context: Context,
        capture: Capture | None,
        stop: Sequence[str],
        token_bytes: Mapping[int, bytes],
        n_keep: int,
        on_end: Callable[[], None],
    ) -> None:
        self.context = context
        self.capture = capture
        self.ids: list[int] = []
        self.text = TextStream(stop)
        self.reason: str | None = None
        self.n_removed = 0  # tokens taken back since one was added
        self._marks: list[Mark] = []  # of the text before each id, while some may be taken back
        # For displays, which show the attention that the caller still has.
        self._handed: deque[weakref.ref[Token]] = deque(maxlen=N_REMEMBERED)
        self._last: Callable[[], Token | None] = lambda: None
        self._token_bytes = token_bytes
        self.n_keep = n_keep
        self._on_end = on_end

    def add(
        self,
        token_id: int,
        event: _core.TokenEvent | _core.ForwardEvent | None,
        logprob: float | None = None,
        top_logprobs: list[tuple[int, float]] | None = None,
        *,
        forced: bool = False,
    ) -> Token:
        """The token *token_id*, with the rows of *event*, the forward pass that it is from."""
        text = self.text.feed(self._token_bytes[token_id])
        token = Token(token_id, text, len(self.ids), logprob, top_logprobs, forced=forced)
        self._last = weakref.ref(token)
        capture, context = self.capture, self.context
        if capture is not None:
            token.capture = capture
            self._handed.append(weakref.ref(token))
            if event is not None:
                token.attention = event.attention
                token.attention_positions = event.positions
                token.hidden = event.hidden
                if capture.vocab_logits and not forced:
                    token.logits = event.logits
        if event is not None and event.n_discarded:
            token.discarded = range(self.n_keep, self.n_keep + event.n_discarded)
        if self.n_removed:
            token.n_removed, self.n_removed = self.n_removed, 0
        token._context, token._n_before = context, len(context.ids)  # pyright: ignore[reportPrivateUsage]
        context.ids.append(token_id)
        self.ids.append(token_id)
        return token

    def mark(self) -> None:
        """Note where the next token begins, so that `remove` can take it back."""
        self._marks.append(self.text.mark())

    def remove(self, n: int) -> None:
        """Take the last *n* tokens back."""
        n_kept = len(self.ids) - n
        self.text.reset(self._marks[n_kept])
        del self.ids[n_kept:], self._marks[n_kept:]
        self._last = lambda: None
        self.context = self.context.branch(n_kept)
        self.n_removed += n

    def cut(self, n_removed: int, ids: Sequence[int]) -> int | None:
        """How many of *ids*, in place of the last *n_removed*, are left when a stop string ends.

        None without one.
        """
        if not self.text.has_stops:
            return None
        n_kept = len(self.ids) - n_removed
        ahead = self.text.branch(self._marks[n_kept] if n_removed else self.text.mark())
        for n, token_id in enumerate(ids, 1):
            ahead.feed(self._token_bytes[token_id])
            if ahead.stop_match is not None:
                return n
        return None

    def end(self, reason: str) -> None:
        """The generation has ended, unless it had before."""
        if self.reason is None:
            self.reason = reason
            # Whether the end is known when the last token is taken is a matter of time.
            rest = self.text.flush()
            if rest and (last := self._last()) is not None:
                last.text += rest
            self._on_end()

    def held_tokens(self) -> list[Token]:
        """The tokens with attention that were handed out and that something still holds."""
        found = [token for one in self._handed.copy() if (token := one()) is not None]
        # One that mods took back has the index of another one, or none.
        last = {token.index: token for token in found if token.attention is not None}
        ids = self.ids
        return [last[i] for i in sorted(last) if i < len(ids) and last[i].id == ids[i]]


class PlainSource:
    """The tokens and rows of one request, as the core generates them.

    One thread or task at a time takes them.

    Attributes:
        handle: The core's generation.
        consumer: Who takes.
        transcript: What was taken.
    """

    mods: Final[tuple[Any, ...]] = ()
    trace: Final[Trace | None] = None
    mod_errors: Final[tuple[ModFailure, ...]] = ()
    tool_calls: Final[Any] = None

    def __init__(
        self,
        request_id: str,
        handle: _core.Generation | None,
        transcript: Transcript,
        consumers: Consumers,
        waker: Callable[[], LoopWaker],
    ) -> None:
        """Take from *handle*; None if it is set later."""
        self.handle = handle or cast("_core.Generation", _Unsubmitted())
        self.consumer = Consumer(request_id)
        self.transcript = transcript
        self._consumers = consumers
        self._waker = waker
        self._turn_ends = 0.0

    def begin(self, generation: object) -> None:
        """Be the source of *generation*, which is not kept alive."""
        self._consumers.add(self.handle.id, generation, self.consumer)

    def check_sync(self) -> None:
        """Refuse to be taken from without an event loop, where that cannot be."""

    def take(self) -> Token | PromptBlock | None:
        """What comes next, None at the end; waits."""
        return None if self.transcript.reason is not None else self.receive(self.next_event())

    async def atake(self) -> Token | PromptBlock | None:
        """Like `take`, without blocking the event loop."""
        event = await self.anext_event()
        return None if event is None else self.receive(event)

    def receive(self, event: Event) -> Token | PromptBlock | None:
        """*event* as a token or as rows of the prompt; None at the end."""
        if isinstance(event, _core.TokenEvent):
            transcript = self.transcript
            token = transcript.add(event.id, event, event.logprob, event.top_logprobs)
            self.consumer.has_taken = True
            if transcript.text.stop_match is not None:
                self.stop("stop_sequence")  # the engine rolls the slot back to this token
            elif event.end is not None:
                token.text += transcript.text.flush()
                self.transcript.end(event.end.finish_reason)
            return token
        if isinstance(event, _core.PromptEvent):
            embedding = event.embedding
            return PromptBlock(
                event.start, event.n_rows, event.attention, event.positions,
                event.hidden if embedding is None else embedding, event.scores,
            )  # fmt: skip
        assert isinstance(event, _core.EndEvent)  # nothing steers it
        self.transcript.end(event.finish_reason)
        return None

    def peek(self, within_s: float) -> Token | PromptBlock | None:
        """What comes first if it comes within that time; an error is raised by the next `take`."""
        with contextlib.suppress(KqviewError):
            event = self.handle.next(within_s)
            if isinstance(event, _core.PromptEvent | _core.TokenEvent):
                return self.receive(event)
        return None

    def stop(self, reason: str, error: BaseException | None = None) -> None:
        """End it at the engine's next step; any thread."""
        if self.transcript.reason is None:
            self.handle.cancel()
            self.transcript.end(reason)

    @property
    def usage(self) -> Usage:
        """As of `Generation`."""
        n, handle = len(self.transcript.ids), self.handle
        end = handle.end
        if end is None:
            return Usage(self.transcript.context.n_prompt, handle.n_cached, n)
        return Usage(
            end.prompt_tokens, end.cached_tokens, n, end.prefill_s, end.decode_s, end.queue_s,
            end.draft_tokens, end.accepted_tokens,
        )  # fmt: skip

    # ---- waiting

    def next_event(self) -> Event:
        """The next event; waits for it."""
        event = self.handle.next()
        if isinstance(event, _core.WaitEvent):
            event = self._wait_for_slot(event)
        self.consumer.note()
        return event

    def _wait_for_slot(self, waits: _core.WaitEvent) -> Event:
        """Wait for the next event while generations that cannot be parked hold every slot."""
        began, ends = time.monotonic(), None
        holders: list[int] = []
        while True:
            holders = waits.holders or holders
            is_late = not waits.holders and self.handle.slot < 0
            name = self.consumer.request_id
            is_ours = self._consumers.is_of_thread(holders, name, is_late=is_late)
            if waits.holders:
                ends = self._wait_ends(waits.holders, began, ends)
            left_s = None if ends is None else ends - time.monotonic()
            if left_s is None or left_s <= 0:  # the core is asked anew who keeps the slots
                event = self.handle.next()
            else:
                event = self.handle.next(min(left_s, HANDOVER_S) if is_ours else left_s, True)
            if not isinstance(event, _core.WaitEvent):
                return event
            waits = event

    async def anext_event(self) -> Event | None:
        """The next event, without blocking the event loop; None if the generation has ended."""
        if time.monotonic() > self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.monotonic() + _TURN_S
        has_waited, began, ends = False, None, None
        while self.transcript.reason is None:
            event = self.handle.try_next(has_waited)
            if not isinstance(event, _core.WaitEvent):
                if has_waited:
                    self._turn_ends = time.monotonic() + _TURN_S
                self.consumer.note(asyncio.current_task())
                return event
            if event.holders:
                name, task = self.consumer.request_id, asyncio.current_task()
                self._consumers.check_task(event.holders, name, task)
                began = began or time.monotonic()
                ends = self._wait_ends(event.holders, began, ends)
            left_s = None if ends is None else ends - time.monotonic()
            has_waited = True
            if left_s is None or left_s <= 0:
                await self._waker().wait(self.handle, self.handle.arm)
                continue
            try:  # when the time is over, the core is asked anew who keeps the slots
                async with asyncio.timeout(left_s):
                    await self._waker().wait(self.handle, self.handle.arm)
            except TimeoutError:
                has_waited = False
        return None

    def _wait_ends(self, holders: list[int], began: float, ends: float | None) -> float | None:
        """When a wait since *began* for *holders*, which keep every slot, ends; logs each once.

        Raises:
            BusyError: Their consumers have done nothing for BUSY_WAIT_S, nor has the wait been
                shorter.
        """
        consumers = self._consumers.of(holders)
        if not consumers:  # they were dropped just now
            return ends
        ends = max(began, *(one.noted for one in consumers.values())) + BUSY_WAIT_S
        names = ", ".join(one.request_id for one in consumers.values())
        waiting = self.consumer
        if time.monotonic() >= ends:
            raise BusyError(
                f"{waiting.request_id} has waited {BUSY_WAIT_S:g} s for a slot, and {names} keeps "
                f"it until its tokens are taken; take them, close {names}, or call "
                "engine.cancel_all()"
            )
        if not consumers.keys() <= waiting.logged:
            waiting.logged.update(consumers)
            _log.warning(
                "%s waits for a slot, and %s keeps it until its tokens are taken; it waits %g s",
                waiting.request_id, names, BUSY_WAIT_S,
            )  # fmt: skip
        return ends
