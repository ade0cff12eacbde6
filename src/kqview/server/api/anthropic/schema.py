"""Bodies of Anthropic's Messages API: typed requests and replies, field for field.

Unknown fields are ignored, as are those that only Anthropic's own servers can act on:
``cache_control``, ``citations``, ``metadata``, ``service_tier``, ``container``. ``attention`` is
ours.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.attention_field import Attention
from kqview.server.api.wire.event_parts import PromptAttention, TokenAttention
from kqview.server.api.wire.llama_fields import LlamaFields, Stops

Object = dict[str, Any]

# ---- requests


class Block(Struct, kw_only=True):
    """A block of a message's content; ``type`` says which of the other fields belong to it.

    Attributes:
        type: Kind of the block: "text", "thinking", "redacted_thinking", "tool_use" or
            "tool_result", such as "text".
        text: Of "text": the text, such as "Who is Anna?".
        thinking: Of "thinking": what the model thought, such as "The user asks for a name.".
        id: Of "tool_use": id of the call, such as "toolu_1".
        name: Of "tool_use": name of the tool, such as "weather".
        input: Of "tool_use": arguments of the call, such as {"city": "Rome"}.
        tool_use_id: Of "tool_result": id of the call that it answers, such as "toolu_1".
        content: Of "tool_result": what the tool returned, such as "sunny", or blocks of text.
        is_error: Of "tool_result": whether the tool failed; accepted, and not shown to the model.
    """

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
    """A turn of the conversation.

    Attributes:
        role: Who speaks.
        content: A text, such as "Who is Anna?", or a list of blocks.
    """

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct, kw_only=True):
    """A function that the model may call.

    Attributes:
        name: Name of the function, such as "weather".
        description: What it does, such as "Weather of a city.".
        input_schema: JSON schema of its arguments, such as {"type": "object"}; a tool without one
            is one that only Anthropic's servers run, and is left out.
        type: Kind of the tool, such as "custom"; not read.
    """

    name: str
    description: str | None = None
    input_schema: Object | None = None
    type: str | None = None


class ToolChoice(Struct, kw_only=True):
    """Whether the model calls tools, and which.

    Attributes:
        type: "auto" leaves it to the model, "any" demands a call, "tool" one of the tool in
            ``name``, "none" forbids calls.
        name: The tool that has to be called, such as "weather".
        disable_parallel_tool_use: Whether there is at most one call.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, kw_only=True):
    """Whether the model thinks before it answers, where its template leaves the choice.

    Attributes:
        type: "enabled" or "disabled", such as "enabled"; others leave it to the model.
        budget_tokens: Most tokens of thinking, such as 1024; the server's limit if not given.
    """

    type: str
    budget_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None


class OutputFormat(Struct, kw_only=True):
    """A schema that the text of the answer has to follow.

    Attributes:
        type: Always "json_schema".
        schema: The JSON schema, such as {"type": "object"}.
    """

    type: Literal["json_schema"]
    schema: Object


class OutputConfig(Struct, kw_only=True):
    """Form and effort of the answer.

    Attributes:
        effort: How much to think, as ``reasoning_effort`` of the model's template, such as "low".
        format: A schema that the text of the answer follows.
    """

    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(LlamaFields, kw_only=True):
    """A conversation whose tokens to count.

    Attributes:
        messages: The conversation, the oldest message first, such as [{"role": "user", "content":
            "Who is Anna?"}].
        model: Id of a configured model, such as "demo"; the default model if not given.
        system: System prompt, such as "Answer briefly.", or blocks of text.
        tools: Functions that the model may call.
        tool_choice: Whether it calls them; as it likes if not given.
        thinking: Whether it thinks first.
        output_config: Form and effort of the answer.
        chat_template_kwargs: Variables for the model's chat template, such as {"enable_thinking":
            false}.
    """

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Object | None = None


class MessagesBody(CountBody, kw_only=True):
    """A conversation to continue; llama.cpp's sampling fields work too.

    Attributes:
        stop_sequences: Texts that end the answer, such as ["\\n\\n"].
        attention: Which attention to send with each token; true for all defaults.
    """

    stop_sequences: Stops | None = None
    attention: Attention | bool | None = None


# ---- replies


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text of the answer.

    Attributes:
        text: The text, such as "Anna is a teacher.".
    """

    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What the model thought first.

    Attributes:
        thinking: The text, such as "The user asks for a name.".
        signature: Always "": nothing checks it.
    """

    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool that the model calls.

    Attributes:
        id: Id of the call, which its result repeats, such as "toolu_1".
        name: Name of the tool, such as "weather".
        input: Arguments of the call, such as {"city": "Rome"}.
    """

    id: str
    name: str
    input: Object


class Usage(Struct, kw_only=True):
    """Tokens of the request.

    Attributes:
        input_tokens: Tokens of the prompt that were evaluated, such as 12.
        cache_creation_input_tokens: Always 0: the cache is the server's own.
        cache_read_input_tokens: Tokens of the prompt that were in the cache, such as 0.
        output_tokens: Tokens that were generated, such as 20.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(Struct, kw_only=True):
    """The answer.

    Attributes:
        id: Id of the message, such as "msg_01"; kept attention has it as its name.
        type: Always "message".
        role: Always "assistant".
        model: The model, as the request names it, such as "demo".
        content: What was answered, in the order in which it came, such as [{"type": "text", "text":
            "Anna is a teacher."}].
        stop_reason: Why it ended: "end_turn", "max_tokens", "stop_sequence" or "tool_use"; null
            while it comes, such as "end_turn".
        stop_sequence: The stop sequence that ended it, such as "\\n\\n"; null without one.
        usage: Tokens of the request.
        attention: Attention of each token, if asked for.
        prompt_attention: Rows of the prompt, if asked for.
    """

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    attention: list[TokenAttention] | UnsetType = UNSET
    prompt_attention: list[PromptAttention] | UnsetType = UNSET


class TokenCount(Struct):
    """How many tokens the prompt of a conversation has.

    Attributes:
        input_tokens: How many there are, such as 12.
    """

    input_tokens: int
