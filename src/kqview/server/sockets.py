"""Socket: a WebSocket as a dialect's handler sees it, and the ASGI app around that handler.

Text frames carry JSON, binary frames rows. The frames of one event stay together, whoever else
sends. Close codes: 1000 done, 1001 the server ends, 1008 a rule was broken, 1011 it failed.
"""

import asyncio
import logging
from typing import Any, Final

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Receive, Scope, Send

from kqview.errors import KqviewError
from kqview.server.endpoint import Call, Operation
from kqview.server.errors import ShuttingDown, TooLarge, answer_of
from kqview.server.run import Run
from kqview.server.security import Gate
from kqview.server.service import Service
from kqview.server.streaming import Frames, Renderer, pump

_log: Final = logging.getLogger("kqview.server")

CLOSE_DONE: Final = 1000
CLOSE_GOING_AWAY: Final = 1001
CLOSE_POLICY: Final = 1008
CLOSE_FAILED: Final = 1011


class Disconnected(Exception):
    """The client is gone."""


class Socket:
    """One accepted WebSocket; one task reads, any task of the loop sends."""

    def __init__(
        self, service: Service, receive: Receive, send: Send, *, subprotocol: str | None
    ) -> None:
        self.service = service
        self.subprotocol = subprotocol
        self._receive = receive
        self._send = send
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def receive(self, *, timeout_s: float | None = None) -> bytes | str:
        """The next message.

        Args:
            timeout_s: Longest wait; None for no limit.

        Raises:
            Disconnected: The client is gone.
            TooLarge: The message is larger than the limit.
            TimeoutError: Nothing came in time.
        """
        async with asyncio.timeout(timeout_s):
            message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self._is_closed = True
            raise Disconnected
        text = message.get("text")
        data: bytes | str = message.get("bytes") or b"" if text is None else text
        limit = self.service.settings.max_message_bytes
        if len(data) > limit:
            raise TooLarge(f"socket.receive: more than {limit} bytes, the limit; send less")
        return data

    async def send(self, frames: Frames) -> None:
        """Send these messages, none between them; waits until the client reads on.

        Raises:
            OSError: The client is gone.
        """
        async with self._lock:
            for frame in frames:
                if self._is_closed:
                    raise ConnectionResetError("the client is gone")
                kind = "text" if isinstance(frame, str) else "bytes"
                await self._send({"type": "websocket.send", kind: frame})

    async def send_json(self, value: Any) -> None:
        """Send *value* as a text frame of JSON."""
        await self.send([msgspec.json.encode(value).decode()])

    async def close(self, code: int = CLOSE_DONE, reason: str = "") -> None:
        """Close it; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            # The reason has to fit into a control frame.
            text = reason.encode()[:123].decode("utf-8", "ignore")
            await self._send({"type": "websocket.close", "code": code, "reason": text})

    async def go_away(self) -> None:
        """Close it because the server ends."""
        await _quietly(self.close(CLOSE_GOING_AWAY, "the server is shutting down"))

    async def pump(self, run: Run, renderer: Renderer) -> None:
        """Send *run* to its end; close the socket where it failed. See `streaming.pump`."""
        error = await pump(self.service, run, renderer, self.send)
        if error is not None:
            await self.close(close_code(error), str(error))

    async def pump_alone(self, run: Run, renderer: Renderer) -> None:
        """As `pump`, for a protocol of one request a socket: further messages are ignored."""
        sending = asyncio.ensure_future(self.pump(run, renderer))
        leaving = asyncio.ensure_future(self._until_gone())
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                raise Disconnected
            await sending
        finally:
            sending.cancel()
            leaving.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _until_gone(self) -> None:
        try:
            while True:
                await self.receive()
        except (Disconnected, TooLarge):
            return


def close_code(error: BaseException) -> int:
    """The code that tells a client why its stream ended."""
    return CLOSE_GOING_AWAY if isinstance(error, ShuttingDown) else CLOSE_FAILED


class SocketEndpoint:
    """ASGI app of one operation over a WebSocket."""

    def __init__(self, operation: Operation, service: Service, gate: Gate) -> None:
        self._operation = operation
        self._service = service
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket until its end."""
        await receive()  # websocket.connect
        known = self._operation.subprotocols
        chosen = next((name for name in scope.get("subprotocols", ()) if name in known), None)
        await send({"type": "websocket.accept", "subprotocol": chosen})
        socket = Socket(self._service, receive, send, subprotocol=chosen)
        self._service.on_drain.add(socket.go_away)
        try:
            caller = self._gate.check(scope, access=self._operation.access)
            call = Call(
                self._service, caller, Headers(scope=scope), QueryParams(scope["query_string"]),
                scope["state"]["request_id"],
            )  # fmt: skip
            await self._operation.handler(call, socket)
            await socket.close()
        except TimeoutError:  # an OSError too, so it comes first
            await _quietly(socket.close(CLOSE_POLICY, "nothing was sent for too long"))
        except (Disconnected, OSError):
            return
        except KqviewError as error:
            # Nothing of a stream was sent, or `pump` would have told the client.
            await _quietly(self._refuse(socket, error))
        except Exception as error:
            _log.error("%s failed", self._operation.path, exc_info=error)
            await _quietly(self._refuse(socket, error))
        finally:
            self._service.on_drain.discard(socket.go_away)

    async def _refuse(self, socket: Socket, error: Exception) -> None:
        answer = answer_of(error)
        await socket.send_json({"type": "error", **self._operation.error_body(answer)})
        is_theirs = answer.status < 500
        code = CLOSE_POLICY if is_theirs else close_code(error)
        await socket.close(code, answer.message)


async def _quietly(closing: Any) -> None:
    try:
        await closing
    except (OSError, Disconnected):
        return
