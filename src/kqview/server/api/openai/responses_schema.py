"""Bodies of OpenAI's Responses API: typed requests and replies, field for field.

Unknown fields are ignored, as are ``metadata``, ``user``, ``service_tier``, ``prompt_cache_key``
and others that only OpenAI's own servers can act on. ``attention`` is ours and means the same as in
``/v1/chat/completions``.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.attention_field import Attention
from kqview.server.api.llama_fields import LlamaFields

Object = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]

# ---- requests


class Part(Struct, kw_only=True):
    """A part of a content; ``type`` says which of the other fields belong to it."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Struct, kw_only=True):
    """An item of the input; ``type`` says which of the other fields belong to it."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class TextFormat(Struct, kw_only=True):
    """Form of the text: any, JSON, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Object | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, kw_only=True):
    """How the text is written."""

    format: TextFormat | None = None


class Reasoning(Struct, kw_only=True):
    """How much the model thinks, where its template leaves the choice."""

    effort: str | None = None


class Tool(Struct, kw_only=True):
    """A function that the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class AllowedTool(Struct, kw_only=True):
    """A tool that may be called."""

    type: str = "function"
    name: str | None = None


class NamedTool(Struct, kw_only=True):
    """The one tool that the model has to call; or, of type allowed_tools, those that it may."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class InputBody(LlamaFields, kw_only=True):
    """A conversation whose tokens to count."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    chat_template_kwargs: Object | None = None
    conversation: Any = None
    prompt: Any = None


class ResponsesBody(InputBody, kw_only=True):
    """A conversation to continue; llama.cpp's sampling fields work too."""

    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    attention: Attention | bool | None = None


# ---- replies


class InputDetails(Struct, kw_only=True):
    """Of the prompt's tokens, those that were in the cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, kw_only=True):
    """Of the generated tokens, those of the reasoning."""

    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of the prompt and generated ones."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Struct, kw_only=True):
    """The answer, or what of it there is so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    model: str
    output: list[Object]
    error: Object | None = None
    incomplete_details: Object | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: Object
    store: bool = False
    temperature: float | None
    text: Object
    tool_choice: Any
    tools: list[Tool]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"] = "disabled"
    usage: Usage | None = None
    attention: list[Object] | UnsetType = UNSET
    prompt_attention: list[Object] | UnsetType = UNSET


class InputTokens(Struct, kw_only=True):
    """How many tokens the prompt of a conversation has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
