"""Requests of the dream dialect that cannot work: what they are told, over HTTP and WebSocket."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
import pytest

from kqview.server.api.dream import schema
from tests.support.dream import PROMPT, DreamSocket, wrong_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.support.serving import Served


@pytest.fixture
def client(demo: Served) -> Iterator[httpx.Client]:
    with demo.client() as client:
        yield client


@pytest.fixture
def ids(demo: Served) -> list[int]:
    return demo.engine.tokenize(PROMPT, add_special=True)


# ---- over HTTP


@pytest.mark.parametrize(
    ("fields", "code", "figures"),
    [
        ({"input_ids": [5, 999999]}, "INVALID_TOKEN", {"vocab_size"}),
        ({"input_ids": [5], "stop_tokens": [-1]}, "INVALID_TOKEN", {"vocab_size"}),
        ({"input_ids": [5] * 100_000}, "CONTEXT_TOO_LONG", {"context_length", "prompt_tokens"}),
        ({"prompt": "x " * 50_000}, "CONTEXT_TOO_LONG", {"context_length"}),
        ({"input_ids": []}, "INVALID_REQUEST", set()),
        ({}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "temperature": -1}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "max_new_tokens": 0}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "num_samples": 17}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "num_samples": 0}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "seed": 2**40}, "INVALID_REQUEST", set()),
        (
            {"input_ids": [5], "return_attention": True, "attention_layers": [2**70]},
            "INVALID_REQUEST",
            set(),
        ),
        (
            {"input_ids": [5], "return_attention": True, "attention_heads": [8]},
            "INVALID_REQUEST",
            set(),
        ),
        (
            {
                "input_ids": [5], "return_attention": True, "attention_format": "aggregated",
                "aggregation_mode": "weighted_layers", "layer_weights": [1.0],
            },
            "INVALID_REQUEST",
            set(),
        ),
        (
            {
                "input_ids": [5], "return_attention": True, "attention_format": "viz",
                "prompt_attention": True,
            },
            "INVALID_REQUEST",
            set(),
        ),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_request_that_cannot_work_is_refused_before_it_begins(
    demo: Served, client: httpx.Client, fields: dict[str, Any], code: str, figures: set[str]
):
    reply = client.post("/api/v1/generate", json=fields)
    assert reply.status_code == 400
    body = reply.json()
    assert (body["type"], body["error_code"]) == ("error", code)
    assert body.keys() == {"type", "error", "error_code", "detail"} | figures
    assert body["detail"]["msg"] == body["error"]  # where KoboldAI's clients look
    demo.wait_idle()


FIELDS = get_type_hints(schema.GenerateBody)


@pytest.mark.parametrize("field", FIELDS)
def test_field_of_another_type_is_refused_by_name(client: httpx.Client, field: str):
    body = {"input_ids": [5], field: wrong_value(FIELDS[field])}
    reply = client.post("/api/v1/generate", json=body)
    assert reply.status_code == 400
    assert f"`$.{field}" in reply.json()["error"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000, b"nul"])
def test_body_that_is_no_request_is_refused(client: httpx.Client, raw: bytes):
    reply = client.post("/api/v1/generate", content=raw)
    assert reply.status_code == 400
    assert reply.json()["error_code"] == "INVALID_REQUEST"


# ---- over the WebSocket


MISTAKES = [
    ({"input_ids": [999999]}, "INVALID_TOKEN", {"vocab_size"}),
    ({"input_ids": [1], "banned_tokens": [-5]}, "INVALID_TOKEN", {"vocab_size"}),
    ({"input_ids": [1] * 100_000}, "CONTEXT_TOO_LONG", {"context_length", "prompt_tokens"}),
    (
        {"input_ids": [1, 2, 3], "max_context_length": 2},
        "CONTEXT_TOO_LONG",
        {"context_length", "prompt_tokens"},
    ),
    ({"input_ids": []}, "INVALID_REQUEST", set[str]()),
    ({"input_ids": [1], "top_p": 2}, "INVALID_REQUEST", set[str]()),
    ({"input_ids": [1], "num_samples": 1000}, "INVALID_REQUEST", set[str]()),
    ({}, "INVALID_REQUEST", set[str]()),
]


@pytest.mark.parametrize("packs", [False, True])
def test_mistakes_are_events_and_the_socket_stays_usable(demo: Served, ids: list[int], packs: bool):
    with DreamSocket(demo.ws_url, packs=packs) as socket:
        for fields, code, figures in MISTAKES:
            socket.send(**{"request_id": "x", "temperature": 0, **fields})
            event = socket.event()
            assert (event["type"], event["error_code"]) == ("error", code), event
            assert event.keys() == {"type", "request_id", "error", "error_code"} | figures
        tokens, _ = socket.generate(input_ids=ids, max_new_tokens=2)
        assert len(tokens) == 2


def test_field_of_a_message_of_another_type_is_refused_by_name(demo: Served, ids: list[int]):
    fields = get_type_hints(schema.Generate)
    with DreamSocket(demo.ws_url) as socket:
        for name, kind in fields.items():
            socket.socket.send(
                json.dumps({"type": "generate", "input_ids": [1], name: wrong_value(kind)})
            )
            event = socket.event()
            assert event["error_code"] == "INVALID_REQUEST"
            assert f"`$.{name}" in event["error"]
        assert len(socket.generate(input_ids=ids, max_new_tokens=2)[0]) == 2


@pytest.mark.parametrize(
    "raw",
    ['{"type": "sing"}', "{}", "[]", "", "{", "nul", '{"type": 1}', b"\xff\x00", "[" * 50_000],
)
def test_message_that_is_none_is_an_error_event(demo: Served, ids: list[int], raw: bytes | str):
    with DreamSocket(demo.ws_url) as socket:
        socket.socket.send(raw)
        event = socket.event()
        assert (event["type"], event["error_code"]) == ("error", "INVALID_REQUEST")
        assert len(socket.generate(input_ids=ids, max_new_tokens=2)[0]) == 2


def test_messagepack_socket_reads_json_text_too(demo: Served, ids: list[int]):
    with DreamSocket(demo.ws_url, packs=True) as socket:
        socket.socket.send(json.dumps({"type": "generate", "input_ids": ids, "max_new_tokens": 1}))
        assert [one["type"] for one in socket.until("done")] == ["token", "done"]
        socket.socket.send(msgspec.msgpack.encode({"type": "sing"}))
        assert socket.event()["error_code"] == "INVALID_REQUEST"
