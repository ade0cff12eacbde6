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
from kqview.server.web.described import example

Object = dict[str, Any]

# ---- requests


class Block(Struct, kw_only=True):
    """A block of a message's content; ``type`` says which of the other fields belong to it.

    Attributes:
        type: Kind of the block: "text", "thinking", "redacted_thinking", "tool_use" or
            "tool_result".
        text: Of "text": the text.
        thinking: Of "thinking": what the model thought.
        id: Of "tool_use": id of the call.
        name: Of "tool_use": name of the tool.
        input: Of "tool_use": arguments of the call.
        tool_use_id: Of "tool_result": id of the call that it answers.
        content: Of "tool_result": what the tool returned, or blocks of text.
        is_error: Of "tool_result": whether the tool failed; accepted, and not shown to the model.
    """

    type: Annotated[str, example("text")]
    text: Annotated[str, example("Who is Anna?")] = ""
    thinking: Annotated[str, example("The user asks for a name.")] = ""
    id: Annotated[str, example("toolu_1")] = ""
    name: Annotated[str, example("weather")] = ""
    input: Annotated[Object, example({"city": "Rome"})] = {}
    tool_use_id: Annotated[str, example("toolu_1")] = ""
    content: Annotated["str | list[Block] | None", example("sunny")] = None
    is_error: bool = False


class InputMessage(Struct, kw_only=True):
    """A turn of the conversation.

    Attributes:
        role: Who speaks.
        content: A text, or a list of blocks.
    """

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], example("Who is Anna?")]


class Tool(Struct, kw_only=True):
    """A function that the model may call.

    Attributes:
        name: Name of the function.
        description: What it does.
        input_schema: JSON schema of its arguments; a tool without one is one that only Anthropic's
            servers run, and is left out.
        type: Kind of the tool; not read.
    """

    name: Annotated[str, example("weather")]
    description: Annotated[str | None, example("Weather of a city.")] = None
    input_schema: Annotated[Object | None, example({"type": "object"})] = None
    type: Annotated[str | None, example("custom")] = None


class ToolChoice(Struct, kw_only=True):
    """Whether the model calls tools, and which.

    Attributes:
        type: "auto" leaves it to the model, "any" demands a call, "tool" one of the tool in
            ``name``, "none" forbids calls.
        name: The tool that has to be called.
        disable_parallel_tool_use: Whether there is at most one call.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: Annotated[str | None, example("weather")] = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, kw_only=True):
    """Whether the model thinks before it answers, where its template leaves the choice.

    Attributes:
        type: "enabled" or "disabled"; others leave it to the model.
        budget_tokens: Most tokens of thinking; the server's limit if not given.
    """

    type: Annotated[str, example("enabled")]
    budget_tokens: Annotated[Annotated[int, msgspec.Meta(ge=0)] | None, example(1024)] = None


class OutputFormat(Struct, kw_only=True):
    """A schema that the text of the answer has to follow.

    Attributes:
        type: Always "json_schema".
        schema: The JSON schema.
    """

    type: Literal["json_schema"]
    schema: Annotated[Object, example({"type": "object"})]


class OutputConfig(Struct, kw_only=True):
    """Form and effort of the answer.

    Attributes:
        effort: How much to think, as ``reasoning_effort`` of the model's template.
        format: A schema that the text of the answer follows.
    """

    effort: Annotated[str | None, example("low")] = None
    format: OutputFormat | None = None


class CountBody(LlamaFields, kw_only=True):
    """A conversation whose tokens to count.

    Attributes:
        messages: The conversation, the oldest message first.
        model: Id of a configured model; the default model if not given.
        system: System prompt, or blocks of text.
        tools: Functions that the model may call.
        tool_choice: Whether it calls them; as it likes if not given.
        thinking: Whether it thinks first.
        output_config: Form and effort of the answer.
        chat_template_kwargs: Variables for the model's chat template.
    """

    messages: Annotated[list[InputMessage], example([{"role": "user", "content": "Who is Anna?"}])]
    model: Annotated[str | None, example("demo")] = None
    system: Annotated[str | list[Block] | None, example("Answer briefly.")] = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[Object | None, example({"enable_thinking": False})] = None


class MessagesBody(CountBody, kw_only=True):
    """A conversation to continue; llama.cpp's sampling fields work too.

    Attributes:
        stop_sequences: Texts that end the answer.
        attention: Which attention to send with each token; true for all defaults.
    """

    stop_sequences: Annotated[Stops | None, example(["\n\n"])] = None
    attention: Attention | bool | None = None


# ---- replies


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text of the answer.

    Attributes:
        text: The text.
    """

    text: Annotated[str, example("Anna is a teacher.")]


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What the model thought first.

    Attributes:
        thinking: The text.
        signature: Always "": nothing checks it.
    """

    thinking: Annotated[str, example("The user asks for a name.")]
    signature: Annotated[str, example("")] = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool that the model calls.

    Attributes:
        id: Id of the call, which its result repeats.
        name: Name of the tool.
        input: Arguments of the call.
    """

    id: Annotated[str, example("toolu_1")]
    name: Annotated[str, example("weather")]
    input: Annotated[Object, example({"city": "Rome"})]


class Usage(Struct, kw_only=True):
    """Tokens of the request.

    Attributes:
        input_tokens: Tokens of the prompt that were evaluated.
        cache_creation_input_tokens: Always 0: the cache is the server's own.
        cache_read_input_tokens: Tokens of the prompt that were in the cache.
        output_tokens: Tokens that were generated.
    """

    input_tokens: Annotated[int, example(12)]
    cache_creation_input_tokens: Annotated[int, example(0)] = 0
    cache_read_input_tokens: Annotated[int, example(0)]
    output_tokens: Annotated[int, example(20)]


class Message(Struct, kw_only=True):
    """The answer.

    Attributes:
        id: Id of the message; kept attention has it as its name.
        type: Always "message".
        role: Always "assistant".
        model: The model, as the request names it.
        content: What was answered, in the order in which it came.
        stop_reason: Why it ended: "end_turn", "max_tokens", "stop_sequence" or "tool_use"; null
            while it comes.
        stop_sequence: The stop sequence that ended it; null without one.
        usage: Tokens of the request.
        attention: Attention of each token, if asked for.
        prompt_attention: Rows of the prompt, if asked for.
    """

    id: Annotated[str, example("msg_01")]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: Annotated[str, example("demo")]
    content: Annotated[
        list[TextBlock | ThinkingBlock | ToolUseBlock],
        example([{"type": "text", "text": "Anna is a teacher."}]),
    ]
    stop_reason: Annotated[str | None, example("end_turn")]
    stop_sequence: Annotated[str | None, example("\n\n")]
    usage: Usage
    attention: list[TokenAttention] | UnsetType = UNSET
    prompt_attention: list[PromptAttention] | UnsetType = UNSET


class TokenCount(Struct):
    """How many tokens the prompt of a conversation has.

    Attributes:
        input_tokens: How many there are.
    """

    input_tokens: Annotated[int, example(12)]
