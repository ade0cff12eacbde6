"""Runs the app under uvicorn, and ends it so that every client hears of it.

At SIGTERM or Ctrl-C: running requests end with an event, WebSockets close with code 1001, then the
process ends with 0; at a second signal it ends at once.
"""

import asyncio
import ctypes
import logging
import socket
import sys
from types import FrameType
from typing import Final

import uvicorn

from kqview.server.app import App
from kqview.server.listening import WebSocketProtocol, allow_files, http_protocol
from kqview.server.settings import Settings
from kqview.server.tls import tls_context

# Parameters of glibc's mallopt (malloc.h), and the most that it takes for the first one.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGEST_KEPT_BYTES: Final = 32 * 2**20
_KEPT_BYTES: Final = 256 * 2**20
# How long a worker thread may go on when the event loop wants to: those that write rows or
# logprobs are several, and Python's own 5 ms are for each of them.
_SWITCH_S: Final = 0.0005
_CUT: Final = "ASGI callable returned without completing response."


def run(app: App, settings: Settings, listener: socket.socket) -> None:
    """Serve *app* on *listener* until a signal ends it."""
    allow_files(settings)
    sys.setswitchinterval(_SWITCH_S)
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.getMessage() != _CUT)
    _Server(app, configured(app, settings)).run(sockets=[listener])


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to 256 MiB, in place of giving it back at once.

    A token's rows are megabytes that are allocated and freed for every token; fresh memory of the
    kernel costs more than the copy into it. To be called before threads are started. Without glibc
    nothing happens.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_M_ARENA_MAX, 1)  # other threads' arenas give back too early


def configured(app: App, settings: Settings) -> uvicorn.Config:
    """uvicorn's configuration for *app*.

    Raises:
        RequestError: As `tls_context`.
    """
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        # It would believe whoever is on this machine; trusted_proxies says whom to (peers.py).
        proxy_headers=False,
        date_header=False,
        http=http_protocol(settings, tls_context(settings)),
        ws=WebSocketProtocol,
        ws_max_size=settings.max_message_bytes,
        # Rows do not compress, and trying takes longer than sending them.
        ws_per_message_deflate=False,
        # A peer that answers no ping is gone; one that reads slowly is not.
        ws_ping_interval=settings.idle_timeout_s,
        ws_ping_timeout=settings.idle_timeout_s,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_grace_s)),
    )


class _Server(uvicorn.Server):
    """uvicorn, but it lets the app say goodbye before connections are closed."""

    def __init__(self, app: App, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._service = app.service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for one in sockets or ():  # now, and not before, it answers and a signal ends it well
            host, port = one.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            scheme = "https" if self._service.settings.ssl_certfile else "http"
            print(
                f"kqview serves {self._service.model_name} at {scheme}://{shown}:{port} "
                "(API: /docs); Ctrl-C ends it",
                flush=True,
            )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: main thread, between two bytecodes of whatever ran."""
        if self._loop is None or self._leaving is not None:
            self.force_exit = self.should_exit = True
            return
        self._loop.call_soon_threadsafe(self._leave)

    def _leave(self) -> None:
        if self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._service.drain(self._service.settings.shutdown_grace_s)
        finally:
            self.should_exit = True
