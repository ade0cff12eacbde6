"""What the actors of a soak run share: the engine, the clock, the tally, and what went wrong."""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from random import Random

    from kqview import Engine

N_FAILURES_KEPT = 20


class World:
    """One run. Every method may be called from any thread."""

    def __init__(self, engine: Engine, seed: int, limit_s: float) -> None:
        self.engine = engine
        self.seed = seed
        self.started_s = time.monotonic()
        self.ends_s = self.started_s + limit_s
        self.tally: Counter[str] = Counter()
        self.failures: list[str] = []
        self.beats: dict[str, float] = {}
        # Generations that are left open and unread may not take every slot from the others.
        self.may_leave_open = threading.Semaphore(len(engine.slots) // 2)
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_s

    def count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self.tally[what] += n

    def fail(self, what: str) -> None:
        """Remember that *what* must not happen; the run goes on, so that more can be seen."""
        with self._lock:
            self.tally["FAILURES"] += 1
            if len(self.failures) < N_FAILURES_KEPT:
                self.failures.append(what)

    def beat(self, actor: str) -> None:
        """*actor* is alive: it has ended one piece of work."""
        self.beats[actor] = time.monotonic()

    def retire(self, actor: str) -> None:
        self.beats.pop(actor, None)

    def silent_since(self, stall_s: float) -> list[str]:
        """Actors that have not been heard of for *stall_s*."""
        now_s = time.monotonic()
        return [name for name, beat_s in list(self.beats.items()) if now_s - beat_s > stall_s]


class Holding:
    """Views that one actor keeps for a while; each is looked at again when it goes."""

    def __init__(self, world: World, rng: Random, n_most: int = 40) -> None:
        self._world = world
        self._rng = rng
        self._n_most = n_most
        self._held: deque[tuple[float, Any, int]] = deque()

    def keep(self, views: Any) -> None:
        """Hold an array, or each of a tuple; or a slice of it, which holds the block as well."""
        for view in views if isinstance(views, tuple) else (views,):
            if view is None:
                continue
            if view.flags.writeable:
                self._world.fail("a view can be written")
            kept = view[..., : max(1, view.shape[-1] // 2)] if self._rng.random() < 0.3 else view
            until_s = time.monotonic() + self._rng.choice((0.0, 0.02, 0.2, 1.0))
            self._held.append((until_s, kept, checksum(kept)))
            self._world.count("views held")

    def release(self, *, everything: bool = False) -> None:
        """Drop what is due, and what is too much."""
        while self._held:
            until_s, view, sum_then = self._held[0]
            if not everything and len(self._held) <= self._n_most and time.monotonic() < until_s:
                return
            if checksum(view) != sum_then:
                self._world.fail("a view changed while it was held")
            del view
            self._held.popleft()
            self._world.count("views dropped")


def checksum(view: np.ndarray[Any, Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(view).tobytes())
