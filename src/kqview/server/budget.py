"""Budget: one number of bytes for all that is under way, and how much of it one client may hold.

What counts: bodies and messages while they arrive, what they become when they are decoded, replies
that are being built, frames that a client has not read, logprobs that a run keeps. Rows of
attention have a pool of their own in the engine.

A client may hold as much as stays free: alone at most half, of n greedy ones each 1/(n+1). So
there is always room for one who holds nothing yet, and no list of clients has to be kept fair.
(Switches share their buffers this way: Choudhury and Hahne, "Dynamic queue length thresholds".)
"""

import sys
import threading
from types import TracebackType
from typing import Self

from kqview.errors import CapacityError
from kqview.server.errors import RateLimited, TooLarge


class Budget:
    """Counts bytes by client; any thread."""

    def __init__(self, total_bytes: int) -> None:
        """Allow *total_bytes* altogether."""
        self.total_bytes = total_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._by_client: dict[str, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes that are held now."""
        return self._used_bytes

    def hold(self, client: str) -> "Hold":
        """What one piece of work of *client* will hold; nothing yet."""
        return Hold(self, client)

    def check(self, client: str, n_bytes: int) -> None:
        """Refuse what `take` would refuse now, and take nothing.

        Raises:
            TooLarge: Or RateLimited, or CapacityError: as `Hold.take`.
        """
        held_bytes = self._by_client.get(client, 0)
        free_bytes = self.total_bytes - self._used_bytes
        if held_bytes + n_bytes <= free_bytes - n_bytes:
            return
        rule = (
            f"memory_budget_bytes is {self.total_bytes} for everyone, and a client may hold as "
            "much as stays free"
        )
        if 2 * n_bytes > self.total_bytes:
            raise TooLarge(f"server.memory: {n_bytes} bytes are needed; {rule}; send or ask less")
        if held_bytes >= self._used_bytes - held_bytes:
            raise RateLimited(
                f"server.memory: {n_bytes} bytes more are needed, this client's requests hold "
                f"{held_bytes} already; {rule}; let them end first",
                retry_after_s=1,
            )
        raise CapacityError(
            f"server.memory: {n_bytes} bytes are needed, {free_bytes} are free; {rule}; try again "
            "later"
        )

    def change(self, client: str, n_bytes: int) -> None:
        """Count *n_bytes* more for *client*, or fewer where that is negative.

        Raises:
            TooLarge: Or RateLimited, or CapacityError: as `Hold.take`; nothing changed.
        """
        with self._lock:
            if n_bytes > 0:
                self.check(client, n_bytes)
            held_bytes = self._by_client.get(client, 0) + n_bytes
            self._used_bytes += n_bytes
            if held_bytes:
                self._by_client[client] = held_bytes
            else:
                self._by_client.pop(client, None)


class Hold:
    """What one request or connection holds; a context manager that gives all of it back.

    One that was closed counts nothing any more, so that work which nobody waits for may go on.
    """

    def __init__(self, budget: Budget, client: str) -> None:
        """Hold bytes of *budget* for *client*."""
        self.client = client
        self._budget = budget
        self._lock = threading.Lock()
        self._n_bytes = 0
        self._is_closed = False

    @property
    def n_bytes(self) -> int:
        """Bytes that it holds."""
        return self._n_bytes

    def part(self) -> "Hold":
        """A further one for the same client, with an end of its own."""
        return Hold(self._budget, self.client)

    def check(self, n_bytes: int) -> None:
        """Refuse at once what `take` would refuse; takes nothing, raises as `take`."""
        self._budget.check(self.client, n_bytes)

    def take(self, n_bytes: int) -> None:
        """Hold *n_bytes* more.

        Raises:
            TooLarge: They never fit.
            RateLimited: This client holds its share already.
            CapacityError: Others hold too much at the moment.
        """
        with self._lock:
            self._change(n_bytes)

    def put(self, n_bytes: int) -> None:
        """Give *n_bytes* of it back."""
        with self._lock:
            self._change(-min(n_bytes, self._n_bytes))

    def set(self, n_bytes: int) -> None:
        """Hold *n_bytes* altogether; raises as `take`."""
        with self._lock:
            self._change(n_bytes - self._n_bytes)

    def _change(self, n_bytes: int) -> None:
        if n_bytes and not self._is_closed:
            self._budget.change(self.client, n_bytes)
            self._n_bytes += n_bytes

    def close(self) -> None:
        """Give all of it back; idempotent."""
        with self._lock:
            self._change(-self._n_bytes)
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def uncounted() -> Hold:
    """One of a budget without end, for callers that share none."""
    return Budget(sys.maxsize).hold("")
