"""The official ``openai`` package: chat completions."""

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


class Clock(pydantic.BaseModel):
    """What the model has to write."""

    zone: Literal["UTC", "CET"]


@pytest.fixture
def client(base_url: str) -> Any:
    with openai.OpenAI(base_url=base_url, api_key=KEY, max_retries=0) as one:
        yield one


def test_chat_answers_as_the_engine_does(client: Any, served: Served) -> None:
    completion = client.chat.completions.create(**CHAT)
    text = served.engine.chat(CHAT["messages"], max_tokens=12, temperature=0).read()
    assert completion.choices[0].message.content == text
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage.completion_tokens == 12
    assert completion.model == CHAT["model"]
    assert [one.id for one in client.models.list()] == [served.service.pool.default.name]


async def test_async_chat_streams(base_url: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY) as client:
        whole = await client.chat.completions.create(**CHAT)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [one async for one in await client.chat.completions.create(**CHAT, **options)]
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chat_calls_a_tool_and_parses_a_model(client: Any) -> None:
    tool = {"type": "function", "function": {"name": "clock", "parameters": CLOCK}}
    wide = {**CHAT, "max_tokens": 120}
    forced = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    called = client.chat.completions.create(**wide, **forced)
    assert called.choices[0].finish_reason == "tool_calls"
    assert called.choices[0].message.tool_calls[0].function.name == "clock"
    parsed = client.chat.completions.parse(**wide, response_format=Clock)
    assert parsed.choices[0].message.parsed.zone in ZONES
