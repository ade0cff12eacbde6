"""Budget: how much one client may have of what all share: memory, and threads (`Workers`).

There is one number of bytes for all work in progress.

Counted are request bodies and messages while they arrive, what they decode to, replies being built,
frames that a client has not read, and the logprobs that a run keeps. Attention rows have a pool of
their own in the engine.

A client may hold as much as stays free: alone at most half, n greedy clients 1/(n+1) each. There is
always room for a client that holds nothing yet, and no fair list of clients has to be kept.
(Switches share buffers this way: Choudhury and Hahne, "Dynamic queue length thresholds".)
"""

import asyncio
import contextlib
import mmap
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Self, TypeVar
from weakref import WeakValueDictionary

from kqview.errors import CapacityError
from kqview.server.errors import RateLimited, TooLarge


class Budget:
    """Counts bytes by client; any thread."""

    def __init__(self, total_bytes: int) -> None:
        """Allow *total_bytes* altogether."""
        self.total_bytes = total_bytes
        self.used_bytes = 0
        """Bytes held now."""
        self.by_client: dict[str, int] = {}
        self.lock = threading.RLock()

    def hold(self, client: str) -> "Reservation":
        """An empty `Reservation` for one piece of work of *client*."""
        return Reservation(self, client)

    def check(self, client: str, n_bytes: int) -> None:
        """Refuse what `Reservation.take` would refuse now, and take nothing.

        Raises:
            TooLarge: Or RateLimited or CapacityError, as `Reservation.take`.
        """
        held_bytes = self.by_client.get(client, 0)
        free_bytes = self.total_bytes - self.used_bytes
        if held_bytes + n_bytes <= free_bytes - n_bytes:
            return
        rule = (
            f"memory_budget_bytes is {self.total_bytes} for everyone, and a client may hold as "
            "much as stays free"
        )
        if 2 * n_bytes > self.total_bytes:
            raise TooLarge(f"{n_bytes} bytes of memory are needed; {rule}; send or ask for less")
        if held_bytes >= self.used_bytes - held_bytes:
            raise RateLimited(
                f"{n_bytes} more bytes of memory are needed, and this client's requests hold "
                f"{held_bytes} already; {rule}; let them end first",
                retry_after_s=1,
            )
        raise CapacityError(
            f"{n_bytes} bytes of memory are needed, {free_bytes} are free; {rule}; try again later"
        )


class Reservation:
    """What one request or connection holds; a context manager that gives all of it back.

    After `close` it counts nothing, so that work that nobody waits for may go on.
    """

    def __init__(self, budget: Budget, client: str) -> None:
        """Hold bytes of *budget* for *client*."""
        self.client = client
        self.n_bytes = 0
        """Bytes held."""
        self._budget = budget
        self._is_closed = False

    def part(self) -> "Reservation":
        """Another one for the same client, closed on its own."""
        return Reservation(self._budget, self.client)

    def take(self, n_bytes: int) -> None:
        """Hold *n_bytes* more, or give so many back if negative.

        Raises:
            TooLarge: They can never fit.
            RateLimited: This client already holds its share.
            CapacityError: Other clients hold too much at the moment.
        """
        budget = self._budget
        with budget.lock:
            if self._is_closed:
                return
            if n_bytes > 0:
                budget.check(self.client, n_bytes)
            n_bytes = max(n_bytes, -self.n_bytes)
            self.n_bytes += n_bytes
            budget.used_bytes += n_bytes
            if held_bytes := budget.by_client.get(self.client, 0) + n_bytes:
                budget.by_client[self.client] = held_bytes
            else:
                budget.by_client.pop(self.client, None)

    def set(self, n_bytes: int) -> None:
        """Hold *n_bytes* in all; raises as `take`."""
        with self._budget.lock:
            self.take(n_bytes - self.n_bytes)

    def close(self, *_: object) -> None:
        """Give everything back; idempotent."""
        with self._budget.lock:
            self.take(-self.n_bytes)
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    __exit__ = close


def uncounted() -> Reservation:
    """A hold on an unlimited budget, for callers that share none."""
    return Budget(sys.maxsize).hold("")


SPILL_BYTES: Final = 2**20
"""Larger bodies go to the folder for temporary files (``TMPDIR``)."""


class Body:
    """A request's body while it arrives; a context manager that releases it.

    Clients may take their time over megabytes, so what is beyond `SPILL_BYTES` waits in a nameless
    temporary file until the body is whole. It belongs to the event loop, `read` to any thread.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=SPILL_BYTES)  # noqa: SIM115 (closed by `close`)
        self._is_closed = False
        self.n_bytes = 0

    def __len__(self) -> int:
        return self.n_bytes

    def add(self, part: bytes) -> None:
        """Append *part*.

        Raises:
            CapacityError: There is no room on the disk.
        """
        self.n_bytes += len(part)
        try:
            self._file.write(part)
        except OSError as error:
            raise self._no_room(error) from error

    def read(self) -> bytes:
        """The whole body; raises as `add`, because files may be written late."""
        try:
            self._file.seek(0)
            return self._file.read()
        except OSError as error:
            raise self._no_room(error) from error

    @contextlib.contextmanager
    def mapped(self) -> Generator[bytes | mmap.mmap]:
        """The whole body without a copy of a large one; raises as `add`."""
        if self.n_bytes <= SPILL_BYTES:
            yield self.read()
            return
        try:
            self._file.flush()
            view = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise self._no_room(error) from error
        with view:
            yield view

    def close(self, *_: object) -> None:
        """Release it; idempotent."""
        if self._is_closed:  # two threads must not close one file
            return
        self._is_closed = True
        if self.n_bytes > SPILL_BYTES:
            with contextlib.suppress(RuntimeError):  # not on an event loop
                # Freeing the blocks of a large file takes tens of milliseconds.
                asyncio.get_running_loop().run_in_executor(None, self._close)
                return
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # what was not written no longer matters
            self._file.close()

    def _no_room(self, error: OSError) -> CapacityError:
        return CapacityError(
            f"the body's {self.n_bytes} bytes do not fit into the folder for temporary files "
            f"({error.strerror}); make room there, or set TMPDIR to another folder"
        )

    def __enter__(self) -> Self:
        return self

    __exit__ = close


# ---- threads

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
        self._places = WeakValueDictionary[str, asyncio.Semaphore]()  # of each client with work

    async def run(self, client: str, work: Callable[..., _T], *args: Any) -> _T:
        """Do *work* in one of the threads when it is *client*'s turn.

        Work cancelled before it began never begins.
        """
        places = self._places.setdefault(client, asyncio.Semaphore(self._most))
        await places.acquire()
        loop = asyncio.get_running_loop()
        try:
            future = self._pool.submit(work, *args)
        except BaseException:
            places.release()
            raise

        def done(_: "Future[_T]") -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(places.release)

        future.add_done_callback(done)
        return await asyncio.wrap_future(future)

    def shutdown(self) -> None:
        """Begin nothing more, and wait for nothing."""
        self._pool.shutdown(wait=False, cancel_futures=True)
