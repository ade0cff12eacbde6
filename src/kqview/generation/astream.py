"""LoopWaker: lets one event loop wait for any number of an engine's generations.

One file descriptor per engine and loop, coalesced: the engine thread makes it readable when an item
arrives for a generation that waits, the loop then asks each waiting one. No thread takes part and
nothing polls.
"""

import asyncio
from collections.abc import Callable

from kqview import _core

Arm = Callable[[_core.WakeHandle], bool]
"""Asks for a signal at the next change; True where there is something already."""


class LoopWaker:
    """Wakes the coroutines of one event loop; used on that loop's thread.

    It does not hold the loop: an engine outlives the loops that wait for it.
    """

    def __init__(self) -> None:
        self._handle = _core.WakeHandle()
        self._waiting: dict[_core.Generation, tuple[Arm, asyncio.Future[None]]] = {}

    async def wait(self, generation: _core.Generation, arm: Arm) -> None:
        """Return when *arm*, a method of *generation*, finds something; one wait a generation.

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
