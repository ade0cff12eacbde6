"""Runs the app under uvicorn and shuts it down gracefully.

At SIGTERM or Ctrl-C running requests end with an event, WebSockets close with code 1001, and the
process exits with 0, all within the grace period. A second signal ends it at once.
"""

import asyncio
import ctypes
import faulthandler
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Final

import uvicorn

from kqview.cli import hangups
from kqview.cli.loading import load_progress
from kqview.errors import KqviewError
from kqview.server.app import App
from kqview.server.config import Config
from kqview.server.settings import Settings
from kqview.server.web.supervisor import Hangup
from kqview.server.web.tls import tls_context
from kqview.server.web.uvicorn_parts import allow_files, identify, url_of, uvicorn_options
from kqview.server.web.worker import HUNG_FACTOR, STALLED, Supervised, Watchdog
from kqview.system import HANGUP

# Parameters of glibc's mallopt (malloc.h), and its maximum for M_MMAP_THRESHOLD.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_KEPT_BYTES: Final = 32 * 2**20
_KEPT_BYTES: Final = 256 * 2**20
# How long a worker thread may keep the GIL from the event loop. Python's default of 5 ms applies to
# each of the threads that write rows or logprobs.
_SWITCH_S: Final = 0.0005
_BEAT_S: Final = 0.5
_LEAST_FLUSH_S: Final = 0.2
_MARGIN_S: Final = 2.0  # beyond the grace period, for the engine and the interpreter to end


_log: Final = logging.getLogger("kqview.server")


def run(
    app: App,
    settings: Settings,
    listener: socket.socket,
    supervised: Supervised | None = None,
    read: Callable[[], Config] | None = None,
) -> None:
    """Load the model of *app* and serve it on *listener* until a signal ends it.

    If anything hangs, at shutdown as well, a `Watchdog` ends the process with status `STALLED`.

    Args:
        app: What is served.
        settings: How it was started.
        listener: A bound socket.
        supervised: The line to the supervisor, if there is one.
        read: Reads the configuration again, at SIGHUP; None if there is no file of it. Windows has
            no such signal.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)
    allow_files(settings)
    sys.setswitchinterval(_SWITCH_S)

    reloads = None if read is None or HANGUP is None else Reloads(app, read)
    is_orphan = False

    def tick() -> None:
        nonlocal is_orphan
        if supervised is not None and not is_orphan and not supervised.tell_alive():
            is_orphan = True
            # Without its supervisor it would neither be restarted nor stopped.
            os.kill(os.getpid(), signal.SIGTERM)

    watchdog = Watchdog(
        HUNG_FACTOR * settings.stall_timeout_s,
        trouble=lambda: app.service.pool.stall(HUNG_FACTOR),
        on_tick=tick,
    )
    watchdog.start()
    try:
        with load_progress() as progress:
            app.service.load(progress)
        if supervised is not None:
            app.log.on_running = supervised.note
        config = configured(app, settings)
        if reloads is not None and settings.ssl_certfile is not None:
            reloads.identify = partial(identify, config)
        _Server(app, config, watchdog, supervised, reloads).run(sockets=[listener])
    finally:
        watchdog.stop()
    if app.service.pool.is_engine_lost:  # its thread would outlive the interpreter
        os._exit(STALLED)


class Reloads:
    """Reads the configuration again at SIGHUP; belongs to one event loop.

    Reading happens on a thread. A signal during one asks for another after it.

    Attributes:
        running: What reads it, None while nothing does.
        identify: Takes a certificate that was renewed; None without TLS.
    """

    identify: Callable[[ssl.SSLContext], None] | None = None

    def __init__(self, app: App, read: Callable[[], Config]) -> None:
        """Replace the configuration of *app* by what *read* returns."""
        self._app = app
        self._read = read
        self._hangup = Hangup()
        self.running: asyncio.Task[None] | None = None
        self._is_wanted = False
        signal.signal(signal.SIGHUP, self._remember)  # while the model is loaded, too

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self._is_wanted = True

    def listen(self, leave: Callable[[], None]) -> None:
        """Handle the signal from now on; call *leave* if it means that the terminal has gone."""

        def hung_up() -> None:
            if self._hangup.is_of_terminal():
                leave()
            else:
                self.ask()

        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hung_up)
        if self._is_wanted or hangups.has_come:  # while the server started
            hung_up()

    def ask(self) -> None:
        """Read the configuration again soon."""
        self._is_wanted = True
        if self.running is None:
            self.running = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        try:
            while self._is_wanted:
                self._is_wanted = False
                await self._once()
        finally:
            self.running = None

    async def _once(self) -> None:
        try:
            done = self._app.reload(await asyncio.to_thread(self._read))
        except (KqviewError, OSError) as error:
            reasons = "; ".join(str(error).splitlines())
            _log.error("the configuration has errors and stays as it was: %s", reasons)
            return
        _log.info("the configuration was read again: %s", done)
        if self.identify is None:
            return
        try:  # the files of the certificate may hold a newer one
            certificate = await asyncio.to_thread(tls_context, self._app.service.settings)
            assert certificate is not None  # only of a server with TLS
            self.identify(certificate)
        except (KqviewError, OSError) as error:
            _log.error("the certificate stays as it was: %s", error)


def keep_freed_memory() -> None:
    """Let this process keep up to 256 MiB of freed memory instead of returning it at once.

    The rows of a token are megabytes that are allocated and freed for every token; fresh memory
    from the kernel costs more than the copy into it. Call it before any thread starts. Without
    glibc it does nothing.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_ARENA_MAX, 1)  # arenas of other threads return memory too early


def configured(app: App, settings: Settings) -> uvicorn.Config:
    """uvicorn's configuration for *app*."""
    return uvicorn.Config(
        app,
        **uvicorn_options(app.service.live),
        ws_max_size=settings.max_message_bytes,
        # Rows do not compress well, and trying takes longer than sending them.
        ws_per_message_deflate=False,
        # A client that answers no ping is gone; a slow reader is not.
        ws_ping_interval=settings.idle_timeout_s,
        ws_ping_timeout=settings.idle_timeout_s,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
    )


class _Server(uvicorn.Server):
    """uvicorn that lets the app end its requests before connections are closed."""

    def __init__(
        self,
        app: App,
        config: uvicorn.Config,
        watchdog: Watchdog,
        supervised: Supervised | None = None,
        reloads: Reloads | None = None,
    ) -> None:
        super().__init__(config)
        self._service = app.service
        self._watchdog = watchdog
        self._supervised = supervised
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._has_asked = False  # whether a signal has asked for the end
        self._reloads = reloads

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self._beat()
        if self._reloads is not None:
            self._reloads.listen(lambda: self.handle_exit(signal.SIGTERM, None))
        if self._supervised is not None:
            self._supervised.tell_ready()
        models = ", ".join(one.name for one in self._service.pool)
        for one in sockets or ():  # it answers only from here on
            url = url_of(one, self._service.settings)
            print(f"kqview serves {models} at {url} (API: /docs); press Ctrl-C to stop", flush=True)

    def _beat(self) -> None:
        self._watchdog.beat()
        asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler; runs on the main thread between any two bytecodes."""
        if self._loop is None or self._has_asked:
            os._exit(128 + sig)
        self._has_asked = True
        self._watchdog.end_within(self._service.settings.shutdown_grace_s + _MARGIN_S)
        self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        self._leaving = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._service.drain(self._service.settings.shutdown_grace_s)
        finally:
            # What is left of the grace period is for the last bytes.
            left_s = self._service.grace_left_s
            self.config.timeout_graceful_shutdown = max(_LEAST_FLUSH_S, left_s)  # pyright: ignore[reportAttributeAccessIssue]
            self.should_exit = True
