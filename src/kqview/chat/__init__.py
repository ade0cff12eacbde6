"""Chat: checks messages, renders a model's chat template, and parses tool calls in its answer.

All of it is Python on text; what needs a model is in `kqview.conversation`.
"""

from kqview.chat.messages import Message, Reply, ToolCall, parse_tool_calls

__all__ = ["Message", "Reply", "ToolCall", "parse_tool_calls"]
