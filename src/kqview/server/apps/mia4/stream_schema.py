"""Frames of MIA4's ``POST /generate`` and its failures, for the description.

`frames` and `convert` write them; a test compares what is sent with these types.
"""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.event_parts import Removed


class Failure(Struct, kw_only=True):
    """What went wrong before a stream began.

    Attributes:
        code: Kind of the failure for programs, such as "INVALID_REQUEST".
        error_type: Wider kind of the failure, such as "invalid_request".
        message: What was wrong, what the limit is and what to do, such as "prompt is missing".
        field: The field that is wrong, such as "overrides.top_p", if a single one is known.
        prompt_tokens: Tokens of a prompt that is too long, such as 3000.
        context_length: The most that it may have, such as 2048.
    """

    code: str
    error_type: str
    message: str
    field: str | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class Frame(Struct, kw_only=True):
    """A frame.

    Attributes:
        request_id: Name of the request, such as "r1".
        model_id: The model that answers, such as "demo".
    """

    request_id: str
    model_id: str


class AnalysisFrame(Frame, kw_only=True):
    """Reasoning while it comes, unless it is dropped.

    Attributes:
        seq: Number of the frame among those of its name, from 0, such as 0.
        text: The text that is new, such as "The user".
        attention: Path of the token's row, such as "/generate/r1/attention/0", if rows are kept.
    """

    seq: int
    text: str
    attention: str | UnsetType = UNSET


class TokenFrame(AnalysisFrame, kw_only=True):
    """The answer while it comes.

    Attributes:
        tokens_out: Tokens that were generated so far, such as 3.
    """

    tokens_out: int


class ReasoningFrame(Frame, kw_only=True):
    """The whole reasoning, where a marker ends it, unless it is dropped.

    Attributes:
        reasoning: The text, such as "The user asks for a name.".
    """

    reasoning: str


class RemovedFrame(Removed, kw_only=True):
    """What mods took back, which a client drops.

    Attributes:
        request_id: Name of the request, such as "r1".
        model_id: The model that answers, such as "demo".
        reasoning_characters: So many of the last characters of reasoning, such as 4.
    """

    request_id: str
    model_id: str
    reasoning_characters: int | UnsetType = UNSET


class ErrorFrame(Frame, kw_only=True):
    """A failure once the stream has begun, in place of the usage.

    Attributes:
        code: Kind of the failure for programs, such as "MODEL_CHANGED".
        error_type: Wider kind of the failure, such as "unavailable".
        message: What was wrong, and what to do, such as "the model was switched".
    """

    code: str
    error_type: str
    message: str


class UsageFrame(Frame, kw_only=True):
    """What it took.

    Attributes:
        prompt_tokens: Tokens of the prompt, such as 14.
        output_tokens: Tokens that were generated, such as 4; marks of reasoning count.
        latency_ms: Milliseconds from admission to the end, such as 20.
        decode_tps: ``output_tokens`` by these, a second, such as 200.0.
        reasoning_tokens: Tokens of the reasoning, such as 2.
        final_tokens: Tokens of the answer, such as 2.
        reasoning_ratio: Share of the output that is reasoning, 0..1, such as 0.5.
        messages_left_out: Messages of the conversation that did not fit into the prompt, such as 2.
    """

    prompt_tokens: int
    output_tokens: int
    latency_ms: int
    decode_tps: float
    reasoning_tokens: int
    final_tokens: int
    reasoning_ratio: float
    messages_left_out: int | UnsetType = UNSET


class EndFrame(Struct, kw_only=True):
    """The end, always the last.

    Attributes:
        request_id: Name of the request, such as "r1".
        status: Whether it went well.
        stop_reason: Why it ended.
    """

    request_id: str
    status: Literal["ok", "error"]
    stop_reason: Literal["stop", "stop_sequence", "length", "cancelled", "error"]
