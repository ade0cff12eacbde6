"""The SSE stream of the kobold dialect over real sockets: its events, its refusals, its ends."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kqview.server import Settings
from tests.support.kobold import ATTENTION, LONG, PATH, TEXT, ids, stream, texts, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Serve, Served


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[httpx.Client]:
    with demo.client() as client:
        yield client


# ---- which events


def test_stream_without_attention_or_name_is_the_plain_one(client: httpx.Client):
    events = stream(client, prompt=TEXT, max_length=3, temperature=0.7, sampler_seed=12345)
    assert all(list(event) == ["token", "finish_reason"] for event in events)
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1] == {"token": "", "finish_reason": "length"}


def test_text_and_its_ids_give_the_same_stream(client: httpx.Client):
    sampling = {"max_length": 12, "temperature": 0.7, "sampler_seed": 12345}
    wanted = {"text": TEXT, "add_special_tokens": True}
    input_ids = client.post("/api/v1/tokenize", json=wanted).json()["token_ids"]
    by_text = stream(client, prompt=TEXT, **sampling)
    by_ids = stream(client, input_ids=input_ids, **sampling)
    assert by_text == by_ids
    assert stream(client, prompt="x", input_ids=input_ids, **sampling) == by_ids


def test_greedy_stream_is_the_engines(demo: Served, client: httpx.Client):
    tokens, done = typed(client, prompt=TEXT, max_length=16)
    generation = demo.engine.generate(TEXT, max_tokens=16, temperature=0)
    assert texts(tokens) == generation.read()
    assert ids(tokens) == generation.tokens
    assert done["finish_reason"] == "length"


@pytest.mark.parametrize("given", [{"request_id": "mine"}, {"output_attentions": False}])
def test_name_or_attention_field_makes_events_typed(client: httpx.Client, given: dict[str, Any]):
    *tokens, done = stream(client, prompt=TEXT, max_length=2, **given)
    assert {event["type"] for event in tokens} == {"token"}
    assert all(list(event) == ["type", "token", "request_id", "attention"] for event in tokens)
    assert all(event["attention"] is None for event in tokens)
    assert list(done) == ["type", "finish_reason", "total_tokens", "request_id"]
    name = given.get("request_id", done["request_id"])
    assert {event["request_id"] for event in [*tokens, done]} == {name}


# ---- what cannot work


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "INVALID_REQUEST"),
        ({"prompt": 1}, 400, "INVALID_REQUEST"),
        ({"input_ids": [1, "a"]}, 400, "INVALID_REQUEST"),
        ({"input_ids": [10**6]}, 400, "INVALID_TOKEN"),
        ({"input_ids": [-1]}, 400, "INVALID_TOKEN"),
        ({"input_ids": []}, 400, "INVALID_REQUEST"),
        ({"input_ids": [5] * 513}, 400, "CONTEXT_TOO_LONG"),
        ({"prompt": "word " * 600}, 400, "CONTEXT_TOO_LONG"),
        ({"input_ids": [5] * 9, "max_context_length": 8}, 400, "CONTEXT_TOO_LONG"),
        ({"prompt": "x", "max_length": 0}, 400, "INVALID_REQUEST"),
        ({"prompt": "x", "temperature": -1}, 400, "INVALID_REQUEST"),
        ({"prompt": "x", "attention_format": "all"}, 400, "INVALID_REQUEST"),
        ({"prompt": "x", "request_id": "r", "num_samples": 2}, 400, "INVALID_REQUEST"),
        ({"input_ids": [1], **ATTENTION, "attention_layers": [9]}, 400, "INVALID_REQUEST"),
        ({"prompt": "x", "grammar": "root ::= ("}, 400, "INVALID_REQUEST"),
    ],
)  # fmt: skip
def test_request_that_cannot_work_is_refused_before_the_first_byte(
    client: httpx.Client, body: dict[str, Any], status: int, code: str
):
    reply = client.post(PATH, json=body, headers={"origin": "http://localhost:8080"})
    assert reply.status_code == status
    assert reply.json()["error_code"] == code
    assert reply.json()["detail"]["msg"] == reply.json()["error"]
    assert reply.headers["access-control-allow-origin"] == "http://localhost:8080"


def test_larger_context_than_there_is_is_no_error(client: httpx.Client):
    tokens, _ = typed(client, prompt=TEXT, max_length=2, max_context_length=8192)
    assert len(tokens) == 2


def test_name_in_use_is_refused(demo: Served, client: httpx.Client):
    with client.stream("POST", PATH, json=LONG | {"request_id": "one"}) as reply:
        chunks = reply.iter_raw()  # dropping it would close the connection
        next(chunks)
        with demo.client() as other:
            refused = other.post(PATH, json=LONG | {"request_id": "one"})
        assert refused.status_code == 400
        assert "one" in refused.json()["error"]
    demo.wait_idle()


# ---- the end


def test_client_that_leaves_frees_the_slot(demo: Served, client: httpx.Client):
    with client.stream("POST", PATH, json=LONG) as reply:
        chunks = reply.iter_raw()  # dropping it would close the connection
        next(chunks)
        assert len(demo.service.runs) == 1
    demo.wait_idle(within_s=5)


def test_failed_stream_ends_with_an_event_and_is_cut(
    serve: Serve, caplog: pytest.LogCaptureFixture
):
    served = serve(Settings(request_timeout_s=0.5))
    raw = raw_reply(served, json.dumps(LONG).encode())
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    last = rest[rest.rindex(b"data: ") :]
    event = json.loads(last[len(b"data: ") : last.index(b"\n")])
    assert (event["type"], event["error_code"]) == ("error", "TIMEOUT")
    assert not raw.endswith(b"0\r\n\r\n")  # the chunk without which no client takes it as whole
    assert [record for record in caplog.records if record.exc_info] == []


def test_client_takes_a_failed_stream_for_failed(serve: Serve):
    served = serve(Settings(request_timeout_s=0.5))
    with served.client() as client, client.stream("POST", PATH, json=LONG) as reply:
        chunks = reply.iter_raw()
        next(chunks)
        wait_until_over(served)
        with pytest.raises(httpx.RemoteProtocolError):
            list(chunks)


def wait_until_over(served: Served) -> None:
    """Wait until the time of the only request is over; its client reads nothing meanwhile."""
    run = next(iter(served.service.runs.values()))
    served.wait_until(lambda: run.error is not None)


def raw_reply(served: Served, body: bytes) -> bytes:
    """Every byte of a reply whose client begins to read when the time of its request is over."""
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        served.wait_until(lambda: served.service.runs)
        wait_until_over(served)
        connection.settimeout(30)
        parts: list[bytes] = []
        while part := connection.recv(1 << 20):
            parts.append(part)
        return b"".join(parts)
