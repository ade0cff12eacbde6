"""Limits of one request and of all together: refused with a reason, and the others go on."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from tests.server.clients import (
    WAITS_S,
    is_closed_by_server,
    json_request,
    masked_frame,
    raw_connection,
    read_all,
    read_to_close,
    read_until,
    request_bytes,
    sse_events,
    upgrade_bytes,
    websocket,
)
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

pytestmark = pytest.mark.full

KIB = 1024
LONG = {"prompt": "Tom has", "max_tokens": 8000, "attention": False}


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    """A server with small limits."""
    settings = Settings(
        n_slots=2, n_ctx=8192, max_body_bytes=8 * KIB, max_message_bytes=8 * KIB, max_tokens=5,
        max_context=32, max_samples=2, max_connections=8,
    )  # fmt: skip
    with serving_toy(settings) as served:
        yield served


# ---- sizes


def test_declared_body_over_the_limit_is_refused_before_it_is_sent(small: Served):
    with raw_connection(small) as sock:
        sock.sendall(request_bytes("POST", "/toy/tokenize", content_length="9000000000"))
        reply = read_until(sock, b'"code"')
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"9000000000 bytes, the limit is 8192" in reply


def test_undeclared_body_over_the_limit_is_refused_on_the_way(small: Served):
    with raw_connection(small) as sock:
        sock.sendall(request_bytes("POST", "/toy/tokenize", transfer_encoding="chunked"))
        for _ in range(9):
            sock.sendall(b"400\r\n" + b"x" * KIB + b"\r\n")
        assert read_until(sock, b'"code"').startswith(b"HTTP/1.1 413 ")


def test_body_of_exactly_the_limit_is_read(small: Served):
    head = len(json.dumps({"text": ""}))
    with small.client() as client:
        fits = client.post("/toy/tokenize", content=json.dumps({"text": "x" * (8 * KIB - head)}))
        over = client.post(
            "/toy/tokenize", content=json.dumps({"text": "x" * (8 * KIB - head + 1)})
        )
        assert (fits.status_code, over.status_code) == (200, 413)
        assert client.post("/toy/tokenize", json={"text": "on"}).status_code == 200


def test_body_in_thousands_of_chunks_is_read(small: Served):
    body = json.dumps({"text": "hello"}).encode() + b" " * 4000
    with raw_connection(small) as sock:
        sock.sendall(request_bytes("POST", "/toy/tokenize", transfer_encoding="chunked"))
        sock.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert read_until(sock, b'"ids"').startswith(b"HTTP/1.1 200 ")


def test_websocket_message_over_the_limit_closes_it(small: Served):
    with websocket(small, "/toy/ws") as socket:
        socket.send("x" * (8 * KIB + 1))
        assert read_to_close(socket) == ([], 1009)


def test_websocket_message_that_only_claims_to_be_large_is_not_waited_for(small: Served):
    with raw_connection(small) as sock:
        sock.sendall(upgrade_bytes("/toy/ws"))
        read_until(sock, b"\r\n\r\n")
        sock.sendall(masked_frame(b"{", length=2**40))
        assert is_closed_by_server(sock)


# ---- tokens


def test_most_tokens_and_samples_are_bounded(small: Served):
    with small.client() as client:
        body = {"prompt": "Tom has", "attention": False}
        reply = client.post("/toy/generate", json={**body, "max_tokens": 10**30})
        assert (reply.status_code, len(reply.json()["ids"])) == (200, 5)
        assert client.post("/toy/generate", json={**body, "n_samples": 3}).status_code == 400
        assert client.post("/toy/generate", json={**body, "n_samples": 0}).status_code == 400
        assert client.post("/toy/generate", json={**body, "max_tokens": 0}).status_code == 400
        assert client.post("/toy/generate", json={**body, "max_tokens": -1}).status_code == 400


def test_prompt_over_the_limit_is_refused_with_its_length(small: Served):
    with small.client() as client:
        fits = client.post("/toy/generate", json={"prompt": [5] * 32, "max_tokens": 1})
        over = client.post("/toy/stream", json={"prompt": [5] * 33, "max_tokens": 1})
    assert fits.status_code == 200
    assert (over.status_code, over.json()["code"]) == (400, "CONTEXT_TOO_LONG")
    assert "33" in over.json()["wrong"]
    assert "32" in over.json()["wrong"]


def test_samples_share_the_request_and_their_tokens_come_from_all(small: Served):
    with small.client() as client:
        body = {"prompt": "Tom has", "n_samples": 2, "max_tokens": 3, "attention": False}
        with client.stream("POST", "/toy/stream", json=body) as reply:
            events = list(sse_events(reply))
    assert sorted(event["sample"] for event in events[:-1]) == [0, 0, 0, 1, 1, 1]
    assert events[-1] == {"type": "done", "reason": "length", "n": 6}


# ---- how many


def test_connections_beyond_the_limit_are_turned_away_and_later_ones_are_not(small: Served):
    idle = [raw_connection(small) for _ in range(8)]
    try:
        with raw_connection(small) as sock:
            reply = read_all(sock)
        assert reply.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1\r\n" in reply
    finally:
        for sock in idle:
            sock.close()
    with small.client() as client:
        small.wait_until(lambda: _is_served(client))


def _is_served(client: Any) -> bool:
    return client.get("/health").status_code == 200


def test_requests_beyond_slots_and_queue_get_503_and_when_to_come_back():
    with serving_toy(Settings(n_slots=1, n_ctx=8192, max_queued=1)) as served:
        with raw_connection(served) as running, raw_connection(served) as queued:
            running.sendall(json_request("/toy/stream", LONG))
            served.wait_until(lambda: len(served.service.runs) == 1)
            queued.sendall(json_request("/toy/stream", LONG))
            served.wait_until(lambda: len(served.service.runs) == 2)
            with served.client() as client:
                refused = client.post("/toy/generate", json=LONG)
                assert client.post("/toy/tokenize", json={"text": "hi"}).status_code == 200
            with websocket(served, "/toy/ws") as socket:
                socket.send(json.dumps(LONG))
                assert '"BUSY"' in socket.recv(timeout=WAITS_S)
        assert (refused.status_code, refused.json()["code"]) == (503, "BUSY")
        assert int(refused.headers["retry-after"]) >= 1
        served.wait_idle()


def test_running_requests_are_bounded_below_the_slots():
    with serving_toy(Settings(n_slots=2, n_ctx=8192, max_running=1)) as served:
        with raw_connection(served) as running, served.client() as client:
            running.sendall(json_request("/toy/stream", LONG))
            served.wait_until(lambda: len(served.service.runs) == 1)
            assert client.post("/toy/generate", json=LONG).status_code == 503
        served.wait_idle()


def test_rate_limit_counts_each_client_and_each_message():
    with serving_toy(Settings(rate_limit=4.0)) as served:
        with served.client() as client:
            statuses = [client.post("/toy/tokenize", json={"text": "x"}) for _ in range(2)]
            assert [reply.status_code for reply in statuses] == [200, 200]
            with websocket(served, "/toy/ws/many") as socket:  # the third
                body = '{"prompt":"Tom","max_tokens":1,"attention":false}'
                socket.send(body)
                assert '"token"' in socket.recv(timeout=WAITS_S)
                assert '"done"' in socket.recv(timeout=WAITS_S)
                socket.send(body + " ")  # the fourth
                assert '"token"' in socket.recv(timeout=WAITS_S)
                assert '"done"' in socket.recv(timeout=WAITS_S)
                socket.send(body + "  ")
                (event,), code = read_to_close(socket)
            refused = client.post("/toy/tokenize", json={"text": "x"})
            assert client.get("/health").status_code == 200
    assert "requests a minute" in str(event)
    assert code == 1008
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 15


# ---- times


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    """A server with short times."""
    settings = Settings(n_slots=1, n_ctx=8192, request_timeout_s=1.5, idle_timeout_s=1.0)
    with serving_toy(settings) as served:
        yield served


def test_request_that_takes_too_long_ends_with_an_event_and_a_cut(impatient: Served):
    with raw_connection(impatient) as sock:
        sock.sendall(json_request("/toy/stream", {**LONG, "n_samples": 4}))
        raw = read_all(sock)
    assert raw.startswith(b"HTTP/1.1 200 ")
    assert b'"code":"TIMEOUT"' in raw[-300:]
    assert not raw.endswith(b"0\r\n\r\n")
    impatient.wait_idle()


def test_plain_request_that_takes_too_long_gets_a_status(impatient: Served):
    with impatient.client() as client:
        reply = client.post("/toy/generate", json={**LONG, "n_samples": 4})
    assert (reply.status_code, reply.json()["code"]) == (504, "TIMEOUT")
    impatient.wait_idle()


def test_time_in_the_queue_counts(impatient: Served):
    with raw_connection(impatient) as first, raw_connection(impatient) as second:
        first.sendall(json_request("/toy/stream", {**LONG, "n_samples": 4}))
        impatient.wait_until(lambda: len(impatient.service.runs) == 1)
        second.sendall(json_request("/toy/generate", LONG))
        assert read_until(second, b'"code"').startswith(b"HTTP/1.1 504 ")
    impatient.wait_idle()


def test_websocket_of_a_request_that_takes_too_long_closes_with_1011(impatient: Served):
    with websocket(impatient, "/toy/ws") as socket:
        socket.send(json.dumps({**LONG, "n_samples": 4}))
        events, code = read_to_close(socket)
    assert '"TIMEOUT"' in str(events[-1])
    assert code == 1011


def test_body_that_stops_coming_gets_408(impatient: Served):
    with raw_connection(impatient) as sock:
        sock.sendall(request_bytes("POST", "/toy/tokenize", content_length="100") + b'{"text"')
        reply = read_all(sock)
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b'"TIMEOUT"' in reply


def test_body_that_trickles_has_an_end_too(impatient: Served):
    with raw_connection(impatient) as sock:
        sock.sendall(request_bytes("POST", "/toy/tokenize", content_length="100"))
        stop = threading.Event()

        def trickle() -> None:
            while not stop.wait(0.1):
                try:
                    sock.sendall(b" ")
                except OSError:
                    return

        feeder = threading.Thread(target=trickle)
        feeder.start()
        try:
            reply = read_until(sock, b'"code"')
        finally:
            stop.set()
            feeder.join()
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"more than 1.5 s" in reply


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: localhost\r\n"]
)
def test_connection_that_asks_for_nothing_is_dropped(impatient: Served, sent: bytes):
    with raw_connection(impatient) as sock:
        sock.sendall(sent)
        assert is_closed_by_server(sock)


def test_websocket_that_says_nothing_closes_with_1008(impatient: Served):
    with websocket(impatient, "/toy/ws") as socket:
        assert read_to_close(socket) == ([], 1008)
