"""Clients for `server.py`: they read into one buffer and look only at lengths, so they cost little.

A Python client that parsed what it reads would be measured instead of the server.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 120
_BUFFER_BYTES = 1 << 22
_RECORD_BYTES = 1 << 24
_MOST_SHORT = 400  # bytes of a text frame that has no rows in it
_TEXT, _BINARY, _CLOSE = 1, 2, 8
_CLOSE_1000 = b"\x88\x02\x03\xe8"


class Wire:
    """One connection and its buffer."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._room = memoryview(bytearray(_BUFFER_BYTES))
        self._head = b""

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self._socket.sendall(data)

    def line_block(self) -> bytes:
        """Bytes up to and with the empty line that ends a header."""
        while b"\r\n\r\n" not in self._head:
            self._head += self._some()
        block, _, self._head = self._head.partition(b"\r\n\r\n")
        return block

    def exactly(self, n_bytes: int) -> bytes:
        """The next few bytes."""
        while len(self._head) < n_bytes:
            self._head += self._some()
        data, self._head = self._head[:n_bytes], self._head[n_bytes:]
        return data

    def skip(self, n_bytes: int) -> None:
        """Receive *n_bytes* and forget them."""
        kept = min(n_bytes, len(self._head))
        self._head = self._head[kept:]
        n_left = n_bytes - kept
        while n_left:
            n = self._socket.recv_into(self._room[: min(n_left, _BUFFER_BYTES)])
            if n == 0:
                raise ConnectionResetError("the server ended the connection too early")
            n_left -= n

    def to_end(self, end: bytes) -> int:
        """Receive until the stream ends in *end*; how many bytes came."""
        n_bytes, tail = len(self._head), self._head[-len(end) :]
        self._head = b""
        while tail != end:
            n = self._socket.recv_into(self._room)
            if n == 0:
                raise ConnectionResetError("the server ended the connection too early")
            n_bytes += n
            tail = (tail + bytes(self._room[max(0, n - len(end)) : n]))[-len(end) :]
        return n_bytes

    def until_closed(self) -> tuple[bytes, list[tuple[int, float]]]:
        """All that comes until the WebSocket's close frame, and when how many bytes were there."""
        data = bytearray(_RECORD_BYTES)
        n_bytes = len(self._head)
        data[:n_bytes] = self._head
        stamps = [(n_bytes, time.perf_counter())]
        room = memoryview(data)
        while data[max(0, n_bytes - 4) : n_bytes] != _CLOSE_1000:
            n = self._socket.recv_into(room[n_bytes:])
            if n == 0:
                raise ConnectionResetError("the server ended the connection too early")
            n_bytes += n
            stamps.append((n_bytes, time.perf_counter()))
        return bytes(room[:n_bytes]), stamps

    def _some(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionResetError("the server ended the connection too early")
        return data


def bare_bytes(port: int, n_tokens: int, row_bytes: int) -> int:
    """Rows from the bare socket; how many bytes came."""
    with Wire(port) as wire:
        wire.send(n_tokens.to_bytes(4, "little"))
        wire.skip(n_tokens * row_bytes)
    return n_tokens * row_bytes


def socket_bytes(port: int, path: str, request: dict[str, Any]) -> int:
    """A generation over a WebSocket, until it is done; how many payload bytes came."""
    with Wire(port) as wire:
        _ask(wire, port, path, request)
        n_bytes = 0
        while True:
            opcode, length = _frame_head(wire.exactly)
            n_bytes += length
            # A token's text frame comes before its row; "done" is the only other short one.
            if opcode != _TEXT or length >= _MOST_SHORT:
                wire.skip(length)
            elif _type_of(wire.exactly(length)) == "done":
                return n_bytes


def socket_ms(port: int, path: str, request: dict[str, Any]) -> float:
    """Milliseconds a token of a generation over a WebSocket, the first token not counted.

    What comes is only looked at when all of it is there.
    """
    with Wire(port) as wire:
        _ask(wire, port, path, request)
        data, stamps = wire.until_closed()
    at, n_rows = 0, 0

    def exactly(n_bytes: int) -> bytes:
        nonlocal at
        at += n_bytes
        return data[at - n_bytes : at]

    while True:
        opcode, length = _frame_head(exactly)
        payload = exactly(length)
        n_rows += opcode == _BINARY
        if n_rows == 1:
            n_first = at
        if opcode == _TEXT and _type_of(payload) == "done":
            break
    if n_rows != request["max_length"]:
        raise RuntimeError(f"{n_rows} tokens came, {request['max_length']} were asked for")
    first_s = next(s for n_bytes, s in stamps if n_bytes >= n_first)
    last_s = next(s for n_bytes, s in stamps if n_bytes >= at)
    return (last_s - first_s) * 1e3 / (n_rows - 1)


def _ask(wire: Wire, port: int, path: str, request: dict[str, Any]) -> None:
    key = base64.b64encode(os.urandom(16)).decode()
    wire.send(
        f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\n"
        "Sec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    status = wire.line_block().split(b"\r\n")[0]
    if b" 101 " not in status:
        raise RuntimeError(f"no WebSocket: {status!r}")
    wire.send(_masked(json.dumps(request).encode()))


def _frame_head(exactly: Callable[[int], bytes]) -> tuple[int, int]:
    """Opcode and length of the next frame, of what *exactly* so many bytes are read from."""
    first, length = exactly(2)
    if length == 126:
        (length,) = struct.unpack(">H", exactly(2))
    elif length == 127:
        (length,) = struct.unpack(">Q", exactly(8))
    if first & 15 == _CLOSE:
        raise ConnectionResetError(f"closed: {exactly(length)!r}")
    return first & 15, length


def _type_of(payload: bytes) -> str:
    message = json.loads(payload)
    if message["type"] == "error":
        raise RuntimeError(message["error"])
    return message["type"]


def event_bytes(port: int, path: str, request: dict[str, Any]) -> int:
    """A generation as Server-Sent Events, until its last chunk; how many bytes came."""
    body = json.dumps(request).encode()
    with Wire(port) as wire:
        wire.send(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = wire.line_block()
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(f"no stream: {head!r}")
        return wire.to_end(b"0\r\n\r\n")


def _masked(data: bytes) -> bytes:
    # A client's frames are masked; a mask of zeros leaves the bytes as they are.
    if len(data) < 126:
        return bytes([0x80 | _TEXT, 0x80 | len(data)]) + bytes(4) + data
    return bytes([0x80 | _TEXT, 0x80 | 126]) + struct.pack(">H", len(data)) + bytes(4) + data
