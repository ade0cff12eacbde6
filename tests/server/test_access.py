"""The access log: one JSON line a request, found by the name that its client was told."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from kqview.server.apps.metrics import Metrics
from kqview.server.web.middleware import AccessLog
from tests.server.clients import (
    json_request,
    raw_connection,
    read_to_close,
    read_until,
    request_bytes,
    reset,
    upgrade_bytes,
    websocket,
)
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.server.conftest import AccessLines
    from tests.support.serving import Served

FIELDS = {"request_id", "client", "method", "path", "status", "bytes", "whole", "ms"}


@pytest.fixture(scope="module")
def toy() -> Iterator[Served]:
    with serving_toy(Settings(n_slots=2, n_ctx=8192, query_key=True)) as served:
        yield served


def test_path_with_parts_reaches_its_handler_and_is_counted_as_one(toy: Served):
    with toy.client() as client:
        found = [client.get(f"/toy/a/parts/{name}").json() for name in ("x", "y%20z")]
        metrics = client.get("/metrics").text
        wrong = client.post("/toy/a/parts/x")
    assert found == [{"kind": "a", "name": "x"}, {"kind": "a", "name": "y z"}]
    assert 'path="/toy/{kind}/parts/{name}",status="200"} 2.0' in metrics
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "GET, HEAD, OPTIONS"


def test_path_of_openai_that_is_not_there_is_told_as_its_clients_read_it(toy: Served):
    with toy.client() as client:
        missing, other = (client.get(path).json()["error"] for path in ("/v1/no", "/no"))
    assert missing | {"message": ""} == {
        "code": 404, "type": "not_found_error", "message": "", "param": None,
    }  # fmt: skip
    assert "/v1/no; see /docs" in missing["message"]
    assert "/no; see /docs" in other


def test_reply_and_log_have_one_name(toy: Served, lines: AccessLines):
    with toy.client() as client:
        reply = client.post("/toy/tokenize?secret=1", json={"text": "hello"})
    line = lines.of(reply.headers["x-request-id"])
    assert set(line) == FIELDS
    assert (line["method"], line["path"], line["status"]) == ("POST", "/toy/tokenize", 200)
    assert (line["client"], line["whole"]) == ("127.0.0.1", True)
    assert line["bytes"] == len(reply.content)
    assert 0 <= line["ms"] < 10_000
    assert "secret" not in lines.raw[-1]


@pytest.mark.parametrize("name", ["abc-123", "4f.:/+=@~_", "x" * 64])
def test_name_that_the_client_gives_is_kept(toy: Served, lines: AccessLines, name: str):
    with toy.client() as client:
        reply = client.get("/nowhere", headers={"x-request-id": name})
    assert reply.headers["x-request-id"] == name
    assert lines.of(name)["status"] == 404


@pytest.mark.parametrize(
    "name",
    [b"", b"x" * 65, b"two words", b'quo"te', b"\xff\xfe", "имя".encode(), b"<b>", b"a\tb", b"a?b"],
)
def test_name_that_could_confuse_a_log_is_replaced(toy: Served, lines: AccessLines, name: bytes):
    with toy.client() as client:
        reply = client.get("/health", headers={b"x-request-id": name})
    assert reply.headers["x-request-id"].encode() != name
    assert len(reply.headers["x-request-id"]) == 32
    assert lines.of(reply.headers["x-request-id"])["status"] == 200


def test_failure_is_found_by_the_name_too(toy: Served, lines: AccessLines):
    with toy.client() as client:
        reply = client.post("/toy/fail", json={}, headers={"x-request-id": "broken"})
    assert reply.headers["x-request-id"] == "broken"
    assert lines.of("broken")["status"] == 500


def test_websocket_has_a_line_and_its_name_in_the_handshake(toy: Served, lines: AccessLines):
    with websocket(toy, "/toy/ws?api_key=secret", additional_headers={"x-request-id": "w1"}) as ws:
        ws.send('{"prompt":"Tom has","max_tokens":2}')
        frames, _ = read_to_close(ws)
        assert ws.response is not None
        assert ws.response.headers["x-request-id"] == "w1"
    line = lines.of("w1")
    assert (line["method"], line["path"], line["status"]) == ("WS", "/toy/ws", 1000)
    assert line["bytes"] == sum(map(len, frames))
    assert line["whole"]
    assert not any("secret" in raw for raw in lines.raw)


def test_stream_that_its_client_left_is_not_whole(toy: Served, lines: AccessLines):
    with raw_connection(toy) as sock:
        body = {"prompt": "Tom has", "max_tokens": 8000, "attention": False}
        sock.sendall(json_request("/toy/stream", body, x_request_id="left"))
        read_until(sock, b"token")
        reset(sock)
    line = lines.of("left")
    assert (line["status"], line["whole"]) == (200, False)
    with raw_connection(toy) as sock:
        sock.sendall(json_request("/toy/generate", body, x_request_id="left-2"))
        toy.wait_until(lambda: toy.service.runs)
    line = lines.of("left-2")
    assert (line["status"], line["whole"], line["bytes"]) == (499, False, 0)


def test_websocket_that_its_client_left_says_so(toy: Served, lines: AccessLines):
    for code, noted in ((1000, 1000), (4321, 499)):
        name = f"closed-{code}"
        with websocket(toy, "/toy/ws", additional_headers={"x-request-id": name}) as ws:
            ws.close(code)
        assert lines.of(name)["status"] == noted
    with raw_connection(toy) as sock:
        sock.sendall(upgrade_bytes("/toy/ws", x_request_id="vanished"))
        read_until(sock, b"\r\n\r\n")
        reset(sock)
    assert lines.of("vanished")["status"] in (1005, 1006)


def test_lines_are_json_whatever_the_path(toy: Served, lines: AccessLines):
    paths = ["/%22%0a%00", "/%ff%fe", "/%F0%9F%99%82", "/" + "x" * 5000, "//a//", "/%ed%a0%80"]
    for i, path in enumerate(paths):
        with raw_connection(toy) as sock:
            sock.sendall(request_bytes("GET", path, x_request_id=f"path-{i}"))
            assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 404 ")
        line = lines.of(f"path-{i}")
        assert line["status"] == 404
        assert len(line["path"]) <= 256


def test_log_can_be_switched_off(lines: AccessLines):
    with serving_toy(Settings(access_log=False)) as served, served.client() as client:
        assert "x-request-id" in client.get("/health").headers
    assert lines.raw == []


@pytest.mark.parametrize("path", ["/health/", "/toy/tokenize///"])
def test_slash_at_the_end_of_a_path_is_ignored(toy: Served, path: str):
    with toy.client() as client:
        method = "GET" if path.startswith("/health") else "POST"
        reply = client.request(method, path, content=b'{"text":"a"}')
    assert reply.status_code == 200


async def test_what_the_client_did_not_take_in_time_is_counted_once(
    toy: Served, caplog: pytest.LogCaptureFixture
):
    n_tries = 0
    started: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in (
            {"type": "http.response.start", "status": 200, "headers": []},
            {"type": "http.response.body", "body": b"ten bytes!", "more_body": False},
        ):
            with contextlib.suppress(TimeoutError):
                await send(message)
                continue
            await send(message)

    async def send(message: Any) -> None:
        nonlocal n_tries
        n_tries += 1
        if n_tries % 2:
            raise TimeoutError
        if message["type"] == "http.response.start":
            started.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "GET", "path": "/slow", "headers": [], "client": None}
    access = AccessLog(app, Settings(), Metrics(toy.service).requests, ["/slow"])
    with caplog.at_level(logging.INFO, "kqview.access"):
        await access(scope, receive, send)
    [line] = [json.loads(record.getMessage()) for record in caplog.records]
    assert (n_tries, line["status"], line["bytes"], line["whole"]) == (4, 200, 10, True)
    assert [name for name, _ in started[0]["headers"]] == [b"x-request-id"]
