"""Workers: threads for work that would block the event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")


class Workers:
    """Threads for work that would block the event loop, no client having more than half of them.

    Each kind of work has threads of its own, so that rows on their way to clients never wait for
    texts to be tokenized. Work that has begun cannot be interrupted: if its client leaves, it keeps
    its thread until it is done, and the result is dropped. Belongs to one event loop.
    """

    def __init__(self, n_threads: int, name: str) -> None:
        """Start up to *n_threads* when there is work."""
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix=f"kqview-{name}")
        self._most = max(1, n_threads // 2)
        self._n_running: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def run(self, client: str, work: Callable[..., _T], *args: Any) -> _T:
        """Do *work* in one of the threads when it is *client*'s turn.

        Work cancelled before it began never begins.
        """
        if self._n_running.get(client, 0) < self._most:
            self._n_running[client] = self._n_running.get(client, 0) + 1
        else:
            await self._turn(client)
        loop = asyncio.get_running_loop()
        try:
            future = self._pool.submit(work, *args)
        except BaseException:
            self._done(client)
            raise

        def done(_: "Future[_T]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._done, client)

        future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    async def _turn(self, client: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came too late
                self._done(client)
            raise

    def _done(self, client: str) -> None:
        """A place of *client* is free; give it to the next that waits."""
        waiting = self._waiting.get(client)
        while waiting:
            turn = waiting.popleft()
            if not waiting:
                del self._waiting[client]
            if not turn.done():
                turn.set_result(None)
                return
        n_running = self._n_running[client] - 1
        if n_running:
            self._n_running[client] = n_running
        else:
            del self._n_running[client]

    def shutdown(self) -> None:
        """Begin nothing more, and wait for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
