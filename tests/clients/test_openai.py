"""The official ``openai`` package: chats, completions, tools, parsed answers, embeddings."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from kqview import Engine
from kqview.server import Settings
from tests.clients.conftest import CLOCK, KEY, QUESTION, ZONES
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")

ASKED: list[Any] = [{"role": "user", "content": QUESTION}]
PLAIN: dict[str, Any] = {"model": "demo", "messages": ASKED, "max_tokens": 8, "temperature": 0}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "parameters": CLOCK, "strict": True},
}
FORCED: dict[str, Any] = {
    "model": "demo", "messages": ASKED, "max_tokens": 90, "temperature": 0,
    "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
}  # fmt: skip


class Clock(pydantic.BaseModel):
    """What a parsed answer is."""

    model_config = pydantic.ConfigDict(extra="forbid")
    zone: Literal["UTC", "CET"]


@pytest.fixture
def client(base_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        yield client


def test_models_are_listed_and_retrieved(client: Any):
    [model] = client.models.list().data
    # "created" is when an answer is made, as llama-server has it.
    retrieved = client.models.retrieve(model.id)
    assert retrieved.model_copy(update={"created": model.created}) == model


def test_chat_whole_and_streamed(client: Any, served: Served):
    whole = client.chat.completions.create(**PLAIN)
    expected = served.engine.chat(ASKED, max_tokens=8, temperature=0).read()
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 8
    with client.chat.completions.create(
        **PLAIN, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    texts = [one.delta.content or "" for chunk in chunks for one in chunk.choices]
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0


def test_echo_gives_the_logprobs_of_the_prompt(client: Any):
    asked: dict[str, Any] = {"model": "demo", "prompt": "Anna is a", "temperature": 0}
    [choice] = client.completions.create(**asked, max_tokens=0, echo=True, logprobs=1).choices
    assert choice.text == "Anna is a"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    with client.completions.create(
        **asked, max_tokens=3, echo=True, logprobs=1, stream=True
    ) as stream:
        parts = [chunk.choices[0].logprobs for chunk in stream if chunk.choices]
    tokens = [token for part in parts if part for token in part.tokens]
    n = len(choice.logprobs.tokens)
    assert tokens[:n] == choice.logprobs.tokens
    assert len(tokens) == n + 3


async def test_chat_with_the_async_client(base_url: str):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY, max_retries=0) as client:
        whole = await client.chat.completions.create(**PLAIN)
        stream = await client.chat.completions.create(**PLAIN, stream=True)
        texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == whole.choices[0].message.content


def test_stream_helper_collects_the_answer(client: Any):
    with client.chat.completions.stream(**FORCED) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls[0].function.parsed_arguments["zone"] in ZONES


def test_forced_call_and_its_result(client: Any):
    choice = client.chat.completions.create(**FORCED).choices[0]
    assert choice.finish_reason == "tool_calls"
    [call] = choice.message.tool_calls
    assert call.function.name == "clock"
    answered = [
        *ASKED,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": "noon"},
    ]
    reply = client.chat.completions.create(**{**PLAIN, "messages": answered})
    assert reply.choices[0].message.content


def test_parsed_answer_is_an_object(client: Any):
    message = (
        client.chat.completions.parse(**{**PLAIN, "max_tokens": 60}, response_format=Clock)
        .choices[0]
        .message
    )
    assert isinstance(message.parsed, Clock)


def test_parsed_call_has_its_arguments(client: Any):
    tool = openai.pydantic_function_tool(Clock, name="clock")
    message = client.chat.completions.parse(**{**FORCED, "tools": [tool]}).choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Clock)


def test_logprobs_and_several_answers(client: Any):
    reply = client.chat.completions.create(**{**PLAIN, "temperature": 1}, n=2, logprobs=True,
                                           top_logprobs=2, seed=3)  # fmt: skip
    assert [len(one.logprobs.content) for one in reply.choices] == [8, 8]
    assert len(reply.choices[1].logprobs.content[0].top_logprobs) == 2


def test_completion_whole_and_streamed(client: Any):
    asked: dict[str, Any] = {"model": "demo", "prompt": ["Anna is a", "Tom"], "max_tokens": 6,
                             "temperature": 0}  # fmt: skip
    whole = client.completions.create(**asked, logprobs=1)
    assert [len(one.logprobs.tokens) for one in whole.choices] == [6, 6]
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in whole.choices]


def test_attention_in_the_reply_and_by_its_id(client: Any):
    wanted = {"attention": {"reduce": "mean"}}
    [*chunks] = client.chat.completions.create(**PLAIN, stream=True, extra_body=wanted)
    rows = [one.attention for chunk in chunks for one in chunk.choices if hasattr(one, "attention")]
    assert len(rows) == 8
    kept = {"attention": {"reduce": "mean", "delivery": "id"}}
    reply = client.chat.completions.create(**PLAIN, extra_body=kept)
    for row in rows:
        data = client.get(f"/attention/{reply.id}/{row['n']}", cast_to=bytes)
        sent = base64.b64decode(row["data"])
        assert np.allclose(np.frombuffer(data, "<f4"), np.frombuffer(sent, "<f4"), atol=1e-3)


def test_errors_have_the_classes_of_the_package(client: Any, base_url: str):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="demo", prompt="a", suffix="b")
    assert (caught.value.param, caught.value.type) == ("suffix", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")
    with (
        openai.OpenAI(base_url=base_url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_embeddings_in_both_encodings():
    texts = ["Anna is a painter.", "Ben"]
    with (
        Engine.demo(n_threads=1, pooling="mean") as engine,
        serving(Settings(), engine) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        expected = np.asarray(engine.embed(texts))
        coded = client.embeddings.create(model="demo", input=texts)  # base64 on the wire
        plain = client.embeddings.create(model="demo", input=texts, encoding_format="float")
    for reply in (coded, plain):
        assert np.allclose([one.embedding for one in reply.data], expected, atol=1e-3)


def test_annotations_are_the_packages_own_types(client: Any):
    asked = {
        **PLAIN, "max_tokens": 40,
        "extra_body": {"documents": [{"text": "Anna has a ball.", "title": "Ball", "url": "a:b"}]},
    }  # fmt: skip
    message = client.chat.completions.create(**asked).choices[0].message
    for one in message.annotations:
        assert isinstance(one, openai.types.chat.chat_completion_message.Annotation)
        assert (one.url_citation.title, one.url_citation.url) == ("Ball", "a:b")
        assert message.content[one.url_citation.start_index : one.url_citation.end_index].strip()
    seen: list[Any] = []
    with client.chat.completions.create(**asked, stream=True) as chunks:
        for chunk in chunks:
            seen += getattr(chunk.choices[0].delta, "annotations", None) or ()
    assert [one["url_citation"]["end_index"] for one in seen] == [
        one.url_citation.end_index for one in message.annotations
    ]
