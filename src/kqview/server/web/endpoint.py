"""Endpoint: one HTTP operation, from the request's bytes to the reply's.

It does what every operation needs and no dialect should repeat: who may call, how large a body may
be, JSON to typed request and typed reply to JSON, errors in the dialect's words, Server-Sent
Events, and cancelling the work when the client leaves.

A `Connection` is what lies below a request or WebSocket, as far as public ASGI shows it: ASGI can
neither drop a connection nor send several messages in one write. `web.uvicorn_parts` has one that
can, for the versions of uvicorn that it was checked with. The bytes that a client receives are the
same.

`pump` is the loop that every stream of tokens goes through, over SSE and WebSockets alike. While it
waits for a client, nobody takes the run's next token; its mailbox fills and the engine pauses that
request alone: backpressure from the socket to the slot.
"""

import asyncio
import contextlib
import logging
import re
import zlib
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Protocol, cast

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.types import Message, Receive, Scope, Send

from kqview._core import count_values
from kqview.errors import EmittedError, InternalError, KqviewError, ModFailed, RequestError
from kqview.json_input import DEPTH_MAX, TooDeep
from kqview.server.errors import Answer, SlowBody, TooLarge, UnsupportedMedia, answer_of
from kqview.server.models.attention import split_json
from kqview.server.models.model_entry import ModelEntry, resolved
from kqview.server.models.run import Removal, Run, Step
from kqview.server.models.service import OFFLOAD_BYTES, Service
from kqview.server.settings import Settings
from kqview.server.web.budget import Body, Budget, Reservation
from kqview.server.web.lenient import LenientDecoder
from kqview.server.web.security import Access, Caller, Gate
from kqview.types import PromptBlock

_log: Final = logging.getLogger("kqview.server")

Handler = Callable[..., Awaitable[Any]]
Decoder = LenientDecoder | msgspec.json.Decoder[Any]
Frames = Sequence[bytes | str]
SendFrames = Callable[[Frames], Awaitable[None]]

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
NAMED_HEAD: Final = b"event: "
"""`Events.head` of a stream whose pieces come from `named_events`."""


# ---- what a dialect sees


@dataclass(frozen=True, slots=True)
class Call:
    """One request as a handler sees it; the memory that it keeps is counted in ``hold``."""

    service: Service
    caller: Caller
    headers: Headers
    query: QueryParams
    request_id: str
    hold: Reservation
    n_body_bytes: int = 0
    path: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values of the names in braces in the operation's path."""
    served: ModelEntry | None = None
    unknown: tuple[str, ...] = ()
    """Members of the body that its type does not have; only of a lenient operation."""

    @property
    def model(self) -> ModelEntry:
        """The model of a request whose operation uses one; it stays loaded until the reply ends."""
        assert self.served is not None, "the operation says that it uses no model"
        return self.served


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


@dataclass(frozen=True, slots=True)
class LongReply:
    """A reply of *n_bytes* in pieces, each made when the client has read those before."""

    n_bytes: int
    pieces: Iterable[bytes]
    media_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Feed:
    """A reply streamed as Server-Sent Events that come from *events*, each whole, with its fields.

    It lasts until *events* ends or the client leaves. An event without frames only sends the
    reply's head.
    """

    events: AsyncGenerator[Frames]


UPLOADS: Final = ("application/json", "application/octet-stream")
"""Media types of an `Upload`."""


class Upload:
    """A request's body that its handler reads itself, up to a limit of its own.

    Until then nothing of it is read, so a request that is refused before costs nothing.
    """

    def __init__(
        self, headers: Headers, receive: Receive, settings: Settings, hold: Reservation
    ) -> None:
        self.media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        self._headers = headers
        self._receive = receive
        self._settings = settings
        self._hold = hold
        self._body = Body()
        self._is_whole = asyncio.Event()

    async def read(self, most_bytes: int) -> Body:
        """The whole body, which lives until the reply is sent and is counted until then.

        Raises:
            UnsupportedMedia: It is compressed.
            TooLarge: It has more than *most_bytes*.
            SlowBody: It does not arrive in time.
            ClientGone: The client left.
            KqviewError: It does not fit into the memory that the client may hold.
        """
        coding = ", ".join(self._headers.getlist("content-encoding")).strip()
        if coding.lower() not in ("", "identity"):
            raise UnsupportedMedia(f"the body is encoded as {coding!r}; send it uncompressed")
        limit_s = self._settings.request_timeout_s
        try:
            async with asyncio.timeout(limit_s or None):
                await _read_body(
                    self._body, self._headers, self._receive, most_bytes,
                    self._settings.idle_timeout_s, self._hold,
                )  # fmt: skip
        except TimeoutError:
            raise SlowBody(f"the body took more than {limit_s:g} s; send it faster") from None
        self._is_whole.set()
        return self._body

    async def after_body(self) -> Message:
        """``receive`` of ASGI for what follows the body."""
        await self._is_whole.wait()
        return await self._receive()

    def __enter__(self) -> "Upload":
        return self

    def __exit__(self, *_: object) -> None:
        self._body.close()


class Renderer(Protocol):
    """How a dialect writes what happens. Pure; `token` and `prompt` may run in another thread.

    Over SSE the frames of one call are bytes, the pieces of one event's data; no frames are no
    event. Over a WebSocket each frame is a message, text or binary; those of a call stay together.
    """

    def prompt(self, run: Run, block: PromptBlock) -> Frames:
        """Rows of the prompt."""
        ...

    def token(self, run: Run, step: Step) -> Frames:
        """One token."""
        ...

    def removed(self, run: Run, removal: Removal) -> Frames:
        """Tokens that mods have taken back; they were rendered before."""
        ...

    def done(self, run: Run) -> Frames:
        """The end."""
        ...

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong; nothing follows it."""
        ...


@dataclass(frozen=True, slots=True)
class Events:
    """A reply that is streamed as Server-Sent Events, each of which begins with *head*.

    *n_repeated* is about how many bytes its first event, its last and that of an error repeat of
    the request.
    """

    run: Run
    renderer: Renderer
    head: bytes = EVENT_HEAD
    n_repeated: int = 0


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
            can encode, an `HttpReply`, `LongReply`, `Events` or `Feed`.
        tag: Dialect, by which the API description groups; "" keeps it out of the description.
        summary: One line for the description.
        body: Type of the JSON body, None for none. Any content type is read as JSON. With `Upload`
            the handler gets one, and reads the body itself.
        upload: Type of the JSON in an `Upload`, for the description; `OneOf` if other media types
            are read as well, None if it may be anything.
        reply: Type of the JSON reply, or `OneOf`, for the description.
        status: Of success, for the description.
        error_body: The dialect's body for a failure.
        failure: Type of that body, for the description; None to describe an example of it.
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

    def admit(self, hold: Reservation) -> None:
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


# ---- one operation


class Host(Protocol):
    """What operations need that read no body but an `Upload` and stream no `Events`."""

    @property
    def settings(self) -> Settings:
        """Limits."""
        ...

    @property
    def budget(self) -> Budget:
        """Memory for requests and replies."""
        ...

    async def offload(self, n_bytes: int, work: Callable[..., Any], *args: Any) -> Any:
        """As `Service.offload`."""
        ...


class Endpoint:
    """ASGI app of one HTTP operation."""

    def __init__(self, operation: Operation, service: Service | Host, gate: Gate) -> None:
        self._operation = operation
        self._service = cast("Service", service)
        self._gate = gate
        self._decoder: Decoder | None = None
        if operation.body not in (None, Upload):
            kind = LenientDecoder if operation.is_lenient else msgspec.json.Decoder
            self._decoder = kind(operation.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        headers = Headers(scope=scope)
        connection = connection_of(scope)
        response = _Response(send, self._service.settings.idle_timeout_s, connection)
        try:
            caller = self._gate.check(scope, access=self._operation.access)
            with (
                self._service.budget.hold(caller.name) as hold,
                Upload(headers, receive, self._service.settings, hold) as upload,
            ):
                args, n_body_bytes, unknown = await self._args(upload, hold)
                query = QueryParams(scope["query_string"])
                after_body = upload.after_body if upload in args else receive
                async with (
                    _WhileConnected(connection, after_body),
                    self._model(args, query) as served,
                ):
                    call = Call(
                        self._service, caller, headers, query, scope["state"]["request_id"], hold,
                        n_body_bytes, scope["path_params"], served, unknown,
                    )  # fmt: skip
                    if served is not None:
                        args = tuple(resolved(one, served) for one in args)
                    await self._reply(call, args, response)
        except ClientGone as error:
            if isinstance(error, Stalled):
                connection.abort()
        except Exception as error:
            await self._fail(response, error)

    @contextlib.asynccontextmanager
    async def _model(
        self, args: tuple[Any, ...], query: QueryParams
    ) -> AsyncGenerator[ModelEntry | None]:
        wanted = self._operation.model
        if wanted == "none":
            yield None
            return
        named = [*(getattr(one, "model", None) for one in args), query.get("model")]
        name = next((one for one in named if one), None) if wanted == "named" else None
        async with self._service.pool.using(name) as served:
            yield served

    async def _args(
        self, upload: Upload, hold: Reservation
    ) -> tuple[tuple[Any, ...], int, tuple[str, ...]]:
        """The handler's further arguments, the size of the body that they were, `Call.unknown`."""
        if self._operation.body is Upload:
            return (upload,), 0, ()
        if self._decoder is None:  # a body is neither expected nor kept
            return (), 0, ()
        with await upload.read(self._service.settings.max_body_bytes) as raw:
            read = partial(_decoded_body, self._decoder)
            body, unknown = await self._service.decoded(read, raw, hold)
            hold.put(len(raw))
            return (body,), len(raw), unknown

    async def _reply(self, call: Call, args: tuple[Any, ...], response: "_Response") -> None:
        reply = await self._operation.handler(call, *args)
        if isinstance(reply, Events):
            response.event_head = reply.head
            error = await pump(
                self._service,
                reply.run,
                reply.renderer,
                response.event,
                reply.n_repeated,
                raises_first=True,
            )
            if error is None:  # else the stream is cut: a clean end would look like success
                await response.finish()
            return
        if isinstance(reply, Feed):
            response.event_head = b""
            async with contextlib.aclosing(reply.events):
                async for frames in reply.events:
                    await response.event(frames)
            await response.finish()
            return
        if isinstance(reply, LongReply):
            await response.sent(200, reply.media_type, {}, reply.n_bytes, reply.pieces)
            return
        if not isinstance(reply, HttpReply):
            reply = HttpReply(msgspec.json.encode(reply))
        call.hold.take(len(reply.body))
        asks = reply.gzips or call.query.get("compression") == "gzip"
        if asks and "gzip" in call.headers.get("accept-encoding", ""):
            call.hold.take(len(reply.body))
            reply = await self._service.offload(len(reply.body), _gzipped, reply)
        await response.whole(reply)

    async def _fail(self, response: "_Response", error: Exception) -> None:
        answer = answer_of(error)
        if answer.code == "INTERNAL":
            _log.error("%s failed", self._operation.path, exc_info=error)
        if not response.is_started:  # else it is cut: a clean end would look like success
            with contextlib.suppress(ClientGone):
                await response.whole(error_reply(answer, self._operation.error_body))


class _WhileConnected:
    """Cancels the block when the client leaves; leaving the block then raises ClientGone.

    A connection that reports its loss needs no task for this; public ASGI has nothing but
    ``receive``, which somebody has to wait for.
    """

    def __init__(self, connection: Connection, receive: Receive) -> None:
        self._connection = connection
        self._receive = receive
        self._is_gone = False
        self._waiting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] | None = task
        self._n_cancelled = task.cancelling()
        if not self._connection.on_lost(self._leave):
            self._waiting = asyncio.create_task(self._wait())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None  # an error's traceback may keep this for long
        assert task is not None
        self._connection.on_lost(None)
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)
            self._waiting = None
        # As in asyncio.timeout: others may have cancelled it too.
        if self._is_gone and task.uncancel() <= self._n_cancelled and kind is not None:
            raise ClientGone from None

    def _leave(self) -> None:
        if self._task is not None and not self._is_gone:
            self._is_gone = True
            self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()


class _Response:
    """Sends one reply; waits for the client, but not longer than *idle_s*."""

    def __init__(self, send: Send, idle_s: float, connection: Connection) -> None:
        self._send = send
        self._idle_s = idle_s
        self._connection = connection
        self.is_started = False
        self.event_head = EVENT_HEAD

    async def whole(self, reply: HttpReply) -> None:
        # A large body goes out in pieces, so that it waits for the client, not in the transport.
        n_bytes = len(reply.body)
        pieces = (reply.body[at : at + PIECE_BYTES] for at in range(0, n_bytes, PIECE_BYTES))
        await self.sent(reply.status, reply.media_type, reply.headers, n_bytes, pieces)

    async def sent(
        self,
        status: int,
        media_type: str,
        headers: Mapping[str, str],
        n_bytes: int,
        pieces: Iterable[bytes],
    ) -> None:
        await self._start(
            status,
            *([(b"content-type", media_type.encode())] if media_type else []),
            (b"content-length", str(n_bytes).encode()),
            *((name.encode(), value.encode()) for name, value in headers.items()),
        )
        n_left = n_bytes
        for piece in pieces:
            n_left -= len(piece)
            await self._body(piece, is_last=not n_left)
        if not n_bytes:
            await self._body(b"", is_last=True)

    async def event(self, frames: Frames) -> None:
        """One Server-Sent Event, its data in pieces; the headers precede the first one."""
        if not self.is_started:
            await self._start(200, *_SSE_HEADERS)
        if not frames:
            return
        small = bytearray(self.event_head)
        for frame in frames:
            piece = frame.encode() if isinstance(frame, str) else frame
            if len(piece) < _SMALL_BYTES:
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
        message = {"type": "http.response.start", "status": status, "headers": [*headers]}
        await self._connection.send(self._send, message, self._idle_s)

    async def _body(self, data: bytes, *, is_last: bool = False) -> None:
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


def named_events(events: Sequence[Mapping[str, Any]], data: bytes | None = None) -> list[bytes]:
    """Pieces of events that are named by their ``type``, for a stream with `NAMED_HEAD`.

    *data* belongs at the `DATA_HERE` of the last one.
    """
    pieces: list[bytes] = []
    for i, one in enumerate(events):
        head = EVENT_TAIL + NAMED_HEAD if i else b""
        pieces.append(b"%s%s\ndata: " % (head, one["type"].encode()))
        if data is None or i < len(events) - 1:
            pieces.append(msgspec.json.encode(one))
        else:
            pieces += split_json(one, data)
    return pieces


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


def decoded(decoder: Decoder, raw: bytes | str) -> Any:
    """The typed request in *raw*; an empty body is ``{}``.

    Raises:
        RequestError: It is not JSON, or a field has the wrong type; the message names the field.
        TooLarge: It has too many values.
    """
    check_values(raw)
    with _reading():
        return decoder.decode(raw or b"{}")


@contextlib.contextmanager
def _reading() -> Generator[None]:
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        named = _FIELD.search(str(error))
        raise RequestError(
            f"the request cannot be read: {error}; correct it",
            parameter=named[1] if named else None,
        ) from None


def decoded_with_unknown(decoder: LenientDecoder, raw: bytes | str) -> tuple[Any, tuple[str, ...]]:
    """As `decoded`, with the names of the members that the type does not have."""
    body = decoded(decoder, raw)
    with _reading():
        return body, decoder.unknown(raw or b"{}", body)


def _decoded_body(decoder: Decoder, body: Body) -> tuple[Any, tuple[str, ...]]:
    raw = body.read()
    if isinstance(decoder, LenientDecoder):
        return decoded_with_unknown(decoder, raw)
    return decoded(decoder, raw), ()


async def _read_body(
    body: Body, headers: Headers, receive: Receive, limit: int, idle_s: float, hold: Reservation
) -> None:
    declared = headers.get("content-length", "0")
    if declared.isdecimal():
        if int(declared) > limit:
            raise TooLarge(f"the body has {declared} bytes, the limit is {limit}; send less")
        hold.check(int(declared))
    while True:
        try:
            async with asyncio.timeout(idle_s):
                message = await receive()
        except TimeoutError:
            raise SlowBody(f"nothing of the body came for {idle_s:g} s; send it faster") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        hold.take(len(part))
        body.add(part)
        if len(body) > limit:
            raise TooLarge(f"the body has more than {limit} bytes, the limit; send less")
        if not message.get("more_body", False):
            return


def _gzipped(reply: HttpReply) -> HttpReply:
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    body = packer.compress(reply.body) + packer.flush()
    headers = {**reply.headers, "content-encoding": "gzip", "vary": "Accept-Encoding"}
    return HttpReply(body, reply.media_type, reply.status, headers=headers)


# ---- a stream of tokens


async def pump(
    service: Service,
    run: Run,
    renderer: Renderer,
    send: SendFrames,
    n_repeated: int = 0,
    *,
    raises_first: bool = False,
) -> KqviewError | None:
    """Send *run* to its end and close it.

    Args:
        service: The run's.
        run: What to send.
        renderer: How to write it.
        send: Sends the frames of one event; raises ClientGone, and Stalled after a time.
        n_repeated: As of `Events`.
        raises_first: Whether an error of a mod is raised, not sent, if nothing was sent before.

    Returns:
        The error that ended the run, which was sent too; None if it ended well.

    Raises:
        ClientGone: Nobody reads; the run is closed.
        asyncio.CancelledError: It was cancelled from outside; the run is closed.
        EmittedError, ModFailed: See *raises_first*.
    """
    has_sent = False

    async def note(frames: Frames) -> None:
        nonlocal has_sent
        has_sent = True
        await send(frames)

    async with run:
        try:
            with run.hold.part() as unread:
                n_sent = await _send_tokens(service, run, renderer, note, unread, n_repeated)
            for removal in run.last_removals():
                await send(renderer.removed(run, removal))
            # The slot is free before the client hears that it is.
            await run.aclose()
            # The end may have the whole answer once more.
            await send(await service.offload(n_sent + n_repeated, renderer.done, run))
        except ClientGone:
            raise
        except (EmittedError, ModFailed) as error:
            if raises_first and not has_sent:
                raise
            failure = error
        except KqviewError as error:
            failure = error
        except Exception as error:
            _log.error("stream of %s failed", run.request_id, exc_info=error)
            failure = InternalError("the server failed; its log says more")
            run.end(failure)
        else:
            return None
        answer = answer_of(failure)
        await send(await service.offload(n_repeated, renderer.error, run, answer))
        return failure


async def _send_tokens(
    service: Service,
    run: Run,
    renderer: Renderer,
    send: SendFrames,
    unread: Reservation,
    n_repeated: int,
) -> int:
    """Send rows and tokens, and return how many bytes that were.

    *unread* counts the bytes that the client may not have read.
    """
    n_sent = 0

    async def deliver(frames: Frames) -> None:
        nonlocal n_sent, n_repeated
        if frames:
            n_bytes = sum(map(len, frames))
            n_sent, n_repeated = n_sent + n_bytes, 0  # only the first event repeats
            unread.take(n_bytes)
            await send(frames)
            unread.set(n_bytes)  # transports wait for what was sent before

    async for block in run.prompt_blocks():
        # Rows of layers with different numbers of heads are a tuple: large enough for a thread.
        n_bytes = getattr(block.rows, "nbytes", OFFLOAD_BYTES)
        frames = await service.offload(n_bytes + n_repeated, renderer.prompt, run, block)
        del block  # the pool wants its memory back while the client reads
        await deliver(frames)
    async for step in run:
        if step.removal is not None:
            await deliver(renderer.removed(run, step.removal))
        frames = await service.offload(step.n_bytes + n_repeated, renderer.token, run, step)
        del step
        await deliver(frames)
    return n_sent
