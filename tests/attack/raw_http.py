"""Malformed HTTP: bytes on a socket that no client library would send.

The server answers with a status below 500, or closes the connection; it never dies, hangs or fails.
A request whose end two parsers could see in different places, or whose body is compressed, is never
answered as if it had been understood.
"""

from __future__ import annotations

import contextlib
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
CODINGS = (
    "chunked", "Chunked", "\tchunked ", "gzip", "gzip, chunked", "chunked, chunked", ", chunked",
    "chunked,", "identity", "identity, chunked", "xchunked", "chunked;q=1", "\x0bchunked", "",
    "\r\n chunked", "chunked\r\n\t",
)  # fmt: skip
LENGTHS = ("{}", "{0}, {0}", "+{}", "-{}", "0{}", "0x{:x}", "{} 0", "{}\r\n 0", "", "0", "99")
COMPRESSIONS = ("identity", "", "gzip", "deflate", "br", "zstd", "x", "identity, gzip", "GZIP")
NAMES = ("transfer-encoding", "Transfer-Encoding", "transfer-encoding ", "transfer_encoding")
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


def framed(rng: random.Random) -> tuple[bytes, bool]:
    """A request with an honest body and any headers about it; whether these leave no doubt."""
    body = b'{"text": "hello"}'
    version = rng.choice(["1.1", "1.1", "1.1", "1.0"])
    codings = rng.choices(CODINGS, k=rng.choice([0, 1, 1, 2, 3]))
    lengths = rng.choices(LENGTHS, k=rng.choice([0, 1, 2] if codings else [1, 1, 2]))
    compressions = rng.choices(COMPRESSIONS, k=rng.choice([0, 0, 0, 1, 2]))
    name = rng.choice(NAMES) if len(codings) == 1 else NAMES[0]
    lines = [f"{name}: {one}" for one in codings]
    lines += [f"content-length: {one.format(len(body))}" for one in lengths]
    lines += [f"content-encoding: {one}" for one in compressions]
    rng.shuffle(lines)
    head = "\r\n".join([f"POST /api/v1/tokenize HTTP/{version}", "host: 127.0.0.1", *lines, "", ""])
    is_chunked = [one.strip(" \t").lower() for one in codings] == ["chunked"]
    is_clear = (
        is_chunked and name.lower() == NAMES[0] and not lengths and version == "1.1"
        if codings
        else lengths in (["{}"], ["0{}"])
    ) and ", ".join(compressions).strip() in ("", "identity")  # fmt: skip
    data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if codings else body
    return head.encode("latin-1") + data, is_clear


def send_framed(running: Target, rng: random.Random, summary: Summary) -> None:
    """One request of `framed`: answered where it is clear, else refused or left unanswered."""
    data, is_clear = framed(rng)
    got = b""
    with contextlib.suppress(OSError), running.connect(timeout_s=WAITS_S) as sock:
        sock.sendall(data)
        while not _STATUS.search(got) and (part := sock.recv(1 << 16)):
            got += part
    found = _STATUS.match(got)
    is_understood = found is not None and found[1].startswith(b"2")
    summary.count(f"framed: {found[1].decode() if found else 'no answer'}")
    if is_understood != is_clear:
        summary.fail(f"{'clear' if is_clear else 'doubtful'}: {data!r} got {got[:300]!r}")


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
            rng.choice([send, send_framed])(running, rng, summary)
        running.is_well(summary)
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
