"""Bodies of OpenAI's Responses API: typed requests and replies, field for field.

Unknown fields are ignored, as are ``metadata``, ``user``, ``service_tier``, ``prompt_cache_key``
and others that only OpenAI's own servers can act on. ``attention`` is ours and means the same as in
``/v1/chat/completions``.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.attention_field import Attention
from kqview.server.api.wire.event_parts import PromptAttention, TokenAttention
from kqview.server.api.wire.llama_fields import LlamaFields
from kqview.server.web.described import example

Object = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]

# ---- requests


class Part(Struct, kw_only=True):
    """A part of a content; ``type`` says which of the other fields belong to it.

    Attributes:
        type: Kind of the part: "input_text", "output_text", "summary_text", "reasoning_text" or
            "refusal".
        text: Its text.
        refusal: Of "refusal": the text.
    """

    type: Annotated[str, example("input_text")]
    text: Annotated[str | None, example("Who is Anna?")] = None
    refusal: Annotated[str | None, example("I cannot do that.")] = None


class Item(Struct, kw_only=True):
    """An item of the input; ``type`` says which of the other fields belong to it.

    Attributes:
        type: Kind of the item: "message", "reasoning", "function_call" or "function_call_output".
        role: Of "message": who speaks.
        content: Of "message" and "reasoning": a text, or its parts.
        summary: Of "reasoning": parts of its summary.
        call_id: Of calls and their outputs: id of the call.
        name: Of "function_call": the function.
        arguments: Of "function_call": its arguments as JSON, such as "{\\"city\\": \\"Rome\\"}".
        output: Of "function_call_output": what the function returned, or its parts.
    """

    type: str = "message"
    role: Annotated[str | None, example("user")] = None
    content: Annotated[str | list[Part] | None, example("Who is Anna?")] = None
    summary: list[Part] | None = None
    call_id: Annotated[str | None, example("call_1")] = None
    name: Annotated[str | None, example("weather")] = None
    arguments: Annotated[str | None, example('{"city": "Rome"}')] = None
    output: Annotated[str | list[Part] | None, example("sunny")] = None


class TextFormat(Struct, kw_only=True):
    """Form of the text: any, JSON, or JSON that follows a schema.

    Attributes:
        type: "text" is any text, "json_object" JSON, "json_schema" JSON that follows the schema.
        name: Name of the schema; not read.
        schema: The JSON schema.
        strict: Not read: the text always follows the schema.
        description: What the schema is for; not read.
    """

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str | None, example("person")] = None
    schema: Annotated[Object | None, example({"type": "object"})] = None
    strict: bool | None = None
    description: Annotated[str | None, example("A person.")] = None


class TextConfig(Struct, kw_only=True):
    """How the text is written.

    Attributes:
        format: Form of the text; any if not given.
    """

    format: TextFormat | None = None


class Reasoning(Struct, kw_only=True):
    """How much the model thinks, where its template leaves the choice.

    Attributes:
        effort: How much to think, as ``reasoning_effort`` of the model's template.
    """

    effort: Annotated[str | None, example("low")] = None


class Tool(Struct, kw_only=True):
    """A function that the model may call.

    Attributes:
        type: Kind of the tool; those of other kinds are left out.
        name: Name of the function.
        description: What it does.
        parameters: JSON schema of its arguments.
        strict: Not read: arguments always follow their schema where a call is demanded.
    """

    type: Annotated[str, example("function")]
    name: Annotated[str | None, example("weather")] = None
    description: Annotated[str | None, example("Weather of a city.")] = None
    parameters: Annotated[Object | None, example({"type": "object"})] = None
    strict: bool | None = None


class AllowedTool(Struct, kw_only=True):
    """A tool that may be called.

    Attributes:
        type: Always "function".
        name: Name of the function.
    """

    type: Annotated[str, example("function")] = "function"
    name: Annotated[str | None, example("weather")] = None


class NamedTool(Struct, kw_only=True):
    """The one tool that the model has to call, or those that it may.

    Attributes:
        type: What it says, which demands a call of the one in ``name``; "allowed_tools" allows
            those in ``tools``.
        name: Name of the function.
        mode: Of "allowed_tools": whether one of them has to be called.
        tools: Of "allowed_tools": those that may be called.
    """

    type: Annotated[str, example("function")]
    name: Annotated[str | None, example("weather")] = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class InputBody(LlamaFields, kw_only=True):
    """A conversation whose tokens to count.

    Attributes:
        input: A text, or the whole conversation as items.
        model: Id of a configured model; the default model if not given.
        instructions: System prompt.
        tools: Functions that the model may call.
        tool_choice: Whether it calls them; "auto" if not given.
        parallel_tool_calls: Whether there may be several calls; true if not given.
        text: How the text is written.
        reasoning: How much the model thinks.
        previous_response_id: Has to be null: the server keeps no responses. Send the whole
            conversation as input.
        chat_template_kwargs: Variables for the model's chat template.
        conversation: Has to be null: the server keeps no conversations.
        prompt: Has to be null: the server keeps no prompts.
    """

    input: Annotated[str | list[Item], example("Who is Anna?")]
    model: Annotated[str | None, example("demo")] = None
    instructions: Annotated[str | None, example("Answer briefly.")] = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None, example(default="auto")
    ] = None
    parallel_tool_calls: Annotated[bool | None, example(default=True)] = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    previous_response_id: Annotated[str | None, example(None)] = None
    chat_template_kwargs: Annotated[Object | None, example({"enable_thinking": False})] = None
    conversation: Annotated[Any, example(None)] = None
    prompt: Annotated[Any, example(None)] = None


class ResponsesBody(InputBody, kw_only=True):
    """A conversation to continue; llama.cpp's sampling fields work too.

    Attributes:
        max_output_tokens: Most tokens to generate; as many as fit the context if not given.
        top_logprobs: So many of the most probable tokens with each, where ``include`` asks for
            logprobs. They are before bias, grammar and samplers.
        include: What else the response has: ["message.output_text.logprobs"] for logprobs; the rest
            is ignored.
        metadata: Texts that the response repeats.
        store: Has to be false: the server keeps no responses. false if not given.
        background: Has to be false: it is not supported. false if not given.
        attention: Which attention to send with each token; true for all defaults.
    """

    max_output_tokens: Annotated[int | None, example(128)] = None
    top_logprobs: Annotated[int | None, example(3)] = None
    include: Annotated[list[str] | None, example(["message.output_text.logprobs"])] = None
    metadata: Annotated[dict[str, str] | None, example({"topic": "names"})] = None
    store: Annotated[bool | None, example(default=False)] = None
    background: Annotated[bool | None, example(default=False)] = None
    attention: Attention | bool | None = None


# ---- replies


class OutputTopLogprob(Struct, kw_only=True):
    """A token that could have been chosen.

    Attributes:
        token: Its text; U+FFFD for bytes that are not UTF-8.
        bytes: Its bytes.
        logprob: Its logprob before bias, grammar and samplers.
    """

    token: Annotated[str, example(" the")]
    bytes: Annotated[list[int], example([32, 116, 104, 101])]
    logprob: Annotated[float, example(-1.5)]


class OutputLogprob(OutputTopLogprob, kw_only=True):
    """A token that was chosen, and those that could have been.

    Attributes:
        top_logprobs: The most probable tokens at its place, the most probable first.
    """

    top_logprobs: list[OutputTopLogprob]


class InputDetails(Struct, kw_only=True):
    """Of the prompt's tokens.

    Attributes:
        cached_tokens: Those that were in the cache.
        cache_write_tokens: Always 0.
    """

    cached_tokens: Annotated[int, example(0)]
    cache_write_tokens: Annotated[int, example(0)] = 0


class OutputDetails(Struct, kw_only=True):
    """Of the generated tokens.

    Attributes:
        reasoning_tokens: Those of the reasoning.
    """

    reasoning_tokens: Annotated[int, example(0)]


class ResponseUsage(Struct, kw_only=True):
    """Tokens of the request.

    Attributes:
        input_tokens: Tokens of the prompt.
        input_tokens_details: More about them.
        output_tokens: Tokens that were generated.
        output_tokens_details: More about them.
        total_tokens: Both together.
    """

    input_tokens: Annotated[int, example(12)]
    input_tokens_details: InputDetails
    output_tokens: Annotated[int, example(20)]
    output_tokens_details: OutputDetails
    total_tokens: Annotated[int, example(32)]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of an answer.

    Attributes:
        text: The text.
        annotations: Always [].
        logprobs: Those of its tokens, if asked for.
    """

    text: Annotated[str, example("Anna is a teacher.")]
    annotations: Annotated[list[Object], example([])] = []
    logprobs: Annotated[list[OutputLogprob], example([])] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought.

    Attributes:
        text: The text.
    """

    text: Annotated[str, example("The user asks for a name.")]


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """A text of the answer.

    Attributes:
        id: Its id.
        status: Whether it is whole.
        role: Always "assistant".
        content: Its one part; none while it comes.
    """

    id: Annotated[str, example("msg_1")]
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText] = []


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it went on.

    Attributes:
        id: Its id.
        status: Whether it is whole.
        summary: Always [].
        content: Its one part; none while it comes.
    """

    id: Annotated[str, example("rs_1")]
    status: Status = "in_progress"
    summary: Annotated[list[Object], example([])] = []
    content: list[ReasoningText] = []


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model calls.

    Attributes:
        id: Its id.
        status: Whether it is whole.
        call_id: Id of the call, which its output repeats.
        name: Name of the function.
        arguments: Its arguments as JSON; "" while they come.
    """

    id: Annotated[str, example("fc_1")]
    status: Status = "in_progress"
    call_id: Annotated[str, example("call_1")]
    name: Annotated[str, example("weather")]
    arguments: Annotated[str, example('{"city": "Rome"}')] = ""


OutputItem = MessageItem | ReasoningItem | CallItem


class ResponseError(Struct, kw_only=True):
    """What went wrong.

    Attributes:
        code: Kind of the failure for programs.
        message: What was wrong, what the limit is and what to do.
    """

    code: Annotated[str, example("server_error")]
    message: Annotated[str, example("the model was switched")]


class Incomplete(Struct):
    """Why a response is not whole.

    Attributes:
        reason: The limit that cut it.
    """

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningShown(Struct):
    """How much the model was asked to think.

    Attributes:
        effort: That of the request.
        summary: Always null.
    """

    effort: Annotated[str | None, example("low")]
    summary: Annotated[None, example(None)] = None


class Response(Struct, kw_only=True):
    """The answer, or what of it there is so far.

    Attributes:
        id: Id of the response; kept attention has it as its name.
        object: Always "response".
        created_at: When it was begun, in seconds since 1970.
        completed_at: When it ended; null before.
        status: Whether it is whole; "incomplete" is one that a limit cut.
        model: The model, as the request names it.
        output: Items of the answer, in the order in which they came.
        error: What went wrong; null otherwise.
        incomplete_details: Which limit cut it; null otherwise.
        instructions: Those of the request.
        max_output_tokens: That of the request.
        metadata: That of the request.
        parallel_tool_calls: Whether there may be several calls.
        previous_response_id: Always null.
        reasoning: The request's effort.
        store: Always false.
        temperature: That of the request.
        text: Form of the text.
        tool_choice: That of the request.
        tools: Those of the request.
        top_logprobs: That of the request.
        top_p: That of the request.
        truncation: Always "disabled".
        usage: Tokens of the request; null before its end.
        attention: Attention of each token, if asked for.
        prompt_attention: Rows of the prompt, if asked for.
    """

    id: Annotated[str, example("resp_1")]
    object: Literal["response"] = "response"
    created_at: Annotated[int, example(1767225600)]
    completed_at: Annotated[int | None, example(1767225601)] = None
    status: Status
    model: Annotated[str, example("demo")]
    output: list[OutputItem]
    error: ResponseError | None = None
    incomplete_details: Incomplete | None = None
    instructions: Annotated[str | None, example("Answer briefly.")]
    max_output_tokens: Annotated[int | None, example(128)]
    metadata: Annotated[dict[str, str], example({"topic": "names"})]
    parallel_tool_calls: bool
    previous_response_id: Annotated[None, example(None)] = None
    reasoning: ReasoningShown
    store: bool = False
    temperature: Annotated[float | None, example(0.7)]
    text: TextConfig
    tool_choice: Annotated[Any, example("auto")]
    tools: Annotated[list[Tool], example([])]
    top_logprobs: Annotated[int, example(0)]
    top_p: Annotated[float | None, example(0.9)]
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    attention: list[TokenAttention] | UnsetType = UNSET
    prompt_attention: list[PromptAttention] | UnsetType = UNSET


class InputTokens(Struct, kw_only=True):
    """How many tokens the prompt of a conversation has.

    Attributes:
        object: Always "response.input_tokens".
        input_tokens: How many there are.
    """

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Annotated[int, example(12)]
