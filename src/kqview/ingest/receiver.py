"""Receiver: handles posts and reads, between the routes and the store.

It belongs to the event loop. Parsing and database access run on its threads: readers and writers,
one writer on SQLite, which allows only one anyway. The number of writers bounds memory, however
many clients post: large bodies wait in files.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec

from kqview.errors import CapacityError, KqviewError
from kqview.ingest import tables
from kqview.ingest.schema import Health
from kqview.ingest.settings import IngestSettings
from kqview.ingest.store import Reader, Store
from kqview.server.settings import Settings
from kqview.server.web.budget import Body, Budget
from kqview.server.web.endpoint import Frames, Host

_T = TypeVar("_T")
_log: Final = logging.getLogger("kqview.server")

_N_READERS: Final = 4
_N_WRITERS: Final = 4  # on PostgreSQL
_OFFLOAD_BYTES: Final = 64 * 1024
_POLL_S: Final = 1.0  # other processes may write to the database too
_ALIVE_S: Final = 15.0  # between keep-alive comments on a quiet feed
_PRUNE_S: Final = 60.0
_MOST_NEWS: Final = 100  # summaries in one query of a feed


class Receiver(Host):
    """One receiver, for its operations."""

    def __init__(self, settings: IngestSettings) -> None:
        """Open the database.

        Raises:
            RequestError: As for `Store`.
        """
        self.options = settings
        self.budget = Budget(settings.web.memory_budget_bytes or 0)
        self.store = Store(settings.database)
        n_writers = 1 if self.store.kind == "sqlite" else _N_WRITERS
        self._writers = ThreadPoolExecutor(n_writers, "kqview-ingest-write")
        self._readers = ThreadPoolExecutor(_N_READERS, "kqview-ingest-read")
        self.n_posts = 0
        """Posts that are being received or stored."""
        self._news = asyncio.Event()
        self._is_closing = False
        self._pruning: asyncio.Task[None] | None = None

    @property
    def settings(self) -> Settings:
        """Address, keys and HTTP limits."""
        return self.options.web

    def open(self) -> None:
        """Begin to delete what exceeds the limits, if there are any."""
        options = self.options
        if options.max_traces or options.max_stored_bytes or options.max_age_s:
            self._pruning = asyncio.create_task(self._prune())

    async def close(self) -> None:
        """End running work and close the database."""
        self.end_feeds()
        if self._pruning is not None:
            self._pruning.cancel()
            await asyncio.gather(self._pruning, return_exceptions=True)
        loop = asyncio.get_running_loop()
        for pool in (self._writers, self._readers):
            await loop.run_in_executor(None, pool.shutdown)
        self.store.close()

    async def offload(self, n_bytes: int, work: Callable[..., Any], *args: Any) -> Any:
        """Do *work* here, or on a reader's thread if *n_bytes* would block the event loop."""
        return work(*args) if n_bytes < _OFFLOAD_BYTES else await self.read(work, *args)

    async def read(self, work: Callable[..., _T], *args: Any) -> _T:
        """Do *work* on a reader's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, work, *args)

    # ---- posts

    @contextlib.contextmanager
    def admitted(self) -> Generator[None]:
        """Count one post while it is received and stored.

        Raises:
            CapacityError: There are too many.
        """
        most = self.options.max_posts
        if self.n_posts >= most:
            raise CapacityError(
                f"{most} traces are already being received or stored; post again later"
            )
        self.n_posts += 1
        try:
            yield
        finally:
            self.n_posts -= 1

    async def put(self, body: Body) -> None:
        """Store a posted trace; raises as `Store.put`."""
        await self.write(lambda: self.store.put(body.read()))
        self._tell()

    async def write(self, work: Callable[..., _T], *args: Any) -> _T:
        """Do *work* on a writer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._writers, work, *args)

    async def _prune(self) -> None:
        """Keep what is stored within the limits: at the start, after posts, and as traces age."""
        options = self.options
        while True:
            news = self._news
            older_than = time.time_ns() // 1000 - int(options.max_age_s * 10**6)
            try:
                n_deleted = await self.write(
                    self.store.prune,
                    options.max_traces,
                    options.max_stored_bytes,
                    older_than if options.max_age_s else None,
                )
                if n_deleted:
                    _log.info("deleted %d traces to stay within the limits", n_deleted)
            except KqviewError as error:
                _log.error("old traces were not deleted: %s", error)
            await asyncio.sleep(_POLL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PRUNE_S):
                    await news.wait()

    # ---- feeds

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def end_feeds(self) -> None:
        """End the feeds, so that their connections close; idempotent."""
        self._is_closing = True
        self._tell()

    async def feed(self, reader: Reader, revision: int | None) -> AsyncGenerator[Frames]:
        """Yield summaries of traces stored after *revision*, or from this moment if it is None."""
        yield []
        if revision is None:
            revision = await self.read(self.store.revision)
        told_s = time.monotonic()
        while not self._is_closing:
            news = self._news
            found = await self.read(self.store.since, reader, revision, _MOST_NEWS)
            for revision, summary in found:
                yield [b"event: trace\nid: %d\ndata: " % revision, msgspec.json.encode(summary)]
                told_s = time.monotonic()
            if len(found) == _MOST_NEWS:
                continue
            if time.monotonic() - told_s > _ALIVE_S:
                yield [b": alive"]
                told_s = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await news.wait()

    # ---- itself

    async def health(self) -> tuple[bool, Health]:
        """Whether the database answers."""
        health = Health("ok", self.store.kind, tables.VERSION)
        try:
            await self.read(self.store.revision)
        except KqviewError as error:
            health.status, health.error = "failed", str(error)
            return False, health
        return True, health
