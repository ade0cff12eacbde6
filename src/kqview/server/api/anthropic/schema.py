"""Bodies of Anthropic's Messages API: typed requests and replies, field for field.

Unknown fields are ignored, as are those that only Anthropic's own servers can act on:
``cache_control``, ``citations``, ``metadata``, ``service_tier``, ``container``. ``attention`` is
ours.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.attention_field import Attention
from kqview.server.api.llama_fields import LlamaFields, Stops

Object = dict[str, Any]

# ---- requests


class Block(Struct, kw_only=True):
    """A block of a message's content; ``type`` says which of the other fields belong to it."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Object = {}
    tool_use_id: str = ""
    content: "str | list[Block] | None" = None
    is_error: bool = False


class InputMessage(Struct, kw_only=True):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    input_schema: Object | None = None
    type: str | None = None


class ToolChoice(Struct, kw_only=True):
    """Whether the model calls tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, kw_only=True):
    """Whether the model thinks before it answers, where its template leaves the choice.

    ``budget_tokens`` is the most tokens of it.
    """

    type: str
    budget_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class OutputFormat(Struct, kw_only=True):
    """A schema that the text of the answer has to follow."""

    type: Literal["json_schema"]
    schema: Object


class OutputConfig(Struct, kw_only=True):
    """Form and effort of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(LlamaFields, kw_only=True):
    """A conversation whose tokens to count."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Object | None = None


class MessagesBody(CountBody, kw_only=True):
    """A conversation to continue; llama.cpp's sampling fields work too."""

    stop_sequences: Stops | None = None
    attention: Attention | bool | None = None


# ---- replies


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What the model thought first. The signature is empty: nothing checks it."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool that the model calls."""

    id: str
    name: str
    input: Object


class Usage(Struct, kw_only=True):
    """Tokens of the prompt that were evaluated, were taken from the cache, and were generated."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(Struct, kw_only=True):
    """The answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    attention: list[Object] | UnsetType = UNSET
    prompt_attention: list[Object] | UnsetType = UNSET


class TokenCount(Struct):
    """How many tokens the prompt of a conversation has."""

    input_tokens: int
