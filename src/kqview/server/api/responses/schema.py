"""Bodies of OpenAI's Responses API: typed requests and replies, field for field.

Unknown fields are ignored, as are ``metadata``, ``user``, ``service_tier``, ``prompt_cache_key``
and others that only OpenAI's own servers can act on. ``attention`` is ours and means the same as in
``/v1/chat/completions``.
"""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Struct

from kqview.server.api.wire.attention import AttentionField
from kqview.server.api.wire.chat_message import EffortField, ParallelCallsField, TemplateField
from kqview.server.api.wire.citations import (
    DocumentsField,
    GroundingField,
    HeadsField,
    InjectionField,
    InjectionFound,
    UrlCitation,
)
from kqview.server.api.wire.event_parts import PromptRows, TokenRows
from kqview.server.api.wire.fields import LlamaFields, ModelField
from kqview.server.api.wire.logprobs import TokenLogprob
from kqview.server.web.described import about

Object = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed"]

# ---- requests


class Part(Struct, kw_only=True):
    """A part of a content; ``type`` says which of the other fields belong to it."""

    type: Annotated[
        str,
        about(
            'Kind of the part: "input_text", "output_text", "summary_text", "reasoning_text" or '
            '"refusal".',
            "input_text",
        ),
    ]
    text: Annotated[str | None, about("Its text.", "Who is Anna?")] = None
    refusal: Annotated[str | None, about('Of "refusal": the text.', "I cannot do that.")] = None


class Item(Struct, kw_only=True):
    """An item of the input; ``type`` says which of the other fields belong to it."""

    type: Annotated[
        str,
        about(
            'Kind of the item: "message", "reasoning", "function_call" or "function_call_output".'
        ),
    ] = "message"
    role: Annotated[str | None, about('Of "message": who speaks.', "user")] = None
    content: Annotated[
        str | list[Part] | None,
        about('Of "message" and "reasoning": a text, or its parts.', "Who is Anna?"),
    ] = None
    summary: Annotated[list[Part] | None, about('Of "reasoning": parts of its summary.')] = None
    call_id: Annotated[
        str | None, about("Of calls and their outputs: id of the call.", "call_1")
    ] = None
    name: Annotated[str | None, about('Of "function_call": the function.', "weather")] = None
    arguments: Annotated[
        str | None,
        about(
            'Of "function_call": its arguments as JSON, such as "{\\"city\\": \\"Rome\\"}".',
            '{"city": "Rome"}',
        ),
    ] = None
    output: Annotated[
        str | list[Part] | None,
        about('Of "function_call_output": what the function returned, or its parts.', "sunny"),
    ] = None


class TextFormat(Struct, kw_only=True):
    """Form of the text: any, JSON, or JSON that follows a schema."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"],
        about(
            '"text" is any text, "json_object" JSON, "json_schema" JSON that follows the schema.'
        ),
    ] = "text"
    name: Annotated[str | None, about("Name of the schema; not read.", "person")] = None
    schema: Annotated[Object | None, about("The JSON schema.", {"type": "object"})] = None
    strict: Annotated[bool | None, about("Not read: the text always follows the schema.")] = None
    description: Annotated[str | None, about("What the schema is for; not read.", "A person.")] = (
        None
    )


class TextConfig(Struct, kw_only=True):
    """How the text is written."""

    format: Annotated[TextFormat | None, about("Form of the text; any if not given.")] = None


class Reasoning(Struct, kw_only=True):
    """How much the model thinks, where its template leaves the choice."""

    effort: EffortField = None


class Tool(Struct, kw_only=True):
    """A function that the model may call."""

    type: Annotated[str, about("Kind of the tool; those of other kinds are left out.", "function")]
    name: Annotated[str | None, about("Name of the function.", "weather")] = None
    description: Annotated[str | None, about("What it does.", "Weather of a city.")] = None
    parameters: Annotated[
        Object | None, about("JSON schema of its arguments.", {"type": "object"})
    ] = None
    strict: Annotated[
        bool | None,
        about("Not read: arguments always follow their schema where a call is demanded."),
    ] = None


class AllowedTool(Struct, kw_only=True):
    """A tool that may be called."""

    type: Annotated[str, about('Always "function".', "function")] = "function"
    name: Annotated[str | None, about("Name of the function.", "weather")] = None


class NamedTool(Struct, kw_only=True):
    """The one tool that the model has to call, or those that it may."""

    type: Annotated[
        str,
        about(
            'What it says, which demands a call of the one in ``name``; "allowed_tools" allows '
            "those in ``tools``.",
            "function",
        ),
    ]
    name: Annotated[str | None, about("Name of the function.", "weather")] = None
    mode: Annotated[
        Literal["auto", "required"] | None,
        about('Of "allowed_tools": whether one of them has to be called.'),
    ] = None
    tools: Annotated[
        list[AllowedTool] | None, about('Of "allowed_tools": those that may be called.')
    ] = None


class InputBody(LlamaFields, kw_only=True):
    """A conversation whose tokens to count."""

    input: Annotated[
        str | list[Item], about("A text, or the whole conversation as items.", "Who is Anna?")
    ]
    model: ModelField = None
    instructions: Annotated[str | None, about("System prompt.", "Answer briefly.")] = None
    tools: Annotated[list[Tool] | None, about("Functions that the model may call.")] = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | None,
        about("Whether it calls them.", default="auto"),
    ] = None
    parallel_tool_calls: ParallelCallsField = None
    text: Annotated[TextConfig | None, about("How the text is written.")] = None
    reasoning: Annotated[Reasoning | None, about("How much the model thinks.")] = None
    documents: DocumentsField = None
    previous_response_id: Annotated[
        str | None,
        about(
            "Has to be null: the server keeps no responses. Send the whole conversation as input.",
            None,
        ),
    ] = None
    chat_template_kwargs: TemplateField = None
    conversation: Annotated[
        Any, about("Has to be null: the server keeps no conversations.", None)
    ] = None
    prompt: Annotated[Any, about("Has to be null: the server keeps no prompts.", None)] = None


class ResponsesBody(InputBody, kw_only=True):
    """A conversation to continue; llama.cpp's sampling fields work too."""

    citation_heads: HeadsField = None
    grounding: GroundingField = None
    injection: InjectionField = None
    max_output_tokens: Annotated[
        int | None, about("Most tokens to generate; as many as fit the context if not given.", 128)
    ] = None
    top_logprobs: Annotated[
        int | None,
        about(
            "So many of the most probable tokens with each, where ``include`` asks for "
            "logprobs. They are before bias, grammar and samplers.",
            3,
        ),
    ] = None
    include: Annotated[
        list[str] | None,
        about(
            'What else the response has: ["message.output_text.logprobs"] for logprobs; the '
            "rest is ignored.",
            ["message.output_text.logprobs"],
        ),
    ] = None
    metadata: Annotated[
        dict[str, str] | None, about("Texts that the response repeats.", {"topic": "names"})
    ] = None
    store: Annotated[
        bool | None, about("Has to be false: the server keeps no responses.", default=False)
    ] = None
    background: Annotated[
        bool | None, about("Has to be false: it is not supported.", default=False)
    ] = None
    attention: AttentionField = None


# ---- replies


class InputDetails(Struct, kw_only=True):
    """Of the prompt's tokens."""

    cached_tokens: Annotated[int, about("Those that were in the cache.", 0)]
    cache_write_tokens: Annotated[int, about("Always 0.", 0)] = 0


class OutputDetails(Struct, kw_only=True):
    """Of the generated tokens."""

    reasoning_tokens: Annotated[int, about("Those of the reasoning.", 0)]


class ResponseUsage(Struct, kw_only=True):
    """Tokens of the request."""

    input_tokens: Annotated[int, about("Tokens of the prompt.", 12)]
    input_tokens_details: Annotated[InputDetails, about("More about them.")]
    output_tokens: Annotated[int, about("Tokens that were generated.", 20)]
    output_tokens_details: Annotated[OutputDetails, about("More about them.")]
    total_tokens: Annotated[int, about("Both together.", 32)]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: Annotated[str, about("The text.", "Anna is a teacher.")]
    annotations: Annotated[
        list[UrlCitation], about("What its sentences are from, if there are ``documents``.", [])
    ] = []
    logprobs: Annotated[list[TokenLogprob], about("Those of its tokens, if asked for.", [])] = []


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: Annotated[str, about("The text.", "The user asks for a name.")]


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    """A text of the answer."""

    id: Annotated[str, about("Its id.", "msg_1")]
    status: Annotated[Status, about("Whether it is whole.")] = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: Annotated[list[OutputText], about("Its one part; none while it comes.")] = []


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before it went on."""

    id: Annotated[str, about("Its id.", "rs_1")]
    status: Annotated[Status, about("Whether it is whole.")] = "in_progress"
    summary: Annotated[list[Object], about("Always [].", [])] = []
    content: Annotated[list[ReasoningText], about("Its one part; none while it comes.")] = []


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model calls."""

    id: Annotated[str, about("Its id.", "fc_1")]
    status: Annotated[Status, about("Whether it is whole.")] = "in_progress"
    call_id: Annotated[str, about("Id of the call, which its output repeats.", "call_1")]
    name: Annotated[str, about("Name of the function.", "weather")]
    arguments: Annotated[
        str, about('Its arguments as JSON; "" while they come.', '{"city": "Rome"}')
    ] = ""


OutputItem = MessageItem | ReasoningItem | CallItem


class ResponseError(Struct, kw_only=True):
    """What went wrong."""

    code: Annotated[str, about("Kind of the failure for programs.", "server_error")]
    message: Annotated[
        str, about("What was wrong, what the limit is and what to do.", "the model was switched")
    ]


class Incomplete(Struct):
    """Why a response is not whole."""

    reason: Annotated[Literal["max_output_tokens"], about("The limit that cut it.")] = (
        "max_output_tokens"
    )


class ReasoningShown(Struct):
    """How much the model was asked to think."""

    effort: Annotated[str | None, about("That of the request.", "low")]
    summary: Annotated[None, about("Always null.", None)] = None


class Response(Struct, kw_only=True):
    """The answer, or what of it there is so far."""

    id: Annotated[str, about("Id of the response; kept attention has it as its name.", "resp_1")]
    object: Literal["response"] = "response"
    created_at: Annotated[int, about("When it was begun, in seconds since 1970.", 1767225600)]
    completed_at: Annotated[int | None, about("When it ended; null before.", 1767225601)] = None
    status: Annotated[Status, about('Whether it is whole; "incomplete" is one that a limit cut.')]
    model: Annotated[str, about("The model, as the request names it.", "demo")]
    output: Annotated[
        list[OutputItem], about("Items of the answer, in the order in which they came.")
    ]
    error: Annotated[ResponseError | None, about("What went wrong; null otherwise.")] = None
    incomplete_details: Annotated[
        Incomplete | None, about("Which limit cut it; null otherwise.")
    ] = None
    instructions: Annotated[str | None, about("Those of the request.", "Answer briefly.")]
    max_output_tokens: Annotated[int | None, about("That of the request.", 128)]
    metadata: Annotated[dict[str, str], about("That of the request.", {"topic": "names"})]
    parallel_tool_calls: Annotated[bool, about("Whether there may be several calls.")]
    previous_response_id: Annotated[None, about("Always null.", None)] = None
    reasoning: Annotated[ReasoningShown, about("The request's effort.")]
    store: Annotated[bool, about("Always false.")] = False
    temperature: Annotated[float | None, about("That of the request.", 0.7)]
    text: Annotated[TextConfig, about("Form of the text.")]
    tool_choice: Annotated[Any, about("That of the request.", "auto")]
    tools: Annotated[list[Tool], about("Those of the request.", [])]
    top_logprobs: Annotated[int, about("That of the request.", 0)]
    top_p: Annotated[float | None, about("That of the request.", 0.9)]
    truncation: Literal["disabled"] = "disabled"
    usage: Annotated[ResponseUsage | None, about("Tokens of the request; null before its end.")] = (
        None
    )
    attention: TokenRows = UNSET
    prompt_attention: PromptRows = UNSET
    injection: InjectionFound = UNSET
