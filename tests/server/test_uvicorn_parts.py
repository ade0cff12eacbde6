"""What is private of uvicorn: limits of connections, frames, and the same bytes without it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from websockets.server import ServerProtocol

from kqview import Engine
from kqview.server import Settings, create_app
from kqview.server.web import uvicorn_parts
from kqview.server.web.uvicorn_parts import _Clients
from tests.server.clients import (
    json_request,
    masked_frame,
    raw_connection,
    read_all,
    read_to_close,
    read_until,
    request_bytes,
    reset,
    upgrade_bytes,
    websocket,
)
from tests.server.toy_dialect import mounted, serving_toy

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from tests.support.serving import Served

pytestmark = pytest.mark.full


CLOSED = b"\x88\x02\x03\xe8"  # a close frame with code 1000
NAMED = b"x-request-id: same\r\n"
BODY = {"prompt": "Once upon", "max_tokens": 4, "prompt_rows": True}


@pytest.fixture
def unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the uvicorn that is installed were one that nobody has tried."""
    monkeypatch.setattr(uvicorn_parts, "CHECKED", ((0, 1), (0, 2)))


def replies(served: Served) -> list[bytes]:
    """What a stream, a plain reply, a refusal and a WebSocket send, byte by byte."""
    found: list[bytes] = []
    for path, body, end in (
        ("/toy/stream", BODY, b"\r\n0\r\n\r\n"),
        ("/toy/generate", BODY, b'"reason":"length"}'),
        ("/toy/generate", {"max_tokens": 1}, b"}"),
    ):
        with raw_connection(served) as sock:
            sock.sendall(json_request(path, body).replace(b"\r\n", b"\r\n" + NAMED, 1))
            found.append(read_until(sock, end))
    with raw_connection(served) as sock:
        sock.sendall(upgrade_bytes("/toy/ws"))
        head = read_until(sock, b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        sock.sendall(masked_frame(json.dumps(BODY).encode()))
        found.append(read_until(sock, CLOSED))
    return found


def test_unknown_uvicorn_sends_the_same_bytes(request: pytest.FixtureRequest):
    with serving_toy() as served:
        fast = replies(served)
    request.getfixturevalue("unknown_version")
    with serving_toy() as served:
        plain = replies(served)
    assert len(fast[0]) > 1000
    assert fast == plain


@pytest.mark.usefixtures("unknown_version")
@pytest.mark.parametrize("path", ["/toy/stream", "/toy/generate"])
def test_client_that_leaves_an_unknown_uvicorn_frees_its_slot(path: str):
    with serving_toy(Settings(n_ctx=8192)) as served:
        sock = raw_connection(served)
        sock.sendall(json_request(path, {**BODY, "max_tokens": 8000}))
        served.wait_until(lambda: any(slot.is_busy for slot in served.engine.stats().slots))
        reset(sock)
        served.wait_idle()
        assert served.engine.stats().n_cancelled == 1


@pytest.mark.usefixtures("unknown_version")
def test_unknown_uvicorn_is_used_by_its_public_parts_and_named_in_the_log(
    caplog: pytest.LogCaptureFixture,
):
    settings = Settings()
    with caplog.at_level(logging.WARNING, "kqview.server"):
        options = uvicorn_parts.uvicorn_options(settings)
    # Names of uvicorn's own parts, no classes of ours.
    assert {type(value) for value in options.values()} <= {str, bool, type(None)}
    assert uvicorn.__version__ in caplog.text


def test_checked_versions_are_those_that_are_installed():
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    extra = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]["server"]
    [wanted] = [one for one in extra if one.startswith("uvicorn")]
    least, above = re.findall(r"(\d+)\.(\d+)", wanted)
    assert (tuple(map(int, least)), tuple(map(int, above))) == uvicorn_parts.CHECKED
    assert uvicorn_parts.is_checked()


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


# ---- connections of one client


MOST = 5


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving_toy(Settings(max_connections_per_client=MOST, cors_origins=("*",))) as one:
        yield one


def is_let_in(served: Served) -> bool:
    with raw_connection(served) as sock:
        sock.sendall(request_bytes("GET", "/health"))
        return sock.recv(4096).startswith(b"HTTP/1.1 200 ")


@contextlib.contextmanager
def idle(served: Served, n: int, first: bytes = b"") -> Iterator[list[socket.socket]]:
    """*n* connections that do nothing, all of which were let in."""
    served.wait_until(lambda: is_let_in(served))
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(raw_connection(served)) for _ in range(n)]
        for sock in socks:
            sock.sendall(first)
            if first:
                read_until(sock, b"\r\n\r\n")
        yield socks


@pytest.mark.parametrize(
    "first", [b"", upgrade_bytes("/toy/ws/many"), request_bytes("GET", "/health")]
)
def test_connections_of_one_client_are_bounded_whatever_they_do(served: Served, first: bytes):
    with idle(served, MOST, first) as socks:
        with raw_connection(served) as one_more:
            reply = read_all(one_more)
        assert reply.startswith(b"HTTP/1.1 429 ")
        assert b"\r\nretry-after: 1\r\n" in reply
        assert b"--trusted-proxy" in reply
        assert b"access-control" not in reply
        socks[0].close()
        served.wait_until(lambda: is_let_in(served))
    served.wait_until(lambda: is_let_in(served))


def test_other_clients_are_let_in_beside_one_that_took_all_of_its_own(served: Served):
    import socket

    with idle(served, MOST):
        # Another address of this machine: to the server, another client.
        port = int(served.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 5, ("127.0.0.9", 0)) as other:
            other.sendall(request_bytes("GET", "/health"))
            assert other.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_trusted_proxy_has_as_many_connections_as_it_likes():
    settings = Settings(max_connections_per_client=2, trusted_proxies=("127.0.0.1",))
    with serving_toy(settings) as served, idle(served, 10):
        assert is_let_in(served)


def test_connections_are_counted_by_client_and_forgotten():
    clients = _Clients(Settings(max_connections_per_client=2, trusted_proxies=("10.0.0.0/8",)))
    names = [clients.enter("2001:db8::1"), clients.enter("2001:db8::2")]
    with pytest.raises(OverflowError):
        clients.enter("2001:db8::3")
    assert clients.enter("10.1.2.3") is None
    assert clients.enter(None) is None
    assert clients.enter("192.0.2.1") == "192.0.2.1"
    for name in names:
        clients.leave(name)
    clients.leave("192.0.2.1")
    clients.leave(None)
    assert not clients._n_of


# ---- pings


FLOODS = {
    "pings": masked_frame(b"", opcode=9),
    "pongs": masked_frame(b"", opcode=10),
    "fragments": masked_frame(b"", opcode=0).replace(b"\x80\x80", b"\x00\x80", 1),
    "messages": masked_frame(b"{}"),
}


@pytest.mark.parametrize("kind", ["pings", "pongs", "fragments"])
def test_flood_of_frames_of_a_client_that_reads_every_answer_ends(served: Served, kind: str):
    with raw_connection(served) as sock:
        sock.sendall(upgrade_bytes("/toy/ws/many"))
        read_until(sock, b"\r\n\r\n")
        if kind == "fragments":
            sock.sendall(b"\x01\x80" + bytes(4))  # the beginning of a message without an end
        sock.settimeout(0.05)
        end_s, got = time.monotonic() + 60, b""
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end_s:
                sock.sendall(FLOODS[kind] * 200)
                try:
                    part = sock.recv(2**16)
                except TimeoutError:
                    continue
                if not part:
                    break
                got += part
        assert time.monotonic() < end_s, "the flood was served for ever"
    assert got.count(b"\x8a\x00") <= 400
    if got and kind == "pings":
        assert got.count(b"\x8a\x00") >= 20  # a client that pings now and then is answered


@pytest.mark.parametrize("kind", FLOODS)
def test_flood_that_is_read_at_once_does_not_hold_the_loop_up(
    served: Served, kind: str, monkeypatch: pytest.MonkeyPatch
):
    """Counted, not timed: how many frames are parsed before the client is told the end."""
    n_parsed = 0
    fed = ServerProtocol.events_received

    def count(self: ServerProtocol) -> Any:
        nonlocal n_parsed
        events = fed(self)
        n_parsed += len(events)
        return events

    monkeypatch.setattr(ServerProtocol, "events_received", count)
    with raw_connection(served) as sock:
        sock.sendall(upgrade_bytes("/toy/ws/many"))
        read_until(sock, b"\r\n\r\n")
        begin = b"\x01\x80" + bytes(4) if kind == "fragments" else b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(begin + FLOODS[kind] * 40_000)
        read_all(sock)
    served.wait_until(lambda: not served.service.on_drain)
    assert n_parsed <= 2000


def test_client_that_pings_now_and_then_is_answered(served: Served):
    with websocket(served, "/toy/ws/many", ping_interval=None) as socket:
        for _ in range(50):
            assert socket.ping().wait(60)
