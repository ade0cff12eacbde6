"""Chunks of OpenAI's completions, for the description; `events` writes them.

A test compares what is sent with these types. The end of a stream is ``data: [DONE]``.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.openai.schema import ChoiceLogprobs, TextLogprobs, ToolCall, Usage
from kqview.server.api.wire.event_parts import ModCall, PromptAttention, Removed, TokenAttention
from kqview.server.api.wire.llama_fields import Progress, Timings
from kqview.server.web.described import example


class Delta(Struct, kw_only=True):
    """What is new in an answer.

    Attributes:
        role: Always "assistant"; in the first chunk of an answer.
        content: Text that is new; null in the first chunk.
        reasoning_content: Reasoning that is new.
        tool_calls: Calls that begin, and pieces of their arguments.
    """

    role: Literal["assistant"] | UnsetType = UNSET
    content: Annotated[str | UnsetType | None, example("Anna")] = UNSET
    reasoning_content: Annotated[str | UnsetType, example("The user")] = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChunkChoice(Struct, kw_only=True):
    """What is new in one of the answers.

    Attributes:
        index: Of the answer, from 0.
        finish_reason: Why it ended; "length" and "tool_calls" are the others. Null before its last
            chunk.
        attention: Attention of the token, if asked for.
        prompt_attention: Rows of the prompt, if asked for, in a chunk of their own.
        removed: What mods took back, in a chunk of its own.
    """

    index: Annotated[int, example(0)]
    finish_reason: Annotated[str | None, example("stop")]
    attention: TokenAttention | UnsetType = UNSET
    prompt_attention: PromptAttention | UnsetType = UNSET
    removed: Removed | UnsetType = UNSET


class ChatChunkChoice(ChunkChoice, kw_only=True):
    """What is new in one of the answers.

    Attributes:
        delta: The new part.
        logprobs: Those of the token, if asked for.
    """

    delta: Delta
    logprobs: ChoiceLogprobs | None


class TextChunkChoice(ChunkChoice, kw_only=True):
    """What is new in one of the texts.

    Attributes:
        text: Text that is new.
        logprobs: Those of the token, if asked for, in OpenAI's older form and that of chat
            completions; of the prompt in the first chunk, with ``echo``.
        tool_calls: Calls that a mod made.
    """

    text: Annotated[str, example(" t")] = ""
    logprobs: TextLogprobs | None
    tool_calls: list[ModCall] | UnsetType = UNSET


class Chunk(Struct, kw_only=True):
    """A piece of a reply.

    Attributes:
        id: Id of the reply, the same in each chunk.
        created: When it was begun, in seconds since 1970.
        model: The model, as the request names it.
        system_fingerprint: What generated it.
        usage: Tokens of the request, in a last chunk without choices, with
            ``stream_options.include_usage``.
        timings: What it cost, in the last chunk; in each one but that which begins a choice with
            ``timings_per_token``.
        prompt_progress: How much of the prompt is evaluated, with ``return_progress``, in chunks
            without choices before the first token.
    """

    id: Annotated[str, example("chatcmpl-1")]
    created: Annotated[int, example(1767225600)]
    model: Annotated[str, example("demo")]
    system_fingerprint: Annotated[str, example("kqview-0.1.0")]
    usage: Usage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: Progress | UnsetType = UNSET


class ChatChunk(Chunk, kw_only=True):
    """A piece of a chat completion.

    Attributes:
        object: Always "chat.completion.chunk".
        choices: The answer that it belongs to; none in the one with the usage.
    """

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextChunk(Chunk, kw_only=True):
    """A piece of a text completion.

    Attributes:
        object: Always "text_completion".
        choices: The text that it belongs to; none in the one with the usage.
    """

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
