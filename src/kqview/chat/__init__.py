"""Chat: checks messages, renders a model's chat template, and parses tool calls in its answer.

All of it is Python on text; what needs a model is in `kqview.conversation`.
"""

from typing import Final

from kqview.chat.messages import Message, Reply, ToolCall, parse_tool_calls

CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template for a model that brings none, as llama.cpp's server takes it."""

__all__ = ["CHATML", "Message", "Reply", "ToolCall", "parse_tool_calls"]
