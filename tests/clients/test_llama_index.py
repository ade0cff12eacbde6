"""LlamaIndex's chat model for servers of OpenAI's API, package ``llama-index-llms-openai-like``."""

from __future__ import annotations

import pytest

from tests.clients.conftest import KEY, QUESTION, ZONES

like = pytest.importorskip("llama_index.llms.openai_like")
llms = pytest.importorskip("llama_index.core.llms")
tools = pytest.importorskip("llama_index.core.tools")


async def test_chat_model_answers_streams_and_calls_tools(base_url: str) -> None:
    model = like.OpenAILike(
        model="demo", api_base=base_url, api_key=KEY, temperature=0, max_tokens=60,
        is_chat_model=True, is_function_calling_model=True, context_window=1024,
    )  # fmt: skip
    question = [llms.ChatMessage(role="user", content=QUESTION)]
    answer = model.chat(question)
    assert answer.message.content
    chunks = [chunk async for chunk in await model.astream_chat(question)]
    assert "".join(chunk.delta or "" for chunk in chunks) == answer.message.content
    assert chunks[-1].message.content == answer.message.content

    def clock(zone: str) -> str:
        """The time in a zone."""
        return "12:00" if zone in ZONES else ""

    tool = tools.FunctionTool.from_defaults(fn=clock)
    called = model.chat_with_tools([tool], user_msg=QUESTION, tool_required=True)
    (call,) = model.get_tool_calls_from_response(called)
    assert call.tool_name == "clock"
