"""The official ``openai`` package: the Responses API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest

from tests.clients.conftest import CLOCK, KEY, QUESTION, ZONES

if TYPE_CHECKING:
    from tests.support.serving import Served

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

CHAT: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 12,
    "temperature": 0,
    "messages": [{"role": "user", "content": QUESTION}],
}
RESPONSE: dict[str, Any] = {
    "model": "demo",
    "max_output_tokens": 20,
    "temperature": 0,
    "input": QUESTION,
}
RESPONSE_CALL: dict[str, Any] = {
    **RESPONSE,
    "max_output_tokens": 120,
    "tools": [{"type": "function", "name": "clock", "parameters": CLOCK, "strict": True}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}


class Clock(pydantic.BaseModel):
    """What the model has to write."""

    zone: Literal["UTC", "CET"]


@pytest.fixture
def client(base_url: str) -> Any:
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as one:
        yield one


def test_response_is_the_answer_of_the_chat(client: Any, served: Served) -> None:
    response = client.responses.create(**RESPONSE, instructions="Tell stories.")
    chat = [{"role": "system", "content": "Tell stories."}, *CHAT["messages"]]
    text = served.engine.chat(chat, max_tokens=20, temperature=0).read()
    assert response.output_text == text
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert response.usage.output_tokens == 20
    counted = client.responses.input_tokens.count(
        model="demo", input=QUESTION, instructions="Tell stories."
    )
    assert counted.input_tokens == response.usage.input_tokens


def test_response_streams_every_event_in_order(client: Any) -> None:
    options = {**RESPONSE, "max_output_tokens": 60, "text": {"format": schema_format()}}
    with client.responses.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert final.output_text == "".join(deltas)
    assert final.usage.output_tokens == client.responses.create(**options).usage.output_tokens


def schema_format() -> dict[str, Any]:
    return {"type": "json_schema", "name": "clock", "schema": CLOCK, "strict": True}


def test_response_parses_a_model(client: Any) -> None:
    response = client.responses.parse(**{**RESPONSE, "max_output_tokens": 60}, text_format=Clock)
    assert response.output_parsed.zone in ZONES


def test_response_calls_a_tool_and_reads_its_result(client: Any) -> None:
    response = client.responses.create(**RESPONSE_CALL)
    assert response.status == "completed"
    (call,) = response.output
    assert (call.type, call.name) == ("function_call", "clock")
    turns = [
        {"role": "user", "content": QUESTION},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"},
    ]
    after = client.responses.create(**{**RESPONSE, "input": turns})
    assert after.output_text
    with client.responses.stream(**RESPONSE_CALL) as stream:
        streamed = stream.get_final_response()
    assert streamed.output[0].arguments == call.arguments


async def test_async_response_has_logprobs(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY) as client:
        include = ["message.output_text.logprobs"]
        response = await client.responses.create(**RESPONSE, include=include, top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(one.token for one in logprobs) == response.output_text
    assert all(len(one.top_logprobs) == 2 for one in logprobs)


def test_what_needs_kept_responses_is_a_clear_error(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="previous_response_id") as refused:
        client.responses.create(**RESPONSE, previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_annotations_are_the_packages_own_types(client: Any) -> None:
    asked = {
        **RESPONSE, "max_output_tokens": 40,
        "extra_body": {"documents": [{"text": "Anna has a ball.", "title": "Ball"}]},
    }  # fmt: skip
    (part,) = client.responses.create(**asked).output[0].content
    kind = openai.types.responses.response_output_text.AnnotationURLCitation
    assert part.annotations
    assert all(isinstance(one, kind) and one.title == "Ball" for one in part.annotations)
    with client.responses.stream(**asked) as stream:
        added = [
            dict(event.annotation)  # which openai 2 leaves untyped
            for event in stream
            if event.type == "response.output_text.annotation.added"
        ]
    assert [one["end_index"] for one in added] == [one.end_index for one in part.annotations]
