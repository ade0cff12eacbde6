"""Turns: whether a generation that waits for a slot waits for others, or for its own consumer.

A slot's holder may itself wait to be taken from. Only who takes the holders' tokens can let go of
them: when that is who waits here, waiting would never end.

Nothing here refers to a generation: dropping one cancels it, at once, whoever looks at that moment.
"""

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from kqview.errors import BusyError

if TYPE_CHECKING:
    import asyncio

    from kqview.generation.stream import Generation

HANDOVER_S: Final = 2.0
"""A generation that nobody has taken from yet may be on its way to another thread."""


class Taker:
    """Who takes the tokens of a generation: the last one who did, at first the one who made it."""

    __slots__ = ("_task", "has_taken", "request_id", "thread")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.thread = threading.get_ident()
        self.has_taken = False
        self._task: weakref.ref[asyncio.Task[Any]] | None = None

    def is_task(self, task: "asyncio.Task[Any] | None") -> bool:
        return task is not None and self._task is not None and self._task() is task

    def note(self, task: "asyncio.Task[Any] | None" = None) -> None:
        """This thread takes, in *task* where that is not None."""
        self.thread = threading.get_ident()
        self._task = weakref.ref(task) if task else None


class Turns:
    """The takers of an engine's generations; any thread."""

    def __init__(self) -> None:
        self._takers: dict[int, Taker] = {}  # by the core's id, as long as somebody holds it

    def add(self, core_id: int, generation: "Generation", taker: Taker) -> None:
        self._takers[core_id] = taker
        weakref.finalize(generation, self._takers.pop, core_id, None).atexit = False

    def name_of(self, core_id: int) -> str | None:
        """The ``request_id`` of a generation; None once nobody holds it."""
        taker = self._takers.get(core_id)
        return taker.request_id if taker else None

    def is_of_thread(self, holders: list[int], waiting: str, *, is_late: bool) -> bool:
        """Whether this thread alone takes from *holders*, for which *waiting* waits.

        Raises:
            BusyError: It does, and that will not change: it has begun to, or *is_late*.
        """
        me = threading.get_ident()
        mine = [one for one in map(self._takers.get, holders) if one and one.thread == me]
        is_ours = bool(holders) and len(mine) == len(holders)
        if is_ours and (is_late or all(one.has_taken for one in mine)):
            raise _deadlock(waiting, mine)
        return is_ours

    def check_task(
        self, holders: list[int], waiting: str, task: "asyncio.Task[Any] | None"
    ) -> None:
        """Refuse to wait for *holders* when *task* is the one who takes from all of them."""
        mine = [one for one in map(self._takers.get, holders) if one and one.is_task(task)]
        if len(mine) == len(holders):
            raise _deadlock(waiting, mine)


def _deadlock(waiting: str, holders: list[Taker]) -> BusyError:
    names = ", ".join(one.request_id for one in holders)
    return BusyError(
        f"generation.next: {waiting} waits for a slot, and {names} keeps it until its "
        f"tokens are taken right here; finish or close {names} first"
    )
