"""Requests of the Responses API as conversations: pure, without a server."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kqview.errors import RequestError
from kqview.server.api.responses import convert, schema


def body_of(**fields: Any) -> schema.ResponsesBody:
    fields.setdefault("input", "Hello")
    return msgspec.convert(fields, schema.ResponsesBody)


# ---- requests


def test_text_is_a_message_behind_the_instructions() -> None:
    assert convert.messages_of(body_of(instructions="Be brief.")) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
    ]


def test_items_of_one_turn_become_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Time?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [
            {"type": "reasoning_text", "text": "I need the clock."}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [
            {"type": "output_text", "text": "One moment.", "annotations": []}]},
        {"type": "function_call", "call_id": "a", "name": "clock", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "clock", "arguments": '{"zone":"UTC"}'},
        {"type": "function_call_output", "call_id": "a", "output": "12:00"},
        {"type": "function_call_output", "call_id": "b", "output": [
            {"type": "input_text", "text": "13:00"}]},
    ]  # fmt: skip
    calls = [
        {"id": "a", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
        {
            "id": "b",
            "type": "function",
            "function": {"name": "clock", "arguments": '{"zone":"UTC"}'},
        },
    ]
    assert convert.messages_of(body_of(input=items)) == [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "content": "One moment.",
            "reasoning_content": "I need the clock.",
            "tool_calls": calls,
        },
        {"role": "tool", "tool_call_id": "a", "content": "12:00"},
        {"role": "tool", "tool_call_id": "b", "content": "13:00"},
    ]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "item_reference", "id": "msg_1"}, r"input\[1\].*'item_reference'"),
        ({"role": "owner", "content": ""}, r"input\[1\].*'owner'"),
        ({"role": "user", "content": [{"type": "input_image"}]}, r"input\[1\].content\[0\].*image"),
        ({"type": "function_call", "call_id": "a"}, r"input\[1\].*name"),
        ({"type": "function_call_output", "output": ""}, r"input\[1\].*call_id"),
    ],
)
def test_item_that_cannot_be_read_is_refused_with_its_place(
    item: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        convert.messages_of(body_of(input=[{"role": "user", "content": "Hi"}, item]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("previous_response_id", "resp_1"), ("conversation", {"id": "conv_1"}),
        ("prompt", {"id": "pmpt_1"}), ("background", True), ("store", True),
    ],
)  # fmt: skip
def test_what_needs_kept_responses_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field} ") as refused:
        convert.check_stateless(body_of(**{field: value}))
    assert refused.value.parameter == field
    convert.check_stateless(body_of(store=False, background=False))


def test_tools_of_openais_servers_are_left_out() -> None:
    parameters = {"type": "object", "properties": {"zone": {"type": "string"}}}
    tools = [
        {"type": "web_search"},
        {"type": "function", "name": "clock", "parameters": parameters, "strict": True},
    ]
    function = {"name": "clock", "description": "", "parameters": parameters}
    assert convert.tools_of(body_of(tools=tools)) == [{"type": "function", "function": function}]
    with pytest.raises(RequestError, match=r"tools\[0\]"):
        convert.tools_of(body_of(tools=[{"type": "function"}]))


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": None}, "chat_template_kwargs": {"a": 1}}, {"a": 1}),
    ],
)
def test_effort_is_an_option_of_the_template(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    assert convert.template_options_of(body_of(**fields)) == options


@pytest.mark.parametrize(
    ("fields", "n_top"),
    [
        ({"top_logprobs": 2}, None),
        ({"include": [convert.LOGPROBS]}, 0),
        ({"include": [convert.LOGPROBS], "top_logprobs": 2}, 2),
    ],
)
def test_logprobs_come_where_include_asks_for_them(
    fields: dict[str, Any], n_top: int | None
) -> None:
    assert convert.chat_of(body_of(**fields)).top_logprobs == n_top


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", None, None, True)),
        ("none", ("none", None, None, True)),
        ("required", ("required", None, None, True)),
        ({"type": "function", "name": "clock"}, ("required", "clock", None, False)),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "mcp"}, {"type": "function", "name": "clock"}]},
            ("required", None, ["clock"], True),
        ),
    ],
)  # fmt: skip
def test_choice_of_tools_is_the_neutral_one(choice: Any, expected: tuple[Any, ...]) -> None:
    chat = convert.chat_of(body_of(tool_choice=choice))
    found = (chat.tool_choice, chat.tool_name, chat.allowed_tools, chat.parallel_calls)
    assert found == expected
