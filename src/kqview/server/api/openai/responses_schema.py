"""Bodies of OpenAI's Responses API: typed requests and replies, field for field.

Unknown fields are ignored, as are ``metadata``, ``user``, ``service_tier``, ``prompt_cache_key``
and others that only OpenAI's own servers can act on. ``attention`` is ours and means the same as in
``/v1/chat/completions``.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.attention_field import Attention
from kqview.server.api.wire.event_parts import PromptAttention, TokenAttention
from kqview.server.api.wire.llama_fields import LlamaFields

Object = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]

# ---- requests


class Part(Struct, kw_only=True):
    """A part of a content; ``type`` says which of the other fields belong to it.

    Attributes:
        type: Kind of the part: "input_text", "output_text", "summary_text", "reasoning_text" or
            "refusal", such as "input_text".
        text: Its text, such as "Who is Anna?".
        refusal: Of "refusal": the text, such as "I cannot do that.".
    """

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(Struct, kw_only=True):
    """An item of the input; ``type`` says which of the other fields belong to it.

    Attributes:
        type: Kind of the item: "message", "reasoning", "function_call" or "function_call_output".
        role: Of "message": who speaks, such as "user".
        content: Of "message" and "reasoning": a text, such as "Who is Anna?", or its parts.
        summary: Of "reasoning": parts of its summary.
        call_id: Of calls and their outputs: id of the call, such as "call_1".
        name: Of "function_call": the function, such as "weather".
        arguments: Of "function_call": its arguments as JSON, such as "{\\"city\\": \\"Rome\\"}".
        output: Of "function_call_output": what the function returned, such as "sunny", or its
            parts.
    """

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class TextFormat(Struct, kw_only=True):
    """Form of the text: any, JSON, or JSON that follows a schema.

    Attributes:
        type: "text" is any text, "json_object" JSON, "json_schema" JSON that follows the schema.
        name: Name of the schema, such as "person"; not read.
        schema: The JSON schema, such as {"type": "object"}.
        strict: Not read: the text always follows the schema.
        description: What the schema is for, such as "A person."; not read.
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema: Object | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct, kw_only=True):
    """How the text is written.

    Attributes:
        format: Form of the text; any if not given.
    """

    format: TextFormat | None = None


class Reasoning(Struct, kw_only=True):
    """How much the model thinks, where its template leaves the choice.

    Attributes:
        effort: How much to think, as ``reasoning_effort`` of the model's template, such as "low".
    """

    effort: str | None = None


class Tool(Struct, kw_only=True):
    """A function that the model may call.

    Attributes:
        type: Kind of the tool, such as "function"; those of other kinds are left out.
        name: Name of the function, such as "weather".
        description: What it does, such as "Weather of a city.".
        parameters: JSON schema of its arguments, such as {"type": "object"}.
        strict: Not read: arguments always follow their schema where a call is demanded.
    """

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class AllowedTool(Struct, kw_only=True):
    """A tool that may be called.

    Attributes:
        type: Always "function".
        name: Name of the function, such as "weather".
    """

    type: str = "function"
    name: str | None = None


class NamedTool(Struct, kw_only=True):
    """The one tool that the model has to call, or those that it may.

    Attributes:
        type: What it says, such as "function", which demands a call of the one in ``name``;
            "allowed_tools" allows those in ``tools``.
        name: Name of the function, such as "weather".
        mode: Of "allowed_tools": whether one of them has to be called.
        tools: Of "allowed_tools": those that may be called.
    """

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class InputBody(LlamaFields, kw_only=True):
    """A conversation whose tokens to count.

    Attributes:
        input: A text, such as "Who is Anna?", or the whole conversation as items.
        model: Id of a configured model, such as "demo"; the default model if not given.
        instructions: System prompt, such as "Answer briefly.".
        tools: Functions that the model may call.
        tool_choice: Whether it calls them; "auto" if not given.
        parallel_tool_calls: Whether there may be several calls; true if not given.
        text: How the text is written.
        reasoning: How much the model thinks.
        previous_response_id: Has to be null: the server keeps no responses. Send the whole
            conversation as input.
        chat_template_kwargs: Variables for the model's chat template, such as {"enable_thinking":
            false}.
        conversation: Has to be null: the server keeps no conversations.
        prompt: Has to be null: the server keeps no prompts.
    """

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
    """A conversation to continue; llama.cpp's sampling fields work too.

    Attributes:
        max_output_tokens: Most tokens to generate, such as 128; as many as fit the context if not
            given.
        top_logprobs: So many of the most probable tokens with each, such as 3, where ``include``
            asks for logprobs. They are before bias, grammar and samplers.
        include: What else the response has: ["message.output_text.logprobs"] for logprobs, such as
            ["message.output_text.logprobs"]; the rest is ignored.
        metadata: Texts that the response repeats, such as {"topic": "names"}.
        store: Has to be false: the server keeps no responses. false if not given.
        background: Has to be false: it is not supported. false if not given.
        attention: Which attention to send with each token; true for all defaults.
    """

    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    attention: Attention | bool | None = None


# ---- replies


class OutputTopLogprob(Struct, kw_only=True):
    """A token that could have been chosen.

    Attributes:
        token: Its text, such as " the"; U+FFFD for bytes that are not UTF-8.
        bytes: Its bytes, such as [32, 116, 104, 101].
        logprob: Its logprob before bias, grammar and samplers, such as -1.5.
    """

    token: str
    bytes: list[int]
    logprob: float


class OutputLogprob(OutputTopLogprob, kw_only=True):
    """A token that was chosen, and those that could have been.

    Attributes:
        top_logprobs: The most probable tokens at its place, the most probable first.
    """

    top_logprobs: list[OutputTopLogprob]


class InputDetails(Struct, kw_only=True):
    """Of the prompt's tokens.

    Attributes:
        cached_tokens: Those that were in the cache, such as 0.
        cache_write_tokens: Always 0.
    """

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct, kw_only=True):
    """Of the generated tokens.

    Attributes:
        reasoning_tokens: Those of the reasoning, such as 0.
    """

    reasoning_tokens: int


class Usage(Struct, kw_only=True):
    """Tokens of the request.

    Attributes:
        input_tokens: Tokens of the prompt, such as 12.
        input_tokens_details: More about them.
        output_tokens: Tokens that were generated, such as 20.
        output_tokens_details: More about them.
        total_tokens: Both together, such as 32.
    """

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(Struct, kw_only=True):
    """The answer, or what of it there is so far.

    Attributes:
        id: Id of the response, such as "resp_1"; kept attention has it as its name.
        object: Always "response".
        created_at: When it was begun, in seconds since 1970, such as 1767225600.
        completed_at: When it ended, such as 1767225601; null before.
        status: Whether it is whole; "incomplete" is one that a limit cut.
        model: The model, as the request names it, such as "demo".
        output: Items of the answer, in the order in which they came, such as [{"type": "message",
            "id": "msg_1", "status": "completed", "role": "assistant", "content": [{"type":
            "output_text", "text": "Anna is a teacher.", "annotations": [], "logprobs": []}]}].
        error: What went wrong, such as {"code": "server_error", "message": "the model was
            switched"}; null otherwise.
        incomplete_details: Which limit cut it, such as {"reason": "max_output_tokens"}; null
            otherwise.
        instructions: Those of the request, such as "Answer briefly.".
        max_output_tokens: That of the request, such as 128.
        metadata: That of the request, such as {"topic": "names"}.
        parallel_tool_calls: Whether there may be several calls.
        previous_response_id: Always null.
        reasoning: The request's effort, such as {"effort": "low", "summary": null}.
        store: Always false.
        temperature: That of the request, such as 0.7.
        text: Form of the text, such as {"format": {"type": "text"}}.
        tool_choice: That of the request, such as "auto".
        tools: Those of the request, such as [].
        top_logprobs: That of the request, such as 0.
        top_p: That of the request, such as 0.9.
        truncation: Always "disabled".
        usage: Tokens of the request; null before its end.
        attention: Attention of each token, if asked for.
        prompt_attention: Rows of the prompt, if asked for.
    """

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
    attention: list[TokenAttention] | UnsetType = UNSET
    prompt_attention: list[PromptAttention] | UnsetType = UNSET


class InputTokens(Struct, kw_only=True):
    """How many tokens the prompt of a conversation has.

    Attributes:
        object: Always "response.input_tokens".
        input_tokens: How many there are, such as 12.
    """

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
