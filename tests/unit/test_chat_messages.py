"""Messages of a chat as they are checked, and tool calls read from an answer."""

from __future__ import annotations

import json
from collections import UserDict
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kqview.chat import Reply, ToolCall, parse_tool_calls
from kqview.chat.turn import checked_messages, checked_options, checked_tools
from kqview.errors import RequestError

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "list of messages"),
        ("Hi", "list of messages"),
        ([], "empty"),
        (["Hi"], r"messages\[0\] is of type str"),
        ([{"content": "x"}], r"messages\[0\]: role is None"),
        ([{"role": "", "content": "x"}], "role is ''"),
        ([{"role": "user\n", "content": "x"}], "role"),
        ([{"role": 1, "content": "x"}], "role is 1"),
        ([{"role": "user"}], "content is missing"),
        ([{"role": "user", "content": None}], "content is missing"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": 3}], r"messages\[1\]"),
        ([{"role": "user", "content": {"text": "x"}}], "list of parts"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "only 'text'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text is missing"),
        ([{"role": "user", "content": "x", "extra": object()}], "extra is of type object"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], "key 1"),
        ([{"role": "user", "content": "x", "tool_call_id": 7}], "tool_call_id"),
        ([{"role": "assistant", "tool_calls": "f"}], "list of calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"name of .* is missing"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "arguments is '{'",
        ),
    ],
)
def test_message_that_is_not_well_formed_is_refused(messages: Any, words: str):
    with pytest.raises(RequestError, match=words):
        checked_messages(messages)


def test_deeply_nested_message_is_refused():
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        checked_messages([{"role": "user", "content": "x", "extra": deep}])


def test_messages_are_copies_of_plain_types():
    class Loud(str):
        def __str__(self) -> str:
            raise AssertionError("code of the caller ran")

    mine = UserDict({"role": Loud("user"), "content": Loud("Hi"), "n": (1, 2.5, True, None)})
    (message,) = checked_messages((mine,))
    assert message == {"role": "user", "content": "Hi", "n": [1, 2.5, True, None]}
    assert type(message["content"]) is str
    message["content"] = "changed"
    assert mine["content"] == "Hi"


def test_arguments_as_json_text_become_an_object():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    (message,) = checked_messages([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert message["tool_calls"][0]["id"] == "1"
    assert calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("tools", ["f", [1], [{}], [{"type": "function", "function": {}}], {}])
def test_tools_that_are_no_functions_are_refused(tools: Any):
    with pytest.raises(RequestError, match="tools"):
        checked_tools(tools)


def test_bare_function_becomes_a_tool():
    bare = {"name": "f", "parameters": {"type": "object"}}
    assert checked_tools([bare]) == [{"type": "function", "function": bare}]
    assert checked_tools([]) is None
    assert checked_tools(None) is None


def test_options_have_names():
    assert checked_options(None) == {}
    with pytest.raises(RequestError, match="template_options"):
        checked_options([1])


# ---- tool calls


ADD = ToolCall("add", {"a": 1, "b": [2, "}"]})
GET = ToolCall("get_weather", {"city": "Zürich </tool_call>"})


def call_json(call: ToolCall, key: str = "arguments") -> str:
    return json.dumps({"name": call.name, key: dict(call.arguments)}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("text", "reply"),
    [
        (f"<tool_call>\n{call_json(ADD)}\n</tool_call>", Reply("", (ADD,))),
        (
            f"Let me see. <tool_call>{call_json(GET)}</tool_call>\n"
            f"<tool_call>\n{call_json(ADD)}</tool_call>",
            Reply("Let me see.", (GET, ADD)),
        ),
        (f"<tool_call>{call_json(ADD)}", Reply("", (ADD,))),  # cut at max_tokens
        (f"<tool_call>{{bad}}</tool_call> <tool_call>{call_json(ADD)}</tool_call>",
         Reply("<tool_call>{bad}</tool_call>", (ADD,))),
        (f"Well. [TOOL_CALLS] [{call_json(ADD)}]", Reply("Well.", (ADD,))),
        ('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc123def"}]',
         Reply("", (ToolCall("f", {}, "abc123def"),))),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x9[ARGS]{}',
         Reply("", (ToolCall("f", {"a": 1}), ToolCall("g", {}, "x9")))),
        ('{"name": "f", "parameters": "{\\"a\\": 1}"}', Reply("", (ToolCall("f", {"a": 1}),))),
    ],
)  # fmt: skip
def test_calls_of_each_family_are_found(text: str, reply: Reply):
    assert parse_tool_calls(text) == reply


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello",
        "<tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        "[TOOL_CALLS]",
        '[TOOL_CALLS][{"name": "f"}]',
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]f[ARGS]7",
        '{"name": "f", "parameters": {}} and more',
        '{"answer": 42}',
        "[" * 100_000,
        "<tool_call>" + '{"a":' * 100_000,
    ],
)
def test_text_without_a_call_stays_text(text: str):
    reply = parse_tool_calls(text)
    assert reply.tool_calls == ()
    assert reply.content.strip() == text.strip()


def test_family_decides_what_is_a_call():
    text = call_json(ADD, "parameters")
    assert parse_tool_calls(text, "hermes") == Reply(text)
    assert parse_tool_calls(text, "mistral") == Reply(text)
    assert parse_tool_calls(text, "llama").tool_calls == (ADD,)
    with pytest.raises(RequestError, match=r"choose from .*hermes, llama"):
        parse_tool_calls(text, "gpt")  # type: ignore[arg-type]


def test_reply_becomes_the_next_message():
    message = parse_tool_calls(f"Ok. <tool_call>{call_json(ADD)}</tool_call>").to_message()
    assert message == {
        "role": "assistant",
        "content": "Ok.",
        "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "}"]}}}
        ],
    }
    assert Reply("Hi").to_message() == {"role": "assistant", "content": "Hi"}


ARGUMENTS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
    max_size=3,
)


@given(st.lists(st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), ARGUMENTS), min_size=1))
def test_calls_written_in_a_family_come_back(calls: list[tuple[str, dict[str, Any]]]):
    wanted = tuple(ToolCall(name, arguments) for name, arguments in calls)
    hermes = "".join(f"<tool_call>\n{call_json(call)}\n</tool_call>\n" for call in wanted)
    assert parse_tool_calls(hermes) == Reply("", wanted)
    mistral = "[TOOL_CALLS][" + ", ".join(call_json(call) for call in wanted) + "]"
    assert parse_tool_calls(mistral, "mistral") == Reply("", wanted)
    llama = "; ".join(call_json(call, "parameters") for call in wanted)
    assert parse_tool_calls(llama, "llama") == Reply("", wanted)


@given(st.text() | st.lists(st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "f", '{"name": "f", ', "{}", "}",
     '"arguments": {}', "[", "]", " ", "<|python_tag|>"]), max_size=12).map("".join))  # fmt: skip
def test_any_text_is_taken_apart_without_an_error(text: str):
    reply = parse_tool_calls(text)
    assert all(call.name for call in reply.tool_calls)
