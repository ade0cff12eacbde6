"""One budget of bytes for all that is under way: no client can fill the memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import pytest

from kqview.errors import CapacityError
from kqview.server import Settings
from kqview.server.errors import RateLimited, TooLarge
from kqview.server.web.budget import SPILL_BYTES, Body, Budget
from tests.server.clients import (
    WAITS_S,
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
    from pathlib import Path

pytestmark = pytest.mark.full

MIB = 2**20
KEY = "Bearer secret"

# ---- counting


def test_client_holds_as_much_as_stays_free():
    budget = Budget(120)
    one, two = budget.hold("a"), budget.hold("b")
    one.take(60)
    with pytest.raises(RateLimited, match="hold 60 already; memory_budget_bytes is 120"):
        one.take(1)
    two.take(30)
    with pytest.raises(CapacityError, match="30 are free; memory_budget_bytes is 120"):
        two.take(1)
    one.take(-20)
    two.take(5)
    assert budget.used_bytes == 75


def test_there_is_always_room_for_a_newcomer():
    budget = Budget(1000)
    for name in "abcdefgh":
        hold = budget.hold(name)
        with contextlib.suppress(RateLimited, CapacityError):
            while True:
                hold.take(1)
    budget.hold("new").take(1)


def test_what_can_never_fit_is_too_large():
    with pytest.raises(TooLarge, match=r"61 bytes .* memory_budget_bytes is 120"):
        Budget(120).hold("a").take(61)


def test_hold_gives_back_all_that_it_has_and_then_counts_nothing():
    budget = Budget(100)
    with budget.hold("a") as hold:
        hold.take(10)
        hold.set(30)
        hold.take(-5)
        assert (hold.n_bytes, budget.used_bytes) == (25, 25)
        with pytest.raises(RateLimited):
            hold.set(60)
        assert hold.n_bytes == 25
    assert budget.used_bytes == 0
    hold.take(90)
    hold.close()
    assert (hold.n_bytes, budget.used_bytes) == (0, 0)


# ---- what is counted


def test_body_is_counted_while_it_arrives_and_given_back():
    with serving_toy(Settings(memory_budget_bytes=8 * MIB)) as served:
        budget = served.service.budget
        with raw_connection(served) as sock:
            sock.sendall(request_bytes("POST", "/toy/tokenize", content_length=str(2 * MIB)))
            sock.sendall(b" " * MIB)
            served.wait_until(lambda: budget.used_bytes == MIB)
        served.wait_until(lambda: budget.used_bytes == 0)


def test_body_over_the_share_is_refused_at_once_and_names_the_setting():
    with serving_toy(Settings(memory_budget_bytes=8 * MIB)) as served:
        with raw_connection(served) as first, raw_connection(served) as second:
            first.sendall(request_bytes("POST", "/toy/tokenize", content_length=str(3 * MIB)))
            first.sendall(b" " * (2 * MIB + MIB // 2))
            served.wait_until(lambda: served.service.budget.used_bytes > 2 * MIB)
            second.sendall(request_bytes("POST", "/toy/tokenize", content_length=str(2 * MIB)))
            refused = read_until(second, b'"code"')
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"memory_budget_bytes is 8388608" in refused
        assert b"retry-after: 1" in refused
        with raw_connection(served) as sock:
            sock.sendall(request_bytes("POST", "/toy/tokenize", content_length=str(5 * MIB)))
            assert read_until(sock, b'"code"').startswith(b"HTTP/1.1 413 ")


def test_body_that_would_become_too_large_is_refused_before_it_is_decoded():
    with serving_toy(Settings(memory_budget_bytes=8 * MIB)) as served, served.client() as client:
        reply = client.post("/toy/tokenize", json={"text": "a" * MIB})
        assert reply.status_code == 413
        assert "memory_budget_bytes" in reply.json()["wrong"]
        assert client.post("/toy/tokenize", json={"text": "a" * 1000}).status_code == 200
        served.wait_until(lambda: served.service.budget.used_bytes == 0)


def test_message_over_the_share_closes_the_socket_with_1013():
    with serving_toy(Settings(memory_budget_bytes=8 * MIB)) as served:
        with raw_connection(served) as sock:
            sock.sendall(upgrade_bytes("/toy/ws"))
            read_until(sock, b"\r\n\r\n")
            served.wait_until(lambda: served.service.on_drain)
            with contextlib.suppress(ConnectionError):
                sock.sendall(masked_frame(b" " * (6 * MIB), length=30 * MIB))
            raw = read_all(sock)
        assert raw[0] == 0x88
        assert raw[2:4] == (1013).to_bytes(2, "big")
        assert b"more bytes of memory are needed" in raw
        served.wait_until(lambda: served.service.budget.used_bytes == 0)


def test_fragments_of_a_message_are_counted():
    with serving_toy(Settings(memory_budget_bytes=MIB)) as served, raw_connection(served) as sock:
        sock.sendall(upgrade_bytes("/toy/ws"))
        read_until(sock, b"\r\n\r\n")
        first = bytes([0x01]) + masked_frame(b" " * 1024)[1:]
        more = bytes([0x00]) + masked_frame(b" " * 1024)[1:]
        with contextlib.suppress(ConnectionError):
            sock.sendall(first + more * 2000)
        assert (1013).to_bytes(2, "big") in read_all(sock)


def test_metrics_tell_what_is_held_and_allowed():
    with serving_toy(Settings(memory_budget_bytes=8 * MIB)) as served, served.client() as client:
        served.service.budget.hold("x").take(1000)
        text = client.get("/metrics").text
    assert "kqview_memory_used_bytes 1000.0" in text
    assert "kqview_memory_budget_bytes 8.388608e+06" in text


def test_logprobs_are_kept_only_where_they_are_asked_for():
    with serving_toy(Settings(n_slots=1)) as served, served.client() as client:
        body = {"prompt": "Tom has", "max_length": 3, "temperature": 0}
        with websocket(served, "/api/v1/generate/stream") as ws:
            ws.send(json.dumps({"type": "generate", **body}))
            while '"done"' not in ws.recv(timeout=WAITS_S):
                pass
        assert served.service.last_of().logprobs == ()
        client.post("/api/v1/generate", json={**body, "top_logprobs": 30})
        assert [len(one.top) for one in served.service.last_of().logprobs] == [20] * 3


# ---- a server in a process of its own, whose memory is measured


@dataclass
class Process:
    """``kqview serve`` with a key and a small budget."""

    pid: int
    url: str

    @property
    def peak_bytes(self) -> int:
        """Most memory that it ever had."""
        with open(f"/proc/{self.pid}/status", encoding="ascii") as status:
            (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", status.read())
        return int(peak) * 1024

    @contextlib.contextmanager
    def grows_by_at_most(self, n_bytes: int) -> Iterator[None]:
        """Check that it takes no more memory meanwhile, and answers afterwards."""
        with open(f"/proc/{self.pid}/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # the peak is what it has now
        before = self.peak_bytes
        yield
        assert httpx.get(self.url + "/health", timeout=WAITS_S).status_code == 200
        assert self.peak_bytes - before < n_bytes


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server that allows 24 MiB for everyone."""
    log: Path = tmp_path_factory.mktemp("log") / "stderr"
    command = [
        sys.executable, "-m", "kqview", "serve", "--demo", "--port", "0", "--api-key", "secret",
        "--memory-budget-bytes", str(24 * MIB), "--slots", "16", "--no-supervise",
    ]  # fmt: skip
    with log.open("wb") as errors:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        found = re.search(r"http://\S+:\d+", line)
        assert found, (line, log.read_text())
        yield Process(running.pid, found[0])
    finally:
        running.terminate()
        running.communicate(timeout=WAITS_S)


def send_until_closed(sock: socket.socket, part: bytes, n_bytes: int) -> int:
    """Send *part* again and again, *n_bytes* at most; how many were sent."""
    sent = 0
    try:
        while sent < n_bytes:
            sock.sendall(part)
            sent += len(part)
    except (ConnectionError, TimeoutError):
        pass
    return sent


@pytest.mark.parametrize(
    "part",
    [b"x: " + b"y" * 1000 + b"\r\n", b"z" * 65536],
    ids=["many trailers", "one trailer without end"],
)
def test_trailers_are_bounded(process: Process, part: bytes):
    with process.grows_by_at_most(60 * MIB), raw_connection(process) as sock:  # pyright: ignore[reportArgumentType]
        sock.sendall(request_bytes("POST", "/api/v1/tokenize", transfer_encoding="chunked"))
        sock.sendall(b"2\r\n{}\r\n0\r\n" + (b"x: " if part[1:2] == b"z" else b""))
        assert send_until_closed(sock, part * 64, 160 * MIB) < 100 * MIB


def test_chunk_extensions_are_bounded(process: Process):
    with raw_connection(process) as sock:  # pyright: ignore[reportArgumentType]
        head = request_bytes(
            "POST", "/api/v1/tokenize", transfer_encoding="chunked", authorization=KEY
        )
        sock.sendall(head + b"1;")
        assert send_until_closed(sock, b"a" * 65536, 32 * MIB) < 16 * MIB


def test_bodies_that_are_half_sent_are_bounded(process: Process):
    with contextlib.ExitStack() as stack, process.grows_by_at_most(60 * MIB):
        answers: list[bytes] = []
        for i in range(24):
            sock = stack.enter_context(raw_connection(process))  # pyright: ignore[reportArgumentType]
            sock.sendall(
                request_bytes(
                    "POST", "/api/v1/tokenize", content_length=str(6 * MIB), authorization=KEY
                )
            )
            sock.settimeout(5)
            send_until_closed(sock, b" " * MIB, 5 * MIB)
            sock.settimeout(0.05 if i < 23 else WAITS_S)  # the last one is refused for certain
            with contextlib.suppress(TimeoutError, ConnectionError):
                answers.append(sock.recv(12))
    assert b"HTTP/1.1 429" in answers


def test_large_bodies_wait_on_the_disk_until_they_are_whole():
    settings = Settings(max_body_bytes=64 * MIB, memory_budget_bytes=1024 * MIB)
    with serving_toy(settings) as served, contextlib.ExitStack() as stack:
        budget = served.service.budget
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for i in range(1, 7):
            sock = stack.enter_context(raw_connection(served))
            length = str(12 * MIB + 100)
            sock.sendall(request_bytes("POST", "/toy/tokenize", content_length=length))
            sock.sendall(b" " * (12 * MIB))
            served.wait_until(lambda n=i: budget.used_bytes == n * 12 * MIB)
        assert tracemalloc.get_traced_memory()[0] < 24 * MIB


def test_body_that_was_on_the_disk_is_read_whole():
    with serving_toy(Settings()) as served, served.client() as client:
        body = b" " * (3 * MIB) + b'{"text": "Tom"}' + b"\n" * MIB
        reply = client.post("/toy/tokenize", content=body)
        assert reply.status_code == 200
        assert reply.json() == client.post("/toy/tokenize", json={"text": "Tom"}).json()


def test_body_that_is_written_late_says_so_too(monkeypatch: pytest.MonkeyPatch):
    def full(self: object, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Body() as body:
        body.add(b"{}")
        monkeypatch.setattr(tempfile.SpooledTemporaryFile, "seek", full)
        with pytest.raises(CapacityError, match="No space left"):
            body.read()


def test_runs_of_one_websocket_give_back_what_they_held():
    with serving_toy(Settings(n_slots=1)) as served:
        asked = {"type": "generate", "prompt": "Tom has", "max_length": 8, "top_logprobs": 20}
        used: list[int] = []
        with websocket(served, "/api/v1/generate/stream") as ws:
            for _ in range(3):
                ws.send(json.dumps(asked))
                while '"done"' not in ws.recv(timeout=WAITS_S):
                    pass
                served.wait_until(lambda: not served.service.runs)
                used.append(served.service.budget.used_bytes)
            large = json.dumps({"type": "nothing", "filler": "x" * MIB})
            ws.send(large)
            ws.recv(timeout=WAITS_S)
            ws.send("{}")
            ws.recv(timeout=WAITS_S)
            assert served.service.budget.used_bytes < MIB
        assert used == used[:1] * 3


def test_disk_without_room_for_a_body_is_said(monkeypatch: pytest.MonkeyPatch):
    def full(self: object, part: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "write", full)
    with serving_toy(Settings()) as served, served.client() as client:
        reply = client.post("/toy/tokenize", json={"text": "Tom"})
    assert reply.status_code == 503
    assert "No space left on device" in reply.text


def test_body_without_a_key_is_not_read(process: Process):
    with process.grows_by_at_most(30 * MIB), raw_connection(process) as sock:  # pyright: ignore[reportArgumentType]
        sock.sendall(request_bytes("POST", "/api/v1/tokenize", content_length=str(30 * MIB)))
        assert read_until(sock, b"UNAUTHORIZED").startswith(b"HTTP/1.1 401 ")
        assert send_until_closed(sock, b" " * MIB, 30 * MIB) < 25 * MIB


def test_refused_websockets_that_go_on_sending_are_bounded(process: Process):
    with contextlib.ExitStack() as stack, process.grows_by_at_most(60 * MIB):
        for _ in range(10):
            sock = stack.enter_context(raw_connection(process))  # pyright: ignore[reportArgumentType]
            sock.sendall(upgrade_bytes("/api/extra/generate/stream/ws"))
            read_until(sock, b"\r\n\r\n")
            sock.settimeout(5)
            sock.sendall(masked_frame(b"", length=30 * MIB)[:14])
            send_until_closed(sock, b" " * MIB, 20 * MIB)


def test_small_request_for_many_logprobs_is_bounded(process: Process):
    body = {"prompt": "Tom", "num_samples": 16, "top_logprobs": 700, "max_length": 200,
            "bypass_eos": True}  # fmt: skip
    with process.grows_by_at_most(100 * MIB):
        reply = httpx.post(
            process.url + "/api/v1/generate", json=body, headers={"authorization": KEY}, timeout=60
        )
    assert reply.status_code == 429
    assert "memory_budget_bytes" in reply.json()["error"]


def test_nothing_is_left_of_what_was_refused(process: Process):
    end_s = time.monotonic() + WAITS_S
    while True:
        text = httpx.get(process.url + "/metrics", headers={"authorization": KEY}).text
        if "kqview_memory_used_bytes 0.0" in text:
            break
        assert time.monotonic() < end_s, re.findall("kqview_memory_used.*", text)
        time.sleep(0.05)


def test_text_that_is_no_utf8_closes_with_1007_and_fills_no_log(caplog: pytest.LogCaptureFixture):
    with serving_toy() as served, raw_connection(served) as sock:
        sock.sendall(upgrade_bytes("/toy/ws"))
        read_until(sock, b"\r\n\r\n")
        sock.sendall(masked_frame(b"\xff"))
        assert read_all(sock)[2:4] == (1007).to_bytes(2, "big")
    assert not [record for record in caplog.records if record.exc_info]


def test_frame_that_is_none_ends_a_stream_without_a_traceback(caplog: pytest.LogCaptureFixture):
    asked = {"prompt": "Tom has", "max_tokens": 400}
    with serving_toy(Settings(n_ctx=8192)) as served, raw_connection(served) as sock:
        sock.sendall(upgrade_bytes("/toy/ws"))
        read_until(sock, b"\r\n\r\n")
        sock.sendall(masked_frame(json.dumps(asked).encode()))
        read_until(sock, b'"token"')
        sock.sendall(b"\xff\xff" * 8)
        read_all(sock)
        served.wait_idle()
    assert not [record for record in caplog.records if record.exc_info]


async def test_large_body_is_released_in_another_thread(monkeypatch: pytest.MonkeyPatch):
    """The blocks of its file take time to be freed."""
    threads: list[int] = []
    released = asyncio.Event()
    loop = asyncio.get_running_loop()
    close = Body._close

    def note(body: Body) -> None:
        threads.append(threading.get_ident())
        close(body)
        loop.call_soon_threadsafe(released.set)

    monkeypatch.setattr(Body, "_close", note)
    for n_bytes in (SPILL_BYTES + 1, 1):
        with Body() as body:
            body.add(bytes(n_bytes))
        await released.wait()
        released.clear()
        assert body._file.closed
    assert threads[0] != threading.get_ident()
    assert threads[1] == threading.get_ident()
