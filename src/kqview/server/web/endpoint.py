"""Endpoint: one HTTP operation, from the request's bytes to the reply's.

It does what every operation needs and no dialect should repeat: who may call, how large a body may
be, JSON to typed request and typed reply to JSON, errors in the dialect's words, Server-Sent
Events, and cancelling the work when the client leaves. What it serves (`Host`) it does not know.

A `Connection` is what lies below a request or WebSocket, as far as public ASGI shows it: ASGI can
neither drop a connection nor send several messages in one write. `web.uvicorn_parts` has one that
can, for the versions of uvicorn that it was checked with. The bytes that a client receives are the
same.
"""

import asyncio
import contextlib
import json
import logging
import math
import re
import zlib
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
    Sized,
)
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import (
    Any,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    get_origin,
    get_type_hints,
)

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive, Scope, Send

from kqview._core import count_values
from kqview.errors import RequestError
from kqview.json_input import DEPTH_MAX, TooDeep
from kqview.server.errors import Answer, SlowBody, TooLarge, UnsupportedMedia, answer_of
from kqview.server.settings import Settings
from kqview.server.web.access import Access, Caller, Gate
from kqview.server.web.budget import Body, Budget, Reservation
from kqview.server.web.lenient import LenientDecoder

_log: Final = logging.getLogger("kqview.server")

Handler = Callable[..., Awaitable[Any]]
Decoder = LenientDecoder | msgspec.json.Decoder[Any]
Frames = Sequence[bytes | str]
_HandlerT = TypeVar("_HandlerT", bound=Handler)
_HostT = TypeVar("_HostT")
_ModelT = TypeVar("_ModelT")
_Raw = TypeVar("_Raw", bound=Sized)
_T = TypeVar("_T")

DECODED_TIMES: Final = 17
"""Most bytes that a byte of JSON takes, with what it decodes to."""

PIECE_BYTES: Final = 2**20
"""Bytes of a reply that are written before the client is waited for."""
_SMALL_BYTES: Final = 64 * 1024  # smaller pieces of an event are joined into one write
_GZIP_LEVEL: Final = 1
_FIELD: Final = re.compile(r"(?:`\$\.|required field `)(\w+)")  # in a message of msgspec
# Most values and members of objects in a request, and the size of one that cannot have so many.
_MOST_VALUES: Final = 2**20
_MOST_MEMBERS: Final = 2**18
_SLICE: Final = 4096  # elements of a list that are encoded in one call
_SSE_HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
EVENT_HEAD: Final = b"event: message\ndata: "
EVENT_TAIL: Final = b"\n\n"
NEXT_EVENT: Final = EVENT_TAIL + EVENT_HEAD
"""Stands between two events in the pieces of one call, over SSE."""
DATA_HEAD: Final = b"data: "
"""Head of the events of a stream that have no other line."""
NEXT_DATA: Final = EVENT_TAIL + DATA_HEAD
NAMED_HEAD: Final = b"event: "
"""Head of the events of a stream in which each piece begins with its event's name."""


# ---- what a dialect sees


@dataclass(frozen=True, slots=True)
class Call(Generic[_HostT, _ModelT]):
    """One request as a handler sees it; the memory that it keeps is counted in ``hold``."""

    service: _HostT
    caller: Caller
    headers: Headers
    query: QueryParams
    request_id: str
    hold: Reservation
    n_body_bytes: int = 0
    path: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values of the names in braces in the operation's path."""
    model: _ModelT = None  # pyright: ignore[reportAssignmentType]
    """The model of a request whose operation uses one; it stays loaded until the reply ends."""
    unknown: tuple[str, ...] = ()
    """Members of the body that its type does not have; only of a lenient operation."""


AnyCall: TypeAlias = Call[Any, Any]
"""A call of whatever is served."""


class Reply(Protocol):
    """What a handler returns if its reply is more than a value for msgspec to encode."""

    async def send(self, call: AnyCall, response: "Response") -> None:
        """Send it to the client of *call*."""
        ...


@dataclass(frozen=True, slots=True)
class HttpReply:
    """A reply that is not plain JSON, or that is compressed if the client accepts it.

    A reply without a body has "" as its media type.
    """

    body: bytes
    media_type: str = "application/json"
    status: int = 200
    gzips: bool = False
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    async def send(self, call: AnyCall, response: "Response") -> None:
        """Send it, counted."""
        reply = self
        call.hold.take(len(self.body))
        asks = self.gzips or call.query.get("compression") == "gzip"
        if asks and "gzip" in call.headers.get("accept-encoding", ""):
            call.hold.take(len(self.body))
            reply = await call.service.offload(len(self.body), _gzipped, self)
        await response.whole(reply)


def warned(text: str | None) -> Mapping[str, str]:
    """Headers of a reply that tell a client of *text*; none without one."""
    return {} if text is None else {"warning": f"299 kqview {json.dumps(text)}"}


@dataclass(frozen=True, slots=True)
class LongReply:
    """A reply of *n_bytes* in pieces, each made when the client has read those before."""

    n_bytes: int
    pieces: Iterable[bytes]
    media_type: str = "application/json"

    async def send(self, call: AnyCall, response: "Response") -> None:
        """Send it piece by piece."""
        length = (b"content-length", str(self.n_bytes).encode())
        await response.start(200, [(b"content-type", self.media_type.encode()), length], {})
        n_left = self.n_bytes
        for piece in self.pieces:
            n_left -= len(piece)
            await response.body(piece, is_last=not n_left)


@dataclass(frozen=True, slots=True)
class Feed:
    """A reply streamed as Server-Sent Events that come from *events*, each whole, with its fields.

    It lasts until *events* ends or the client leaves. An event without frames only sends the
    reply's head.
    """

    events: AsyncGenerator[Frames]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    async def send(self, call: AnyCall, response: "Response") -> None:
        """Send each event when it comes."""
        response.event_head, response.event_headers = b"", self.headers
        async with contextlib.aclosing(self.events):
            async for frames in self.events:
                await response.event(frames)
        await response.finish()


UPLOADS: Final = ("application/json", "application/octet-stream")
"""Media types of an `Upload`."""


class Upload:
    """A request's body that its handler reads itself, up to a limit of its own.

    Until then nothing of it is read, so a request that is refused before costs nothing.
    """

    def __init__(self, headers: Headers, receive: Receive, host: "Host", hold: Reservation) -> None:
        self.media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        self._headers = headers
        self._receive = receive
        self._settings = host.settings
        self._budget = host.budget
        self._hold = hold
        self._body = Body()
        self._is_whole = asyncio.Event()

    async def read(self, most_bytes: int | None = None) -> Body:
        """The whole body, which lives until the reply is sent and is counted until then.

        Args:
            most_bytes: Its limit; None for the setting ``max_body_bytes``.

        Raises:
            UnsupportedMedia: It is compressed.
            TooLarge: It has more.
            SlowBody: It does not arrive in time.
            ClientGone: The client left.
            KqviewError: It does not fit into the memory that the client may hold.
        """
        if most_bytes is None:
            most_bytes = self._settings.max_body_bytes
        coding = ", ".join(self._headers.getlist("content-encoding")).strip()
        if coding.lower() not in ("", "identity"):
            raise UnsupportedMedia(f"the body is encoded as {coding!r}; send it uncompressed")
        declared = self._headers.get("content-length", "0")
        if declared.isdecimal():
            if int(declared) > most_bytes:
                raise TooLarge(
                    f"the body has {declared} bytes, the limit is {most_bytes}; send less"
                )
            self._budget.check(self._hold.client, int(declared))
        limit_s, idle_s = self._settings.request_timeout_s, self._settings.idle_timeout_s
        loop, has_more = asyncio.get_running_loop(), True
        end_s = loop.time() + (limit_s or math.inf)
        try:
            async with asyncio.timeout(None) as limit:
                while has_more:
                    limit.reschedule(min(end_s, loop.time() + idle_s))
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    self._hold.take(len(part))
                    self._body.add(part)
                    if self._body.n_bytes > most_bytes:
                        raise TooLarge(
                            f"the body has more than {most_bytes} bytes, the limit; send less"
                        )
                    has_more = message.get("more_body", False)
        except TimeoutError:
            why = f"the body took more than {limit_s:g} s"
            if loop.time() < end_s:
                why = f"nothing of the body came for {idle_s:g} s"
            raise SlowBody(f"{why}; send it faster") from None
        self._is_whole.set()
        return self._body

    async def json(self, kind: type[_T]) -> _T:
        """A body of JSON as short as any other; an empty one is ``{}``.

        Raises:
            RequestError: It cannot be read; the message names the field.
            KqviewError: As `read`.
        """
        body = await self.read()
        return decoded(msgspec.json.Decoder(kind), body.read())

    async def after_body(self) -> Message:
        """``receive`` of ASGI for what follows the body."""
        await self._is_whole.wait()
        return await self._receive()

    def close(self) -> None:
        """Release what was read; idempotent."""
        self._body.close()


@dataclass(frozen=True, slots=True)
class Sample:
    """A message of a WebSocket, or an event of a stream, as the description shows it.

    Attributes:
        sender: Who sends it.
        about: When it is sent.
        body: Of a message with a *type*, values that its example has in place of, or besides, those
            of the type; of a binary message, what its bytes are, in words; of an event that is no
            JSON, its data.
        event: Name of a Server-Sent Event.
        type: Type of its JSON, None for a binary message.
    """

    sender: Literal["client", "server"]
    about: str
    body: Mapping[str, Any] | str = field(default_factory=dict[str, Any])
    event: str = "message"
    type: Any = None


@dataclass(frozen=True, slots=True)
class OneOf:
    """Types of which a body has one, for the description."""

    types: tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A row of the route table.

    Attributes:
        method: HTTP method, or "WS" for a WebSocket.
        path: URL path; ``{name}`` stands for one part of it, see `Call.path`.
        handler: ``async def handler(call)``, with the decoded body as second argument if there is a
            *body*, with a `web.sockets.Socket` for a WebSocket. Returns whatever msgspec
            can encode, or a `Reply`.
        tag: Dialect, by which the API description groups; "" keeps it out of the description.
        summary: One line for the description.
        body: Type of the JSON body, None for none. Any content type is read as JSON. With `Upload`
            the handler gets one, and reads the body itself.
        upload: Type of the JSON in an `Upload`, for the description; `OneOf` if other media types
            are read as well, None if it may be anything.
        reply: Type of the JSON reply, or `OneOf`, for the description.
        status: Of success, for the description.
        error_body: The dialect's body for a failure.
        failure: Type of that body, for the description.
        access: As `Gate.check` takes it.
        model: Which model `Call.model` is: "named" by the body's field ``model``, else by
            ``?model=`` in the URL; "default" without asking; "none" if the handler needs none, or
            enters the pool itself.
        parameters: What each name in the path is, and each in the URL's query, for the description;
            "such as 0" in it is an example.
        is_lenient: Whether the body is read as KoboldCpp reads it, see `lenient`.
        also: Further paths of the same operation.
        streams: Whether it replies with Server-Sent Events.
        subprotocols: Those that a WebSocket speaks.
        example: A body, for the description.
        samples: Messages of a WebSocket or events of a stream in their order, for the description.
    """

    method: Literal["GET", "POST", "DELETE", "WS"]
    path: str
    handler: Handler
    tag: str
    summary: str
    error_body: Callable[[Answer], Any]
    failure: Any = None
    body: Any = None
    upload: Any = None
    reply: Any = None
    status: int = 200
    access: Access = "user"
    model: Literal["default", "named", "none"] = "none"
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])
    is_lenient: bool = False
    also: tuple[str, ...] = ()
    streams: bool = False
    subprotocols: tuple[str, ...] = ()
    example: Mapping[str, Any] | None = None
    samples: tuple[Sample, ...] = ()


class Operations(list[Operation]):
    """Rows of a dialect's route table, each added by the decorator of its handler.

    What a row does not say is read off the handler: the summary is the first line of its docstring,
    the body what it takes as ``body``, the reply what it returns, unless that is a `Reply`.
    """

    def __init__(self, **common: Any) -> None:
        """Rows with *common* fields, unless they say otherwise."""
        super().__init__()
        self._common = common

    def add(self, method: str, path: str, **given: Any) -> Callable[[_HandlerT], _HandlerT]:
        """A decorator that adds an operation; *given* are fields of `Operation`."""

        def added(handler: _HandlerT) -> _HandlerT:
            types = get_type_hints(handler)
            returned = types.get("return")
            is_data = get_origin(returned) is list or hasattr(returned, "__struct_fields__")
            known: dict[str, Any] = {
                "summary": (handler.__doc__ or "").partition("\n")[0],
                "reply": returned if is_data else None,
                "body": None if method == "GET" else types.get("body"),
            }
            row = known | self._common | given
            self.append(Operation(method=cast("Any", method), path=path, handler=handler, **row))
            return handler

        return added

    def get(self, path: str, **given: Any) -> Callable[[_HandlerT], _HandlerT]:
        """As `add`, for GET."""
        return self.add("GET", path, **given)

    def post(self, path: str, **given: Any) -> Callable[[_HandlerT], _HandlerT]:
        """As `add`, for POST."""
        return self.add("POST", path, **given)


# ---- the connection below a request

FRAMES: Final = "kqview.frames"
"""ASGI extension in a WebSocket's scope: ``websocket.send`` may have ``frames``, a sequence of
messages (str or bytes), in place of one ``text`` or ``bytes``. They are sent in one write."""


def frames_of(message: Message) -> Sequence[bytes | str]:
    """The messages that a ``websocket.send`` sends."""
    if "frames" in message:
        return message["frames"]
    data: bytes | None = message.get("bytes")
    return (message["text"] if data is None else data,)


def n_bytes_of(frame: bytes | str) -> int:
    """Bytes of a message."""
    return len(frame.encode()) if isinstance(frame, str) and not frame.isascii() else len(frame)


class ClientGone(ConnectionError):
    """The client left."""


class Stalled(ClientGone):
    """The client is there, but reads nothing."""


class Connection:
    """A connection of which nothing is known; belongs to the event loop."""

    def abort(self) -> None:
        """Drop the connection with its unsent bytes; does nothing if the server has no way to.

        Closing would wait until the client has read what was written. A client that stopped reading
        would keep file descriptor and buffer forever.
        """

    def admit(self, hold: Reservation) -> None:
        """Allow large messages from a WebSocket's client, and count incoming bytes in *hold*."""

    def on_lost(self, call: Callable[[], None] | None) -> bool:
        """Call *call* once when the client leaves, or no longer if it is None.

        Returns:
            Whether that is possible; if not, only the ``receive`` of ASGI tells.
        """
        return False

    async def send(self, send: Send, message: Message, idle_s: float | None) -> None:
        """Give *message* to *send* and wait until the server takes it, no longer than *idle_s*.

        Raises:
            Stalled: The client read nothing for *idle_s*.
            ClientGone: The client left.
        """
        try:
            if idle_s is None:
                return await send(message)
            async with asyncio.timeout(idle_s):
                return await send(message)
        except TimeoutError:
            pass  # nothing of it was written: servers wait first
        except ClientGone:
            raise
        except OSError as error:  # what ASGI servers raise; uvicorn's is no ConnectionError
            raise ClientGone(str(error)) from error
        # Outside the handler: that error's frames hold the task, which holds this one.
        raise Stalled(f"the client read nothing for {idle_s:g} s")

    def watch(self, idle_s: float) -> None:
        """Drop the connection if its client reads nothing of what is left for *idle_s*.

        For the end of a request, when nobody waits for the client any more.
        """


UNKNOWN: Final = Connection()


# ---- one operation


class Host:
    """What operations serve; this one has no models."""

    budget: Budget
    """Memory for requests and replies."""
    on_drain: set[Callable[[], Awaitable[None]]]
    """Called when the server ends; of a host with WebSockets."""
    is_closing = False
    """Whether the server ends; the same."""

    @property
    def settings(self) -> Settings:
        """Limits."""
        raise NotImplementedError

    async def offload(self, n_bytes: int, work: Callable[..., _T], *args: Any) -> _T:
        """Do *work* here, or in another thread if *n_bytes* would hold up the event loop."""
        raise NotImplementedError

    async def decoded(self, decode: Callable[[_Raw], _T], raw: _Raw, hold: Reservation) -> _T:
        """*decode* of *raw*, counted in *hold*; the result may live as long as that."""
        hold.take((DECODED_TIMES - 1) * len(raw))
        return decode(raw)

    def entered(
        self, operation: Operation, args: tuple[Any, ...], query: QueryParams
    ) -> AbstractAsyncContextManager[tuple[Any, tuple[Any, ...]]]:
        """What `Call.model` is until the reply has been sent, and the handler's further arguments.

        Args:
            operation: What is called; its ``model`` says what it needs.
            args: The decoded body, if there is one.
            query: Of the URL.
        """
        return contextlib.nullcontext((None, args))


class Endpoint:
    """ASGI app of one HTTP operation."""

    def __init__(self, operation: Operation, host: Host, gate: Gate) -> None:
        self._operation = operation
        self._host = host
        self._gate = gate
        self._decode: Callable[[Body], Any] | None = None
        if operation.body not in (None, Upload):
            kind = LenientDecoder if operation.is_lenient else msgspec.json.Decoder
            self._decode = partial(decoded_with_unknown, kind(operation.body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        operation, host = self._operation, self._host
        headers = Headers(scope=scope)
        connection = scope["state"].get("connection", UNKNOWN)
        response = Response(send, host.settings.idle_timeout_s, connection)
        hold: Reservation | None = None
        upload: Upload | None = None
        try:
            caller = self._gate.check(scope, access=operation.access)
            hold = Reservation(host.budget, caller.name)
            upload = Upload(headers, receive, host, hold)
            args: tuple[Any, ...] = ()
            after_body, n_body_bytes, unknown = receive, 0, ()
            if operation.body is Upload:
                args, after_body = (upload,), upload.after_body
            elif self._decode is not None:  # else a body is neither expected nor kept
                body = await upload.read()
                n_body_bytes = len(body)
                value, unknown = await host.decoded(self._decode, body, hold)
                args = (value,)
                upload.close()
                hold.take(-n_body_bytes)
            query = QueryParams(scope["query_string"])
            async with (
                while_connected(connection, after_body),
                host.entered(operation, args, query) as (served, args),
            ):
                call: Call[Any, Any] = Call(
                    host, caller, headers, query, scope["state"]["request_id"], hold,
                    n_body_bytes, scope["path_params"], served, unknown,
                )  # fmt: skip
                reply = await operation.handler(call, *args)
                if not hasattr(reply, "send"):
                    reply = HttpReply(msgspec.json.encode(reply))
                await reply.send(call, response)
        except ClientGone as error:
            if isinstance(error, Stalled):
                connection.abort()
        except Exception as error:
            await self._fail(response, error)
        finally:
            if upload is not None:
                upload.close()
            if hold is not None:
                hold.close()

    async def _fail(self, response: "Response", error: Exception) -> None:
        answer = answer_of(error)
        if answer.code == "INTERNAL":
            _log.error("%s failed", self._operation.path, exc_info=error)
        if not response.is_started:  # else it is cut: a clean end would look like success
            with contextlib.suppress(ClientGone):
                await response.whole(error_reply(answer, self._operation.error_body))


@contextlib.asynccontextmanager
async def while_connected(connection: "Connection", receive: Receive) -> AsyncGenerator[None]:
    """Cancels the block when the client leaves; leaving the block then raises ClientGone.

    A connection that reports its loss needs no task for this; public ASGI has nothing but
    ``receive``, which somebody has to wait for.
    """
    limit = asyncio.timeout(None)

    def leave() -> None:
        with contextlib.suppress(RuntimeError):  # the block was left meanwhile
            limit.reschedule(asyncio.get_running_loop().time())

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        leave()

    waiting: asyncio.Task[None] | None = None
    try:
        async with limit:
            waiting = None if connection.on_lost(leave) else asyncio.create_task(wait())
            yield
    except Exception:
        if limit.expired():
            raise ClientGone from None
        raise
    finally:
        connection.on_lost(None)
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


class Response:
    """Sends one reply; waits for the client, but not longer than *idle_s*."""

    def __init__(self, send: Send, idle_s: float, connection: Connection) -> None:
        self._send = send
        self._idle_s = idle_s
        self._connection = connection
        self.is_started = False
        self.event_head = EVENT_HEAD
        self.event_headers: Mapping[str, str] = {}

    async def whole(self, reply: HttpReply) -> None:
        """Send *reply*; a large body in pieces, so that it waits for the client, not below."""
        n_bytes = len(reply.body)
        head = [(b"content-length", str(n_bytes).encode())]
        if reply.media_type:
            head.insert(0, (b"content-type", reply.media_type.encode()))
        await self.start(reply.status, head, reply.headers)
        for at in range(0, n_bytes or 1, PIECE_BYTES):
            piece = reply.body[at : at + PIECE_BYTES]
            await self.body(piece, is_last=at + PIECE_BYTES >= n_bytes)

    async def start(
        self, status: int, head: Sequence[tuple[bytes, bytes]], headers: Mapping[str, str]
    ) -> None:
        """Send *head* and then *headers*."""
        self.is_started = True
        named = [(name.encode(), value.encode()) for name, value in headers.items()]
        message = {"type": "http.response.start", "status": status, "headers": [*head, *named]}
        await self._connection.send(self._send, message, self._idle_s)

    async def event(self, frames: Frames) -> None:
        """One Server-Sent Event, its data in pieces; the headers precede the first one."""
        if not self.is_started:
            await self.start(200, _SSE_HEADERS, self.event_headers)
        if not frames:
            return
        small = bytearray(self.event_head)
        for frame in frames:
            piece = frame.encode() if isinstance(frame, str) else frame
            if len(piece) < _SMALL_BYTES:
                small += piece
                continue
            await self.body(bytes(small))
            await self.body(piece)
            small.clear()
        await self.body(bytes(small + EVENT_TAIL))

    async def finish(self) -> None:
        await self.body(b"", is_last=True)

    async def body(self, data: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body."""
        message = {"type": "http.response.body", "body": data, "more_body": not is_last}
        await self._connection.send(self._send, message, self._idle_s)


def error_reply(answer: Answer, error_body: Callable[[Answer], Any]) -> HttpReply:
    """The reply for a failure, in a dialect's words."""
    headers: dict[str, str] = {}
    if answer.retry_after_s is not None:
        headers["retry-after"] = str(answer.retry_after_s)
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    if answer.status == 408:  # the rest of the body is not worth waiting for
        headers["connection"] = "close"
    if answer.status == 415:  # a decoder would have to be bounded, and no client asks for one
        headers["accept-encoding"] = "identity"
    return HttpReply(msgspec.json.encode(error_body(answer)), status=answer.status, headers=headers)


def json_in_slices(value: msgspec.Struct) -> bytes:
    """JSON of *value*, whose lists may be long, slice by slice; the lists are empty afterwards.

    One call for everything would hold the GIL for all of it.
    """
    parts: list[bytes] = []
    for name in value.__struct_encode_fields__:
        field = getattr(value, name)
        parts += [b"," if parts else b"{", msgspec.json.encode(name), b":"]
        if not isinstance(field, list):
            parts.append(msgspec.json.encode(field))
            continue
        items = cast("list[Any]", field)
        parts.append(b"[")
        for start in range(0, len(items), _SLICE):
            parts += [b","] if start else []
            parts.append(msgspec.json.encode(items[start : start + _SLICE])[1:-1])
        parts.append(b"]")
        empty(items)
    return b"".join([*parts, b"}"])


def empty(items: list[Any]) -> None:
    """Remove all *items* slice by slice.

    Left to the last reference, a long list is freed at once, with the GIL held, and often by the
    event loop.
    """
    while items:
        del items[-_SLICE:]


def check_values(raw: bytes | str, *, packs: bool = False) -> None:
    """Refuse input that is nested too deeply, or would decode to too many objects.

    Making more than can be made in the time of a few tokens holds the GIL for too long, in any
    thread. A text of any length is one value.

    Raises:
        RequestError: It is nested too deeply.
        TooLarge: The JSON, or with *packs* the MessagePack, has too many values.
    """
    data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
    counts = count_values(data, packs)
    if counts.depth > DEPTH_MAX:
        raise RequestError(f"the request cannot be read: {TooDeep(counts.depth)}")
    if counts.n_values > _MOST_VALUES or counts.n_members > _MOST_MEMBERS:
        raise TooLarge(
            f"the request has {counts.n_values} values, {counts.n_members} of them members of "
            f"objects; limits are {_MOST_VALUES} and {_MOST_MEMBERS}; send shorter lists"
        )


def decoded(decoder: Decoder, raw: Body | bytes | str) -> Any:
    """The typed request in *raw*; an empty body is ``{}``.

    Raises:
        RequestError: It is not JSON, or a field has the wrong type; the message names the field.
        TooLarge: It has too many values.
    """
    return decoded_with_unknown(decoder, raw)[0]


def decoded_with_unknown(decoder: Decoder, raw: Body | bytes | str) -> tuple[Any, tuple[str, ...]]:
    """As `decoded`, with the names of the members that the type of a lenient decoder lacks."""
    if isinstance(raw, Body):
        raw = raw.read()
    check_values(raw)
    raw = raw or b"{}"
    try:
        body = decoder.decode(raw)
        return body, decoder.unknown(raw, body) if isinstance(decoder, LenientDecoder) else ()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        named = _FIELD.search(str(error))
        raise RequestError(
            f"the request cannot be read: {error}; correct it",
            parameter=named[1] if named else None,
        ) from None


def _gzipped(reply: HttpReply) -> HttpReply:
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    body = packer.compress(reply.body) + packer.flush()
    headers = {**reply.headers, "content-encoding": "gzip", "vary": "Accept-Encoding"}
    return HttpReply(body, reply.media_type, reply.status, headers=headers)
