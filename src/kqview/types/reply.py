"""Reply and ToolCall: an answer of a chat, taken apart."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks to be called.

    Attributes:
        name: The name of the function as the model wrote it; it may not be one of the given tools.
        arguments: The arguments by name, not checked against a schema.
        id: The id of the call, for ``tool_call_id`` of the message with its result. From
            `kqview.chat.parse_tool_calls` the one that the model wrote, None if it wrote none.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    def to_message(self) -> dict[str, Any]:
        """The call in the form of ``tool_calls`` in a message of the assistant."""
        call: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "arguments": dict(self.arguments)},
        }
        return call if self.id is None else {"id": self.id, **call}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer split into text, tool calls and reasoning.

    Attributes:
        content: The text without the calls and the reasoning.
        tool_calls: The calls in the order of the text.
        reasoning: What the model wrote before its answer between marks such as ``<think>``; empty
            from `kqview.chat.parse_tool_calls`, which leaves it in the content.
    """

    content: str
    tool_calls: tuple[ToolCall, ...] = field(default=())
    reasoning: str = ""

    def to_message(self) -> dict[str, Any]:
        """The answer as a message of the assistant for the next `Engine.chat`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return message
