"""Chat: messages checked, rendered by a model's own template, and tool calls read from its answer.

Everything here is pure Python on text; what needs a model is in `kqview.conversation`.
"""

from kqview.chat.messages import Message, Reply, ToolCall, parse_tool_calls

__all__ = ["Message", "Reply", "ToolCall", "parse_tool_calls"]
