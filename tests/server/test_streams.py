"""Streams over real sockets: what arrives, what happens to the slot when the client does not read,
and how soon it is free when the client leaves.
"""

from __future__ import annotations

import base64
import gc
import json
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine
from kqview.server import Settings
from tests.server.clients import (
    is_closed_by_server,
    json_request,
    masked_frame,
    raw_connection,
    read_all,
    read_to_close,
    read_until,
    reset,
    sse_events,
    upgrade_bytes,
    websocket,
)
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

pytestmark = pytest.mark.full

LONG = {"prompt": "Tom has", "max_tokens": 8000, "seed": 3}
ROWS = {**LONG, "attention": True}
BARE = {**LONG, "attention": False}


@pytest.fixture(scope="module")
def toy() -> Iterator[Served]:
    with serving_toy(Settings(n_slots=2, n_ctx=8192)) as served:
        yield served


@pytest.fixture(scope="module")
def expected(toy: Served) -> tuple[list[int], list[np.ndarray[Any, Any]]]:
    """Ids and rows of a short request, in process."""
    options: dict[str, Any] = {"temperature": 0.7, "seed": 1, "ignore_eos": True}
    with Engine.demo(n_threads=1, n_slots=2, n_ctx=8192) as engine:
        tokens = list(engine.generate("Tom has", max_tokens=6, capture="probs", **options))
        return [t.id for t in tokens], [np.array(t.attention) for t in tokens]


# ---- what arrives


def test_sse_has_every_token_with_the_rows_of_the_engine(toy: Served, expected: Any):
    ids, rows = expected
    body = {"prompt": "Tom has", "max_tokens": 6}
    with toy.client() as client, client.stream("POST", "/toy/stream", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["cache-control"] == "no-cache, no-transform"
        events = list(sse_events(reply))
    assert [event["type"] for event in events] == ["token"] * 6 + ["done"]
    assert [event["id"] for event in events[:-1]] == ids
    for event, row in zip(events, rows, strict=False):
        got = np.frombuffer(base64.b64decode(event["data"]), "<f4").reshape(event["shape"])
        np.testing.assert_allclose(got, row, atol=1e-5)


def test_websocket_has_a_text_and_a_binary_frame_a_token(toy: Served, expected: Any):
    ids, rows = expected
    with websocket(toy, "/toy/ws") as socket:
        socket.send(json.dumps({"prompt": "Tom has", "max_tokens": 6}))
        frames, code = read_to_close(socket)
    assert code == 1000
    assert [type(frame) for frame in frames] == [str, bytes] * 6 + [str]
    assert [json.loads(frame)["id"] for frame in frames[:-1:2]] == ids
    for head, frame, row in zip(frames[:-1:2], frames[1::2], rows, strict=True):
        assert isinstance(frame, bytes)
        got = np.frombuffer(frame, "<f4").reshape(json.loads(head)["shape"])
        np.testing.assert_allclose(got, row, atol=1e-5)


def test_rows_of_the_prompt_come_first(toy: Served):
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 1, "prompt_rows": True}
    with toy.client() as client, client.stream("POST", "/toy/stream", json=body) as reply:
        events = list(sse_events(reply))
    assert [event["type"] for event in events] == ["prompt", "token", "done"]
    assert events[0]["shape"] == [4, 8, 4, 4]
    rows = np.frombuffer(base64.b64decode(events[0]["data"]), "<f4").reshape(4, 8, 4, 4)
    token = np.frombuffer(base64.b64decode(events[1]["data"]), "<f4").reshape(4, 8, 4)
    np.testing.assert_allclose(rows[:, :, -1], token, atol=1e-6)


def test_slot_is_free_when_the_end_is_told(toy: Served):
    body = {"prompt": "Tom has", "max_tokens": 3}
    with toy.client() as client, client.stream("POST", "/toy/stream", json=body) as reply:
        for event in sse_events(reply):
            if event["type"] == "done":
                assert not any(slot.is_busy for slot in toy.engine.stats().slots)


def test_end_of_a_stream_is_the_end_of_the_body_and_the_connection_stays(toy: Served):
    with raw_connection(toy) as sock:
        for _ in range(2):
            sock.sendall(json_request("/toy/stream", {"prompt": "Tom", "max_tokens": 2}))
            assert read_until(sock, b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_messages_during_a_stream_of_one_request_are_ignored(toy: Served):
    with websocket(toy, "/toy/ws") as socket:
        socket.send(json.dumps({"prompt": "Tom has", "max_tokens": 40, "attention": False}))
        for _ in range(20):
            socket.send("noise")
        frames, code = read_to_close(socket)
    assert len(frames) == 41
    assert code == 1000


# ---- a client that does not read


def paused(served: Served) -> list[str | None]:
    return [s.request_id for s in served.engine.stats().slots if s.state == "paused"]


def stalled_post(served: Served, body: dict[str, Any], request_id: str) -> socket.socket:
    sock = raw_connection(served, receive_bytes=4096)
    sock.sendall(json_request("/toy/stream", body, x_request_id=request_id))
    return sock


def stalled_websocket(served: Served, body: dict[str, Any], request_id: str) -> socket.socket:
    sock = raw_connection(served, receive_bytes=4096)
    sock.sendall(upgrade_bytes("/toy/ws", x_request_id=request_id))
    read_until(sock, b"\r\n\r\n")
    sock.sendall(masked_frame(json.dumps(body).encode()))
    return sock


def wait_stalled(served: Served, request_id: str) -> None:
    """Wait until nothing moves any more; a slot is paused for a moment now and then.

    Meanwhile somebody else is served from end to end: loop and engine had their turns.
    """
    run = served.wait_run(request_id)
    with served.client() as client:

        def is_stalled() -> bool:
            before = run.n_tokens
            for _ in range(3):
                client.post("/toy/generate", json={**BARE, "max_tokens": 2}).raise_for_status()
            return run.n_tokens == before and paused(served) == [request_id]

        served.wait_until(is_stalled)


STALLS = pytest.mark.parametrize("stall", [stalled_post, stalled_websocket])


@STALLS
def test_client_that_does_not_read_pauses_its_own_request_only(toy: Served, stall: Any):
    with stall(toy, ROWS, "stalled"):
        wait_stalled(toy, "stalled")
        run = toy.wait_run("stalled")
        before = run.n_tokens
        leased = toy.engine.stats().pool.leased_bytes
        with toy.client() as client:
            reply = client.post("/toy/generate", json={**BARE, "max_tokens": 200})
            assert client.post("/toy/tokenize", json={"text": "hello"}).status_code == 200
        assert len(reply.json()["ids"]) == 200
        stats = toy.engine.stats()
        assert paused(toy) == ["stalled"]
        assert run.n_tokens <= before + 1
        # What the engine ran ahead, what is being sent; not what was generated.
        row_bytes = 4 * 8 * 4 * stats.slots[0].n_tokens + 2**16
        assert stats.pool.leased_bytes <= max(leased, 11 * row_bytes)
    toy.wait_idle()
    toy.wait_until(lambda: not toy.engine.stats().pool.n_leased)


def test_client_that_reads_on_gets_every_token(toy: Served):
    with stalled_post(toy, {**ROWS, "max_tokens": 700}, "slow") as sock:
        wait_stalled(toy, "slow")
        raw = read_all_chunks(sock)
    assert raw.count(b'"type":"token"') == 700
    assert raw.count(b'"type":"done"') == 1


def read_all_chunks(sock: socket.socket) -> bytes:
    got = bytearray()
    while not got.endswith(b"\r\n0\r\n\r\n"):
        part = sock.recv(2**20)
        assert part
        got += part
    return bytes(got)


@pytest.fixture(scope="module")
def one_slot() -> Iterator[Served]:
    with serving_toy(Settings(n_slots=1, n_ctx=8192)) as served:
        yield served


@STALLS
def test_client_that_does_not_read_holds_up_nobody_at_one_slot(one_slot: Served, stall: Any):
    # 21 MB of rows, which no socket buffers: without its client the run cannot end.
    n_tokens = 500
    n_parkings = one_slot.engine.stats().n_parkings
    with stall(one_slot, {**ROWS, "max_tokens": n_tokens}, "stalled") as sock:
        run = one_slot.wait_run()
        with one_slot.client() as client:
            for n in (30, 1, 5):
                reply = client.post("/toy/generate", json={**BARE, "max_tokens": n})
                assert len(reply.json()["ids"]) == n
        stats = one_slot.engine.stats()
        assert stats.n_parkings > n_parkings
        assert run.n_tokens < n_tokens
        raw = read_to_done(sock)
    assert raw.count(b'"type":"token"') == n_tokens
    one_slot.wait_idle()  # the next one has the same id


def read_to_done(sock: socket.socket) -> bytes:
    got, mark = bytearray(), b'"type":"done"'
    n_seen = 0
    while got.find(mark, max(0, n_seen - len(mark))) < 0:
        n_seen = len(got)
        part = sock.recv(2**20)
        assert part
        got += part
    return bytes(got)


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    # Long enough for a client that a loaded machine lets wait between handshake and request.
    with serving_toy(Settings(n_slots=2, n_ctx=8192, idle_timeout_s=2.0)) as served:
        yield served


@pytest.fixture(scope="module")
def steady() -> Iterator[Served]:
    """Patient enough for a client that a loaded machine lets wait."""
    with serving_toy(Settings(n_slots=1, idle_timeout_s=1.0)) as served:
        yield served


def read_slowly(sock: socket.socket) -> bytes:
    """As `socket.recv`, at a rate that takes more than twice the idle time for 27 MB."""
    part = sock.recv(2**18)
    assert part
    time.sleep(len(part) / 12e6)
    return part


@STALLS
def test_client_that_reads_nothing_for_too_long_is_dropped(
    impatient: Served, no_collector: None, stall: Any
):
    impatient.wait_until(lambda: not impatient.n_connections)  # those of the test before
    n_cancelled = impatient.engine.stats().n_cancelled
    with stall(impatient, ROWS, "stalled") as sock:
        impatient.wait_until(lambda: impatient.engine.stats().n_cancelled == n_cancelled + 1)
        impatient.wait_idle()
        impatient.wait_until(lambda: not impatient.engine.stats().pool.n_leased)
        # Not only the request is over: the socket is closed, unread buffers and all.
        impatient.wait_until(lambda: not impatient.n_connections)
        assert is_closed_by_server(sock)


def test_client_that_reads_a_large_event_slowly_gets_all_of_it(steady: Served):
    body = {"prompt": [5] * 400, "max_tokens": 1, "prompt_rows": True}
    with raw_connection(steady, receive_bytes=2**16) as sock:
        sock.sendall(json_request("/toy/stream", body))
        got = bytearray()
        while not got.endswith(b"\r\n0\r\n\r\n"):
            got += read_slowly(sock)
    assert len(got) > 27e6
    assert got.count(b'"type":"done"') == 1


def test_client_that_leaves_a_whole_reply_unread_is_dropped(impatient: Served):
    impatient.wait_until(lambda: not impatient.n_connections)  # those of the test before
    with raw_connection(impatient, receive_bytes=4096) as sock:
        sock.sendall(b"GET /toy/large HTTP/1.1\r\nhost: localhost\r\n\r\n")
        read_until(sock, b"\r\n\r\n")
        impatient.wait_until(lambda: not impatient.n_connections)
        raw = read_all(sock)
    assert len(raw) < 32 * 2**20


def test_client_that_reads_a_whole_reply_slowly_gets_all_of_it(steady: Served):
    n_left = 32 * 2**20
    with raw_connection(steady) as sock:
        sock.sendall(b"GET /toy/large HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        n_left -= len(read_until(sock, b"\r\n\r\n").partition(b"\r\n\r\n")[2])
        while n_left > 0:
            n_left -= len(read_slowly(sock))
    assert n_left == 0


# ---- a client that leaves


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Rows have to be free when nobody holds them, not when the collector happens to run."""
    gc.disable()
    yield
    gc.enable()


def leaves_post(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    sock = raw_connection(served)
    sock.sendall(json_request(path, body))
    if path == "/toy/stream":
        read_until(sock, b"token")
    return sock


def leaves_websocket(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    sock = raw_connection(served)
    sock.sendall(upgrade_bytes(path))
    read_until(sock, b"\r\n\r\n")
    sock.sendall(masked_frame(json.dumps(body).encode()))
    read_until(sock, b"token")
    return sock


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("body", [BARE, ROWS], ids=["bare", "rows"])
@pytest.mark.parametrize(
    ("start", "path"),
    [
        (leaves_post, "/toy/stream"),
        (leaves_post, "/toy/generate"),
        (leaves_websocket, "/toy/ws"),
        (leaves_websocket, "/toy/ws/many"),
    ],
    ids=["sse", "post", "ws", "ws-many"],
)
def test_slot_and_rows_are_free_soon_after_the_client_left(
    toy: Served, no_collector: None, start: Any, path: str, body: dict[str, Any], how: str
):
    n_cancelled = toy.engine.stats().n_cancelled
    sock = start(toy, path, body)
    toy.wait_until(lambda: any(slot.is_busy for slot in toy.engine.stats().slots))
    if how == "reset":
        reset(sock)
    elif how == "half":
        sock.shutdown(socket.SHUT_WR)
    else:
        sock.close()
    toy.wait_idle()
    sock.close()
    assert toy.engine.stats().n_cancelled == n_cancelled + 1
    toy.wait_until(lambda: not toy.engine.stats().pool.n_leased)


def test_client_that_leaves_the_queue_gives_up_its_place(toy: Served):
    socks = [leaves_post(toy, "/toy/stream", BARE) for _ in range(2)]
    queued = raw_connection(toy)
    queued.sendall(json_request("/toy/stream", BARE))

    def n_without_slot() -> int:
        stats = toy.engine.stats()
        return stats.n_queued + stats.n_parked  # any of the three may wait: they take turns

    toy.wait_until(lambda: len(toy.service.runs) == 3 and n_without_slot() == 1)
    reset(queued)
    toy.wait_until(lambda: len(toy.service.runs) == 2 and n_without_slot() == 0)
    for sock in socks:
        sock.close()
    toy.wait_idle()


def test_client_that_vanishes_in_the_middle_of_a_frame_leaves_the_others_alone(toy: Served):
    with websocket(toy, "/toy/ws") as other:
        other.send(json.dumps({**BARE, "max_tokens": 300}))
        for body in (b'{"prompt":"To', b""):
            sock = raw_connection(toy)
            sock.sendall(upgrade_bytes("/toy/ws"))
            read_until(sock, b"\r\n\r\n")
            sock.sendall(masked_frame(body, length=500))
            reset(sock)
        frames, code = read_to_close(other)
    assert len(frames) == 301
    assert code == 1000
    toy.wait_idle()
