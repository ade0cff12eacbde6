"""Messages of a WebSocket on their way out: heads, several at once, who has to be waited for."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import uvicorn

from kqview import Engine
from kqview.server import create_app
from kqview.server.connection import UNKNOWN
from kqview.server.uvicorn_parts import UvicornConnection, connection
from tests.server.clients import read_to_close, websocket
from tests.server.toy_dialect import mounted, serving_toy

if TYPE_CHECKING:
    import pytest

    from tests.support.serving import Served


def check_sizes(served: Served) -> None:
    # The head of a frame changes at 126 and 65,536 bytes (RFC 6455, section 5.2).
    sizes = [0, 1, 125, 126, 127, 65_535, 65_536, 65_537, 20_000_000, 0, 3, 0]
    with websocket(served, "/toy/ws/sizes") as socket:
        socket.send(json.dumps(sizes))
        frames, code = read_to_close(socket)
    assert code == 1000
    assert [len(frame) for frame in frames[::2]] == sizes
    assert [len(frame) for frame in frames[1::2]] == sizes
    for text, data in zip(frames[::2], frames[1::2], strict=True):
        assert text == "\x7f" * len(text)
        assert data == (bytes(range(256)) * (len(data) // 256 + 1))[: len(data)]


def test_messages_of_any_size_arrive_whole():
    with serving_toy() as served:
        check_sizes(served)


def test_messages_of_any_size_arrive_whole_without_uvloop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(uvicorn.Config, "get_loop_factory", lambda config: asyncio.new_event_loop)
    with serving_toy() as served:
        check_sizes(served)


async def test_a_server_that_does_not_know_our_extension_gets_one_message_at_a_time():
    received = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": "[3, 0]"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/toy/ws/sizes"
    scope = {
        "type": "websocket", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "ws",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"",
        "headers": [], "subprotocols": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    with mounted(), Engine.demo(n_threads=1) as engine:
        await create_app(engine)(scope, receive, send)
    frames = [{key: value for key, value in one.items() if key != "type"} for one in sent[1:-1]]
    assert frames == [
        {"text": "\x7f" * 3},
        {"bytes": bytes(range(3))},
        {"text": ""},
        {"bytes": b""},
    ]
    assert [sent[0]["type"], sent[-1]["type"]] == ["websocket.accept", "websocket.close"]


def test_only_who_waits_before_it_writes_needs_no_limit_where_nothing_is_on_its_way():
    class Transport:
        n_left = 0

        def get_write_buffer_size(self) -> int:
            return self.n_left

    class WritesFirst:
        def __init__(self) -> None:
            self.transport = Transport()

        async def send(self, message: Any) -> None: ...

    class WaitsFirst(WritesFirst):
        writable = asyncio.Event()

    one = WaitsFirst()
    assert isinstance(connection(one.send), UvicornConnection)
    assert connection(one.send).is_clear
    one.transport.n_left = 1
    assert not connection(one.send).is_clear
    assert not connection(WritesFirst().send).is_clear
    assert not UNKNOWN.is_clear
