"""Messages and tools: what is refused, and that the caller's own objects stay as they are."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest

from kqview.chat.messages import checked_messages, checked_options, checked_tools
from kqview.errors import RequestError


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
        ([{"role": "user", "content": "x", "extra": object()}], "extra: got object"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], "key 1"),
        ([{"role": "user", "content": "x", "tool_call_id": 7}], "tool_call_id"),
        ([{"role": "assistant", "tool_calls": "f"}], "list of calls"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "name is missing"),
        (
            [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "arguments are '{'",
        ),
    ],
)
def test_message_that_is_not_well_formed_is_refused(messages: Any, words: str):
    with pytest.raises(RequestError, match=words):
        checked_messages("chat", messages)


def test_deeply_nested_message_is_refused():
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested"):
        checked_messages("chat", [{"role": "user", "content": "x", "extra": deep}])


def test_messages_are_copies_of_plain_types():
    class Loud(str):
        def __str__(self) -> str:
            raise AssertionError("code of the caller ran")

    mine = UserDict({"role": Loud("user"), "content": Loud("Hi"), "n": (1, 2.5, True, None)})
    (message,) = checked_messages("chat", (mine,))
    assert message == {"role": "user", "content": "Hi", "n": [1, 2.5, True, None]}
    assert type(message["content"]) is str
    message["content"] = "changed"
    assert mine["content"] == "Hi"


def test_arguments_as_json_text_become_an_object():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    (message,) = checked_messages(
        "chat", [{"role": "assistant", "content": None, "tool_calls": calls}]
    )
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert message["tool_calls"][0]["id"] == "1"
    assert calls[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize("tools", ["f", [1], [{}], [{"type": "function", "function": {}}], {}])
def test_tools_that_are_no_functions_are_refused(tools: Any):
    with pytest.raises(RequestError, match="tools"):
        checked_tools("chat", tools)


def test_bare_function_becomes_a_tool():
    bare = {"name": "f", "parameters": {"type": "object"}}
    assert checked_tools("chat", [bare]) == [{"type": "function", "function": bare}]
    assert checked_tools("chat", []) is None
    assert checked_tools("chat", None) is None


def test_options_have_names():
    assert checked_options("chat", None) == {}
    with pytest.raises(RequestError, match="template_options"):
        checked_options("chat", [1])
