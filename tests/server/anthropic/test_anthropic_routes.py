"""Anthropic's routes over a socket, as any HTTP client sees them."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture

if TYPE_CHECKING:
    from tests.support.serving import Served

CHAT = [{"role": "user", "content": "Who is Anna?"}]
BODY: dict[str, Any] = {"model": "any", "max_tokens": 12, "temperature": 0, "messages": CHAT}
TOOL = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}


def post(served: Served, path: str = "/v1/messages", **body: Any) -> Any:
    with served.client() as client:
        return client.post(path, json=body)


def test_stream_names_each_event_by_its_type(demo: Served) -> None:
    with demo.client() as client:
        whole = client.post("/v1/messages", json=BODY).json()
        sent = client.post("/v1/messages", json={**BODY, "stream": True})
    assert sent.headers["content-type"].startswith("text/event-stream")
    pairs = [event.split("\n") for event in sent.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    assert (
        "".join(
            event["delta"]["text"] for event in events if event["type"] == "content_block_delta"
        )
        == whole["content"][0]["text"]
    )
    assert whole["model"] == "any"


def test_reasoning_that_the_request_opens_is_a_thinking_block(demo: Served) -> None:
    begun = {"role": "assistant", "content": "<think>"}
    message = post(demo, **{**BODY, "messages": [*CHAT, begun]}).json()
    (block,) = message["content"]
    assert block["type"] == "thinking"
    assert block["thinking"]
    assert block["signature"] == ""


def test_answer_that_the_request_begins_goes_on(demo: Served) -> None:
    text = post(demo, **BODY).json()["content"][0]["text"]
    begun, _, _ = text.partition(".")  # the end of a token
    turn = {"role": "assistant", "content": begun}
    rest = post(demo, **{**BODY, "messages": [*CHAT, turn]}).json()["content"][0]["text"]
    assert (begun + rest).startswith(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": ""}]}, r"messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "watch"}}, "'watch'"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "any"},
                "output_config": {"format": {"type": "json_schema", "schema": {"const": 1}}},
            },
            "output_config.format cannot be combined with a tool_choice",
        ),
        ({"tool_choice": {"type": "tool"}}, "tool_choice has no name"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format is refused",
        ),
    ],
)
def test_request_that_cannot_work_is_refused_in_anthropics_form(
    demo: Served, fields: dict[str, Any], message: str
) -> None:
    refused = post(demo, **{**BODY, **fields})
    assert refused.status_code == 400
    body = refused.json()
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert message in body["error"]["message"]


def test_count_is_that_of_the_prompt_with_its_tools(demo: Served) -> None:
    counts = [
        post(demo, "/v1/messages/count_tokens", **fields).json()["input_tokens"]
        for fields in ({"messages": CHAT}, {"messages": CHAT, "tools": [TOOL]})
    ]
    assert counts[0] == len(demo.engine.apply_chat_template(CHAT))
    assert counts[1] > counts[0]


# ---- attention


def test_each_token_has_an_event_with_the_rows_of_the_engine(demo: Served) -> None:
    wanted = {"values": "probs", "layers": [0, 2]}
    sent = post(demo, **BODY, stream=True, attention=wanted).text.strip().split("\n\n")
    rows = [json.loads(event.split("data: ")[1]) for event in sent]
    found = [row["attention"] for row in rows if row["type"] == "attention"]
    prompt = demo.engine.apply_chat_template(CHAT)
    capture = Capture("probs", layers=[0, 2])
    expected = demo.engine.generate(prompt, max_tokens=12, temperature=0, capture=capture)
    for token, one in zip(expected, found, strict=True):
        values = np.frombuffer(base64.b64decode(one["data"]), np.float32).reshape(one["shape"])
        assert (one["n"], one["token_id"]) == (token.index, token.id)
        np.testing.assert_allclose(values, token.attention, atol=1e-5)


def test_spans_are_sums_of_the_rows(demo: Served) -> None:
    spans = [[0, 4], [2, 7], [4, None]]
    found: dict[str, list[dict[str, Any]]] = {}
    for name, more in (("rows", {}), ("sums", {"spans": spans})):
        wanted = {"values": "probs", **more}
        message = post(demo, **BODY, cache_prompt=False, attention=wanted).json()
        found[name] = message["attention"]
    for whole, one in zip(found["rows"], found["sums"], strict=True):
        rows, sums = (
            np.frombuffer(base64.b64decode(each["data"]), np.float32).reshape(each["shape"])
            for each in (whole, one)
        )
        assert one["spans"] == spans
        assert "context_length" not in one
        expected = np.stack([rows[..., start:end].sum(-1) for start, end in spans], axis=-1)
        # Two runs: what shares a step may move the last bits.
        np.testing.assert_allclose(sums, expected, atol=2e-3)


def test_message_has_the_attention_of_its_stream(demo: Served) -> None:
    wanted = {"reduce": "mean", "prompt": True}
    message = post(demo, **BODY, attention=wanted).json()
    sent = post(demo, **BODY, stream=True, attention=wanted).text.strip().split("\n\n")
    events = [json.loads(event.split("data: ")[1]) for event in sent]
    for name, kind in (("attention", "attention"), ("prompt_attention", "prompt_attention")):
        assert message[name] == [one["attention"] for one in events if one["type"] == kind]
    assert events[0]["type"] == "message_start"
    assert len(message["attention"]) == 12


def test_kept_rows_are_found_by_the_id_of_the_message(demo: Served) -> None:
    message = post(demo, **BODY, attention={"reduce": "mean_heads", "delivery": "id"}).json()
    assert "attention" not in message
    with demo.client() as client:
        kept = client.get(f"/v1/attention/{message['id']}").json()
        row = client.get(f"/v1/attention/{message['id']}/0")
    shape = kept["choices"][0]["rows"][0]["shape"]
    assert len(kept["choices"][0]["rows"]) == 12
    assert np.frombuffer(row.content, np.float32).size == np.prod(shape)
