"""Frames of MIA4's ``POST /generate`` and its failures, for the description.

`frames` and `convert` write them; a test compares what is sent with these types.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.event_parts import Removed
from kqview.server.web.described import example


class Failure(Struct, kw_only=True):
    """What went wrong before a stream began.

    Attributes:
        code: Kind of the failure for programs.
        error_type: Wider kind of the failure.
        message: What was wrong, what the limit is and what to do.
        field: The field that is wrong, if a single one is known.
        prompt_tokens: Tokens of a prompt that is too long.
        context_length: The most that it may have.
    """

    code: Annotated[str, example("INVALID_REQUEST")]
    error_type: Annotated[str, example("invalid_request")]
    message: Annotated[str, example("prompt is missing")]
    field: Annotated[str | UnsetType, example("overrides.top_p")] = UNSET
    prompt_tokens: Annotated[int | UnsetType, example(3000)] = UNSET
    context_length: Annotated[int | UnsetType, example(2048)] = UNSET


class Frame(Struct, kw_only=True):
    """A frame.

    Attributes:
        request_id: Name of the request.
        model_id: The model that answers.
    """

    request_id: Annotated[str, example("r1")]
    model_id: Annotated[str, example("demo")]


class AnalysisFrame(Frame, kw_only=True):
    """Reasoning while it comes, unless it is dropped.

    Attributes:
        seq: Number of the frame among those of its name, from 0.
        text: The text that is new.
        attention: Path of the token's row, if rows are kept.
    """

    seq: Annotated[int, example(0)]
    text: Annotated[str, example("The user")]
    attention: Annotated[str | UnsetType, example("/generate/r1/attention/0")] = UNSET


class TokenFrame(AnalysisFrame, kw_only=True):
    """The answer while it comes.

    Attributes:
        tokens_out: Tokens that were generated so far.
    """

    tokens_out: Annotated[int, example(3)]


class ReasoningFrame(Frame, kw_only=True):
    """The whole reasoning, where a marker ends it, unless it is dropped.

    Attributes:
        reasoning: The text.
    """

    reasoning: Annotated[str, example("The user asks for a name.")]


class RemovedFrame(Removed, kw_only=True):
    """What mods took back, which a client drops.

    Attributes:
        request_id: Name of the request.
        model_id: The model that answers.
        reasoning_characters: So many of the last characters of reasoning.
    """

    request_id: Annotated[str, example("r1")]
    model_id: Annotated[str, example("demo")]
    reasoning_characters: Annotated[int | UnsetType, example(4)] = UNSET


class ErrorFrame(Frame, kw_only=True):
    """A failure once the stream has begun, in place of the usage.

    Attributes:
        code: Kind of the failure for programs.
        error_type: Wider kind of the failure.
        message: What was wrong, and what to do.
    """

    code: Annotated[str, example("MODEL_CHANGED")]
    error_type: Annotated[str, example("unavailable")]
    message: Annotated[str, example("the model was switched")]


class UsageFrame(Frame, kw_only=True):
    """What it took.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        output_tokens: Tokens that were generated; marks of reasoning count.
        latency_ms: Milliseconds from admission to the end.
        decode_tps: ``output_tokens`` by these, a second.
        reasoning_tokens: Tokens of the reasoning.
        final_tokens: Tokens of the answer.
        reasoning_ratio: Share of the output that is reasoning, 0..1.
        messages_left_out: Messages of the conversation that did not fit into the prompt.
    """

    prompt_tokens: Annotated[int, example(14)]
    output_tokens: Annotated[int, example(4)]
    latency_ms: Annotated[int, example(20)]
    decode_tps: Annotated[float, example(200.0)]
    reasoning_tokens: Annotated[int, example(2)]
    final_tokens: Annotated[int, example(2)]
    reasoning_ratio: Annotated[float, example(0.5)]
    messages_left_out: Annotated[int | UnsetType, example(2)] = UNSET


class EndFrame(Struct, kw_only=True):
    """The end, always the last.

    Attributes:
        request_id: Name of the request.
        status: Whether it went well.
        stop_reason: Why it ended.
    """

    request_id: Annotated[str, example("r1")]
    status: Literal["ok", "error"]
    stop_reason: Literal["stop", "stop_sequence", "length", "cancelled", "error"]
