"""WebSockets of the dream dialect that end because somebody left, failed, waited or shut down."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from websockets.exceptions import ConnectionClosed

from kqview import Engine
from kqview.server import Settings
from tests.support.dream import PROMPT, WITHIN_S, DreamSocket

if TYPE_CHECKING:
    from tests.support.serving import Serve, Served

LONG = {"prompt": PROMPT, "max_new_tokens": 400, "return_attention": True}


def close_code(socket: DreamSocket) -> int | None:
    """The code that the server closes with; what it still sends is read."""
    try:
        while True:
            socket.socket.recv(timeout=WITHIN_S)
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else None


def test_client_that_leaves_frees_its_slot(demo: Served):
    socket = DreamSocket(demo.ws_url)
    socket.send(**LONG)
    assert socket.event()["type"] == "token"
    socket.socket.close()
    demo.wait_idle(within_s=5)
    demo.wait_until(lambda: demo.engine.stats().pool.leased_bytes == 0)


def test_request_that_takes_too_long_ends_with_an_event_and_1011(serve: Serve):
    served = serve(Settings(request_timeout_s=0.3, n_ctx=2048))
    with DreamSocket(served.ws_url) as socket:
        socket.send(prompt=PROMPT, max_new_tokens=2000, return_attention=True, num_samples=4)
        events = [socket.event()]
        while events[-1]["type"] == "token":
            events.append(socket.event())
        assert (events[-1]["type"], events[-1]["error_code"]) == ("error", "TIMEOUT")
        assert close_code(socket) == 1011
    served.wait_idle()


def test_rows_without_room_end_with_an_event_that_has_figures(serve: Serve):
    with Engine.demo(n_threads=1, n_ctx=256, attention_budget_bytes=1024) as engine:
        served = serve(Settings(), engine)
        with DreamSocket(served.ws_url) as socket:
            socket.send(prompt=PROMPT, max_new_tokens=4, return_attention=True)
            event = socket.event()
            assert (event["type"], event["error_code"]) == ("error", "OOM")
            assert event["context_length"] == 256
            assert event["prompt_tokens"] == 20
            assert event["attention_budget_mb"] == 0
            assert close_code(socket) == 1011


def test_server_that_ends_tells_running_and_idle_sockets(serve: Serve):
    served = serve(Settings(n_ctx=2048))
    loops: list[asyncio.AbstractEventLoop] = []
    served.service.on_end = lambda run: loops.append(asyncio.get_running_loop())
    with DreamSocket(served.ws_url) as running, DreamSocket(served.ws_url) as idle:
        assert len(idle.generate(prompt=PROMPT, max_new_tokens=1)[0]) == 1
        running.send(prompt=PROMPT, max_new_tokens=2000, return_attention=True, num_samples=4)
        assert running.event()["type"] == "token"
        leaving = asyncio.run_coroutine_threadsafe(served.service.drain(5), loops[0])
        events = [running.event()]
        while events[-1]["type"] == "token":
            events.append(running.event())
        assert events[-1]["type"] == "error"
        assert close_code(running) == 1001
        assert close_code(idle) == 1001
        leaving.result(10)


def test_idle_socket_is_closed_after_a_while(serve: Serve):
    served = serve(Settings(idle_timeout_s=0.3))
    with DreamSocket(served.ws_url) as socket:
        assert len(socket.generate(prompt=PROMPT, max_new_tokens=2)[0]) == 2
        assert close_code(socket) == 1008


def test_key_is_needed_where_there_are_keys(serve: Serve):
    served = serve(Settings(api_keys=("secret",)))
    with DreamSocket(served.ws_url) as socket:
        event = socket.event()
        assert (event["type"], event["error_code"]) == ("error", "UNAUTHORIZED")
        assert close_code(socket) == 1008
    headers = {"authorization": "Bearer secret"}
    with DreamSocket(served.ws_url, additional_headers=headers) as socket:
        assert len(socket.generate(prompt=PROMPT, max_new_tokens=2)[0]) == 2
