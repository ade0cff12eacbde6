"""Many at once, full disks, killed receivers, two processes: nothing is half stored."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy import event

from kqview.errors import RequestError
from kqview.ingest import IngestSettings, tables
from kqview.ingest.store import Reader, Store, TraceFilter
from tests.support import postgres
from tests.support.receiving import Receiving, receiving, sqlite_url
from tests.support.serve_process import Parent, started
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.full

BECOMES_WITHIN_S = 60.0


def trace_of(request_id: str, n_events: int = 3) -> dict[str, Any]:
    """A trace whose events each have a call of a mod."""
    return {
        "request": {"request_id": request_id},
        "events": [
            {"event_type": "Added", "step": i, "sequence_order": i, "added_tokens": [i]}
            for i in range(n_events)
        ],
        "mod_calls": [
            {"event_sequence_order": i, "mod_name": "m", "event_type": "Added", "step": i}
            for i in range(n_events)
        ],
    }


def is_whole(store: Store, request_id: str) -> bool:
    """Whether the trace is stored with as many parts as its summary says; False if it is not."""
    read = store.trace(request_id, Reader())
    if read is None:
        return False
    trace = json.loads(read)
    [summary] = store.summaries(Reader(), TraceFilter(search=request_id), limit=1)[0]
    assert summary.n_events == len(trace["events"]) == len(trace["mod_calls"])
    return True


def test_200_posts_at_once_are_all_stored_whole(stored: Receiving) -> None:
    ids = [f"trace-{i:03}-" for i in range(200)]
    with stored.client(limits=httpx.Limits(max_connections=200)) as client:
        with ThreadPoolExecutor(200) as pool:
            replies = list(pool.map(lambda i: client.post("/ingest", json=trace_of(i)), ids))
    assert [one.status_code for one in replies] == [201] * 200
    assert all(is_whole(stored.store, one) for one in ids)


def test_posts_of_one_id_at_once_leave_one_of_them(stored: Receiving) -> None:
    with stored.client() as client, ThreadPoolExecutor(20) as pool:
        bodies = [trace_of("same", n_events=i + 1) for i in range(40)]
        replies = list(pool.map(lambda body: client.post("/ingest", json=body), bodies))
    assert [one.status_code for one in replies] == [201] * 40
    assert stored.store.totals()[0] == 1
    assert is_whole(stored.store, "same")


def test_trace_that_turns_out_wrong_at_its_end_leaves_the_older_one(stored: Receiving) -> None:
    older, newer = trace_of("a", n_events=3), trace_of("a", n_events=2000)
    newer["mod_calls"][-1]["event_sequence_order"] = 2000
    with stored.client() as client:
        assert client.post("/ingest", json=older).status_code == 201
        assert client.post("/ingest", json=newer).status_code == 400
    [summary] = stored.store.summaries(Reader(), TraceFilter(), limit=9)[0]
    assert summary.n_events == 3
    assert is_whole(stored.store, "a")


# ---- the disk


@pytest.fixture
def few_pages() -> Iterator[None]:
    """Databases of this process have no more than 100 pages of 4 KiB."""

    def limit(connection: Any, _record: object) -> None:
        with contextlib.suppress(AttributeError):
            connection.execute("PRAGMA max_page_count = 100")

    event.listen(sa.Engine, "connect", limit)
    yield
    event.remove(sa.Engine, "connect", limit)


def check_full(folder: Path, log: pytest.LogCaptureFixture) -> None:
    with receiving(IngestSettings(database=sqlite_url(folder / "traces.db"))) as received:
        with received.client() as client:
            assert client.post("/ingest", json=trace_of("before")).status_code == 201
            with log.at_level(logging.CRITICAL, "kqview.server"):
                full = client.post("/ingest", json=trace_of("large", n_events=10_000))
            assert full.status_code == 507
            assert "full" in full.json()["error"]
            assert client.get("/health").status_code == 200
            assert is_whole(received.store, "before")
            assert not is_whole(received.store, "large")
            assert client.delete("/v1/traces/before").status_code == 204
            assert client.post("/ingest", json=trace_of("after")).status_code == 201
        assert is_whole(received.store, "after")


@pytest.mark.usefixtures("few_pages")
def test_full_database_refuses_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_full(tmp_path, caplog)


def test_database_that_is_gone_is_503_until_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    with postgres.running() as server:
        with receiving(IngestSettings(database=server.new_database())) as received:
            with received.client() as client, caplog.at_level(logging.CRITICAL, "kqview.server"):
                assert client.post("/ingest", json=trace_of("before")).status_code == 201
                server.stop()
                gone = client.post("/ingest", json=trace_of("lost"))
                health = client.get("/health")
                server.start()
                assert client.post("/ingest", json=trace_of("after")).status_code == 201
            assert (gone.status_code, health.status_code) == (503, 503)
            assert int(gone.headers["retry-after"]) >= 1
            assert health.json()["error"]
            assert is_whole(received.store, "before")
            assert not is_whole(received.store, "lost")


# ---- processes


@contextlib.contextmanager
def ingesting(database: Path) -> Iterator[tuple[Parent, str]]:
    """``kqview ingest`` in a process of its own, and its URL."""
    command = ["ingest", "--port", "0", "--database", str(database)]
    with started([sys.executable, "-m", "kqview", *command]) as parent:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/ingest", parent.wait_for("/ingest"))
        assert found
        yield parent, found[1]


def test_killed_receiver_has_stored_nothing_by_halves(tmp_path: Path) -> None:
    database = tmp_path / "traces.db"
    log = tmp_path / "traces.db-wal"
    body = json.dumps(trace_of("large", n_events=30_000)).encode()
    with ingesting(database) as (first, url):
        httpx.post(f"{url}/ingest", json=trace_of("before"), timeout=60).raise_for_status()
        host, _, port = url.removeprefix("http://").partition(":")
        head = (
            f"POST /ingest HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=60) as half:
            half.sendall(head.encode() + body[:1000])  # one in the middle of its body
            with socket.create_connection((host, int(port)), timeout=60) as client:
                client.sendall(head.encode() + body)
                # Its rows are being written once they no longer fit into SQLite's cache.
                wait_until(lambda: log.stat().st_size > 2**20)
                first.process.kill()
                first.process.wait(BECOMES_WITHIN_S)
    with ingesting(database) as (_, url):
        store = Store(sqlite_url(database))
        assert is_whole(store, "before")
        is_whole(store, "large")  # not there, or, if the kill came late, whole
        with httpx.Client(base_url=url, timeout=60) as client:
            again = client.post(
                "/ingest", content=body, headers={"content-type": "application/json"}
            )
            assert again.status_code == 201
        assert is_whole(store, "large")
        store.close()


def test_two_processes_share_a_file_and_see_what_the_other_stores(tmp_path: Path) -> None:
    database = tmp_path / "traces.db"
    with (
        ingesting(database) as (_, other),
        receiving(IngestSettings(database=sqlite_url(database))) as own,
        own.client() as client,
        client.stream("GET", "/v1/stream") as stream,
        ThreadPoolExecutor(8) as pool,
    ):
        ids = [f"id-{i:02}-" for i in range(20)]
        urls = [own.url, other]

        def post(i: int) -> int:
            return httpx.post(
                f"{urls[i % 2]}/ingest", json=trace_of(ids[i]), timeout=60
            ).status_code

        assert list(pool.map(post, range(20))) == [201] * 20
        seen: set[str] = set()
        for line in stream.iter_lines():
            if line.startswith("data: "):
                seen.add(json.loads(line[6:])["request_id"])
            if len(seen) == 20:
                break
        assert seen == set(ids)
        assert all(is_whole(own.store, one) for one in ids)


def test_signal_ends_the_receiver_and_its_feeds(tmp_path: Path) -> None:
    with ingesting(tmp_path / "traces.db") as (receiver, url):
        with httpx.stream("GET", f"{url}/v1/stream", timeout=60) as stream:
            receiver.process.send_signal(signal.SIGTERM)
            assert list(stream.iter_lines()) == []
        assert receiver.process.wait(BECOMES_WITHIN_S) == 0


# ---- feeds


def events_of(stream: httpx.Response) -> Iterator[dict[str, str]]:
    fields: dict[str, str] = {}
    for line in stream.iter_lines():
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        elif fields:
            yield fields
            fields = {}


def test_feed_goes_on_after_the_last_event_that_a_client_has(received: Receiving) -> None:
    with received.client() as client:
        for name in ("a", "b", "c"):
            client.post("/ingest", json=trace_of(name))
        with client.stream("GET", "/v1/stream", headers={"last-event-id": "1"}) as stream:
            found = events_of(stream)
            got = [next(found), next(found)]
    assert [json.loads(one["data"])["request_id"] for one in got] == ["b", "c"]
    assert [(one["event"], one["id"]) for one in got] == [("trace", "2"), ("trace", "3")]


# ---- limits of what is kept


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_traces": 2}, ["d", "e"]),
        ({"max_traces": 9}, ["a", "b", "c", "d", "e"]),
        ({"max_bytes": 500}, ["c", "d", "e"]),
        ({"older_than": 2**62}, []),
        ({"older_than": 0}, ["a", "b", "c", "d", "e"]),
        ({"max_traces": 3, "max_bytes": 200}, ["e"]),
    ],
)
def test_what_was_stored_first_is_deleted_first(
    database: str, limits: dict[str, int], left: list[str]
) -> None:
    store = Store(database)
    for name in ("a", "b", "c", "d", "e"):
        store.put(json.dumps({"request": {"request_id": name}}).encode().ljust(150))
    n_deleted = store.prune(
        limits.get("max_traces", 0), limits.get("max_bytes", 0), limits.get("older_than")
    )
    kept = store.summaries(Reader(), TraceFilter(), limit=9)[0]
    store.close()
    assert sorted(one.request_id for one in kept) == left
    assert n_deleted == 5 - len(left)


def test_receiver_keeps_its_limits_by_itself(tmp_path: Path) -> None:
    settings = IngestSettings(database=sqlite_url(tmp_path / "traces.db"), max_traces=3)
    with receiving(settings) as received, received.client() as client:
        for i in range(10):
            client.post("/ingest", json=trace_of(f"{i}"))
        wait_until(lambda: received.store.totals()[0] == 3)
        kept = {one["request_id"] for one in client.get("/v1/traces").json()["traces"]}
    assert kept == {"7", "8", "9"}


# ---- schemas


def test_other_schema_is_refused(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr(tables, "VERSION", tables.VERSION + 1)
        Store(database).close()
    with pytest.raises(RequestError, match=r"schema 2.*--database"):
        Store(database)


def test_stores_that_open_an_empty_database_at_once_make_it_once(database: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(Store, [database] * 4))
    engine = sa.create_engine(stores[0].url)
    with engine.begin() as db:
        assert len(db.execute(sa.select(tables.counter)).all()) == 1
    engine.dispose()
    for one in stores:
        one.close()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("sqlite:////no/such/folder/x.db", "unable to open"),
        ("sqlite://", "file"),
        ("mysql://localhost/x", "mysql"),
        ("nonsense://x", "sqlite:///FILE"),
        ("postgresql://localhost:1/x", "refused"),
    ],
)
def test_database_that_cannot_be_opened_is_named(url: str, named: str) -> None:
    with pytest.raises(RequestError, match="--database") as error:
        Store(url)
    assert named in str(error.value)


def test_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("my notes " * 200)
    with pytest.raises(RequestError, match="not a database"):
        Store(sqlite_url(path))
    assert path.read_text() == "my notes " * 200
    assert os.listdir(tmp_path) == ["notes.txt"]
