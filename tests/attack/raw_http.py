"""Malformed HTTP: bytes on a socket that no client library would send.

The server answers with a status below 500, or closes the connection; it never dies, hangs or fails.
"""

from __future__ import annotations

import random
import re
import time
from typing import TYPE_CHECKING

from tests.attack.summary import Summary, main
from tests.attack.target import target

if TYPE_CHECKING:
    from tests.attack.target import Target

METHODS = ("GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE", "CONNECT", "TRACE", "PRI", "", "\0")
PATHS = (
    "/", "/health", "/api/v1/model", "/api/v1/generate", "/api/extra/generate/stream",
    "/api/extra/generate/stream/ws", "/api/v1/tokenize", "//", "/..", "/%00", "/%", "/%zz", "*",
    "http://a/", "/" + "a" * 5000, "/?" + "a=b&" * 2000, "/static/../run.py", "/api/v1/generate#x",
)  # fmt: skip
HEADERS = (
    "host: 127.0.0.1", "host:", "host: a, b", "content-length: -1", "content-length: 1e3",
    "content-length: 99999999999999999999", "content-length: 5\r\ncontent-length: 6",
    "transfer-encoding: chunked", "transfer-encoding: gzip, chunked", "transfer-encoding: xyz",
    "content-length: 4\r\ntransfer-encoding: chunked", "connection: upgrade\r\nupgrade: websocket",
    "upgrade: h2c\r\nconnection: upgrade", "expect: 100-continue", "expect: 200-maybe",
    "sec-websocket-version: 99", "sec-websocket-key: x", "accept-encoding: gzip;q=abc",
    "authorization: Bearer " + "x" * 4000, "authorization:", "x-request-id: \x01\x02", "cookie: a",
    "origin: null", "origin: https://evil.example", "x-forwarded-for: " + "1.2.3.4, " * 300,
    "x: " + "y" * 30_000, ": no name", "bad header", "x y: z", "range: bytes=-1", "via: 1.1 a",
)  # fmt: skip
BODIES = (
    b"", b"{}", b"{", b"null", b"[" * 5000, b"\xff\xfe", b'{"prompt": "a"', b"0\r\n\r\n",
    b"ffffffffffffffff\r\n", b"-1\r\n", b"5;ext=1\r\nhello\r\n0\r\nx: y\r\n\r\n", b"zz\r\n",
    b"\0" * 99,
)  # fmt: skip
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
WAITS_S = 0.3


def message(rng: random.Random) -> bytes:
    """One request, or what is left of it."""
    version = rng.choice(["HTTP/1.1"] * 6 + ["HTTP/1.0", "HTTP/2.0", "HTTP/9.9", "", "http/1.1"])
    lines = [f"{rng.choice(METHODS)} {rng.choice(PATHS)} {version}"]
    if rng.random() < 0.8:
        lines.append("host: 127.0.0.1")
    lines += rng.choices(HEADERS, k=rng.randrange(5))
    end = rng.choice(["\r\n"] * 6 + ["\n", "\r", "\r\r\n"])
    data = end.join([*lines, "", ""]).encode("latin-1", "replace") + rng.choice(BODIES)
    if rng.random() < 0.3:
        noise = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            noise[rng.randrange(len(noise))] = rng.randrange(256)
        data = bytes(noise)
    if rng.random() < 0.2:
        data = data[: rng.randrange(len(data))]
    return data


def send(running: Target, rng: random.Random, summary: Summary) -> None:
    """A few messages on one connection, in pieces."""
    data = b"".join(message(rng) for _ in range(rng.choice([1, 1, 1, 2, 5])))
    got = b""
    try:
        with running.connect(timeout_s=WAITS_S) as sock:
            while data:
                n = rng.choice([1, 7, 100, 10**6])
                sock.sendall(data[:n])
                data = data[n:]
            while part := sock.recv(1 << 16):
                got += part
    except TimeoutError:
        summary.count("left open")
    except OSError:
        summary.count("reset")
    statuses = [int(match) for match in _STATUS.findall(got)]
    for status in statuses:
        summary.count(f"status {status}")
        if status >= 500 and status != 503:
            summary.fail(f"status {status}: {got[:300]!r}")
    if not statuses:
        summary.count("no answer")


def run(seconds: float, seed: int) -> Summary:
    """Send for *seconds*."""
    summary = Summary("raw http", seed)
    rng = random.Random(seed)
    ends_s = time.monotonic() + seconds
    with target(summary) as running:
        while time.monotonic() < ends_s:
            send(running, rng, summary)
        running.is_well(summary)
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
