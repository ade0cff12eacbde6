"""Real servers on free ports of this machine for tests, closed again.

Owns: the server's thread and the demo engines that it opens. A test talks to it over sockets, and
may look at its ``service`` and ``engine``; only reading them is safe from the test's thread.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx
import pytest

from kqview import Engine

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

from kqview.cli.serving import configured  # noqa: E402
from kqview.server import Settings, create_app  # noqa: E402
from kqview.server.config import Config  # noqa: E402
from tests.support.waiting import wait_until  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kqview.server.apps.conversations import ChatService
    from kqview.server.models.run import Run

ENDS_WITHIN_S = 60.0  # until a test fails, not a measure of anything


@dataclass(frozen=True)
class Served:
    """A server that runs: ``url`` and ``ws_url`` have no slash at their end."""

    url: str
    ws_url: str
    service: ChatService
    server: uvicorn.Server

    @property
    def runs(self) -> list[Run]:
        """Requests that run, in a list that the server's thread does not change."""
        return list(self.service.runs.values())

    def wait_run(self, request_id: str | None = None) -> Run:
        """Wait until a request runs, the first one or that of this id."""
        found: list[Run] = []

        def is_running() -> bool:
            # One before it whose client has its end may not be settled yet.
            found[:] = (run for run in self.runs if request_id in (None, run.request_id))
            return bool(found)

        self.wait_until(is_running)
        return found[0]

    @contextlib.contextmanager
    def noting_ends(self, note: Callable[[Run], object]) -> Iterator[None]:
        """The block in which *note* is called, on the event loop, with each run that has ended."""
        ended = self.service._ended

        def both(model: Any, run: Run) -> None:
            ended(model, run)
            note(run)

        self.service._ended = both
        try:
            yield
        finally:
            del self.service._ended

    @property
    def n_connections(self) -> int:
        """Connections that the server has open."""
        return len(self.server.server_state.connections)

    @property
    def engine(self) -> Engine:
        """The engine that serves now."""
        return self.service.pool.default.engine

    def client(self, **options: Any) -> httpx.Client:
        """A client for paths of this server; close it, or use it as a context manager."""
        # Reading certificates takes longer than most requests.
        options.setdefault("verify", self.url.startswith("https"))
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Wait until *condition*, which only reads, is true; fails where it does not become so."""
        wait_until(condition)

    def wait_idle(self) -> None:
        """Wait until no request is known and no slot is busy."""
        self.wait_until(
            lambda: not self.service.runs and not any(s.is_busy for s in self.engine.stats().slots)
        )


class Serve(Protocol):
    """Starts a server; it ends with the test.

    Without an engine, and with settings that name no model, it serves a demo engine of its own with
    one thread and `Settings.n_slots` slots. An engine that is passed stays the caller's.
    """

    def __call__(
        self, settings: Settings | Config | None = None, engine: Engine | None = None
    ) -> Served: ...


@contextlib.contextmanager
def serving(
    settings: Settings | Config | None = None,
    engine: Engine | None = None,
    *,
    port: int = 0,
) -> Iterator[Served]:
    """What the fixture `serve` starts, under uvicorn as ``kqview serve`` configures it.

    A *port* is one that a server has just left.
    """
    given = settings or Settings()
    settings = given.settings if isinstance(given, Config) else given
    with contextlib.ExitStack() as stack:
        opens_its_own = isinstance(given, Config) or settings.model is not None or settings.demo
        if engine is None and not opens_its_own:
            engine = stack.enter_context(
                Engine.demo(n_threads=1, n_ctx=settings.n_ctx, n_slots=settings.n_slots)
            )
        app = create_app(engine, given) if engine is not None else create_app(given)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        port = listener.getsockname()[1]
        server = uvicorn.Server(configured(app, settings))
        stack.enter_context(in_thread(server, listener))
        s = "" if settings.ssl_certfile is None else "s"
        address = f"{s}://127.0.0.1:{port}"
        yield Served(f"http{address}", f"ws{address}", app.service, server)


@contextlib.contextmanager
def in_thread(server: uvicorn.Server, listener: socket.socket) -> Iterator[None]:
    """Let *server* run on *listener*, from when it has started until it has ended."""
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        yield
    finally:
        server.should_exit = True
        thread.join(ENDS_WITHIN_S)
        assert not thread.is_alive(), "the server did not end"
