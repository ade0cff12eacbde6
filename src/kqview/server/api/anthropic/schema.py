"""Bodies of Anthropic's Messages API: typed requests and replies, field for field.

Unknown fields are ignored, as are those that only Anthropic's own servers can act on:
``cache_control``, ``metadata``, ``service_tier``, ``container``. ``attention`` and
``citation_heads`` are ours.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.attention import AttentionField
from kqview.server.api.wire.chat_message import ANY_MESSAGES, EffortField, TemplateField
from kqview.server.api.wire.citations import (
    GroundingField,
    GroundingFound,
    HeadsField,
    InjectionField,
    InjectionFound,
)
from kqview.server.api.wire.event_parts import PromptRows, TokenRows
from kqview.server.api.wire.fields import LlamaFields, ModelField, Stops
from kqview.server.web.described import about

Object = dict[str, Any]

# ---- requests


class Source(Struct, kw_only=True):
    """Where a document's text is: here."""

    type: Annotated[str, about('"text", or "content" for blocks of text.', "text")]
    data: Annotated[str, about('Of "text": the text.', "Anna is a teacher.")] = ""
    content: Annotated[
        "str | list[Block] | None", about('Of "content": the blocks, or the only one.', None)
    ] = None


class Block(Struct, kw_only=True):
    """A block of a message's content; ``type`` says which of the other fields belong to it."""

    type: Annotated[
        str,
        about(
            'Kind of the block: "text", "document", "thinking", "redacted_thinking", "tool_use" '
            'or "tool_result".',
            "text",
        ),
    ]
    text: Annotated[str, about('Of "text": the text.', "Who is Anna?")] = ""
    source: Annotated[Source | None, about('Of "document": its text.')] = None
    title: Annotated[str | None, about('Of "document": its title.', "People")] = None
    context: Annotated[
        str | None, about('Of "document": what the model is told of it, and cannot be cited.', None)
    ] = None
    citations: Annotated[
        Any,
        about(
            'Of "document": whether the answer says which sentences are from it, true in '
            "``enabled``; of other blocks not read.",
            {"enabled": True},
        ),
    ] = None
    thinking: Annotated[
        str, about('Of "thinking": what the model thought.', "The user asks for a name.")
    ] = ""
    id: Annotated[str, about('Of "tool_use": id of the call.', "toolu_1")] = ""
    name: Annotated[str, about('Of "tool_use": name of the tool.', "weather")] = ""
    input: Annotated[Object, about('Of "tool_use": arguments of the call.', {"city": "Rome"})] = {}
    tool_use_id: Annotated[
        str, about('Of "tool_result": id of the call that it answers.', "toolu_1")
    ] = ""
    content: Annotated[
        "str | list[Block] | None",
        about('Of "tool_result": what the tool returned, or blocks of text.', "sunny"),
    ] = None
    is_error: Annotated[
        bool,
        about('Of "tool_result": whether the tool failed; accepted, and not shown to the model.'),
    ] = False


class InputMessage(Struct, kw_only=True):
    """A turn of the conversation."""

    role: Annotated[Literal["user", "assistant", "system"], about("Who speaks.")]
    content: Annotated[str | list[Block], about("A text, or a list of blocks.", "Who is Anna?")]


class Tool(Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, about("Name of the function.", "weather")]
    description: Annotated[str | None, about("What it does.", "Weather of a city.")] = None
    input_schema: Annotated[
        Object | None,
        about(
            "JSON schema of its arguments; a tool without one is one that only Anthropic's "
            "servers run, and is left out.",
            {"type": "object"},
        ),
    ] = None
    type: Annotated[str | None, about("Kind of the tool; not read.", "custom")] = None


class ToolChoice(Struct, kw_only=True):
    """Whether the model calls tools, and which."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"],
        about(
            '"auto" leaves it to the model, "any" demands a call, "tool" one of the tool in '
            '``name``, "none" forbids calls.'
        ),
    ]
    name: Annotated[str | None, about("The tool that has to be called.", "weather")] = None
    disable_parallel_tool_use: Annotated[bool, about("Whether there is at most one call.")] = False


class Thinking(Struct, kw_only=True):
    """Whether the model thinks before it answers, where its template leaves the choice."""

    type: Annotated[str, about('"enabled" or "disabled"; others leave it to the model.', "enabled")]
    budget_tokens: Annotated[
        Annotated[int, msgspec.Meta(ge=0)] | None,
        about("Most tokens of thinking; the server's limit if not given.", 1024),
    ] = None


class OutputFormat(Struct, kw_only=True):
    """A schema that the text of the answer has to follow."""

    type: Literal["json_schema"]
    schema: Annotated[Object, about("The JSON schema.", {"type": "object"})]


class OutputConfig(Struct, kw_only=True):
    """Form and effort of the answer."""

    effort: EffortField = None
    format: Annotated[
        OutputFormat | None, about("A schema that the text of the answer follows.")
    ] = None


class CountBody(LlamaFields, kw_only=True):
    """A conversation whose tokens to count."""

    messages: Annotated[list[InputMessage], ANY_MESSAGES]
    model: ModelField = None
    system: Annotated[
        str | list[Block] | None, about("System prompt, or blocks of text.", "Answer briefly.")
    ] = None
    tools: Annotated[list[Tool] | None, about("Functions that the model may call.")] = None
    tool_choice: Annotated[
        ToolChoice | None, about("Whether it calls them; as it likes if not given.")
    ] = None
    thinking: Annotated[Thinking | None, about("Whether it thinks first.")] = None
    output_config: Annotated[OutputConfig | None, about("Form and effort of the answer.")] = None
    chat_template_kwargs: TemplateField = None


class MessagesBody(CountBody, kw_only=True):
    """A conversation to continue; llama.cpp's sampling fields work too."""

    citation_heads: HeadsField = None
    grounding: GroundingField = None
    injection: InjectionField = None
    stop_sequences: Annotated[Stops | None, about("Texts that end the answer.", ["\n\n"])] = None
    attention: AttentionField = None


# ---- replies

StopSequence = Annotated[
    str | None, about("The stop sequence that ended it; null without one.", "\n\n")
]


class Citation(Struct, kw_only=True):
    """A passage of a document that a sentence is from."""

    cited_text: Annotated[str, about("The passage.", "Anna is a teacher.")]
    document_index: Annotated[int, about("Of the document among those of the request, from 0.", 0)]
    document_title: Annotated[str | None, about("Its title.", "People")]
    score: Annotated[
        float, about("Attention that the passage got, the mean over the sentence's tokens.", 0.4)
    ]
    grounding: GroundingFound = UNSET


class CharLocation(Citation, kw_only=True, tag_field="type", tag="char_location"):
    """The same by characters."""

    start_char_index: Annotated[int, about("Its first character.", 0)]
    end_char_index: Annotated[int, about("The character behind its last one.", 18)]


class BlockLocation(Citation, kw_only=True, tag_field="type", tag="content_block_location"):
    """The same by blocks of the document."""

    start_block_index: Annotated[int, about("Its first block.", 0)]
    end_block_index: Annotated[int, about("The block behind its last one.", 1)]


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: Annotated[str, about("The text.", "Anna is a teacher.")]
    citations: Annotated[
        list[CharLocation | BlockLocation] | UnsetType,
        about("What it is from, if a document can be cited.", []),
    ] = UNSET


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What the model thought first."""

    thinking: Annotated[str, about("The text.", "The user asks for a name.")]
    signature: Annotated[str, about('Always "": nothing checks it.', "")] = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A tool that the model calls."""

    id: Annotated[str, about("Id of the call, which its result repeats.", "toolu_1")]
    name: Annotated[str, about("Name of the tool.", "weather")]
    input: Annotated[Object, about("Arguments of the call.", {"city": "Rome"})]


class Usage(Struct, kw_only=True):
    """Tokens of the request."""

    input_tokens: Annotated[int, about("Tokens of the prompt that were evaluated.", 12)]
    cache_creation_input_tokens: Annotated[
        int, about("Always 0: the cache is the server's own.", 0)
    ] = 0
    cache_read_input_tokens: Annotated[
        int, about("Tokens of the prompt that were in the cache.", 0)
    ]
    output_tokens: Annotated[int, about("Tokens that were generated.", 20)]


class Message(Struct, kw_only=True):
    """The answer."""

    id: Annotated[str, about("Id of the message; kept attention has it as its name.", "msg_01")]
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: Annotated[str, about("The model, as the request names it.", "demo")]
    content: Annotated[
        list[TextBlock | ThinkingBlock | ToolUseBlock],
        about(
            "What was answered, in the order in which it came.",
            [{"type": "text", "text": "Anna is a teacher."}],
        ),
    ]
    stop_reason: Annotated[
        str | None,
        about(
            'Why it ended: "end_turn", "max_tokens", "stop_sequence" or "tool_use"; null while '
            "it comes.",
            "end_turn",
        ),
    ]
    stop_sequence: StopSequence
    usage: Annotated[Usage, about("Tokens of the request.")]
    attention: TokenRows = UNSET
    prompt_attention: PromptRows = UNSET
    injection: InjectionFound = UNSET


class TokenCount(Struct):
    """How many tokens the prompt of a conversation has."""

    input_tokens: Annotated[int, about("How many there are.", 12)]
