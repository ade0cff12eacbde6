"""Connection: what ASGI has no word for: dropping a connection, several messages at once.

Closing one waits until its client has read what was written, and a client that stopped reading
never does: file descriptor and buffer would stay for ever. uvicorn's transport is reached through
the ``send`` that it hands out; on a server without one nothing happens here, and its own timeouts
have to do.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from starlette.types import Message, Scope, Send

from kqview.server.budget import Hold

FRAMES: Final = "kqview.frames"
"""ASGI extension of a WebSocket's scope: ``websocket.send`` may have ``frames``, a sequence of
messages, str or bytes, in place of one ``text`` or ``bytes``. They are one write."""


def frames_of(message: Message) -> Sequence[bytes | str]:
    """What a ``websocket.send`` sends."""
    if "frames" in message:
        return message["frames"]
    data: bytes | None = message.get("bytes")
    return (message["text"] if data is None else data,)


class Connection:
    """The connection below one request or WebSocket; belongs to the event loop."""

    def __init__(self, send: Send) -> None:
        """Find the connection of a server's own *send*, not one that something wraps."""
        owner = getattr(send, "__self__", None)
        self._transport: Any = getattr(owner, "transport", None)
        # uvicorn's HTTP has a `flow`, its WebSocket of Sans-I/O a `writable`, and both wait for it
        # before they write; its older WebSocket writes and waits then.
        self._waits_first = hasattr(owner, "flow") or hasattr(owner, "writable")

        self._admit: Callable[[Hold], None] | None = getattr(owner, "admit", None)

    def admit(self, hold: Hold) -> None:
        """Let a WebSocket's client send large messages; what arrives is counted in *hold*.

        Before that, a server that knows of this takes small ones only.
        """
        if self._admit is not None:
            self._admit(hold)

    def abort(self) -> None:
        """Drop it now, with what was not sent yet."""
        if self._transport is not None:
            self._transport.abort()

    def watch(self, idle_s: float) -> None:
        """Drop it where its client reads nothing for *idle_s* of what was written to it.

        For the end of a request, when nobody waits for the client any more.
        """
        n_left = self.n_left
        if n_left:
            asyncio.get_running_loop().call_later(idle_s, self._check, idle_s, n_left)

    def _check(self, idle_s: float, n_before: int) -> None:
        if self.n_left >= n_before:
            self.abort()
        else:
            self.watch(idle_s)

    @property
    def is_clear(self) -> bool:
        """Whether a message can be given to it without waiting for the client."""
        return (
            self._waits_first
            and self._transport is not None
            and not self._transport.get_write_buffer_size()
        )

    @property
    def n_left(self) -> int:
        """Bytes that were written and not taken by the kernel yet; 0 where that is not known."""
        if self._transport is None:
            return 0
        return self._transport.get_write_buffer_size()


def connection_of(scope: Scope) -> Connection:
    """The connection of a request, as the app noted it."""
    return scope["state"].get("connection") or NO_CONNECTION


async def _send_nowhere(message: Any) -> None:
    raise ConnectionError


NO_CONNECTION: Final = Connection(_send_nowhere)
"""Of which nothing is known; cannot be dropped."""
