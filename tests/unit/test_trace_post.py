"""Traces on their way to a receiver: one that fails, hangs, dies, comes back."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kqview.errors import RequestError
from kqview.trace import Trace, TraceRequest
from kqview.trace.post import Poster
from tests.support.trace_receiver import LONG_S, Receiver, receiving
from tests.support.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path


def trace(name: str, text: str = "") -> Trace:
    return Trace(TraceRequest(request_id=name, final_text=text))


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as one:
        yield one


@contextmanager
def posting(url: str, **options: Any) -> Generator[Poster]:
    quick: dict[str, Any] = {"first_retry_s": 0.01, "max_retry_s": 0.05}
    poster = Poster(url, **quick | options)
    try:
        yield poster
    finally:
        poster.close(timeout_s=0)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


# ---- sending


def test_traces_arrive_in_order_at_the_default_path_and_leave_no_file(
    receiver: Receiver, tmp_path: Path
):
    with posting(receiver.url, spool=tmp_path, headers={"x-key": "k"}) as poster:
        for i in range(5):
            poster.post(trace(str(i)))
        assert poster.flush(LONG_S)
        stats = poster.stats()
    assert receiver.names == ["0", "1", "2", "3", "4"]
    assert receiver.posts[0][1]["path"] == "/ingest"
    assert receiver.posts[0][1]["content-type"] == "application/json"
    assert receiver.posts[0][1]["x-key"] == "k"
    assert (stats.n_posted, stats.n_sent, stats.n_waiting) == (5, 5, 0)
    assert stats.last_error is None
    assert files(tmp_path) == []


def test_path_and_query_of_the_url_are_kept(receiver: Receiver):
    with posting(f"{receiver.url}/v1/ingest?team=a") as poster:
        poster.post(trace("a"))
        assert poster.flush(LONG_S)
    assert receiver.posts[0][1]["path"] == "/v1/ingest?team=a"


@pytest.mark.parametrize("status", [429, 500, 503])
def test_failing_receiver_is_asked_again_until_it_takes_the_trace(receiver: Receiver, status: int):
    answers = iter([status, status, 201])
    receiver.answer = lambda name: next(answers)
    with posting(receiver.url) as poster:
        poster.post(trace("a"))
        assert poster.flush(LONG_S)
        stats = poster.stats()
    assert receiver.names == ["a"] * 3
    assert (stats.n_sent, stats.n_failures) == (1, 2)


def test_receiver_says_when_to_come_back(receiver: Receiver):
    receiver.answer = lambda name: 429
    receiver.headers = {"retry-after": "3000"}
    with posting(receiver.url, max_retry_s=10_000.0) as poster:
        poster.post(trace("a"))
        receiver.wait(lambda: len(receiver.posts) == 1)
        assert not poster.flush(1.0)
    assert receiver.names == ["a"]


@pytest.mark.parametrize("status", [301, 400, 404, 413, 415, 422])
def test_trace_that_is_refused_is_put_aside_and_not_sent_again(
    receiver: Receiver, tmp_path: Path, status: int
):
    receiver.answer = lambda name: status if name == "bad" else 201
    with posting(receiver.url, spool=tmp_path) as poster:
        poster.post(trace("bad"))
        poster.post(trace("good"))
        assert poster.flush(LONG_S)
        stats = poster.stats()
    assert receiver.names == ["bad", "good"]
    assert (stats.n_refused, stats.n_sent, stats.n_waiting_bytes) == (1, 1, 0)
    assert files(tmp_path) == []
    [kept] = files(tmp_path / "refused")
    assert read_trace(kept.read_bytes()) == trace("bad")


def test_trace_that_the_receiver_chokes_on_holds_up_no_other(receiver: Receiver, tmp_path: Path):
    receiver.answer = lambda name: 500 if name == "bad" else 201
    with posting(receiver.url, spool=tmp_path) as poster:
        for name in ("bad", "a", "b"):
            poster.post(trace(name))
        assert poster.flush(LONG_S)
        assert poster.stats().n_sent == 2
    assert receiver.names.count("bad") == 8
    assert len(files(tmp_path / "refused")) == 1


def test_dead_receiver_gets_everything_when_it_comes_back(tmp_path: Path):
    port = closed_port()
    with posting(f"http://127.0.0.1:{port}", spool=tmp_path) as poster:
        poster.post(trace("a"))
        poster.post(trace("b"))
        while poster.stats().n_failures < 2:
            time.sleep(0.01)
        assert "refused" in (poster.stats().last_error or "").lower()
        with receiving(port) as receiver:
            assert poster.flush(LONG_S)
            assert sorted(receiver.names) == ["a", "b"]


def test_trace_that_another_process_has_sent_is_forgotten(tmp_path: Path):
    port = closed_port()
    with posting(f"http://127.0.0.1:{port}", spool=tmp_path) as poster:
        poster.post(trace("a"))
        while poster.stats().n_failures < 2:
            time.sleep(0.01)
        for one in files(tmp_path):
            one.unlink()
        poster.post(trace("b"))
        with receiving(port) as receiver:
            assert poster.flush(LONG_S)
            assert receiver.names == ["b"]
        assert poster.stats().n_waiting_bytes == 0


def test_receiver_that_hangs_is_given_up_and_asked_again(receiver: Receiver):
    receiver.may_answer.clear()
    with posting(receiver.url, timeout_s=0.2) as poster:
        poster.post(trace("a"))
        receiver.wait(lambda: len(receiver.posts) >= 2)
        receiver.may_answer.set()
        assert poster.flush(LONG_S)
        assert poster.stats().n_failures >= 1


def test_receiver_that_answers_drop_by_drop_is_given_up():
    # Each read gets a byte in time; only the whole takes too long.
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            with listener.accept()[0] as client:
                while not stop.wait(0.05):
                    try:
                        client.sendall(b"H")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        with posting(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5) as poster:
            poster.post(trace("a"))
            while not poster.stats().n_failures:
                time.sleep(0.01)
        stop.set()
        thread.join(LONG_S)


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 ", b"HTTP/1.1 9999 x\r\n"])
def test_answer_that_is_no_http_is_a_failure(answer: bytes):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            with listener.accept()[0] as client:
                client.recv(65536)
                client.sendall(answer)

        threading.Thread(target=speak, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with posting(url, first_retry_s=1000.0, max_retry_s=1000.0) as poster:
            poster.post(trace("a"))
            while not poster.stats().n_failures:
                time.sleep(0.01)
            assert poster.stats().n_waiting == 1


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:1", "ftp://a/b", "http://", "http://a:x/", "http://u:p@a/", "http://[/"]
)
def test_url_that_cannot_be_posted_to_is_refused(url: str):
    with pytest.raises(RequestError, match="http://") as caught:
        Poster(url)
    assert caught.value.parameter == "url"


# ---- never in the way


def test_posting_never_waits_and_a_full_queue_drops_the_oldest(receiver: Receiver, tmp_path: Path):
    receiver.may_answer.clear()
    with posting(receiver.url, spool=tmp_path, max_spool_bytes=2000, max_queued=4) as poster:
        for i in range(500):
            poster.post(trace(str(i), "x" * 100))
        receiver.wait(lambda: len(receiver.posts) == 1)
        while (stats := poster.stats()).n_waiting > 20:
            time.sleep(0.01)
        assert stats.n_posted == 500
        assert stats.n_dropped > 400
        receiver.may_answer.set()
        assert poster.flush(LONG_S)
        stats = poster.stats()
        assert stats.n_sent + stats.n_dropped == 500
    assert receiver.names[-1] == "499"
    assert files(tmp_path) == []


def test_spool_on_a_full_disk_keeps_traces_in_memory(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kqview.durable.write_whole", full)
    with posting(receiver.url, spool=tmp_path) as poster:
        poster.post(trace("a"))
        assert poster.flush(LONG_S)
    assert receiver.names == ["a"]


def test_trace_that_cannot_be_written_costs_no_other(receiver: Receiver):
    broken = trace("broken")
    broken.events.append(None)  # pyright: ignore[reportArgumentType]
    with posting(receiver.url) as poster:
        poster.post(broken)
        poster.post(trace("a"))
        assert poster.flush(LONG_S)
        assert (poster.stats().n_sent, poster.stats().n_dropped) == (1, 1)
    assert receiver.names == ["a"]


# ---- the end


def test_close_sends_what_waits(receiver: Receiver):
    poster = Poster(receiver.url)
    for i in range(20):
        poster.post(trace(str(i)))
    poster.close(timeout_s=LONG_S)
    assert len(receiver.posts) == 20
    poster.post(trace("late"))
    assert poster.stats().n_dropped == 1
    poster.close()


def test_close_is_bounded_when_the_receiver_hangs_and_the_spool_keeps_the_rest(
    receiver: Receiver, tmp_path: Path
):
    receiver.may_answer.clear()
    poster = Poster(receiver.url, spool=tmp_path, timeout_s=1000.0)
    poster.post(trace("a"))
    receiver.wait(lambda: len(receiver.posts) == 1)
    poster.close(timeout_s=0.2)  # would hang with the receiver
    assert len(files(tmp_path)) == 1
    receiver.may_answer.set()
    with posting(receiver.url, spool=tmp_path) as later:
        assert later.flush(LONG_S)
        assert (later.stats().n_found, later.stats().n_sent) == (1, 1)
    assert receiver.names == ["a", "a"]
    assert files(tmp_path) == []


def test_process_that_ends_sends_what_waits_first(receiver: Receiver):
    code = (
        "import sys\nfrom kqview.trace import Poster, Trace, TraceRequest\n"
        "Poster(sys.argv[1]).post(Trace(TraceRequest(request_id='last')))\n"
    )
    subprocess.run([sys.executable, "-c", code, receiver.url], check=True, timeout=LONG_S)
    assert receiver.names == ["last"]
