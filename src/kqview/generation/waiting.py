"""How generations wait: on an event loop (LoopWaker), and for slots held by others (Turns).

LoopWaker: one file descriptor per engine and loop, with coalesced signals. The engine thread makes
it readable when an item arrives for a waiting generation; the loop then checks each waiting one.
This needs no extra thread and no polling.

Turns: the holder of a slot may itself be waiting for its consumer, and one that cannot be parked
keeps its slot until that consumer acts. If that consumer is the thread or task that waits here, the
wait would never end. Nothing here keeps a generation alive: dropping one cancels it at once, even
during a check.

SlotWait: such a wait is logged at once, and ends when the holders' consumers have done nothing for
BUSY_WAIT_S.
"""

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from kqview import _core
from kqview.errors import BusyError

_log: Final = logging.getLogger("kqview")

Arm = Callable[[_core.WakeHandle], bool]
"""Requests a signal at the next change; True if there is something already."""


class LoopWaker:
    """Wakes the coroutines of one event loop; used only on that loop's thread.

    It does not keep the loop alive: an engine outlives the loops that wait for it.
    """

    def __init__(self) -> None:
        self._handle = _core.WakeHandle()
        self._waiting: dict[_core.Generation, tuple[Arm, asyncio.Future[None]]] = {}

    async def wait_for(self, generation: _core.Generation, arm: Arm, limit_s: float | None) -> bool:
        """As `wait`, for *limit_s* unless that is None; False when that time is over."""
        if limit_s is None:
            await self.wait(generation, arm)
            return True
        try:
            async with asyncio.timeout(limit_s):
                await self.wait(generation, arm)
        except TimeoutError:
            return False
        return True

    async def wait(self, generation: _core.Generation, arm: Arm) -> None:
        """Return when *arm*, a method of *generation*, finds something; one wait per generation.

        Spurious returns are possible.
        """
        if arm(self._handle):
            return
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if not self._waiting:
            loop.add_reader(self._handle.fileno(), self._on_signal)
        self._waiting[generation] = arm, future
        try:
            await future
        finally:
            del self._waiting[generation]
            generation.disarm(self._handle)
            if not self._waiting:
                loop.remove_reader(self._handle.fileno())

    def _on_signal(self) -> None:
        self._handle.drain()
        for arm, future in self._waiting.values():
            if arm(self._handle) and not future.done():
                future.set_result(None)


HANDOVER_S: Final = 2.0
"""Seconds to wait for another thread to start taking tokens of a new generation."""

BUSY_WAIT_S: Final = 10.0
"""Seconds to wait for consumers that keep their slots and do nothing."""


class Taker:
    """The last thread or task to take tokens of a generation; initially the thread that made it."""

    __slots__ = ("_task", "has_taken", "logged", "noted", "request_id", "thread")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.thread = threading.get_ident()
        self.has_taken = False
        self.noted = time.monotonic()  # when it last took something
        self.logged: set[int] = set()  # holders of slots that it has waited for
        self._task: weakref.ref[asyncio.Task[Any]] | None = None

    def is_task(self, task: asyncio.Task[Any] | None) -> bool:
        return task is not None and self._task is not None and self._task() is task

    def note(self, task: asyncio.Task[Any] | None = None) -> None:
        """Record that this thread takes tokens, in *task* unless that is None."""
        self.thread = threading.get_ident()
        self.noted = time.monotonic()
        self._task = weakref.ref(task) if task else None


class Turns:
    """The takers of an engine's generations; any thread."""

    def __init__(self) -> None:
        # By the core's id, while the generation exists.
        self._takers: dict[int, Taker] = {}
        self._generations: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, core_id: int, generation: object, taker: Taker) -> None:
        """Keep *taker* for as long as *generation* exists."""
        self._takers[core_id] = taker
        self._generations[core_id] = generation
        weakref.finalize(generation, self._takers.pop, core_id, None).atexit = False

    def generations(self) -> dict[int, Any]:
        """The generations that exist, by the core's id, in the order of their submission."""
        return dict(sorted(self._generations.items()))

    def name_of(self, core_id: int) -> str | None:
        """The ``request_id`` of a generation; None after the generation was dropped."""
        taker = self.taker_of(core_id)
        return taker.request_id if taker else None

    def taker_of(self, core_id: int) -> Taker | None:
        """The taker of a generation; None after the generation was dropped."""
        return self._takers.get(core_id)

    def is_of_thread(self, holders: list[int], waiting: str, *, is_late: bool) -> bool:
        """Whether only this thread takes from all *holders*, for which *waiting* waits.

        Raises:
            BusyError: It does, and waiting cannot help: it has taken from each of them, or
                *is_late*.
        """
        me = threading.get_ident()
        mine = [one for one in map(self._takers.get, holders) if one and one.thread == me]
        is_ours = bool(holders) and len(mine) == len(holders)
        if is_ours and (is_late or all(one.has_taken for one in mine)):
            raise _deadlock(waiting, mine)
        return is_ours

    def check_task(self, holders: list[int], waiting: str, task: asyncio.Task[Any] | None) -> None:
        """Raise BusyError if *task* is the one that takes from all *holders*."""
        mine = [one for one in map(self._takers.get, holders) if one and one.is_task(task)]
        if len(mine) == len(holders):
            raise _deadlock(waiting, mine)


class SlotWait:
    """One wait of a generation for a slot, as far as others keep every slot."""

    def __init__(self, turns: Turns, waiting: Taker) -> None:
        self._turns = turns
        self._waiting = waiting
        self._began = time.monotonic()
        self._ends: float | None = None  # unknown while nobody is known to keep a slot

    def note(self, holders: list[int]) -> None:
        """Log that *holders* keep every slot, each once.

        Raises:
            BusyError: Their consumers have done nothing for BUSY_WAIT_S, nor has the wait been
                shorter.
        """
        takers = {one: taker for one in holders if (taker := self._turns.taker_of(one))}
        if not takers:  # they were dropped just now
            return
        last = max(taker.noted for taker in takers.values())
        self._ends = max(self._began, last) + BUSY_WAIT_S
        names = ", ".join(taker.request_id for taker in takers.values())
        waiting = self._waiting
        if time.monotonic() >= self._ends:
            raise BusyError(
                f"{waiting.request_id} has waited {BUSY_WAIT_S:g} s for a slot, and {names} keeps "
                f"it until its tokens are taken; take them, close {names}, or call "
                "engine.cancel_all()"
            )
        if not takers.keys() <= waiting.logged:
            waiting.logged.update(takers)
            _log.warning(
                "%s waits for a slot, and %s keeps it until its tokens are taken; it waits %g s",
                waiting.request_id, names, BUSY_WAIT_S,
            )  # fmt: skip

    @property
    def left_s(self) -> float | None:
        """Seconds until it must be asked again who keeps the slots; None for no limit."""
        if self._ends is None:
            return None
        left_s = self._ends - time.monotonic()
        return left_s if left_s > 0 else None


def _deadlock(waiting: str, holders: list[Taker]) -> BusyError:
    names = ", ".join(one.request_id for one in holders)
    return BusyError(
        f"{waiting} waits for a slot, and {names} keeps it until its tokens are taken by this same "
        f"thread or task; finish or close {names} first, or call engine.cancel_all()"
    )
