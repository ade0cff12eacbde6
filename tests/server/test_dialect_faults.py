"""The real dialects under the faults of the toy: who leaves, stalls or stammers costs nothing."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kqview.server import Settings
from kqview.server.api.koboldai.request import Generate
from kqview.server.app import DIALECTS
from tests.server.clients import (
    WAITS_S,
    is_closed_by_server,
    json_request,
    masked_frame,
    raw_connection,
    read_all,
    read_to_close,
    read_until,
    reset,
    upgrade_bytes,
    websocket,
)
from tests.server.test_openapi import WRONG
from tests.support.serving import serving

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from tests.support.serving import Served

KOBOLD = {
    "prompt": "Tom has", "max_length": 8000, "output_attentions": True, "ban_eos_token": True,
    "sampler_seed": 3,
}  # fmt: skip
DREAM = {
    "type": "generate", "prompt": "Tom has", "max_new_tokens": 8000, "return_attention": True,
    "bypass_eos": True, "seed": 3,
}  # fmt: skip
# Path, whether it is a WebSocket, request, what the first token brings.
STREAMS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "kobold-sse": ("/api/extra/generate/stream", False, KOBOLD),
    "kobold-legacy": ("/api/extra/generate/stream", False, {**KOBOLD, "output_attentions": False}),
    "kobold-ws": ("/api/extra/generate/stream/ws", True, KOBOLD),
    "dream-ws": ("/api/v1/generate/stream", True, DREAM),
    "dream-post": ("/api/v1/generate", False, {**DREAM, "return_attention": False}),
}
_PATHS = {one.path for dialect in DIALECTS for one in dialect.OPERATIONS}
SERVED = [name for name, (path, _, _) in STREAMS.items() if path in _PATHS]
EACH = pytest.mark.parametrize("name", SERVED)
WITH_ROWS = pytest.mark.parametrize(
    "name", [name for name in SERVED if STREAMS[name][2] in (KOBOLD, DREAM)]
)


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with serving(Settings(n_slots=2, n_ctx=8192)) as served:
        yield served


@pytest.fixture(scope="module")
def impatient() -> Iterator[Served]:
    with serving(Settings(n_slots=2, n_ctx=8192, idle_timeout_s=0.5)) as served:
        yield served


@pytest.fixture(scope="module")
def hurried() -> Iterator[Served]:
    with serving(Settings(n_slots=2, n_ctx=8192, request_timeout_s=1.5)) as served:
        yield served


@pytest.fixture(scope="module")
def small() -> Iterator[Served]:
    with serving(Settings(n_slots=2, n_ctx=128, max_tokens=4)) as served:
        yield served


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def begun(served: Served, name: str, *, receive_bytes: int | None = None) -> socket.socket:
    """A client whose request runs."""
    path, is_socket, body = STREAMS[name]
    sock = raw_connection(served, receive_bytes=receive_bytes)
    if is_socket:
        sock.sendall(upgrade_bytes(path))
        read_until(sock, b"\r\n\r\n")
        sock.sendall(masked_frame(json.dumps(body).encode()))
    else:
        sock.sendall(json_request(path, body))
    served.wait_until(lambda: any(run.n_tokens > 2 for run in served.runs))
    return sock


@EACH
@pytest.mark.parametrize("how", ["close", "reset"])
def test_client_that_leaves_frees_slot_and_rows(
    demo: Served, no_collector: None, name: str, how: str
):
    n_cancelled = demo.engine.stats().n_cancelled
    sock = begun(demo, name)
    if how == "reset":
        reset(sock)
    sock.close()
    demo.wait_idle()
    assert demo.engine.stats().n_cancelled == n_cancelled + 1
    demo.wait_until(lambda: not demo.engine.stats().pool.n_leased)


def test_client_that_leaves_behind_a_large_body_ends_its_request(
    demo: Served, no_collector: None, monkeypatch: pytest.MonkeyPatch
):
    # From here on, bytes are many at once: reading pauses when they come while the server waits.
    monkeypatch.setattr("uvicorn.protocols.http.httptools_impl.HIGH_WATER_LIMIT", 0)
    body = json.dumps({"prompt": "Tom has", "max_tokens": 8000, "ignore_eos": True}).encode()
    fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    head = f"POST /completion HTTP/1.1\r\nHost: localhost\r\n{fields}Expect: 100-continue\r\n\r\n"
    n_cancelled = demo.engine.stats().n_cancelled
    with raw_connection(demo) as sock:
        sock.sendall(head.encode())
        read_until(sock, b"100 Continue\r\n\r\n")
        sock.sendall(body)
        demo.wait_until(lambda: any(slot.is_busy for slot in demo.engine.slots))
    demo.wait_idle()
    assert demo.engine.stats().n_cancelled == n_cancelled + 1


@WITH_ROWS
def test_client_that_reads_nothing_is_dropped(impatient: Served, no_collector: None, name: str):
    with begun(impatient, name, receive_bytes=4096) as sock:
        impatient.wait_idle()
        impatient.wait_until(lambda: not impatient.engine.stats().pool.n_leased)
        impatient.wait_until(lambda: not impatient.n_connections)  # who reads on is not idle
        assert is_closed_by_server(sock)


@WITH_ROWS
def test_request_that_takes_too_long_ends_with_an_error(hurried: Served, name: str):
    # It reads nothing meanwhile, so that rows wait at the server until the time is over.
    with begun(hurried, name, receive_bytes=4096) as sock:
        run = hurried.wait_run()
        hurried.wait_until(lambda: run.error is not None)
        raw = read_until(sock, b'"error_code":"TIMEOUT"')
        if STREAMS[name][1]:
            while (1011).to_bytes(2) not in raw[-130:]:  # it waits for an answer to its close
                part = sock.recv(4096)
                assert part, raw[-400:]
                raw += part
        else:
            raw += read_all(sock)
    assert b'"error_code":"TIMEOUT"' in raw[-400:]
    if not STREAMS[name][1]:
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert not raw.endswith(b"0\r\n\r\n")  # without it no client takes the reply as whole
    hurried.wait_idle()


@pytest.mark.parametrize("name", [name for name in SERVED if STREAMS[name][1]])
def test_silent_websocket_closes_with_1008(impatient: Served, name: str):
    with websocket(impatient, STREAMS[name][0]) as ws:
        _, code = read_to_close(ws)
    assert code == 1008


MALFORMED: list[Any] = [
    "", "{", "[]", "null", "5", '"text"', "{}" * 2, '{"type":5}', '{"type":"nonsense"}',
    '{"type":"generate"}', '{"prompt":5}', '{"prompt":null}', '{"input_ids":["a"]}',
    '{"input_ids":[99999999999999999999999]}', '{"a":' * 5000, "\x00", b"\xff\xfe", b"",
    b"\xc1", b"\xde\x00\xff", b"\xdf\xff\xff\xff\xff",
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SERVED if STREAMS[name][1]])
@pytest.mark.parametrize("subprotocols", [None, ["msgpack"]])
def test_malformed_messages_get_an_error_event(demo: Served, name: str, subprotocols: Any):
    for message in MALFORMED:
        with websocket(demo, STREAMS[name][0], subprotocols=subprotocols) as ws:
            ws.send(message)
            event = ws.recv(timeout=WAITS_S)
            text = event.decode("latin-1") if isinstance(event, bytes) else event
            assert "error" in text, message
            assert "INTERNAL" not in text, message
            assert "Traceback" not in text, message
    demo.wait_idle()


@pytest.mark.parametrize("name", [name for name in SERVED if STREAMS[name][1]])
def test_other_clients_run_on_beside_one_that_does_not_read(demo: Served, name: str):
    with begun(demo, name, receive_bytes=4096), demo.client() as client:
        body = {**KOBOLD, "max_length": 100, "request_id": "x"}
        reply = client.post("/api/extra/generate/stream", json=body)
        assert reply.text.count('"type":"token"') == 100
        assert len(demo.service.runs) == 1  # the one that waits for its client
    demo.wait_idle()


@pytest.mark.parametrize("field", [one.encode_name for one in msgspec.structs.fields(Generate)])
def test_wrong_type_of_any_field_of_a_message_is_an_event_and_the_socket_stays(
    small: Served, field: str
):
    with websocket(small, STREAMS["dream-ws"][0]) as ws:
        for name, value in WRONG.items():
            body = {"type": "generate", "prompt": "Tom has", field: value}
            ws.send(msgspec.json.encode(body).decode())
            event = {"type": ""}
            while event["type"] not in ("done", "error"):
                frame = ws.recv(timeout=WAITS_S)
                event = json.loads(frame) if isinstance(frame, str) else event
            what = f"{field}={name}: {event}"
            assert event.get("error_code") != "INTERNAL", what
            try:
                msgspec.convert(body, Generate)
            except msgspec.ValidationError:
                assert event["type"] == "error", what
                assert f"`$.{field}" in event["error"], what
    small.wait_idle()
