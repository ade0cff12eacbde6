"""The Responses API over a socket, as any HTTP client sees it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.serving import Served

BODY: dict[str, Any] = {"input": "Who is Anna?", "max_output_tokens": 12, "temperature": 0}


def post(served: Served, path: str = "/v1/responses", **body: Any) -> Any:
    with served.client() as client:
        return client.post(path, json=body)


def test_stream_names_each_event_by_its_type(demo: Served) -> None:
    sent = post(demo, **BODY, stream=True)
    assert sent.headers["content-type"].startswith("text/event-stream")
    pairs = [event.split("\n") for event in sent.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name for name, _ in pairs] == [f"event: {event['type']}" for event in events]
    whole = post(demo, **BODY).json()
    last = events[-1]["response"]
    assert last["output"][0]["content"] == whole["output"][0]["content"]
    assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == 12


def test_reasoning_that_the_request_opens_is_a_reasoning_item(demo: Served) -> None:
    turns = [
        {"role": "user", "content": "Who is Anna?"},
        {"role": "assistant", "content": "<think>"},
    ]
    response = post(demo, **{**BODY, "input": turns}).json()
    (item,) = response["output"]
    assert item["type"] == "reasoning"
    assert item["content"][0]["text"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input is empty"),
        ({"store": True}, "store"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "y"}}}},
            "text.format is refused",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {
                "tools": [{"type": "function", "name": "f"}],
                "tool_choice": "required",
                "text": {"format": {"type": "json_object"}},
            },
            "text.format cannot be combined with a tool_choice",
        ),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}},
            "'x', which is not among the tools",
        ),
        ({"top_logprobs": 21}, "top_logprobs is 21"),
        ({"top_logprobs": -1}, "top_logprobs is -1"),
        ({"max_output_tokens": -5}, "max_output_tokens is -5"),
    ],
)
def test_request_that_cannot_work_is_refused_in_openais_form(
    demo: Served, fields: dict[str, Any], message: str
) -> None:
    refused = post(demo, **{**BODY, **fields})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


def test_paths_of_llama_cpps_server_lead_here_too(demo: Served) -> None:
    counted = post(demo, "/responses/input_tokens", input="Who is Anna?").json()
    used = post(demo, "/responses", **BODY).json()["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used["input_tokens"]}


def test_each_token_has_an_event_with_its_row_and_the_whole_has_the_same(demo: Served) -> None:
    wanted = {"values": "probs", "prompt": True}
    sent = post(demo, **BODY, stream=True, attention=wanted).text.strip().split("\n\n")
    events = [json.loads(event.split("data: ")[1]) for event in sent]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    whole = post(demo, **BODY, attention=wanted).json()
    for name in ("attention", "prompt_attention"):
        found = [one["attention"] for one in events if one["type"] == f"response.{name}"]
        assert found == whole[name]
    assert [one["n"] for one in whole["attention"]] == [*range(12)]


def test_kept_rows_are_found_by_the_id_of_the_response(demo: Served) -> None:
    response = post(demo, **BODY, attention={"reduce": "mean", "delivery": "id"}).json()
    assert "attention" not in response
    with demo.client() as client:
        kept = client.get(f"/v1/attention/{response['id']}").json()
    assert len(kept["choices"][0]["rows"]) == 12
