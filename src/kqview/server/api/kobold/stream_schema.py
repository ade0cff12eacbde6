"""Events and frames of the KoboldAI API, for the description; `convert` writes them.

A test compares what is sent with these types.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.event_parts import (
    AttentionObject,
    LeftOut,
    LikelyToken,
    ModCall,
    Removed,
    RunDetails,
)


class FailureDetail(Struct, kw_only=True):
    """A failure in KoboldCpp's words.

    Attributes:
        error: Name of the status, such as "Bad Request".
        msg: What was wrong, what the limit is and what to do, such as "top_p is 2".
        type: Kind of the failure, such as "bad_input".
    """

    error: str
    msg: str
    type: str


class Failure(Struct, kw_only=True):
    """What went wrong.

    Attributes:
        error: What was wrong, what the limit is and what to do, such as "top_p is 2".
        error_code: Kind of the failure for programs, such as "INVALID_REQUEST".
        detail: The same as KoboldCpp says it.
    """

    error: str
    error_code: str
    detail: FailureDetail


class CountFailure(Failure, kw_only=True):
    """Why tokens were not counted.

    Attributes:
        value: Always -1.
    """

    value: int


class TextFailure(Failure, kw_only=True):
    """Why ids were not turned into text.

    Attributes:
        result: Always "".
        success: Always false.
    """

    result: str
    success: bool


class EventToken(Struct, kw_only=True):
    """A token that was generated.

    Attributes:
        token_id: Its id, such as 354.
        text: The text that it completes, such as " teac"; "" inside a character of several ids.
        logprob: Its logprob before bias, grammar and samplers, such as -0.6, if asked for.
        top_logprobs: The most probable tokens at its place, if asked for.
    """

    token_id: int
    text: str
    logprob: float | UnsetType = UNSET
    top_logprobs: list[LikelyToken] | UnsetType = UNSET


class TokenEvent(Struct, kw_only=True):
    """A token, with its attention.

    Attributes:
        type: Always "token".
        token: The token.
        request_id: Name of the request, such as "r1".
        attention: Its attention; null if none was asked for.
    """

    type: Literal["token"]
    token: EventToken
    request_id: str
    attention: AttentionObject | None


class PromptEvent(Struct, kw_only=True):
    """Rows of the prompt, with ``prompt_attention``.

    Attributes:
        type: Always "prompt_attention".
        start: Position of their first token, such as 0.
        rows: How many tokens they are of, such as 6.
        request_id: Name of the request, such as "r1".
        attention: Their attention.
    """

    type: Literal["prompt_attention"]
    start: int
    rows: int
    request_id: str
    attention: AttentionObject | None


class RemovedEvent(Removed, kw_only=True):
    """What mods took back, which a client drops.

    Attributes:
        type: Always "removed".
        request_id: Name of the request, such as "r1".
    """

    type: Literal["removed"]
    request_id: str


class DoneFrame(RunDetails, kw_only=True):
    """The end, with the figures of the request.

    Attributes:
        type: Always "done".
        finish_reason: Why it ended: "stop" or "length", such as "length".
        total_tokens: Tokens that were generated, such as 2.
        reason: Why it ended exactly: "stop" if the model ended the text, "stop_token",
            "stop_sequence", "length", "cancelled" or "tool_calls", such as "length".
        text: Text that no token completed, such as "\\ufffd", if the model ended inside
            a character.
        tool_calls: Calls that a mod made.
    """

    type: Literal["done"]
    finish_reason: str
    total_tokens: int
    reason: str
    text: str | UnsetType = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET


class DoneEvent(DoneFrame, kw_only=True):
    """The end.

    Attributes:
        request_id: Name of the request, such as "r1".
    """

    request_id: str


class ErrorEvent(Failure, kw_only=True):
    """A failure, in place of the end.

    Attributes:
        type: Always "error".
        request_id: Name of the request, such as "r1"; absent if it was not begun.
    """

    type: Literal["error"]
    request_id: str | UnsetType = UNSET


class PlainEvent(LeftOut, kw_only=True):
    """Text in KoboldAI's form, for requests without attention and ``request_id``.

    Attributes:
        token: Text that is new, such as " t".
        finish_reason: Why it ended, such as "length", or "stop"; null before the end.
        removed: What mods took back.
        tool_calls: Calls that a mod made.
    """

    token: str
    finish_reason: str | None
    removed: Removed | UnsetType = UNSET
    tool_calls: list[ModCall] | UnsetType = UNSET


class TokenFrame(Struct, kw_only=True):
    """A token; a binary frame with its row follows.

    Attributes:
        type: Always "token".
        token_id: Its id, such as 354.
        text: The text that it completes, such as " teac".
        attention: What the row is, if it is anything but float32 of all layers and heads; formats
            that are not arrays are here completely.
    """

    type: Literal["token"]
    token_id: int
    text: str
    attention: AttentionObject | UnsetType = UNSET


class PromptFrame(Struct, kw_only=True):
    """Rows of the prompt, with ``prompt_attention``; a binary frame with their values follows.

    Attributes:
        type: Always "prompt_attention".
        start: Position of their first token, such as 0.
        rows: How many tokens they are of, such as 6.
        attention: What the values are.
    """

    type: Literal["prompt_attention"]
    start: int
    rows: int
    attention: AttentionObject | UnsetType = UNSET


class RemovedFrame(Removed, kw_only=True):
    """What mods took back, which a client drops; no binary frame follows.

    Attributes:
        type: Always "removed".
    """

    type: Literal["removed"]
