"""WebSocket frames: requests of both protocols, cut, joined, lied about and mixed with noise.

The server answers or closes; no close code says that it failed (1011) unless a generation did, it
never dies, and when all is over its memory budget is free again.
"""

from __future__ import annotations

import contextlib
import os
import struct
from typing import TYPE_CHECKING

from tests.attack.bodies import attack, body
from tests.attack.summary import Summary, main

if TYPE_CHECKING:
    import random

    from tests.attack.target import Target

PATHS = (
    "/api/extra/generate/stream/ws", "/api/v1/generate/stream", "/api/latest/generate/stream",
    "/api/v1/generate/stream",
)  # fmt: skip
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
WAITS_S = 0.3
MOST_READ = 2**22


def frame(rng: random.Random, opcode: int, data: bytes, *, is_last: bool = True) -> bytes:
    """A frame as a client has to send it, or nearly."""
    first = opcode | (0x80 if is_last else 0)
    if rng.random() < 0.02:
        first |= rng.choice([0x10, 0x20, 0x40])  # reserved bits
    n = len(data)
    if rng.random() < 0.03:
        n = rng.choice([0, n + 1, 125, 2**16, 2**25, 2**31, 2**63])
    mask = os.urandom(4) if rng.random() < 0.9 else bytes(4)
    is_masked = rng.random() > 0.02
    bit = 0x80 if is_masked else 0
    if n < 126:
        head = bytes([first, bit | n])
    elif n < 2**16:
        head = struct.pack("!BBH", first, bit | 126, n)
    else:
        head = struct.pack("!BBQ", first, bit | 127, n)
    if not is_masked:
        return head + data
    key = (mask * (len(data) // 4 + 1))[: len(data)]
    masked = int.from_bytes(data, "big") ^ int.from_bytes(key, "big")
    return head + mask + masked.to_bytes(len(data), "big")


def message(rng: random.Random) -> bytes:
    """Frames of one message, or of something else."""
    kind = rng.random()
    if kind < 0.15:
        opcode = rng.choice([PING, PONG, CLOSE, 0, 3, 7, 11, 15])
        return frame(rng, opcode, os.urandom(rng.choice([0, 1, 2, 125, 126, 1000])))
    if kind < 0.2:
        return os.urandom(rng.randrange(1, 300))
    data = body(rng)
    if kind < 0.6:
        data = b'{"type":"' + rng.choice([b"generate", b"cancel", b"x"]) + b'",' + data[1:]
    opcode = rng.choice([TEXT, TEXT, TEXT, BINARY])
    if rng.random() < 0.7:
        return frame(rng, opcode, data)
    n = rng.choice([1, 2, 100]) if len(data) < 10_000 else len(data) // 3
    pieces = [data[i : i + n] for i in range(0, len(data), n)] or [b""]
    frames = [
        frame(rng, 0 if i else opcode, piece, is_last=i == len(pieces) - 1)
        for i, piece in enumerate(pieces)
    ]
    if rng.random() < 0.2:
        rng.shuffle(frames)
    return b"".join(frames)


def send(running: Target, rng: random.Random, summary: Summary) -> None:
    """A few messages on one WebSocket, then whatever it answers."""
    packs = "sec-websocket-protocol: msgpack\r\n" if rng.random() < 0.3 else ""
    head = (
        f"GET {rng.choice(PATHS)} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\n"
        "upgrade: websocket\r\nsec-websocket-version: 13\r\n"
        f"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n{packs}\r\n"
    ).encode()
    data = b"".join(message(rng) for _ in range(rng.choice([1, 1, 2, 3, 10])))
    got = b""
    with contextlib.suppress(OSError), running.connect(timeout_s=WAITS_S) as sock:
        sock.sendall(head)
        if rng.random() < 0.9:
            got = sock.recv(1 << 16)
        sock.sendall(data)
        if rng.random() < 0.1:
            summary.count("left")
            return
        while len(got) < MOST_READ and (part := sock.recv(1 << 16)):
            got += part
    status = got[9:12].decode("latin-1")
    summary.count(f"status {status}" if status else "no answer")
    if status not in ("101", "400", "403", "429", "431", "503", ""):
        summary.fail(f"status {status}: {got[:300]!r}")
    if b'"INTERNAL"' in got:
        at = got.index(b'"INTERNAL"')
        summary.fail(f"it failed at {data[:300]!r}: {got[max(0, at - 200) : at + 20]!r}")
    for code in (1000, 1001, 1002, 1003, 1007, 1008, 1009, 1011, 1013):
        at = got.rfind(b"\x88")
        if at >= 0 and got[at + 2 : at + 4] == code.to_bytes(2, "big"):
            summary.count(f"closed with {code}")


def run(seconds: float, seed: int) -> Summary:
    """Send for *seconds*."""
    return attack(Summary("frames", seed), seconds, send)


if __name__ == "__main__":
    raise SystemExit(main(run))
