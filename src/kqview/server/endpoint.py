"""Endpoint: one operation of the route table as an ASGI app.

It does what every operation needs and no dialect should repeat: who may call, how large a body is,
JSON to typed request and typed reply to JSON, errors in the dialect's words, Server-Sent Events,
and the end of the work when the client is gone.
"""

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive, Scope, Send

from kqview.errors import RequestError
from kqview.server.body import Body
from kqview.server.budget import Hold
from kqview.server.caller import Caller
from kqview.server.connection import Connection, connection_of
from kqview.server.errors import Answer, SlowBody, TooLarge, answer_of
from kqview.server.security import Gate
from kqview.server.service import Service
from kqview.server.streaming import (
    EVENT_HEAD,
    EVENT_TAIL,
    ClientGone,
    Events,
    Frames,
    Stalled,
    pump,
    sent,
)
from kqview.server.wire import check_values

_log: Final = logging.getLogger("kqview.server")
_PIECE_BYTES: Final = 2**20  # of a reply that are written before the client is waited for
_SMALL: Final = 64 * 1024  # pieces of an event below it are joined into one write
_GZIP_LEVEL: Final = 1
_SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)

Handler = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Call:
    """One request, as a handler sees it; what it keeps in memory is counted in ``hold``."""

    service: Service
    caller: Caller
    headers: Headers
    query: QueryParams
    request_id: str
    hold: Hold
    n_body_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """A handler's reply that is no plain JSON, or that is to be compressed if the client can."""

    body: bytes
    media_type: str = "application/json"
    status: int = 200
    gzips: bool = False
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A row of the route table.

    Attributes:
        method: HTTP method, or "WS" for a WebSocket.
        path: URL path.
        handler: ``async def handler(call)``, with the decoded body second where *body* is given,
            with a `kqview.server.sockets.Socket` second for a WebSocket. Returns what msgspec can
            encode, a `Reply`, or `Events`.
        tag: Dialect, as the description groups it; "" leaves it out of the description.
        summary: One line for the description.
        body: Type of the JSON body, None for none. Any content type is read as JSON.
        reply: Type of the JSON reply, for the description.
        error_body: The dialect's body for a failure.
        access: "open": anyone; "user": needs a key where there are keys; "admin": an admin key.
        also: Further paths of the same operation.
        streams: Whether it replies with Server-Sent Events.
        subprotocols: Of a WebSocket: those it speaks.
    """

    method: Literal["GET", "POST", "WS"]
    path: str
    handler: Handler
    tag: str
    summary: str
    error_body: Callable[[Answer], Any]
    body: Any = None
    reply: Any = None
    access: Literal["open", "user", "admin"] = "user"
    also: tuple[str, ...] = ()
    streams: bool = False
    subprotocols: tuple[str, ...] = ()


class Endpoint:
    """ASGI app of one HTTP operation."""

    def __init__(self, operation: Operation, service: Service, gate: Gate) -> None:
        self._operation = operation
        self._service = service
        self._gate = gate
        body = operation.body
        self._decoder = msgspec.json.Decoder(body) if body is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope)
        connection = connection_of(scope)
        response = _Response(send, self._service.settings.idle_timeout_s, connection)
        try:
            caller = self._gate.check(scope, access=self._operation.access)
            with self._service.budget.hold(caller.name) as hold:
                args, n_body_bytes = await self._args(headers, receive, hold)
                call = Call(
                    self._service, caller, headers, QueryParams(scope["query_string"]),
                    scope["state"]["request_id"], hold, n_body_bytes,
                )  # fmt: skip
                await self._until_gone(self._work(call, args, response), receive)
        except ClientGone as error:
            if isinstance(error, Stalled):
                connection.abort()
        except Exception as error:
            await self._fail(response, error)

    async def _args(
        self, headers: Headers, receive: Receive, hold: Hold
    ) -> tuple[tuple[Any, ...], int]:
        """The handler's further arguments, and the bytes that they were in the body."""
        if self._decoder is None:  # a body is neither expected nor kept
            return (), 0
        settings = self._service.settings
        with Body() as raw:
            try:
                async with asyncio.timeout(settings.request_timeout_s or None):
                    await _read_body(
                        raw,
                        headers,
                        receive,
                        settings.max_body_bytes,
                        settings.idle_timeout_s,
                        hold,
                    )
            except TimeoutError:
                raise SlowBody(
                    f"request.body: not all came within {settings.request_timeout_s:g} s"
                ) from None
            body = await self._service.decoded(partial(_decoded_body, self._decoder), raw, hold)
            hold.put(len(raw))
            return (body,), len(raw)

    async def _work(self, call: Call, args: tuple[Any, ...], response: "_Response") -> None:
        reply = await self._operation.handler(call, *args)
        if isinstance(reply, Events):
            error = await pump(self._service, reply.run, reply.renderer, response.event)
            # A stream that failed is cut: a clean end would look like success.
            if error is None:
                await response.finish()
            return
        if not isinstance(reply, Reply):
            reply = Reply(msgspec.json.encode(reply))
        call.hold.take(len(reply.body))
        asks = reply.gzips or call.query.get("compression") == "gzip"
        if asks and "gzip" in call.headers.get("accept-encoding", ""):
            call.hold.take(len(reply.body))
            reply = await self._service.offload(len(reply.body), _gzipped, reply)
        await response.whole(reply)

    async def _until_gone(self, work: Awaitable[None], receive: Receive) -> None:
        working = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientGone
            await working
        finally:
            gone.cancel()
            working.cancel()
            await asyncio.gather(working, gone, return_exceptions=True)
            del working, gone  # as in Socket.pump_alone

    async def _fail(self, response: "_Response", error: Exception) -> None:
        answer = answer_of(error)
        if answer.code == "INTERNAL":
            _log.error("%s failed", self._operation.path, exc_info=error)
        if not response.is_started:  # else it is cut: a clean end would look like success
            with contextlib.suppress(ClientGone):
                await response.whole(error_reply(answer, self._operation.error_body))


def error_reply(answer: Answer, error_body: Callable[[Answer], Any]) -> Reply:
    """The reply for a failure, in a dialect's words."""
    headers: dict[str, str] = {}
    if answer.retry_after_s is not None:
        headers["retry-after"] = str(answer.retry_after_s)
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    if answer.status == 408:  # the rest of the body is not worth waiting for
        headers["connection"] = "close"
    return Reply(msgspec.json.encode(error_body(answer)), status=answer.status, headers=headers)


def decoded(decoder: "msgspec.json.Decoder[Any]", raw: bytes | str) -> Any:
    """The typed request in *raw*; an empty body is ``{}``.

    Raises:
        RequestError: It is no JSON, or a field has the wrong type; the message names it.
        TooLarge: It has too many values.
    """
    check_values(raw)
    try:
        return decoder.decode(raw or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"request.decode: {error}; correct the body") from None


def _decoded_body(decoder: "msgspec.json.Decoder[Any]", body: Body) -> Any:
    return decoded(decoder, body.read())


class _Response:
    """What is sent; waits for the client, but not longer than *idle_s*."""

    def __init__(self, send: Send, idle_s: float, connection: Connection) -> None:
        self._send = send
        self._idle_s = idle_s
        self._connection = connection
        self.is_started = False

    async def whole(self, reply: Reply) -> None:
        await self._start(
            reply.status,
            (b"content-type", reply.media_type.encode()),
            (b"content-length", str(len(reply.body)).encode()),
            *((name.encode(), value.encode()) for name, value in reply.headers.items()),
        )
        # Large ones in pieces, so that it is the client's wait, not the transport's memory.
        body, start = reply.body, 0
        while len(body) - start > _PIECE_BYTES:
            await self._body(body[start : start + _PIECE_BYTES])
            start += _PIECE_BYTES
        await self._body(body[start:], is_last=True)

    async def event(self, frames: Frames) -> None:
        """One Server-Sent Event, its data in pieces; headers before the first one."""
        if not self.is_started:
            await self._start(200, *_SSE_HEADERS)
        if not frames:
            return
        small = bytearray(EVENT_HEAD)
        for frame in frames:
            piece = frame.encode() if isinstance(frame, str) else frame
            if len(piece) < _SMALL:
                small += piece
                continue
            await self._body(bytes(small))
            await self._body(piece)
            small.clear()
        await self._body(bytes(small + EVENT_TAIL))

    async def finish(self) -> None:
        await self._body(b"", is_last=True)

    async def _start(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        self.is_started = True
        await self._pass({"type": "http.response.start", "status": status, "headers": [*headers]})

    async def _body(self, data: bytes, *, is_last: bool = False) -> None:
        await self._pass({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _pass(self, message: Message) -> None:
        await sent(self._send, message, self._idle_s, self._connection)


async def _read_body(
    body: Body, headers: Headers, receive: Receive, limit: int, idle_s: float, hold: Hold
) -> None:
    declared = headers.get("content-length", "0")
    if declared.isdecimal():
        if int(declared) > limit:
            raise TooLarge(f"request.body: {declared} bytes, the limit is {limit}; send less")
        hold.check(int(declared))
    while True:
        try:
            async with asyncio.timeout(idle_s):
                message = await receive()
        except TimeoutError:
            raise SlowBody(f"request.body: nothing came for {idle_s:g} s; send faster") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        hold.take(len(part))
        body.add(part)
        if len(body) > limit:
            raise TooLarge(f"request.body: more than {limit} bytes, the limit; send less")
        if not message.get("more_body", False):
            return


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _gzipped(reply: Reply) -> Reply:
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    body = packer.compress(reply.body) + packer.flush()
    headers = {**reply.headers, "content-encoding": "gzip", "vary": "Accept-Encoding"}
    return Reply(body, reply.media_type, reply.status, headers=headers)
