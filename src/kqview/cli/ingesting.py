"""Runs the receiver under uvicorn until a signal; running posts are then stored, feeds ended."""

import os
import socket
from types import FrameType
from typing import Final

import uvicorn

from kqview.ingest.app import IngestApp
from kqview.server.web.uvicorn_parts import allow_files, url_of, uvicorn_options

_GRACE_S: Final = 10


def run(app: IngestApp, listener: socket.socket) -> None:
    """Serve *app* on *listener* until a signal ends it."""
    allow_files(app.receiver.settings)
    ReceiverServer(app).run(sockets=[listener])


class ReceiverServer(uvicorn.Server):
    """uvicorn that ends the feeds, which would never finish, before it waits for requests."""

    def __init__(self, app: IngestApp) -> None:
        """Serve *app*, with its limits on connections."""
        self._receiver = app.receiver
        super().__init__(
            uvicorn.Config(
                app,
                timeout_graceful_shutdown=_GRACE_S,
                **uvicorn_options(app.receiver.settings),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say where."""
        await super().startup(sockets)
        for one in sockets or ():
            url = url_of(one, self._receiver.settings)
            print(
                f"kqview ingest receives traces at {url}/ingest and shows them at {url}/; press "
                "Ctrl-C to stop",
                flush=True,
            )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End with status 0; at a second signal, end at once."""
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for running requests, but not for feeds."""
        self._receiver.end_feeds()
        await super().shutdown(sockets)
