"""What a post is answered: status, limits, and a message that says what is wrong."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from kqview.ingest import IngestSettings
from kqview.ingest.settings import web_settings
from tests.server.clients import check_browser_headers
from tests.support.receiving import Receiving, receiving, sqlite_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    """One receiver for all tests here: a status does not depend on what is stored."""
    folder = tmp_path_factory.mktemp("statuses")
    with receiving(IngestSettings(database=sqlite_url(folder / "traces.db"))) as one:
        yield one


JSON = {"content-type": "application/json"}


def post(received: Receiving, body: Any, **headers: str) -> tuple[int, str]:
    """Status and message of a post of *body*, JSON already if it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with received.client() as client:
        reply = client.post("/ingest", content=data, headers={**JSON, **headers})
    return reply.status_code, reply.json()["error"] if reply.content else ""


def with_event(**fields: Any) -> dict[str, Any]:
    event = {"event_type": "Added", "step": 1, "sequence_order": 0, **fields}
    return {"request": {"request_id": "a"}, "events": [event]}


CALL = {"event_sequence_order": 0, "mod_name": "m", "event_type": "Added", "step": 1}


def with_call(**fields: Any) -> dict[str, Any]:
    return {**with_event(), "mod_calls": [{**CALL, **fields}]}


ACCEPTED: dict[str, Any] = {
    "nothing but an id": {"request": {"request_id": "a"}},
    "empty lists": {
        "request": {"request_id": "a"}, "events": [], "mod_calls": [], "mod_logs": [],
        "actions": [],
    },
    "null for what is optional": {
        "request": {"request_id": "a", "model": None, "created_at": None, "max_tokens": None}
    },
    "unknown fields": {"request": {"request_id": "a", "colour": 1}, "events": [], "more": {}},
    "seconds since 1970": {"request": {"request_id": "a", "created_at": 1764613800.5}},
    "an int at the end of its range": with_event(sampled_token=2**31 - 1),
    "a long text": with_event(token_text="x" * 200_000),
    "a NUL in a text": b'{"request": {"request_id": "a", "mod_text": "\\u0000"}}',
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_valid_trace_is_stored(received: Receiving, case: str) -> None:
    assert post(received, ACCEPTED[case]) == (201, "")


NESTED = b"[" * 100_000
REFUSED: dict[str, tuple[Any, int, str]] = {
    "cut off": (b'{"request": {"request_id"', 400, "JSON"),
    "empty": (b"", 400, "JSON"),
    "not UTF-8": (b'{"request": {"request_id": "\xff"}}', 400, "utf-8"),
    "not UTF-8 in details": (
        b'{"request": {"request_id": "a", "inference_stats": ["\xff"]}}', 400, "utf-8",
    ),
    "NaN": (b'{"request": {"request_id": "a", "temperature": NaN}}', 400, "JSON"),
    "half of a surrogate": (b'{"request": {"request_id": "\\ud800"}}', 400, "JSON"),
    "half of a surrogate in details": (
        b'{"request": {"request_id": "a", "inference_stats": "\\ud800"}}', 400, "JSON",
    ),
    "nested too deeply": (
        b'{"request": {"request_id": "a", "inference_stats": ' + NESTED, 400, "JSON",
    ),
    "a list": ([], 422, "object"),
    "no request": ({}, 422, "request"),
    "no id": ({"request": {}}, 422, "request_id"),
    "an empty id": ({"request": {"request_id": ""}}, 422, "request_id"),
    "nothing but a NUL as id": (b'{"request": {"request_id": "\\u0000"}}', 422, "request_id"),
    "a long id": ({"request": {"request_id": "x" * 513}}, 422, "512"),
    "a number as model": ({"request": {"request_id": "a", "model": 1}}, 422, "$.request.model"),
    "null for a list": ({"request": {"request_id": "a"}, "events": None}, 422, "events"),
    "an event of no type": (
        {"request": {"request_id": "a"}, "events": [{"step": 1, "sequence_order": 0}]},
        422, "$.events[0]",
    ),
    "an event of an unknown type": (with_event(event_type="Done"), 422, "$.events[0].event_type"),
    "a fraction": (with_event(step=1.0), 422, "$.events[0].step"),
    "an int out of range": (with_event(step=2**31), 422, "2147483647"),
    "an int out of range below": (with_event(step=-(2**31) - 1), 422, "-2147483648"),
    "a number out of range": (with_event(created_at=1e300), 422, "events[0].created_at"),
    "an endless number": (
        b'{"request": {"request_id": "a", "created_at": ' + b"9" * 5000 + b"}}", 422, "created_at",
    ),
    "a time without an offset": (
        {"request": {"request_id": "a", "created_at": "2025-12-01T18:30:00"}}, 422, "timezone",
    ),
    "a date": ({"request": {"request_id": "a", "created_at": "2025-12-01"}}, 422, "created_at"),
    "null for exception_occurred": (
        with_call(exception_occurred=None), 422, "$.mod_calls[0].exception_occurred",
    ),
    "null for log_level": (
        {
            **with_call(),
            "mod_logs": [
                {"mod_call_sequence": 0, "mod_name": "m", "log_message": "", "log_level": None}
            ],
        },
        422, "$.mod_logs[0].log_level",
    ),
    "two events of one number": (
        {"request": {"request_id": "a"}, "events": with_event()["events"] * 2},
        400, "events[1].sequence_order",
    ),
    "a call of no event": (with_call(event_sequence_order=1), 400, "mod_calls[0]"),
    "a call of event -1": (with_call(event_sequence_order=-1), 400, "mod_calls[0]"),
    "a log of no call": (
        {
            **with_call(),
            "mod_logs": [{"mod_call_sequence": 1, "mod_name": "m", "log_message": "x"}],
        },
        400, "mod_logs[0].mod_call_sequence",
    ),
    "an action of call -1": (
        {
            **with_call(),
            "actions": [{"mod_call_sequence": -1, "action_type": "Noop", "action_order": 0}],
        },
        400, "actions[0].mod_call_sequence",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_trace_is_refused_with_the_place_and_nothing_is_stored(
    received: Receiving, case: str
) -> None:
    body, status, named = REFUSED[case]
    before = received.store.totals()
    got, message = post(received, body)
    assert got == status, message
    assert named.lower() in message.lower()  # msgspec 0.23 writes UTF-8
    assert received.store.totals() == before


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json; charset=utf-8", 201),
        ("Application/JSON", 201),
        ("application/vnd.kqview+json", 201),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("application/jsonp", 415),
        ("", 415),
    ],
)
def test_body_has_to_be_called_json(received: Receiving, kind: str, status: int) -> None:
    got, message = post(received, {"request": {"request_id": "a"}}, **{"content-type": kind})
    assert got == status
    assert status == 201 or "application/json" in message


def test_compressed_body_is_refused(received: Receiving) -> None:
    assert post(received, b"x", **{"content-encoding": "gzip"})[0] == 415


@pytest.mark.parametrize("path", ["/", "/static/page.js", "/v1/traces", "/v1/traces/none", "/no"])
def test_no_reply_may_be_framed_or_taken_for_another_type(received: Receiving, path: str) -> None:
    with received.client() as client:
        check_browser_headers(client.get(path))


def test_body_above_75_mib_is_refused_before_it_is_sent(received: Receiving) -> None:
    limit = 75 * 2**20
    host, _, port = received.url.removeprefix("http://").partition(":")
    head = (
        f"POST /ingest HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {limit + 1}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.sendall(head.encode())
        reply = client.recv(2**16)
        while b"}" not in reply:
            reply += client.recv(2**16)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert str(limit).encode() in reply


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Receiving]:
    settings = IngestSettings(
        database=sqlite_url(tmp_path / "traces.db"), web=web_settings(max_body_bytes=1000)
    )
    with receiving(settings) as one:
        yield one


@pytest.mark.parametrize(("n_bytes", "status"), [(1000, 201), (1001, 413)])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_above_the_limit_is_refused_while_it_arrives_too(
    small: Receiving, n_bytes: int, status: int, is_chunked: bool
) -> None:
    body = json.dumps({"request": {"request_id": "a"}}).encode().ljust(n_bytes)
    content: Any = iter([body[:500], body[500:]]) if is_chunked else body
    with small.client() as client:
        assert client.post("/ingest", content=content, headers=JSON).status_code == status


def test_post_beyond_those_at_a_time_is_told_when_to_try_again(tmp_path: Path) -> None:
    settings = IngestSettings(database=sqlite_url(tmp_path / "traces.db"), max_posts=1)
    with receiving(settings) as received, received.receiver.admitted():
        with received.client() as client:
            reply = client.post("/ingest", json={"request": {"request_id": "a"}})
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert received.store.totals()[0] == 0


@pytest.mark.parametrize("path", ["/ingest", "/v1/ingest", "/ingest/"])
def test_both_paths_receive(received: Receiving, path: str) -> None:
    with received.client() as client:
        assert client.post(path, json={"request": {"request_id": "a"}}).status_code == 201


def test_options_are_answered_without_a_body(received: Receiving) -> None:
    page = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    with received.client() as client:
        plain = client.options("/ingest")
        preflight = client.options("/ingest", headers=page)
    assert (plain.status_code, plain.content, plain.headers["allow"]) == (204, b"", "OPTIONS, POST")
    assert (preflight.status_code, preflight.content) == (204, b"")
    assert preflight.headers["access-control-allow-origin"] == page["origin"]


def test_page_of_another_site_may_not_post(received: Receiving) -> None:
    body = {"request": {"request_id": "a"}}
    assert post(received, body, origin="https://evil.example")[0] == 403


def test_wrong_method_and_wrong_path_say_what_there_is(received: Receiving) -> None:
    with received.client() as client:
        wrong_method, wrong_path = client.get("/ingest"), client.get("/v1/nothing")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "OPTIONS, POST")
    assert wrong_path.status_code == 404
    assert "/openapi.json" in wrong_path.json()["error"]
