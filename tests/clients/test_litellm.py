"""LiteLLM, as a client of OpenAI's and of Anthropic's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import CLOCK, KEY, QUESTION, ZONES

if TYPE_CHECKING:
    from tests.support.serving import Served

litellm = pytest.importorskip("litellm")

QUESTIONS = [{"role": "user", "content": QUESTION}]


@pytest.fixture(params=["openai", "anthropic"])
def options(request: pytest.FixtureRequest, served: Served, base_url: str) -> dict[str, Any]:
    base = base_url if request.param == "openai" else served.url
    return {
        "model": f"{request.param}/demo", "api_base": base, "api_key": KEY, "temperature": 0,
        "max_tokens": 60, "messages": QUESTIONS,
    }  # fmt: skip


async def test_completion_answers_streams_and_calls_tools(options: dict[str, Any]) -> None:
    answer = litellm.completion(**options).choices[0].message.content
    assert answer
    stream = await litellm.acompletion(**options, stream=True)
    pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(pieces) == answer
    tool = {"type": "function", "function": {"name": "clock", "parameters": CLOCK}}
    called = litellm.completion(**options, tools=[tool], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "clock"
    assert any(zone in call.function.arguments for zone in ZONES)
