"""Clients that misbehave by the hundred: nothing leaks, nothing hangs, the others do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from tests.server.clients import (
    json_request,
    masked_frame,
    n_files,
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
    import socket
    from collections.abc import Iterator

    from tests.support.serving import Served

N_IDLE = 200
N_CONNECTS = 1000
LONG = {"prompt": "Tom has", "max_tokens": 8000, "attention": True}
SHORT = {"prompt": "Tom has", "max_tokens": 20, "attention": True}
MOST_RSS_GROWTH_BYTES = 24 * 2**20

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts /proc/self/fd"),
]


@pytest.fixture(scope="module")
def toy() -> Iterator[Served]:
    settings = Settings(
        n_slots=2, n_ctx=8192, max_connections=2000, max_connections_per_client=2000, max_queued=100
    )
    with serving_toy(settings) as served:
        with served.client() as client:  # what is made once is made now
            client.post("/toy/generate", json=SHORT)
            client.get("/metrics")
        yield served


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def n_tasks() -> int:
    """Tasks that are not done, of any loop."""
    # By type: what stands for another object asks that one for its class, which may be gone.
    tasks = [one for one in gc.get_objects() if issubclass(type(one), asyncio.Task)]
    return sum(not task.done() for task in tasks)


@pytest.fixture
def no_leak(toy: Served) -> Iterator[None]:
    """Descriptors, tasks, runs, leases and slots are what they were before."""
    gc.collect()
    toy.wait_idle()
    files, tasks = n_files(), n_tasks()
    yield
    toy.wait_idle()
    gc.collect()

    def is_clean() -> bool:
        stats = toy.engine.stats()
        return (
            n_files() <= files
            and n_tasks() <= tasks
            and not toy.service.runs
            and not toy.service.on_drain
            and not stats.pool.n_leased
            and not stats.n_queued
        )

    try:
        toy.wait_until(is_clean)
    except AssertionError:
        left = toy.engine.stats()
        raise AssertionError(
            f"files {files} -> {n_files()}, tasks {tasks} -> {n_tasks()}, "
            f"runs {toy.service.runs}, sockets {len(toy.service.on_drain)}, "
            f"leases {left.pool.n_leased}, queued {left.n_queued}"
        ) from None


def check_served(served: Served) -> None:
    """Everything still works: tokenize, a generation, a WebSocket."""
    with served.client() as client:
        assert client.post("/toy/tokenize", json={"text": "hello"}).status_code == 200
        assert len(client.post("/toy/generate", json=SHORT).json()["ids"]) == 20
    with websocket(served, "/toy/ws") as ws:
        ws.send(json.dumps(SHORT))
        frames, code = read_to_close(ws)
    assert (len(frames), code) == (41, 1000)


@contextlib.contextmanager
def many(served: Served, n: int, first: bytes, **options: Any) -> Iterator[list[socket.socket]]:
    """*n* connections that sent *first* and nothing more."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(raw_connection(served, **options)) for _ in range(n)]
        for sock in socks:
            sock.sendall(first)
        yield socks


BROKEN_REQUEST = request_bytes("POST", "/toy/tokenize", content_length="50") + b'{"text":'


@pytest.mark.parametrize(
    "first",
    [b"", b"POST /toy/gen", BROKEN_REQUEST, upgrade_bytes("/toy/ws")[:-10]],
    ids=["silent", "half-head", "half-body", "half-upgrade"],
)
def test_hundreds_of_idle_sockets_change_nothing(toy: Served, no_leak: None, first: bytes):
    with many(toy, N_IDLE, first):
        check_served(toy)


def test_hundreds_of_half_open_websockets_change_nothing(toy: Served, no_leak: None):
    with many(toy, N_IDLE, upgrade_bytes("/toy/ws")) as socks:
        for sock in socks:
            read_until(sock, b"\r\n\r\n")
        for sock in socks[::2]:
            sock.sendall(masked_frame(b'{"prompt":"T', length=100))
        check_served(toy)
        for sock in socks[::3]:
            reset(sock)
        check_served(toy)


def test_tokenize_answers_while_all_slots_are_busy_and_clients_do_not_read(
    toy: Served, no_leak: None
):
    with many(toy, 20, json_request("/toy/stream", LONG), receive_bytes=4096):
        toy.wait_until(lambda: len(toy.service.runs) == 20)
        with toy.client() as client:
            for _ in range(20):
                assert client.post("/toy/tokenize", json={"text": "hello"}).status_code == 200
        assert len(toy.service.runs) == 20  # none of them had to end for it


def test_clients_that_vanish_all_at_once_leave_nothing(toy: Served, no_leak: None):
    with many(toy, 30, json_request("/toy/stream", LONG)) as socks:
        toy.wait_until(lambda: len(toy.service.runs) == 30)
        for sock in socks:
            reset(sock)
        toy.wait_idle()
    check_served(toy)


def test_websockets_that_vanish_in_the_middle_of_what_is_sent_leave_nothing(
    toy: Served, no_leak: None
):
    for _ in range(10):
        sock = raw_connection(toy, receive_bytes=4096)
        sock.sendall(upgrade_bytes("/toy/ws"))
        read_until(sock, b"\r\n\r\n")
        sock.sendall(masked_frame(json.dumps(LONG).encode()))
        read_until(sock, b"token")
        reset(sock)
    check_served(toy)


OVERSIZED = [
    request_bytes("POST", "/toy/generate", content_length=str(2**40)),
    request_bytes("GET", "/health", x="y" * 100_000),
    request_bytes("POST", "/toy/generate", transfer_encoding="chunked") + b"fffffffff\r\n",
    upgrade_bytes("/toy/ws") + masked_frame(b"x", length=2**62),
    upgrade_bytes("/toy/ws") + b"\xff" * 100,
    upgrade_bytes("/toy/ws") + masked_frame(b"\xff\xfe", opcode=1),
    upgrade_bytes("/toy/ws") + masked_frame(b"\x03", opcode=8),
    upgrade_bytes("/toy/ws") + masked_frame(b"x" * 200, opcode=9),
]


@pytest.mark.parametrize("piece", [b"x: y\r\n", b"y" * 1000, b"z" * 1000 + b"\r\n"])
def test_head_without_an_end_is_cut(toy: Served, no_leak: None, piece: bytes):
    with raw_connection(toy) as sock:
        sock.sendall(
            b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + (b"a: " if b":" not in piece else b"")
        )
        n_sent = 0
        with contextlib.suppress(ConnectionError):
            while n_sent < 2**24:
                sock.sendall(piece * 50)
                n_sent += len(piece) * 50
        assert n_sent < 2**24
    check_served(toy)


def test_pings_of_a_client_that_reads_no_answer_are_not_gathered(toy: Served, no_leak: None):
    ping = masked_frame(b"x" * 125, opcode=9) * 1000
    with raw_connection(toy, receive_bytes=4096) as sock:
        sock.sendall(upgrade_bytes("/toy/ws"))
        read_until(sock, b"\r\n\r\n")
        n_sent = 0
        with contextlib.suppress(ConnectionError):
            while n_sent < 2**26:
                sock.sendall(ping)
                n_sent += len(ping)
        assert n_sent < 2**26
    check_served(toy)


def test_oversized_and_malformed_input_leaves_nothing(toy: Served, no_leak: None):
    for raw in OVERSIZED:
        head, mark, rest = raw.partition(b"\r\n\r\n")
        for _ in range(5):
            with raw_connection(toy) as sock:
                sock.sendall(head + mark)
                if b"upgrade" in head:
                    read_until(sock, b"\r\n\r\n")
                with contextlib.suppress(OSError):
                    sock.sendall(rest)
                sock.settimeout(0.05)
                with contextlib.suppress(OSError):
                    sock.recv(4096)
    check_served(toy)


@pytest.mark.parametrize("kind", ["connect", "request", "websocket", "handshake-and-reset"])
def test_a_thousand_connections_leave_nothing(toy: Served, no_leak: None, kind: str):
    def once() -> None:
        sock = raw_connection(toy)
        if kind == "request":
            sock.sendall(request_bytes("GET", "/health", connection="close"))
            assert sock.recv(4096)
        elif kind != "connect":
            sock.sendall(upgrade_bytes("/toy/ws"))
            assert sock.recv(4096)
            if kind == "websocket":
                sock.sendall(masked_frame(b"\x03\xe8", opcode=8))
                assert sock.recv(4096)
        if kind == "handshake-and-reset":
            reset(sock)
        else:
            sock.close()

    for _ in range(100):
        once()
    gc.collect()
    before = rss_bytes()
    for _ in range(N_CONNECTS - 100):
        once()
    gc.collect()
    assert rss_bytes() - before < MOST_RSS_GROWTH_BYTES
    check_served(toy)


def test_streams_by_the_hundred_keep_memory_bounded(toy: Served, no_leak: None):
    body = json_request("/toy/stream", {**SHORT, "max_tokens": 60})

    def once() -> None:
        with raw_connection(toy) as sock:
            sock.sendall(body)
            read_until(sock, b'"type":"token"')

    for _ in range(20):
        once()
    toy.wait_idle()
    gc.collect()
    before = rss_bytes()
    for _ in range(150):
        once()
    toy.wait_idle()
    gc.collect()
    assert rss_bytes() - before < MOST_RSS_GROWTH_BYTES


@pytest.fixture
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of failures hold their frames, and pytest keeps records."""
    for name in ("kqview.server", "uvicorn.error"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def test_failures_by_the_hundred_leave_nothing(toy: Served, no_log: None, no_leak: None):
    with toy.client() as client:
        for _ in range(50):
            for how in ("bug", "os"):
                assert client.post("/toy/fail", json={"how": how}).status_code == 500
            assert client.post("/toy/generate", json={"prompt": [10**6]}).status_code == 400
            with client.stream("POST", "/toy/stream", json={**SHORT, "fails_at": 1}) as reply:
                assert reply.status_code == 200
    toy.wait_idle()


def test_many_kinds_of_bad_clients_at_once_do_not_disturb_a_good_one(toy: Served, no_leak: None):
    stop = threading.Event()

    def misbehave(first: bytes) -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                sock = raw_connection(toy)
                sock.sendall(first)
                sock.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    sock.recv(100)
                reset(sock)

    firsts = [
        json_request("/toy/stream", LONG), b"\x00\xff" * 50, upgrade_bytes("/toy/ws"),
        BROKEN_REQUEST, b"",
    ]  # fmt: skip
    threads = [threading.Thread(target=misbehave, args=(first,)) for first in firsts]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            check_served(toy)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
