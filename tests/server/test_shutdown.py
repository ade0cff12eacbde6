"""SIGTERM while clients are served: each of them hears of it, and the process ends in time."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpx
import pytest
from websockets.sync.client import connect

from tests.server.clients import (
    WAITS_S,
    json_request,
    raw_connection,
    read_all,
    read_to_close,
    read_until,
    upgrade_bytes,
)
from tests.support.serve_process import Parent
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

GRACE_S = 20.0  # more than a loaded machine needs to end a process, less than a test may take
SHORT_GRACE_S = 4.0
LONG = {
    "prompt": "Tom has", "max_length": 8000, "output_attentions": True, "request_id": "r",
    "ban_eos_token": True,
}  # fmt: skip
# A reply that is not streamed may not be as large.
PLAIN = {**LONG, "output_attentions": False, "request_id": "p"}

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no SIGTERM")


class Process(Parent):
    """``kqview serve`` in a process of its own; has what the clients ask of a Served."""

    @property
    def ws_url(self) -> str:
        return "ws" + self.url.removeprefix("http")

    def metric(self, name: str) -> float:
        """A figure of /metrics."""
        text = httpx.get(f"{self.url}/metrics", verify=False).text
        return float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0])

    def wait_running(self, n: int) -> None:
        """Wait until *n* requests run."""
        wait_until(lambda: self.metric("kqview_running_requests") == n)

    def wait_blocked(self) -> None:
        """Wait until clients that do not read have stopped every generation of rows.

        Meanwhile somebody else is served from end to end: the server had its turns.
        """

        def is_blocked() -> bool:
            before = self.metric("kqview_attention_copied_bytes_total")
            for _ in range(3):
                httpx.post(
                    f"{self.url}/api/v1/generate",
                    json={"prompt": "Tom has", "max_length": 2}, timeout=60, verify=False,
                ).raise_for_status()  # fmt: skip
            return self.metric("kqview_attention_copied_bytes_total") == before > 0

        wait_until(is_blocked)

    def is_ending(self) -> bool:
        """Whether it takes no requests: it says so, or connections to it are lost."""
        try:
            return httpx.get(f"{self.url}/health", verify=False).status_code == 503
        except httpx.TransportError:
            return True

    def end(self, number: int = signal.SIGTERM) -> float:
        """Send a signal and wait; seconds until the end."""
        started_s = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(2 * GRACE_S)
        return time.monotonic() - started_s


@pytest.fixture(params=[GRACE_S])
def served(request: pytest.FixtureRequest) -> Iterator[Process]:
    command = [
        sys.executable, "-m", "kqview", "serve", "--demo", "--port", "0", "--threads", "1",
        "--slots", "4", "--ctx", "8192", "--shutdown-grace-s", str(request.param),
    ]  # fmt: skip
    process = Process(command)
    yield process
    process.close()


def test_every_client_is_told_and_the_process_ends_with_zero(served: Process):
    assert urlsplit(served.url).port
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(raw_connection(served))
        stream.sendall(json_request("/api/extra/generate/stream", LONG))
        read_until(stream, b'"type":"token"')
        plain = stack.enter_context(raw_connection(served))
        plain.sendall(json_request("/api/v1/generate", PLAIN))
        idle_http = stack.enter_context(raw_connection(served))
        busy = stack.enter_context(connect(served.ws_url + "/api/extra/generate/stream/ws"))
        busy.send(json.dumps({**LONG, "request_id": "w"}))
        busy.recv(timeout=WAITS_S)
        idle = stack.enter_context(connect(served.ws_url + "/api/extra/generate/stream/ws"))
        # These two read all the time: a client that does not could not be told.
        pool = stack.enter_context(ThreadPoolExecutor())
        streamed, received = pool.submit(read_all, stream), pool.submit(read_to_close, busy)
        served.wait_running(3)
        took_s = served.end()
        raw = streamed.result()
        events, code = received.result()
        idle_events, idle_code = read_to_close(idle)
        answer = read_all(plain)
        rest = read_all(idle_http)
    assert served.process.returncode == 0
    assert took_s < GRACE_S
    # The stream: an event that says so, and no end that looks like success.
    assert b'"error"' in raw[-600:]
    assert b"shutting down" in raw[-600:]
    assert not raw.endswith(b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after" in answer
    assert code == idle_code == 1001
    texts = [event for event in events if isinstance(event, str)]
    assert "shutting down" in texts[-1]
    assert idle_events == []
    assert rest == b""


@pytest.mark.full
@pytest.mark.parametrize("served", [SHORT_GRACE_S], indirect=True)
def test_clients_that_do_not_read_do_not_hold_the_end_up(served: Process):
    with contextlib.ExitStack() as stack:
        for i in range(2):
            sock = stack.enter_context(raw_connection(served, receive_bytes=4096))
            sock.sendall(
                json_request("/api/extra/generate/stream", {**LONG, "request_id": f"s{i}"})
            )
            sock = stack.enter_context(raw_connection(served, receive_bytes=4096))
            sock.sendall(upgrade_bytes("/api/extra/generate/stream/ws"))
        served.wait_running(2)
        served.wait_blocked()
        took_s = served.end()
    assert served.process.returncode == 0
    assert took_s < 2 * SHORT_GRACE_S  # one grace: it took two


def test_second_signal_ends_it_at_once_and_a_long_prompt_does_not_hold_it_up(served: Process):
    with contextlib.ExitStack() as stack:
        for i in range(2):
            sock = stack.enter_context(raw_connection(served, receive_bytes=4096))
            prompt = {"prompt": "Tom has a " * 1900, "max_length": 100} if i else {}
            sock.sendall(
                json_request(
                    "/api/extra/generate/stream", {**LONG, "request_id": f"s{i}", **prompt}
                )
            )
            if i == 0:  # what was sent to it fills every buffer: it cannot be over in time
                served.wait_blocked()
        served.wait_running(2)
        served.process.send_signal(signal.SIGTERM)
        wait_until(served.is_ending)
        took_s = served.end()
    assert served.process.returncode != 0
    assert took_s < GRACE_S / 2


def test_interrupt_ends_it_too_and_the_port_is_free(served: Process):
    port = urlsplit(served.url).port
    assert served.end(signal.SIGINT) < GRACE_S
    assert served.process.returncode == 0
    served.close()
    assert not any("Traceback" in line for line in served.said)
    import socket

    with socket.create_server(("127.0.0.1", port)):
        pass
