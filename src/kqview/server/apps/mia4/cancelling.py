"""Cancelling: ends a request by its name in every phase, before and after it has a `Run`.

A request is known from when its body was read: while it waits for its conversation, for its model
to load and for a slot, and while it generates. After its end its name is known for a while, so that
cancelling once more is no error.

Belongs to the server's event loop.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from typing import Final, Literal

from kqview.errors import RequestError
from kqview.server.models.run import Run
from kqview.server.web.access import Caller

_MOST_ENDED: Final = 256  # names of one owner that are remembered


class Cancelled(Exception):
    """The request was cancelled while it waited."""


@dataclass(slots=True)
class CancellableRequest:
    """One request that can be cancelled."""

    owner: str
    is_cancelled: bool = False
    _run: Run | None = None
    _wait: asyncio.Timeout | None = None

    def cancel(self) -> None:
        """End it; what it produced so far stays. Idempotent."""
        self.is_cancelled = True
        if self._run is not None:
            self._run.end()
        elif self._wait is not None and not self._wait.expired():
            self._wait.reschedule(asyncio.get_running_loop().time())

    def runs(self, run: Run) -> None:
        """From here on *run* is what to end."""
        self._run = run
        if self.is_cancelled:
            run.end()

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncGenerator[None]:
        """A block that is left at its next wait when the request is cancelled.

        Raises:
            Cancelled: It was.
        """
        if self.is_cancelled:
            raise Cancelled
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._wait = limit
                yield
        except TimeoutError:
            if limit.expired():
                raise Cancelled from None
            raise
        finally:
            self._wait = None


class Cancelling:
    """Every request that can be cancelled."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], CancellableRequest] = {}
        self._ended: dict[str, OrderedDict[str, None]] = {}  # names by owner, oldest first

    @property
    def running(self) -> list[tuple[str, str]]:
        """Owner and name of every request that has not ended."""
        return list(self._running)

    @contextlib.contextmanager
    def known(self, owner: str, request_id: str) -> Generator[CancellableRequest]:
        """A request of *owner* that can be cancelled until the block is left.

        Raises:
            RequestError: Another one of this owner has the name.
        """
        name = owner, request_id
        if name in self._running:
            raise RequestError(
                f"request_id {request_id!r} is in use; send another one", parameter="request_id"
            )
        work = self._running[name] = CancellableRequest(owner)
        try:
            yield work
        finally:
            del self._running[name]
            names = self._ended.setdefault(owner, OrderedDict())
            names[request_id] = None
            names.move_to_end(request_id)
            if len(names) > _MOST_ENDED:
                names.popitem(last=False)

    def cancel(self, caller: Caller, request_id: str) -> Literal["cancelling", "ended"] | None:
        """Cancel *caller*'s request of this name; an admin without one cancels everybody's.

        Returns:
            Whether it ends now or had ended before; None if there is none that the caller may see.
        """
        found = [
            work
            for (owner, name), work in self._running.items()
            if name == request_id and caller.may_see(owner)
        ]
        for work in [work for work in found if work.owner == caller.owner] or found:
            work.cancel()
        if found:
            return "cancelling"
        is_known = any(
            request_id in names for owner, names in self._ended.items() if caller.may_see(owner)
        )
        return "ended" if is_known else None
