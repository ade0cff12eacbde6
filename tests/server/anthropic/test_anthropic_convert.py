"""Anthropic's requests as conversations: pure, without a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kqview.server.api.anthropic import convert, schema


def body_of(**fields: Any) -> schema.MessagesBody:
    fields.setdefault("messages", [{"role": "user", "content": "Hello"}])
    return msgspec.convert(fields, schema.MessagesBody)


# ---- requests


def test_system_prompt_is_the_first_message() -> None:
    blocks = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    assert convert.messages_of(body_of(system="Be brief."))[0] == {
        "role": "system",
        "content": "Be brief.",
    }
    assert convert.messages_of(body_of(system=blocks))[0] == {"role": "system", "content": blocks}


def test_calls_and_thoughts_of_a_turn_become_one_message() -> None:
    turn = [
        {"type": "thinking", "thinking": "I need the time.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "One moment."},
        {"type": "tool_use", "id": "a", "name": "clock", "input": {"zone": "UTC"}},
    ]
    body = body_of(messages=[{"role": "assistant", "content": turn}])
    function = {"name": "clock", "arguments": {"zone": "UTC"}}
    assert convert.messages_of(body) == [
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "I need the time.",
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        }
    ]


def test_results_precede_the_text_of_their_turn() -> None:
    turn = [
        {"type": "text", "text": "Here it is."},
        {"type": "tool_result", "tool_use_id": "a", "content": "12:00"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "13:00"}]},
        {"type": "tool_result", "tool_use_id": "c", "is_error": True},
    ]
    assert convert.messages_of(body_of(messages=[{"role": "user", "content": turn}])) == [
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "tool", "tool_call_id": "b", "content": "13:00"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "Here it is."},
    ]
    alone = body_of(messages=[{"role": "user", "content": turn[1:2]}])
    assert [message["role"] for message in convert.messages_of(alone)] == ["tool"]


def test_tools_of_anthropics_servers_are_left_out() -> None:
    schema_ = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tools = [
        {"name": "clock", "description": "The time.", "input_schema": schema_},
        {"name": "web_search", "type": "web_search_20250305"},
    ]
    function = {"name": "clock", "description": "The time.", "parameters": schema_}
    assert convert.tools_of(body_of(tools=tools)) == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking": {"type": "disabled"}},
            {"enable_thinking": True},
        ),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ],
)
def test_thinking_and_effort_are_options_of_the_template(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    assert convert.template_options_of(body_of(**fields)) == options
