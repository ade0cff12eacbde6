"""The chat that a request is made of, as mods read it: messages, tool calls and their results.

All of it is read from the event, which belongs to one request; a mod cannot see another's.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kqview.mods.events import Prefilled


def get_conversation(event: Prefilled) -> list[dict[str, Any]]:
    """The messages of the request of *event*, copied; empty for a request that is no chat."""
    return [copy.deepcopy(dict(message)) for message in event.context_info.messages or ()]


def get_schemas(event: Prefilled) -> list[dict[str, Any]]:
    """The tools that the chat of *event* offers, copied: each with name, description, parameters.

    The wrapper ``{"type": "function", "function": ...}`` is taken off.
    """
    tools = [copy.deepcopy(dict(tool)) for tool in event.context_info.tools or ()]
    return [dict(_function(tool)) for tool in tools]


@dataclass(frozen=True)
class ToolCallPair:
    """A tool call in a conversation, and what came back.

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
    """Each tool call in *messages* with the result that answers it, in the order of the calls.

    A result belongs to the call that has its ``tool_call_id``. Results and calls without an id are
    matched in their order, within the messages that follow the calls.
    """
    pairs: list[ToolCallPair] = []
    n_closed = 0  # pairs of earlier turns: an id may come again
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
