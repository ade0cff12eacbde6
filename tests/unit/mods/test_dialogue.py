"""What a mod reads of a chat: its own request's messages, and which result answers which call."""

from __future__ import annotations

from typing import Any

from kqview.mods import Prefilled, mod
from kqview.mods.events import ContextInfo, Dialogue
from kqview.mods.kit import get_conversation, get_schemas, tool_call_pairs
from tests.support.mods import END, Words, drive


def call(id_: str | None, name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {"function": function} if id_ is None else {"id": id_, "function": function}


def result(id_: str | None, text: str) -> dict[str, Any]:
    message = {"role": "tool", "content": text}
    return message if id_ is None else message | {"tool_call_id": id_}


def paired(messages: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    pairs = tool_call_pairs(messages)
    return [(pair.name, None if pair.result is None else pair.result["content"]) for pair in pairs]


def test_results_belong_to_the_calls_that_they_name():
    messages = [
        {"role": "assistant", "tool_calls": [call("1", "a"), call("2", "b"), call("3", "c")]},
        result("2", "B"),
        result("1", "A"),
    ]
    assert paired(messages) == [("a", "A"), ("b", "B"), ("c", None)]


def test_results_without_ids_belong_to_calls_in_their_order():
    messages = [
        {"role": "assistant", "tool_calls": [call(None, "a"), call(None, "b")]},
        result(None, "A"),
        result(None, "B"),
    ]
    assert paired(messages) == [("a", "A"), ("b", "B")]


def test_id_that_comes_again_belongs_to_the_latest_calls():
    turn = [{"role": "assistant", "tool_calls": [call("1", "a")]}, result("1", "A")]
    assert paired([*turn, {"role": "user", "content": ""}, *turn]) == [("a", "A"), ("a", "A")]
    assert tool_call_pairs(turn)[0].arguments == "{}"


def test_conversation_is_a_copy_of_the_messages_of_the_request():
    messages = [{"role": "user", "content": "Hi", "parts": [1]}]
    seen: list[Any] = []

    @mod
    def reads(event: Any) -> None:
        if isinstance(event, Prefilled):
            seen.append(get_conversation(event))
            seen[-1][0]["parts"].append(2)

    for _ in range(2):
        drive(reads, words=Words(), model=lambda text: [END], dialogue=Dialogue(messages))
    assert [one[0]["parts"] for one in seen] == [[1, 2], [1, 2]]
    assert get_conversation(Prefilled("r", 0, 1)) == []


def test_schemas_are_those_of_the_tools_without_their_wrapper():
    schema = {"name": "paint", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": schema}, schema]
    event = Prefilled("r", 0, 1, ContextInfo(tools=tools))
    found = get_schemas(event)
    assert found == [schema, schema]
    found[0]["parameters"]["type"] = "array"
    assert get_schemas(event) == [schema, schema]
    assert get_schemas(Prefilled("r", 0, 1)) == []
