"""Events of Anthropic's Messages API, for the description; `events` and `blocks` write them.

A test compares what is sent with these types. The name of an event is its ``type``.
"""

from typing import Annotated, Literal

from msgspec import Struct

from kqview.server.api.anthropic.schema import (
    Message,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Usage,
)
from kqview.server.api.wire.event_parts import PromptAttention, Removed, TokenAttention
from kqview.server.web.described import example


class FailureFacts(Struct, kw_only=True):
    """What went wrong.

    Attributes:
        type: Kind of the failure for programs.
        message: What was wrong, what the limit is and what to do.
    """

    type: Annotated[str, example("invalid_request_error")]
    message: Annotated[str, example("top_k is -5")]


class Failure(Struct, kw_only=True):
    """A failure, also as the last event of a stream.

    Attributes:
        type: Always "error".
        error: What went wrong.
    """

    type: Literal["error"]
    error: FailureFacts


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The message, which is empty so far.

    Attributes:
        message: The message.
    """

    message: Message


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins.

    Attributes:
        index: Of the block, from 0.
        content_block: The block, which is empty so far.
    """

    index: Annotated[int, example(0)]
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """Text that is new.

    Attributes:
        text: The text.
    """

    text: Annotated[str, example("Anna")]


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """Thinking that is new.

    Attributes:
        thinking: The text.
    """

    thinking: Annotated[str, example("The user")]


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    """The signature of a block of thinking.

    Attributes:
        signature: Always "": nothing checks it.
    """

    signature: Annotated[str, example("")]


class JsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """A piece of a call's arguments.

    Attributes:
        partial_json: The piece, such as "{\\"city\\": ".
    """

    partial_json: Annotated[str, example('{"city": ')]


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """A block goes on.

    Attributes:
        index: Of the block, from 0.
        delta: What is new in it.
    """

    index: Annotated[int, example(0)]
    delta: TextDelta | ThinkingDelta | SignatureDelta | JsonDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block ends.

    Attributes:
        index: Of the block, from 0.
    """

    index: Annotated[int, example(0)]


class AttentionEvent(Struct, tag_field="type", tag="attention"):
    """Attention of a token, if asked for; an event of kqview's own.

    Attributes:
        attention: The attention.
    """

    attention: TokenAttention


class PromptAttentionEvent(Struct, tag_field="type", tag="prompt_attention"):
    """Rows of the prompt, if asked for; an event of kqview's own.

    Attributes:
        attention: The rows.
    """

    attention: PromptAttention


class RemovedEvent(Removed, tag_field="type", tag="removed"):
    """What mods took back, which a client drops; an event of kqview's own."""


class StopFacts(Struct):
    """Why a message ended.

    Attributes:
        stop_reason: "end_turn", "max_tokens", "stop_sequence" or "tool_use".
        stop_sequence: The stop sequence that ended it; null without one.
    """

    stop_reason: Annotated[str, example("end_turn")]
    stop_sequence: Annotated[str | None, example("\n\n")]


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The message is whole.

    Attributes:
        delta: Why it ended.
        usage: Tokens of the request.
    """

    delta: StopFacts
    usage: Usage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The end."""
