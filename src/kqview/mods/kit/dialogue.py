"""The chat behind a request, as mods read it: messages, tool calls and their results.

All of it comes from the event, which belongs to one request; a mod cannot see other requests.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kqview.mods.events import Prefilled


def get_conversation(event: Prefilled) -> list[dict[str, Any]]:
    """Copy of the messages of the chat of *event*; empty if the request is not a chat."""
    return [copy.deepcopy(dict(message)) for message in event.context_info.messages or ()]


def get_schemas(event: Prefilled) -> list[dict[str, Any]]:
    """Copy of the tools of the chat of *event*: each has name, description and parameters.

    The wrapper ``{"type": "function", "function": ...}`` is removed.
    """
    tools = [copy.deepcopy(dict(tool)) for tool in event.context_info.tools or ()]
    return [dict(_function(tool)) for tool in tools]


@dataclass(frozen=True)
class ToolCallPair:
    """A tool call in a conversation, and its result.

    Attributes:
        call: The call as the assistant's message has it: ``id`` and ``function``, with ``name`` and
            ``arguments``.
        result: The message with the result; None if there is none yet.
    """

    call: Mapping[str, Any]
    result: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """Name of the function."""
        return str(_function(self.call).get("name", ""))

    @property
    def arguments(self) -> Any:
        """Arguments of the call as the message has them: JSON text, or a mapping."""
        return _function(self.call).get("arguments")


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return cast("Mapping[str, Any]", function) if isinstance(function, Mapping) else {}


def tool_call_pairs(messages: Sequence[Mapping[str, Any]]) -> list[ToolCallPair]:
    """Pair each tool call in *messages* with its result, in the order of the calls.

    A result belongs to the call that has its ``tool_call_id``. Results and calls without an id are
    matched in their order, within the messages that follow the calls.
    """
    pairs: list[ToolCallPair] = []
    n_closed = 0  # pairs of earlier turns: an id may recur
    for message in messages:
        if calls := message.get("tool_calls"):
            n_closed = len(pairs)
            pairs += [ToolCallPair(call, None) for call in calls]
        elif message.get("role") in ("tool", "function"):
            id_ = message.get("tool_call_id")
            for i in range(n_closed, len(pairs)):
                if pairs[i].result is None and id_ in (None, pairs[i].call.get("id", id_)):
                    pairs[i] = ToolCallPair(pairs[i].call, message)
                    break
    return pairs
