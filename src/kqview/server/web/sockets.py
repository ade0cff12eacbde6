"""Socket: a WebSocket as a dialect's handler sees it, and the ASGI app around that handler.

Text frames carry JSON, binary frames rows. The frames of one event stay together even if several
tasks send. Close codes: 1000 done, 1001 server ends, 1008 rule broken, 1009 message too big, 1011
failed.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive, Scope, Send

from kqview.errors import KqviewError
from kqview.server.errors import ShuttingDown, TooLarge, answer_of
from kqview.server.web.access import Gate
from kqview.server.web.budget import Reservation
from kqview.server.web.endpoint import (
    DECODED_TIMES,
    FRAMES,
    UNKNOWN,
    Call,
    ClientGone,
    Connection,
    Frames,
    Host,
    Operation,
    Stalled,
    n_bytes_of,
)

_log: Final = logging.getLogger("kqview.server")

CLOSE_DONE: Final = 1000
CLOSE_GOING_AWAY: Final = 1001
CLOSE_POLICY: Final = 1008
CLOSE_TOO_BIG: Final = 1009
CLOSE_FAILED: Final = 1011


class Disconnected(ClientGone):
    """The client is gone: nothing more will be received."""


class Socket:
    """One accepted WebSocket; one task reads, any task of the loop sends."""

    def __init__(
        self,
        host: Host,
        scope: Scope,
        receive: Receive,
        send: Send,
        known: Sequence[str] = (),
        on_message: Callable[[], None] = lambda: None,
    ) -> None:
        """Wrap an ASGI WebSocket for *host*, whose settings count.

        *known* are the subprotocols that may be agreed on. *on_message* is called for each message
        but the first, which it refuses by raising.
        """
        self.host = host
        self.subprotocol = next((n for n in scope.get("subprotocols", ()) if n in known), None)
        self.is_closed = False
        """Whether nothing more can be sent."""
        self._receive = receive
        self._send = send
        self._connection: Connection = scope["state"].get("connection", UNKNOWN)
        self._takes_frames = FRAMES in (scope.get("extensions") or {})
        self._on_message = on_message
        self._lock = asyncio.Lock()
        self._messages: Reservation | None = None
        self._n_received = 0
        self._n_streams = 0
        self._has_no_stream = asyncio.Event()
        self._has_no_stream.set()

    def admit(self, arriving: Reservation, messages: Reservation) -> None:
        """Allow large messages from now on.

        Args:
            arriving: Counts incoming bytes until they are a message.
            messages: Counts messages and what they decode to.
        """
        self._messages = messages
        self._connection.admit(arriving)

    async def accept(self) -> None:
        """Finish the handshake.

        Raises:
            ClientGone: The client is gone.
        """
        await self._pass({"type": "websocket.accept", "subprotocol": self.subprotocol})

    async def receive(self, *, timeout_s: float | None = None) -> bytes | str:
        """The next message.

        Args:
            timeout_s: Longest wait; None for no limit.

        Raises:
            Disconnected: The client is gone.
            TooLarge: The message is larger than the limit.
            RateLimited: The client sends too often.
            Unauthorized: Its key was revoked.
            ShuttingDown: The server ends.
            KqviewError: It does not fit into the memory that the client may hold.
            TimeoutError: Nothing came in time.
        """
        if self.host.is_closing and not self._n_streams:
            raise ShuttingDown("the server is shutting down; try again later")
        async with asyncio.timeout(timeout_s):
            message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self.is_closed = True
            raise Disconnected
        self._n_received += 1
        if self._n_received > 1:
            self._on_message()
        text = message.get("text")
        data: bytes | str = message.get("bytes") or b"" if text is None else text
        limit = self.host.settings.max_message_bytes
        n_bytes = n_bytes_of(data)
        if n_bytes > limit:
            raise TooLarge(f"the message has {n_bytes} bytes, the limit is {limit}; send less")
        if self._messages is not None:
            # A run may keep the largest message until it ends.
            kept_bytes = self._messages.n_bytes if self._n_streams else 0
            self._messages.set(max(kept_bytes, DECODED_TIMES * n_bytes))
        return data

    async def send(self, frames: Frames) -> None:
        """Send *frames* as messages in a row; waits until the client reads on.

        Raises:
            ClientGone: The client is gone; Stalled if it read nothing for too long.
        """
        parts: list[dict[str, Any]] = [{"frames": frames}]
        if not self._takes_frames:
            parts = [{"text" if isinstance(one, str) else "bytes": one} for one in frames]
        async with self._lock:
            for part in parts:
                if self.is_closed:
                    raise ClientGone("the WebSocket is closed")
                await self._pass({"type": "websocket.send", **part})

    async def close(self, code: int = CLOSE_DONE, reason: str = "") -> None:
        """Close it after the event that is being sent; idempotent.

        Raises:
            ClientGone: As `send`.
        """
        async with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            # The reason has to fit into a control frame.
            text = reason.encode("utf-8", "replace")[:123].decode("utf-8", "ignore")
            await self._pass({"type": "websocket.close", "code": code, "reason": text})

    async def _pass(self, message: Message) -> None:
        try:
            await self._connection.send(self._send, message, self.host.settings.idle_timeout_s)
        except ClientGone as error:
            self.is_closed = True
            if isinstance(error, Stalled):
                self._connection.abort()
            raise

    async def go_away(self) -> None:
        """Close it because the server ends, after its generations were told."""
        await self._has_no_stream.wait()
        with contextlib.suppress(ClientGone):
            await self.close(CLOSE_GOING_AWAY, "the server is shutting down")

    @contextlib.contextmanager
    def streaming(self) -> Generator[None]:
        """A block that sends a stream, before whose end the server does not close the socket."""
        self._n_streams += 1
        self._has_no_stream.clear()
        try:
            yield
        finally:
            self._n_streams -= 1
            if not self._n_streams:
                self._has_no_stream.set()

    async def alone(self, stream: Coroutine[Any, Any, None]) -> None:
        """Send *stream* in a protocol with one request a socket: further messages are ignored.

        Raises:
            Disconnected: The client is gone.
            TooLarge: A message was too large.
            RateLimited: The client sends too much.
        """
        sending = asyncio.ensure_future(stream)
        leaving = asyncio.ensure_future(self._ignore_messages())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            await (sending if sending.done() else leaving)
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            # Otherwise a task's error holds this frame, which holds the task, and everything on
            # its way stays until the collector runs.
            del sending, leaving

    async def _ignore_messages(self) -> None:
        while True:
            await self.receive()


def close_code(error: BaseException) -> int:
    """The code that tells a client why its stream ended."""
    return CLOSE_GOING_AWAY if isinstance(error, ShuttingDown) else CLOSE_FAILED


class SocketEndpoint:
    """ASGI app of one operation over a WebSocket."""

    def __init__(self, operation: Operation, host: Host, gate: Gate) -> None:
        self._operation = operation
        self._host = host
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket until its end."""
        await receive()  # websocket.connect
        caller = None

        def check() -> None:
            if caller is not None:  # its key may be revoked by now
                self._gate.check(scope, access=self._operation.access)

        known = self._operation.subprotocols
        socket = Socket(self._host, scope, receive, send, known, check)
        self._host.on_drain.add(socket.go_away)
        holds = contextlib.ExitStack()
        try:
            # Accepted even if it is then refused: a page sees no other close code.
            await socket.accept()
            caller = self._gate.check(scope, access=self._operation.access)
            budget = self._host.budget
            hold, arriving, messages = (
                holds.enter_context(budget.hold(caller.name)) for _ in range(3)
            )
            socket.admit(arriving, messages)
            call: Call[Any, Any] = Call(
                self._host, caller, Headers(scope=scope), QueryParams(scope["query_string"]),
                scope["state"]["request_id"], hold, path=scope["path_params"],
            )  # fmt: skip
            await self._operation.handler(call, socket)
            await socket.close()
        except TimeoutError:  # an OSError too, so it comes first
            with contextlib.suppress(ClientGone):
                await socket.close(CLOSE_POLICY, "idle clients are disconnected")
        except ClientGone:
            return
        except KqviewError as error:
            # No stream has begun, or it would have told the client itself.
            await self._refuse(socket, error)
        except Exception as error:
            _log.error("%s failed", self._operation.path, exc_info=error)
            await self._refuse(socket, error)
        finally:
            holds.close()
            self._host.on_drain.discard(socket.go_away)

    async def _refuse(self, socket: Socket, error: Exception) -> None:
        answer = answer_of(error)
        body = msgspec.to_builtins(self._operation.error_body(answer))
        code = CLOSE_POLICY if answer.status < 500 else close_code(error)
        with contextlib.suppress(ClientGone):
            await socket.send([msgspec.json.encode({"type": "error", **body}).decode()])
            await socket.close(
                CLOSE_TOO_BIG if isinstance(error, TooLarge) else code, answer.message
            )
