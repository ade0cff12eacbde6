"""Work: the register of what uses one model. Belongs to the event loop."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Generator
from itertools import chain
from typing import TYPE_CHECKING

from kqview.server.errors import ModelChanged, ShuttingDown

if TYPE_CHECKING:
    from kqview.errors import KqviewError
    from kqview.server.models.run import Run


class ModelWork:
    """What uses a model.

    Attributes:
        n_uses: Requests that use it or wait for it.
        last_used_s: When a request used it last, by ``time.monotonic``; 0.0 before the first.
        runs: Its runs by owner and request_id.
        others: What uses the engine without a run, by the limit of its time: its owner, and why it
            ended early.
    """

    def __init__(self, on_idle: Callable[[], None]) -> None:
        """*on_idle* is called when a request no longer uses it."""
        self.n_uses = 0
        self.last_used_s = 0.0
        self.runs: dict[tuple[str, str], Run] = {}
        self.others: dict[asyncio.Timeout, tuple[str, KqviewError | None]] = {}
        self._on_idle = on_idle

    @property
    def n_busy(self) -> int:
        """Requests that run, or wait for a slot."""
        return len(self.runs) + len(self.others)

    @property
    def is_used(self) -> bool:
        """Whether a request uses the model, or waits for it."""
        return bool(self.n_uses or self.n_busy)

    @contextlib.contextmanager
    def used(self) -> Generator[None]:
        """Count a request that uses the model, or waits for it."""
        self.n_uses += 1
        try:
            yield
        finally:
            self.n_uses -= 1
            self.last_used_s = time.monotonic()
            self._on_idle()

    def owners(self, *, has_parked: bool) -> Counter[str]:
        """Number of each owner's requests of `n_busy`, with or without parked runs."""
        runs = (run.owner for run in self.runs.values() if has_parked or not run.is_parked)
        return Counter(chain(runs, (owner for owner, _ in self.others.values())))

    def end(self, error: ModelChanged | ShuttingDown) -> None:
        """End every run and other work on the engine, and tell its client *error*."""
        for run in list(self.runs.values()):
            run.end(error)
        for limit in self.others:
            if not limit.expired():
                self.others[limit] = self.others[limit][0], error
                limit.reschedule(asyncio.get_running_loop().time())
