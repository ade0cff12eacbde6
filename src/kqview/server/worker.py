"""What a worker has of its supervisor, and tells it: the socket, signs of life, what it is about.

The other side is `supervisor.py`, which says what the descriptors are.
"""

import json
import os
import socket
import uuid
from collections.abc import Iterable, MutableMapping
from typing import Final, Self

from starlette.types import ASGIApp, Receive, Scope, Send

from kqview.server.access import sent_id
from kqview.server.supervisor import ALIVE, ENVIRONMENT, NOTES_BYTES, READY

_MOST_NOTE: Final = 160  # characters


class Supervised:
    """This process's line to its supervisor; any thread."""

    def __init__(self, listener: socket.socket, control: socket.socket, notes: int) -> None:
        control.setblocking(False)
        self.listener = listener
        self._control = control
        self._notes = notes

    @classmethod
    def from_env(cls, environ: MutableMapping[str, str]) -> Self | None:
        """The line whose descriptors *environ* names, and no longer does; None without one."""
        text = environ.pop(ENVIRONMENT, None)
        if text is None:
            return None
        descriptors = [int(part) for part in text.split(",")]
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        listener, control, notes = descriptors
        return cls(socket.socket(fileno=listener), socket.socket(fileno=control), notes)

    def tell_ready(self) -> None:
        """Requests are taken from now on."""
        self._tell(READY)

    def tell_alive(self) -> bool:
        """Give a sign of life; False where the supervisor is gone."""
        return self._tell(ALIVE)

    def _tell(self, what: bytes) -> bool:
        try:
            self._control.send(what)
        except BlockingIOError:  # it does not listen at the moment
            return True
        except OSError:
            return False
        return True

    def note(self, requests: Iterable[str]) -> None:
        """Keep what runs where the supervisor finds it after a crash; the newest as far as fit."""
        data, kept = b"[]", list[str]()
        for request in reversed(list(requests)):
            kept.append(request[:_MOST_NOTE])
            longer = json.dumps(kept).encode()
            if len(longer) > NOTES_BYTES:
                break
            data = longer
        os.pwrite(self._notes, data.ljust(NOTES_BYTES), 0)


class Noted:
    """Wraps an ASGI app: its requests in flight, by the names of the access log, are noted."""

    def __init__(self, app: ASGIApp, supervised: Supervised) -> None:
        self._app = app
        self._supervised = supervised
        self._running: dict[object, str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_id = sent_id(scope)
        if request_id is None:
            request_id = uuid.uuid4().hex
            others = [one for one in scope["headers"] if one[0] != b"x-request-id"]
            scope["headers"] = [*others, (b"x-request-id", request_id.encode())]
        key = object()
        self._running[key] = f"{request_id} {scope['path']}"
        self._supervised.note(self._running.values())
        try:
            await self._app(scope, receive, send)
        finally:
            del self._running[key]
            self._supervised.note(self._running.values())
