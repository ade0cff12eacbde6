"""Events and frames of the KoboldAI API, for the description; `convert` writes them.

A test compares what is sent with these types.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.event_parts import (
    AttentionObject,
    LeftOut,
    LikelyToken,
    ModCall,
    Removed,
    RunDetails,
)
from kqview.server.web.described import example


class FailureDetail(Struct, kw_only=True):
    """A failure in KoboldCpp's words.

    Attributes:
        error: Name of the status.
        msg: What was wrong, what the limit is and what to do.
        type: Kind of the failure.
    """

    error: Annotated[str, example("Bad Request")]
    msg: Annotated[str, example("top_p is 2")]
    type: Annotated[str, example("bad_input")]


class Failure(Struct, kw_only=True):
    """What went wrong.

    Attributes:
        error: What was wrong, what the limit is and what to do.
        error_code: Kind of the failure for programs.
        detail: The same as KoboldCpp says it.
    """

    error: Annotated[str, example("top_p is 2")]
    error_code: Annotated[str, example("INVALID_REQUEST")]
    detail: FailureDetail


class CountFailure(Failure, kw_only=True):
    """Why tokens were not counted.

    Attributes:
        value: Always -1.
    """

    value: Annotated[int, example(-1)]


class TextFailure(Failure, kw_only=True):
    """Why ids were not turned into text.

    Attributes:
        result: Always "".
        success: Always false.
    """

    result: Annotated[str, example("")]
    success: bool


class EventToken(Struct, kw_only=True):
    """A token that was generated.

    Attributes:
        token_id: Its id.
        text: The text that it completes; "" inside a character of several ids.
        logprob: Its logprob before bias, grammar and samplers, if asked for.
        top_logprobs: The most probable tokens at its place, if asked for.
    """

    token_id: Annotated[int, example(354)]
    text: Annotated[str, example(" teac")]
    logprob: Annotated[float | UnsetType, example(-0.6)] = UNSET
    top_logprobs: list[LikelyToken] | UnsetType = UNSET


class TokenEvent(Struct, kw_only=True):
    """A token, with its attention.

    Attributes:
        type: Always "token".
        token: The token.
        request_id: Name of the request.
        attention: Its attention; null if none was asked for.
    """

    type: Literal["token"]
    token: EventToken
    request_id: Annotated[str, example("r1")]
    attention: AttentionObject | None


class PromptEvent(Struct, kw_only=True):
    """Rows of the prompt, with ``prompt_attention``.

    Attributes:
        type: Always "prompt_attention".
        start: Position of their first token.
        rows: How many tokens they are of.
        request_id: Name of the request.
        attention: Their attention.
    """

    type: Literal["prompt_attention"]
    start: Annotated[int, example(0)]
    rows: Annotated[int, example(6)]
    request_id: Annotated[str, example("r1")]
    attention: AttentionObject | None


class RemovedEvent(Removed, kw_only=True):
    """What mods took back, which a client drops.

    Attributes:
        type: Always "removed".
        request_id: Name of the request.
    """

    type: Literal["removed"]
    request_id: Annotated[str, example("r1")]


class DoneFrame(RunDetails, kw_only=True):
    """The end, with the figures of the request.

    Attributes:
        type: Always "done".
        finish_reason: Why it ended: "stop" or "length".
        total_tokens: Tokens that were generated.
        reason: Why it ended exactly: "stop" if the model ended the text, "stop_token",
            "stop_sequence", "length", "cancelled" or "tool_calls".
        text: Text that no token completed, if the model ended inside a character.
        tool_calls: Calls that a mod made.
    """

    type: Literal["done"]
    finish_reason: Annotated[str, example("length")]
    total_tokens: Annotated[int, example(2)]
    reason: Annotated[str, example("length")]
    text: Annotated[str | UnsetType, example("�")] = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET


class DoneEvent(DoneFrame, kw_only=True):
    """The end.

    Attributes:
        request_id: Name of the request.
    """

    request_id: Annotated[str, example("r1")]


class ErrorEvent(Failure, kw_only=True):
    """A failure, in place of the end.

    Attributes:
        type: Always "error".
        request_id: Name of the request; absent if it was not begun.
    """

    type: Literal["error"]
    request_id: Annotated[str | UnsetType, example("r1")] = UNSET


class PlainEvent(LeftOut, kw_only=True):
    """Text in KoboldAI's form, for requests without attention and ``request_id``.

    Attributes:
        token: Text that is new.
        finish_reason: Why it ended, such as "length", or "stop"; null before the end.
        removed: What mods took back.
        tool_calls: Calls that a mod made.
    """

    token: Annotated[str, example(" t")]
    finish_reason: Annotated[str | None, example("length")]
    removed: Removed | UnsetType = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET


class TokenFrame(Struct, kw_only=True):
    """A token; a binary frame with its row follows.

    Attributes:
        type: Always "token".
        token_id: Its id.
        text: The text that it completes.
        attention: What the row is, if it is anything but float32 of all layers and heads; formats
            that are not arrays are here completely.
    """

    type: Literal["token"]
    token_id: Annotated[int, example(354)]
    text: Annotated[str, example(" teac")]
    attention: AttentionObject | UnsetType = UNSET


class PromptFrame(Struct, kw_only=True):
    """Rows of the prompt, with ``prompt_attention``; a binary frame with their values follows.

    Attributes:
        type: Always "prompt_attention".
        start: Position of their first token.
        rows: How many tokens they are of.
        attention: What the values are.
    """

    type: Literal["prompt_attention"]
    start: Annotated[int, example(0)]
    rows: Annotated[int, example(6)]
    attention: AttentionObject | UnsetType = UNSET


class RemovedFrame(Removed, kw_only=True):
    """What mods took back, which a client drops; no binary frame follows.

    Attributes:
        type: Always "removed".
    """

    type: Literal["removed"]
