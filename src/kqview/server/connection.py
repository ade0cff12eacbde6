"""Connection: what lies below one request or WebSocket, as far as public ASGI shows it.

ASGI can neither drop a connection nor send several messages in one write. This class does without;
`uvicorn_parts` has the one that can, for the versions of uvicorn that it was checked with. The
bytes that a client receives are the same.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from starlette.types import Message, Scope, Send

from kqview.server.budget import Hold

FRAMES: Final = "kqview.frames"
"""ASGI extension in a WebSocket's scope: ``websocket.send`` may have ``frames``, a sequence of
messages (str or bytes), in place of one ``text`` or ``bytes``. They are sent in one write."""


def frames_of(message: Message) -> Sequence[bytes | str]:
    """The messages that a ``websocket.send`` sends."""
    if "frames" in message:
        return message["frames"]
    data: bytes | None = message.get("bytes")
    return (message["text"] if data is None else data,)


class ClientGone(ConnectionError):
    """The client left."""


class Stalled(ClientGone):
    """The client is there, but reads nothing."""


class Connection:
    """A connection of which nothing is known; belongs to the event loop."""

    @property
    def is_clear(self) -> bool:
        """Whether the server takes a message at once, without waiting for the client."""
        return False

    @property
    def n_left(self) -> int:
        """Bytes written but not yet taken by the kernel; 0 if unknown."""
        return 0

    def abort(self) -> None:
        """Drop the connection with its unsent bytes; does nothing if the server has no way to.

        Closing would wait until the client has read what was written. A client that stopped reading
        would keep file descriptor and buffer forever.
        """

    def admit(self, hold: Hold) -> None:
        """Allow large messages from a WebSocket's client, and count incoming bytes in *hold*."""

    def on_lost(self, call: Callable[[], None] | None) -> bool:
        """Call *call* once when the client leaves, or no longer if it is None.

        Returns:
            Whether that is possible; if not, only the ``receive`` of ASGI tells.
        """
        return False

    async def send(self, send: Send, message: Message, idle_s: float) -> None:
        """Give *message* to *send* and wait until the server takes it.

        Raises:
            Stalled: The client read nothing for *idle_s*.
            ClientGone: The client left.
        """
        n_left = self.n_left
        while True:
            try:
                if self.is_clear:
                    await send(message)
                else:
                    async with asyncio.timeout(idle_s):
                        await send(message)
                return
            except TimeoutError:
                pass  # nothing of it was written: servers wait first
            except ClientGone:
                raise
            except OSError as error:  # what ASGI servers raise; uvicorn's is no ConnectionError
                raise ClientGone(str(error)) from error
            n_before, n_left = n_left, self.n_left
            if n_left >= n_before:  # a client that reads slowly makes room all the time
                # Outside the handler: that error's frames hold the task, which holds this one.
                raise Stalled(f"the client read nothing for {idle_s:g} s")

    def watch(self, idle_s: float) -> None:
        """Drop the connection if its client reads nothing of what is left for *idle_s*.

        For the end of a request, when nobody waits for the client any more.
        """
        if n_left := self.n_left:
            asyncio.get_running_loop().call_later(idle_s, self._check, idle_s, n_left)

    def _check(self, idle_s: float, n_before: int) -> None:
        if self.n_left >= n_before:
            self.abort()
        else:
            self.watch(idle_s)


UNKNOWN: Final = Connection()


def connection_of(scope: Scope) -> Connection:
    """The connection of a request, as the app noted it."""
    return scope["state"].get("connection", UNKNOWN)
