"""Connections of one client: a limit of its own leaves the others theirs; pings by the thousand."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest
from websockets.server import ServerProtocol

from kqview.server import Settings
from kqview.server.uvicorn_parts import _Clients
from tests.server.clients import (
    masked_frame,
    raw_connection,
    read_all,
    read_until,
    request_bytes,
    upgrade_bytes,
    websocket,
)
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from tests.support.serving import Served

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
        end_s, got = time.monotonic() + 30, b""
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
            assert socket.ping().wait(5)
