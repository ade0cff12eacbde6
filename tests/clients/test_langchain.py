"""LangChain's chat model for OpenAI's API, package ``langchain-openai``."""

from __future__ import annotations

import pytest

from tests.clients.conftest import CLOCK, KEY, QUESTION, ZONES

langchain_openai = pytest.importorskip("langchain_openai")


async def test_chat_model_answers_streams_calls_tools_and_fills_a_schema(base_url: str) -> None:
    # In one event loop: the package keeps its connections for the next model.
    for uses_responses in (False, True):
        model = langchain_openai.ChatOpenAI(
            model="demo", base_url=base_url, api_key=KEY, temperature=0, max_tokens=60,
            use_responses_api=uses_responses, stream_usage=True,
        )  # fmt: skip
        answer = model.invoke(QUESTION)
        assert answer.text
        assert answer.usage_metadata["output_tokens"] > 0
        chunks = [chunk async for chunk in model.astream(QUESTION)]
        assert "".join(chunk.text for chunk in chunks) == answer.text
        tool = {"name": "clock", "description": "The time.", "parameters": CLOCK}
        called = model.bind_tools([tool], tool_choice="required").invoke(QUESTION)
        assert called.tool_calls[0]["args"]["zone"] in ZONES
        schema = {"title": "clock", "description": "A clock.", **CLOCK}
        filled = model.with_structured_output(schema, method="json_schema").invoke(QUESTION)
        assert filled["zone"] in ZONES
