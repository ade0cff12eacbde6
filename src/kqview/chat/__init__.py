"""Chat: checks messages, renders a model's chat template, and takes its answer apart.

All of it is Python on text; what needs a model is in `kqview.conversation`.
"""

from typing import Final

from kqview.chat.tool_format import parse_tool_calls as parse_tool_calls
from kqview.chat.turn import (
    Message as Message,
    ToolChoice as ToolChoice,
    tools_as_text as tools_as_text,
)
from kqview.types.reply import Reply as Reply, ToolCall as ToolCall

CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template for a model that brings none, as llama.cpp's server takes it."""
