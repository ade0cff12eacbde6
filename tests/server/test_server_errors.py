"""Failures: one table of statuses, in each dialect's words, and nothing of our insides."""

from __future__ import annotations

import contextlib
import gzip
import logging
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kqview import errors
from kqview.server import Settings, errors as server_errors
from kqview.server.app import DIALECTS
from kqview.server.errors import STATUS, Answer, ServerError, answer_of
from kqview.server.web.endpoint import error_reply
from kqview.server.web.pages import error_body
from tests.server.clients import (
    json_request,
    raw_connection,
    read_all,
    read_to_close,
    read_until,
    request_bytes,
    sse_events,
    websocket,
)
from tests.server.toy_dialect import OPERATIONS, serving_toy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

CODES = {
    "INVALID_TOKEN", "INVALID_REQUEST", "CONTEXT_TOO_LONG", "OOM", "NO_MODEL", "BUSY", "TIMEOUT",
    "UNAUTHORIZED", "MODEL_CHANGED", "INTERNAL",
}  # fmt: skip
PATHS = ("/secret", "Traceback", "ZeroDivision", 'File "', "toy_dialect.py")


def subclasses(base: type[Any]) -> set[type[Any]]:
    return {base}.union(*(subclasses(one) for one in base.__subclasses__()))


KINDS = sorted(
    {one for one in subclasses(errors.KqviewError) if one.__module__ in
     (errors.__name__, server_errors.__name__)}
    # no route reads a corpus or a head file
    - {errors.KqviewError, errors.CorpusError, errors.HeadFileError, ServerError},
    key=lambda kind: kind.__name__,
)  # fmt: skip


@pytest.fixture(scope="module")
def toy() -> Iterator[Served]:
    with serving_toy(Settings(n_slots=2)) as served:
        yield served


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_class_of_error_has_a_status_and_a_known_code(kind: type[Exception]):
    assert any(base in STATUS for base in kind.__mro__)
    answer = answer_of(kind("what: got, limit; remedy"))
    assert 400 <= answer.status <= 599
    assert answer.code in CODES
    assert answer.message == "what: got, limit; remedy"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.RequestError, 400, "INVALID_REQUEST"),
        (errors.InvalidSampling, 400, "INVALID_REQUEST"),
        (errors.InvalidToken, 400, "INVALID_TOKEN"),
        (errors.PromptTooLong, 400, "CONTEXT_TOO_LONG"),
        (errors.UnknownSlot, 404, "INVALID_REQUEST"),
        (errors.QueueFull, 503, "BUSY"),
        (errors.PoolExhausted, 503, "OOM"),
        (errors.OutOfMemory, 503, "OOM"),
        (errors.ClosedError, 503, "NO_MODEL"),
        (server_errors.Unauthorized, 401, "UNAUTHORIZED"),
        (server_errors.TooLarge, 413, "INVALID_REQUEST"),
        (server_errors.RateLimited, 429, "BUSY"),
        (server_errors.ModelChanged, 503, "MODEL_CHANGED"),
        (server_errors.TimedOut, 504, "TIMEOUT"),
        (server_errors.SlowBody, 408, "TIMEOUT"),
        (errors.DecodeError, 500, "INTERNAL"),
        (KeyError, 500, "INTERNAL"),
        (MemoryError, 500, "INTERNAL"),
        (OSError, 500, "INTERNAL"),
    ],
)
def test_status_and_code_of_a_class(kind: type[Exception], status: int, code: str):
    answer = answer_of(kind("text"))
    assert (answer.status, answer.code) == (status, code)


@pytest.mark.parametrize("kind", [KeyError, OSError, ValueError, RuntimeError, MemoryError])
def test_message_of_a_foreign_error_stays_here(kind: type[Exception]):
    assert "secret" not in answer_of(kind("/secret/path")).message


def test_what_may_be_tried_again_says_when():
    for kind, row in STATUS.items():
        if row.status in (429, 503):
            assert row.retry_after_s, kind
    reply = error_reply(answer_of(errors.QueueFull("x")), error_body)
    assert reply.headers["retry-after"] == "1"
    precise = server_errors.RateLimited("x", retry_after_s=17)
    assert answer_of(precise).retry_after_s == 17


def test_every_dialect_renders_every_error():
    operations = [*OPERATIONS, *(one for dialect in DIALECTS for one in dialect.OPERATIONS)]
    bodies = {one.error_body for one in operations} | {error_body}
    for body in bodies:
        for kind in KINDS:
            answer = answer_of(kind("what: got, limit; remedy"))
            reply = error_reply(answer, body)
            assert reply.status == answer.status
            assert b"what: got, limit; remedy" in reply.body


def test_figures_of_an_answer_are_part_of_the_body():
    answer = Answer(400, "CONTEXT_TOO_LONG", "x", None, {"max_context": 7})
    assert error_body(answer)["max_context"] == 7


# ---- over sockets


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b"null", "Expected `object`"),
        (b"5", "Expected `object`"),
        (b'{"prompt": 5}', "$.prompt"),
        (b'{"prompt": null}', "$.prompt"),
        (b'{"prompt": ["a"]}', "$.prompt"),
        (b'{"prompt": "a", "max_tokens": "b"}', "$.max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1.5}', "$.max_tokens"),
        (b'{"prompt": "a", "max_tokens": 1e999}', "out of range"),
        (b'{"prompt": "a", "max_tokens": NaN}', "malformed"),
        (b'{"prompt": "\xff\xfe"}', "utf-8"),
        (b'{"prompt": "\\ud800"}', "truncated"),
        (b'{"prompt": "a\x00b"}', "malformed"),
        (b"\xef\xbb\xbf{}", "malformed"),
        (b'{"a":' * 100_000, "100000 deep, the limit is 128"),
        (b'{"prompt": "a"} trailing', "malformed"),
        (b"", "missing required field `prompt`"),
        (b"\x00" * 1000, "malformed"),
    ],
)
def test_malformed_body_gets_400_that_says_what(toy: Served, raw: bytes, part: str):
    for path in ("/toy/generate", "/toy/stream"):
        with toy.client() as client:
            reply = client.post(path, content=raw)
        assert (reply.status_code, reply.json()["code"]) == (400, "INVALID_REQUEST")
        assert part.lower() in reply.json()["wrong"].lower()  # msgspec 0.23 writes UTF-8
    with websocket(toy, "/toy/ws") as socket:
        socket.send(raw)
        (event,), code = read_to_close(socket)
    assert part.lower() in str(event).lower()
    assert code == 1008


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([], "INVALID_REQUEST"), ([768], "INVALID_TOKEN"), ([-1], "INVALID_TOKEN"),
        ([2**31], "INVALID_TOKEN"), ([2**70], "INVALID_TOKEN"), ([-(2**70)], "INVALID_TOKEN"),
        ([1] * 513, "CONTEXT_TOO_LONG"), ([1] * 100_000, "CONTEXT_TOO_LONG"),
        ("long " * 5000, "CONTEXT_TOO_LONG"),
    ],
)  # fmt: skip
def test_prompt_that_cannot_work_gets_400_before_the_stream_begins(
    toy: Served, prompt: Any, code: str
):
    with toy.client() as client:
        reply = client.post("/toy/stream", json={"prompt": prompt})
    assert (reply.status_code, reply.json()["code"]) == (400, code)


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/xml", "nonsense", ""])
def test_any_content_type_is_read_as_json(toy: Served, content_type: str | None):
    headers = {} if content_type is None else {"content-type": content_type}
    with toy.client() as client:
        reply = client.post("/toy/tokenize", content=b'{"text":"hello"}', headers=headers)
    assert reply.status_code == 200


@pytest.mark.parametrize("how", ["bug", "os", "memory", "recursion", "timeout"])
def test_failure_of_a_handler_gets_500_and_nothing_of_its_insides(
    toy: Served, how: str, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.ERROR), toy.client() as client:
        reply = client.post("/toy/fail", json={"how": how})
        assert client.get("/health").status_code == 200
    assert reply.status_code == 500
    assert reply.json() == {"wrong": "the server failed; its log says more", "code": "INTERNAL"}
    assert not any(part in str(reply.headers) for part in PATHS)
    assert any(record.exc_info for record in caplog.records), "the log says no more"


def test_failure_in_a_stream_is_an_event_and_a_cut(toy: Served):
    body = {"prompt": "Tom has", "max_tokens": 20, "fails_at": 3}
    with raw_connection(toy) as sock:
        sock.sendall(json_request("/toy/stream", body))
        raw = read_all(sock).decode()
    assert raw.startswith("HTTP/1.1 200 ")
    assert raw.count('"type":"token"') == 3
    assert '"type":"error"' in raw
    assert '"INTERNAL"' in raw
    assert not raw.endswith("0\r\n\r\n")
    assert not any(part in raw for part in PATHS)
    toy.wait_idle()


def test_failure_in_a_websocket_is_an_event_and_1011(toy: Served):
    for path, first in (("/toy/ws", '{"prompt":"Tom has","fails_at":0}'), ("/toy/ws/fail", "go")):
        with websocket(toy, path) as socket:
            socket.send(first)
            (event,), code = read_to_close(socket)
        assert '"INTERNAL"' in str(event)
        assert code == 1011
        assert not any(part in str(event) for part in PATHS)
    toy.wait_idle()


def test_end_of_the_engine_in_a_stream_is_an_event_and_a_cut():
    with serving_toy(Settings(n_ctx=8192)) as served, served.client() as client:
        body = {"prompt": "Tom has", "max_tokens": 8000, "attention": False}
        events: list[dict[str, Any]] = []
        with client.stream("POST", "/toy/stream", json=body) as reply:
            with contextlib.suppress(httpx.RemoteProtocolError):  # it is cut
                for event in sse_events(reply):
                    events.append(event)
                    if len(events) == 5:
                        served.engine.close()
        assert events[-1]["type"] == "error"
        assert events[-1]["code"] == "NO_MODEL"
        after = client.post("/toy/generate", json=body)
    assert (after.status_code, after.json()["code"]) == (503, "NO_MODEL")


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\x00" * 4096,
        request_bytes("POST", "/toy/tokenize", content_length="-5"),
        request_bytes("POST", "/toy/tokenize", content_length="5x"),
        request_bytes("POST", "/toy/tokenize", transfer_encoding="chunked") + b"zz\r\n",
        request_bytes("GET", "/" + "a" * 100_000), request_bytes("GET", "/health", x="\x01"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_request_are_answered_and_closed(toy: Served, raw: bytes):
    with raw_connection(toy) as sock:
        sock.sendall(raw)
        sock.settimeout(1)
        try:
            reply = sock.recv(2**16)
        except (TimeoutError, ConnectionError):
            reply = b""
    assert b" 500 " not in reply
    assert not any(part.encode() in reply for part in PATHS)
    with toy.client() as client:
        assert client.get("/health").status_code == 200


BODY = b'{"text": "hello"}'
CHUNKS = b"11\r\n" + BODY + b"\r\n0\r\n\r\n"
NEXT = request_bytes("GET", "/health")  # would be answered if the server went on reading


@pytest.mark.parametrize(
    ("head", "version"),
    [
        (head, "1.1")
        for head in (
            "transfer-encoding: chunked\r\ntransfer-encoding: chunked",
            "transfer-encoding: gzip\r\ntransfer-encoding: chunked",
            "transfer-encoding: identity\r\ntransfer-encoding: chunked",
            "transfer-encoding: gzip, chunked", "transfer-encoding: identity, chunked",
            "transfer-encoding: , chunked", "transfer-encoding: chunked, chunked",
            "transfer-encoding: chunked, gzip", "transfer-encoding: xchunked",
            "transfer-encoding: chunked;q=1", "transfer-encoding: identity", "transfer-encoding:",
            "transfer-encoding : chunked", "transfer-encoding:\r\n chunked", "x: y\r\n z",
            "transfer-encoding: \x0bchunked", "x: y\ntransfer-encoding: chunked",
            "transfer-encoding: chunked\r\ncontent-length: 17",
            "content-length: 17\r\ntransfer-encoding: chunked",
            "content-length: 17\r\ncontent-length: 17", "content-length: 17, 17",
            "content-length: +17", "content-length: 17\r\n 0",
        )
    ]
    + [("transfer-encoding: chunked", "1.0")],
)  # fmt: skip
def test_request_whose_end_is_in_doubt_is_refused_and_the_connection_closed(
    toy: Served, head: str, version: str
):
    lines = f"POST /toy/tokenize HTTP/{version}\r\nhost: 127.0.0.1\r\n{head}\r\n\r\n"
    with raw_connection(toy) as sock:
        sock.sendall(lines.encode() + CHUNKS + NEXT)
        reply = read_all(sock)  # ends where the server closes
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert b" 200 OK" not in reply
    assert b"connection: close" in reply
    assert b"nosniff" in reply


def test_one_coding_ends_a_request_without_a_doubt(toy: Served):
    for coding in ("chunked", "CHUNKED", "\tchunked "):
        with raw_connection(toy) as sock:
            head = request_bytes("POST", "/toy/tokenize", transfer_encoding=coding)
            sock.sendall(head + CHUNKS + NEXT)
            assert read_until(sock, b'"ok"').count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd", "x", "identity, gzip"])
def test_compressed_body_is_refused_with_what_is_read(toy: Served, coding: str):
    data = gzip.compress(BODY) if "gzip" in coding else BODY
    with toy.client() as client:
        for given, status in ((coding, 415), ("identity", 200), ("", 200)):
            body = data if status == 415 else BODY
            reply = client.post("/toy/tokenize", content=body, headers={"content-encoding": given})
            assert reply.status_code == status
            assert reply.headers.get("accept-encoding") == ("identity" if status == 415 else None)
