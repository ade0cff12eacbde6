"""Clients of the server tests that real libraries are too well-behaved for: raw sockets.

They read as little as they are told to, leave in the middle, or never say anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx
    from websockets.sync.client import ClientConnection

    from tests.support.serving import Served

WAITS_S = 60.0  # until a test fails; no measure of anything


def raw_connection(served: Served, *, receive_bytes: int | None = None) -> socket.socket:
    """A TCP connection; *receive_bytes* keeps its kernel from reading ahead."""
    parts = urlsplit(served.url)
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(WAITS_S)
    sock.connect((parts.hostname, parts.port))
    return sock


def request_bytes(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """An HTTP/1.1 request; underscores of header names are hyphens."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if body and "transfer_encoding" not in headers and "content_length" not in headers:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def json_request(path: str, value: Any, **headers: str) -> bytes:
    """A POST of JSON."""
    return request_bytes("POST", path, json.dumps(value).encode(), **headers)


def upgrade_bytes(path: str, **headers: str) -> bytes:
    """The client's half of a WebSocket handshake."""
    return request_bytes(
        "GET", path, connection="Upgrade", upgrade="websocket",
        sec_websocket_version="13", sec_websocket_key="dGhlIHNhbXBsZSBub25jZQ==", **headers,
    )  # fmt: skip


def masked_frame(data: bytes, opcode: int = 1, *, length: int | None = None) -> bytes:
    """A client's frame, of a length that may be a lie; its mask is zero."""
    n = len(data) if length is None else length
    if n < 126:
        head = bytes([0x80 | opcode, 0x80 | n])
    elif n < 2**16:
        head = bytes([0x80 | opcode, 0x80 | 126]) + struct.pack("!H", n)
    else:
        head = bytes([0x80 | opcode, 0x80 | 127]) + struct.pack("!Q", n)
    return head + bytes(4) + data


def read_all(sock: socket.socket) -> bytes:
    """Everything until the server closes; a reset counts as the end too."""
    parts: list[bytes] = []
    try:
        while part := sock.recv(2**16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """What comes up to *mark* and a little more."""
    got = bytearray()
    n_searched = 0
    while got.find(mark, n_searched) < 0:
        n_searched = max(0, len(got) - len(mark))
        part = sock.recv(4096)
        assert part, f"closed before {mark!r}: {got!r}"
        got += part
    return bytes(got)


def reset(sock: socket.socket) -> None:
    """Vanish: the peer gets a reset, not an end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def check_browser_headers(reply: httpx.Response) -> None:
    """Browsers neither frame the reply, nor guess its type, nor tell others where it was."""
    policy = dict(
        one.strip().split(" ", 1) for one in reply.headers["content-security-policy"].split(";")
    )
    assert policy["frame-ancestors"] == "'none'"
    assert policy["default-src"] == "'self'"
    assert reply.headers.get_list("x-frame-options") == ["DENY"]
    assert reply.headers.get_list("x-content-type-options") == ["nosniff"]
    assert reply.headers["referrer-policy"] == "same-origin"


def n_files() -> int:
    """Open files of this process, the server's sockets among them."""
    return len(os.listdir("/proc/self/fd"))


def is_closed_by_server(sock: socket.socket) -> bool:
    """Whether the server ends the connection within the socket's time; skips what it sent."""
    with contextlib.suppress(OSError):  # it may be closed both ways
        # What is on its way would trickle through a small window.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20)
    try:
        while sock.recv(2**16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


def sse_events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """JSON objects of the ``data:`` lines, as they come."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line[6:])


def websocket(served: Served, path: str, **options: Any) -> ClientConnection:
    """A WebSocket that takes messages of any size, uncompressed."""
    options = {"max_size": None, "compression": None, "close_timeout": 2, **options}
    return connect(served.ws_url + path, **options)


def read_to_close(socket: ClientConnection) -> tuple[list[str | bytes], int]:
    """The messages that are left, and the code that the server closes with."""
    messages: list[str | bytes] = []
    try:
        while True:
            messages.append(socket.recv(timeout=WAITS_S))
    except ConnectionClosed as closed:
        return messages, closed.rcvd.code if closed.rcvd is not None else 1006
