"""Uvicorn parts: the only file that knows uvicorn's insides, and `CHECKED`, the versions it knows.

uvicorn waits forever for the first byte of a request, accepts any number of connections, so that a
few hundred silent sockets use up the process's file descriptors, and collects request heads of any
length. It answers any number of pings, copies every WebSocket message on its way out and sends each
one by itself. It hears of a TLS connection only after the handshake, which a client may put off.
The protocols here are uvicorn's with bounds on all of this, and `connection` reaches the transport
behind the ``send`` that uvicorn hands out.

With any other version of uvicorn none of this is used: `uvicorn_options` takes uvicorn's own
protocols, connections are those of public ASGI (`web.endpoint.Connection`), and clients get the
same bytes.
"""

import asyncio
import contextlib
import logging
import re
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import uvicorn
from starlette.types import Message, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request
from websockets.protocol import State

from kqview import system
from kqview.errors import KqviewError, RequestError
from kqview.server.live_config import LiveConfig
from kqview.server.settings import Settings
from kqview.server.web.budget import Reservation
from kqview.server.web.endpoint import FRAMES, UNKNOWN, Connection, Stalled, frames_of
from kqview.server.web.peers import Peers, client_name
from kqview.server.web.tls import tls_context

CHECKED: Final = ((0, 53), (0, 55))
"""First version of uvicorn that this was checked with, and the first one that it was not."""

_log: Final = logging.getLogger("kqview.server")


def _refusal(status: bytes, text: bytes = b"", more: bytes = b"") -> bytes:
    """A whole reply; without CORS headers: it is sent before it is known which page asks."""
    kind = b"content-type: text/plain\r\nx-content-type-options: nosniff\r\n" if text else b""
    head = b"HTTP/1.1 %b\r\n%b%bcontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % (status, more, kind, len(text)) + text


_BUSY: Final = _refusal(b"503 Service Unavailable", more=b"retry-after: 1\r\n")
_TOO_MANY: Final = _refusal(
    b"429 Too Many Requests",
    b"too many connections from your address; close some, or, if it is a proxy's, name it "
    b"(--trusted-proxy)\n",
    b"retry-after: 1\r\n",
)
_TOO_LONG: Final = _refusal(b"431 Request Header Fields Too Large")
_MOST_HEAD_BYTES: Final = 64 * 1024
_MOST_UNREAD_BODY: Final = 2**20  # that may follow a reply that did not wait for it
_LINGER_S: Final = 2.0  # for the client to read that reply before the connection is closed
_MOST_UNKNOWN_MESSAGE: Final = 64 * 1024  # of a client that the app has not admitted yet
_MOST_AFTER_CLOSE: Final = 64 * 1024
_FRAGMENT_BYTES: Final = 64  # of the object around a fragment
_TRY_AGAIN: Final = 1013
_NO_UTF8: Final = 1007
_MOST_REASON: Final = 123  # bytes in a close frame
_WHOLE_TEXT: Final = 0x81  # FIN and opcode 1
_WHOLE_BINARY: Final = 0x82
# Small frames of a client: so many at once, and so many a second in the long run. Reading one
# blocks the loop for 10 us. A ping has to be answered and a pong was not asked for: each counts as
# several.
_MOST_FRAMES: Final = 1000
_FRAMES_PER_S: Final = 100
_SMALL_FRAME_BYTES: Final = 1024
_PING_COST: Final = 10
_PIECE_BYTES: Final = 4096  # read at a time, so that a flood is noticed early
_CLOSE_POLICY: Final = 1008
_HANDSHAKE_S: Final = 10.0
_OPTIONS: Final = {
    "log_config": None, "access_log": False, "server_header": False, "date_header": False,
    "proxy_headers": False,  # it would trust any local client; peers.py knows whom to trust
}  # fmt: skip
_SPARE_FILES: Final = 128  # model, log, wake handles, connections being refused


def is_checked() -> bool:
    """Whether this uvicorn is one whose private parts are known here."""
    major, minor = map(int, re.findall(r"\d+", uvicorn.__version__)[:2])
    return CHECKED[0] <= (major, minor) < CHECKED[1]


def connection(owner: Any) -> Connection:
    """The connection of *owner*, of which uvicorn's ``send`` is a method."""
    return UvicornConnection(owner) if is_checked() else UNKNOWN


def uvicorn_options(given: Settings | LiveConfig) -> dict[str, Any]:
    """Options of uvicorn.Config for our servers, with the limits of *given* on connections and TLS.

    Raises:
        RequestError: As `tls_context`.
    """
    live = LiveConfig.of(given)
    settings = live.settings  # but for clients, what a connection is limited to needs a restart
    tls = tls_context(settings)
    if not is_checked():
        _log.warning(
            "uvicorn %s is unknown to this version of kqview: idle connections, connections per "
            "client, request heads and WebSocket frames are not limited; install uvicorn>=%d.%d,"
            "<%d.%d, or put a proxy in front",
            uvicorn.__version__, *CHECKED[0], *CHECKED[1],
        )  # fmt: skip
        files = {"ssl_certfile": settings.ssl_certfile, "ssl_keyfile": settings.ssl_keyfile}
        return {**_OPTIONS, "http": "httptools", "ws": "websockets-sansio", **files}
    limits = {
        "idle_s": settings.idle_timeout_s,
        "most": settings.max_connections,
        "clients": _Clients(live),
    }
    kind = type("HttpProtocol", (_BoundedHttpProtocol,), limits)
    if tls is not None:
        kind = type(
            "TlsHandshake", (_TlsHandshake,), {"kind": kind, "tls": tls, "handshakes": set()}
        )
    return {**_OPTIONS, "http": kind, "ws": WebSocketProtocol}


def url_of(listener: socket.socket, settings: Settings) -> str:
    """Where a server with *settings* answers."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def identify(config: uvicorn.Config, certificate: ssl.SSLContext) -> None:
    """Let the server show *certificate* from the next connection on.

    Args:
        config: A loaded one of a server with TLS.
        certificate: As `tls_context` returns it.

    Raises:
        RequestError: This version of uvicorn is not known, so that it takes a restart.
    """
    kind = config.http_protocol_class
    if not issubclass(kind, _TlsHandshake):
        raise RequestError("a new certificate needs a restart with this version of uvicorn")
    kind.tls = certificate


class UvicornConnection(Connection):
    """The connection below a request (its cycle) or a WebSocket (its protocol) of uvicorn."""

    def __init__(self, owner: Any) -> None:
        """Take what uvicorn's ``send`` is a method of."""
        self._owner = owner
        self._transport: asyncio.Transport = owner.transport
        # HTTP has a `flow`, the Sans-I/O WebSocket a `writable`, and both wait for it before they
        # write; uvicorn's older WebSocket writes and waits then.
        self._waits_first = hasattr(owner, "flow") or hasattr(owner, "writable")

    def abort(self) -> None:
        self._transport.abort()

    async def send(self, send: Send, message: Message, idle_s: float | None) -> None:
        n_left = self._transport.get_write_buffer_size()
        while True:
            # With nothing left to write, the server takes a message at once.
            is_clear = self._waits_first and not self._transport.get_write_buffer_size()
            try:
                return await super().send(send, message, None if is_clear else idle_s)
            except Stalled:
                n_before, n_left = n_left, self._transport.get_write_buffer_size()
                if n_left >= n_before:  # a client that reads slowly makes room all the time
                    raise

    def watch(self, idle_s: float) -> None:
        if n_left := self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(idle_s, self._check, idle_s, n_left)

    def _check(self, idle_s: float, n_before: int) -> None:
        if self._transport.get_write_buffer_size() >= n_before:
            self.abort()
        else:
            self.watch(idle_s)

    def admit(self, hold: Reservation) -> None:
        if isinstance(self._owner, WebSocketProtocol):
            self._owner.admit(hold)

    def on_lost(self, call: Callable[[], None] | None) -> bool:
        protocol = self._transport.get_protocol()
        if not isinstance(protocol, _BoundedHttpProtocol):
            return False
        protocol.on_lost = call
        if call is not None:
            # Many bytes at once pause reading until somebody asks for more, and nobody does behind
            # the end of a body: then nothing would tell that the client has left.
            protocol.flow.resume_reading()
            if protocol.is_lost:
                asyncio.get_running_loop().call_soon(call)
        return True


def allow_files(settings: Settings) -> None:
    """Raise this process's soft limit of open files to what the connections need, if possible."""
    # A large body has a file of its own.
    system.allow_files(2 * settings.max_connections + _SPARE_FILES)


class _Clients:
    """Counts the connections of each client; trusted proxies are not limited."""

    def __init__(self, settings: Settings | LiveConfig) -> None:
        self._live = LiveConfig.of(settings)
        self._peers = self._live.derived(lambda config: config.settings.trusted_proxies, Peers)
        self._n_of: Counter[str] = Counter()

    def enter(self, address: str | None) -> str | None:
        """Count one more; returns the name for `leave`, None if it is not counted.

        Raises:
            OverflowError: The client has too many; this one is not counted.
        """
        if address is None or self._peers.value.trusts(address):
            return None
        name = client_name(address)
        if self._n_of[name] >= self._live.settings.max_connections_per_client:
            raise OverflowError
        self._n_of[name] += 1
        return name

    def leave(self, name: str | None) -> None:
        """Count one less."""
        if name is None:
            return
        self._n_of[name] -= 1
        if not self._n_of[name]:
            del self._n_of[name]


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket without copies of rows, and with bounds on what clients send.

    Messages are collected before the app sees them: small ones only until the app has admitted the
    client, and then they count as memory of that client.
    """

    on_lost: Callable[[], object] = staticmethod(lambda: None)
    _n_frames = 0.0
    _counted_s = 0.0
    _joins = False
    _hold: Reservation | None = None
    _n_fragment_bytes = 0
    _n_queued_bytes = 0
    _n_after_close = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        """As uvicorn calls it."""
        super().__init__(*args, **options)
        self.conn.max_message_size = min(_MOST_UNKNOWN_MESSAGE, self.config.ws_max_size)

    def admit(self, hold: Reservation) -> None:
        """Accept messages of any size that the settings allow, counted in *hold*."""
        self._hold = hold
        self.conn.max_message_size = self.config.ws_max_size

    def data_received(self, data: bytes) -> None:
        """Count incoming bytes; drop a client that goes on sending after the close."""
        if self.close_sent:
            self._n_after_close += len(data)
            if self._n_after_close > _MOST_AFTER_CLOSE:
                self.transport.abort()
                return
        was_closed = self.close_sent
        for start in range(0, len(data), _PIECE_BYTES):
            super().data_received(data[start : start + _PIECE_BYTES])
            if self.close_sent and not was_closed:  # because of what came; ignore the rest
                return
        self._count_bytes()

    def handle_cont(self, event: Frame) -> None:
        """Count a fragment."""
        if self._counts(event):
            self._n_fragment_bytes += len(event.data) + _FRAGMENT_BYTES
            super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        """Count a message, or its first fragment."""
        if self._counts(event):
            super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """As `handle_text`."""
        if self._counts(event):
            super().handle_bytes(event)

    def send_receive_event_to_app(self) -> None:
        """Count a message until the app takes it; invalid UTF-8 closes the socket, unlogged."""
        if self.curr_msg_data_type == "text" and not _is_utf8(b"".join(self.frames)):
            self.frames = []
            self.conn.fail(_NO_UTF8, "text is not UTF-8")
            self.handle_parser_exception()
            return
        self._n_queued_bytes += sum(map(len, self.frames))
        self._n_fragment_bytes = 0
        super().send_receive_event_to_app()

    async def receive(self) -> Any:
        """The next message; from now on the app counts it."""
        message = await super().receive()
        if self.queue.empty():
            self._n_queued_bytes = 0
            self._count_bytes()
        return message

    def _count_bytes(self) -> None:
        if self._hold is None or self.close_sent:
            return
        n_bytes = len(self.conn.reader.buffer) + self._n_fragment_bytes + self._n_queued_bytes
        if self.frames:  # the first fragment of a message
            n_bytes += len(self.frames[0])
        try:
            self._hold.set(n_bytes)
        except KqviewError as error:
            self.frames = []
            reason = str(error).encode()[:_MOST_REASON].decode("utf-8", "ignore")
            self.conn.fail(_TRY_AGAIN, reason)
            self.conn.reader.discard()
            self.handle_parser_exception()  # sends that and tells the app

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note how the transport writes."""
        super().connection_made(transport)
        # From Python 3.12 on, asyncio's writelines() does not pause the writer, and in some
        # versions does not check whether the connection is still there.
        self._joins = type(transport).__module__.startswith("asyncio.")

    def handle_connect(self, event: Request) -> None:
        """Tell the app that it may send several messages in one write."""
        super().handle_connect(event)
        if not self.close_sent:
            self.scope.setdefault("extensions", {})[FRAMES] = {}  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]

    async def send(self, message: Any) -> None:
        """Send heads and data as separate buffers: joining them would copy megabytes."""
        await self.writable.wait()
        if self.close_sent:  # by the protocol, while the app had more to send
            raise ClientDisconnected
        is_open = self.conn.state is State.OPEN and not self.disconnected
        if not is_open or message["type"] != "websocket.send":
            await super().send(message)
            return
        buffers = _buffers(frames_of(message))
        if self._joins:
            self.transport.write(b"".join(buffers))
        else:
            self.transport.writelines(buffers)

    def connection_lost(self, exc: Exception | None) -> None:
        """Report it to the count of connections."""
        super().connection_lost(exc)
        self.on_lost()

    def handle_ping(self) -> None:
        """Answer a ping, or close the connection if there are too many."""
        if self._counts(None):
            super().handle_ping()

    def handle_pong(self, event: Frame) -> None:
        """As `handle_ping`: most pongs were not asked for."""
        if self._counts(None):
            super().handle_pong(event)

    def _counts(self, event: Frame | None) -> bool:
        """Count a frame, None for a ping or pong; False if it was one too many."""
        if self.close_sent:
            return False
        if event is not None and len(event.data) >= _SMALL_FRAME_BYTES:
            return True
        now_s = self.loop.time()
        left = self._n_frames - (now_s - self._counted_s) * _FRAMES_PER_S
        self._n_frames = max(0.0, left) + (_PING_COST if event is None else 1)
        self._counted_s = now_s
        if self._n_frames <= _MOST_FRAMES:
            return True
        self.conn.fail(
            _CLOSE_POLICY, "too many pings" if event is None else "too many small frames"
        )
        self.conn.reader.discard()
        self.handle_parser_exception()  # sends that and tells the app
        if self.transport.get_write_buffer_size():  # the client does not read either
            self.transport.abort()
        return False


def _is_utf8(data: bytes) -> bool:
    try:
        return data.isascii() or bool(data.decode())
    except UnicodeDecodeError:
        return False


def _buffers(frames: Sequence[bytes | str]) -> list[bytes]:
    """Whole, unmasked messages as they are sent (RFC 6455, section 5.2)."""
    buffers: list[bytes] = []
    for frame in frames:
        is_text = isinstance(frame, str)
        data = frame.encode() if is_text else frame
        first, n_bytes = _WHOLE_TEXT if is_text else _WHOLE_BINARY, len(data)
        if n_bytes < 126:
            head = bytes((first, n_bytes))
        elif n_bytes < 1 << 16:
            head = struct.pack("!BBH", first, 126, n_bytes)
        else:
            head = struct.pack("!BBQ", first, 127, n_bytes)
        buffers.append(head)
        if data:
            buffers.append(data)
    return buffers


class _BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses connections beyond *most*, and drops those without a request for *idle_s*."""

    idle_s: ClassVar[float]
    most: ClassVar[int]
    clients: ClassVar[_Clients]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._n_requests = 0
        self._is_in_head = True
        self._n_head_bytes = 0
        self._has_moved = False
        self._n_unread_body = 0
        self._timer: asyncio.TimerHandle | None = None
        self._client: str | None = None
        self._is_counted = False
        self.is_lost = False
        self.on_lost: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if not self._is_counted and (refusal := self.admit(transport, len(self.connections))):
            transport.write(refusal)
            transport.close()
        else:
            self._wait(n_before=0)

    def admit(self, transport: asyncio.Transport, n_open: int) -> bytes:
        """Count a new connection, one of *n_open*; returns its refusal, b"" if it is admitted."""
        if n_open > self.most:
            return _BUSY
        try:
            self._client = self.clients.enter((transport.get_extra_info("peername") or (None,))[0])
        except OverflowError:
            return _TOO_MANY
        self._is_counted = True
        return b""

    def data_received(self, data: bytes) -> None:
        self._has_moved = False
        super().data_received(data)
        # What comes between two pieces of a body and after the last one is a kind of head: chunk
        # extensions, trailers.
        self._n_head_bytes = 0 if self._has_moved else self._n_head_bytes + len(data)
        if self._n_head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
            if self._is_in_head or not self.cycle.response_started:
                self.transport.write(_TOO_LONG)
                self.transport.close()
            else:
                self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self.transport.write(_refusal(b"400 Bad Request", msg.encode()))
        self.transport.close()

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._has_moved = False
        self._n_head_bytes = 0
        self._n_unread_body = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # to the parser trailers are headers; nobody reads them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._has_moved = True
        self._n_requests += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        super().on_body(body)
        if self.cycle.response_complete:
            self._n_unread_body += len(body)
            if self._n_unread_body > _MOST_UNREAD_BODY and self.transport.is_reading():
                # Closing on unread bytes would take back a reply that the client, or a proxy
                # in front, has not read yet.
                self.transport.pause_reading()
                self.loop.call_later(_LINGER_S, self.transport.abort)

    def handle_websocket_upgrade(self) -> None:
        self._stop()
        super().handle_websocket_upgrade()
        # From now on the transport reports its loss to the WebSocket, and not here.
        protocol = self.transport.get_protocol()
        if isinstance(protocol, WebSocketProtocol):
            protocol.on_lost = partial(self.clients.leave, self._client)
            self._client = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)
        self.leave()
        self.is_lost = True
        if self.on_lost is not None:
            self.on_lost()

    def leave(self) -> None:
        """Stop counting it."""
        self.clients.leave(self._client)
        self._client = None

    def _wait(self, n_before: int) -> None:
        self._timer = self.loop.call_later(self.idle_s, self._check, n_before)

    def _check(self, n_before: int) -> None:
        cycle: Any = self.cycle
        is_answered = cycle is None or cycle.response_complete
        is_read = not self.transport.get_write_buffer_size()
        if self._n_requests == n_before and is_answered and is_read:
            self.transport.abort()
        else:
            self._wait(self._n_requests)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _TlsHandshake(asyncio.Protocol):
    """Takes the place of uvicorn's protocol until a new connection has completed its handshake.

    asyncio's TLS server reports a connection only after that, so clients that never begin would
    escape every limit. Here the connection is counted first; then its socket moves to a transport
    with TLS and a protocol of *kind*, which keeps the count.
    """

    kind: ClassVar[type[_BoundedHttpProtocol]]
    tls: ClassVar[ssl.SSLContext]
    handshakes: ClassVar[set[asyncio.Task[None]]]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._http = self.kind(*args, **options)

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        n_open = len(self._http.connections) + len(self.handshakes) + 1
        sock: socket.socket | None = None
        if not self._http.admit(transport, n_open):  # a refusal in plain text would be noise
            with contextlib.suppress(OSError):  # no more files
                sock = transport.get_extra_info("socket").dup()
        transport.abort()
        if sock is None:
            self._http.leave()
            return
        handshake = asyncio.get_running_loop().create_task(self._shake_hands(sock))
        self.handshakes.add(handshake)
        handshake.add_done_callback(self.handshakes.discard)

    async def _shake_hands(self, sock: socket.socket) -> None:
        http = self._http
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: http, sock, ssl=self.tls,
                ssl_handshake_timeout=min(_HANDSHAKE_S, http.idle_s),
            )  # fmt: skip
        except OSError:  # not TLS, no common version, or too late
            pass
        finally:
            if http.transport is None:  # pyright: ignore[reportUnnecessaryComparison]
                http.leave()
                sock.close()
