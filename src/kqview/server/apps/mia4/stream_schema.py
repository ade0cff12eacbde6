"""Frames of MIA4's ``POST /generate`` and its failures, for the description.

`frames` and `convert` write them; a test compares what is sent with these types.
"""

from typing import Annotated, Literal

from msgspec import UNSET, Struct, UnsetType

from kqview.server.api.wire.event_parts import Removed
from kqview.server.web.described import about


class Failure(Struct, kw_only=True):
    """What went wrong before a stream began."""

    code: Annotated[str, about("Kind of the failure for programs.", "INVALID_REQUEST")]
    error_type: Annotated[str, about("Wider kind of the failure.", "invalid_request")]
    message: Annotated[
        str, about("What was wrong, what the limit is and what to do.", "prompt is missing")
    ]
    field: Annotated[
        str | UnsetType,
        about("The field that is wrong, if a single one is known.", "overrides.top_p"),
    ] = UNSET
    prompt_tokens: Annotated[
        int | UnsetType, about("Tokens of a prompt that is too long.", 3000)
    ] = UNSET
    context_length: Annotated[int | UnsetType, about("The most that it may have.", 2048)] = UNSET


class Frame(Struct, kw_only=True):
    """A frame."""

    request_id: Annotated[str, about("Name of the request.", "r1")]
    model_id: Annotated[str, about("The model that answers.", "demo")]


class AnalysisFrame(Frame, kw_only=True):
    """Reasoning while it comes, unless it is dropped."""

    seq: Annotated[int, about("Number of the frame among those of its name, from 0.", 0)]
    text: Annotated[str, about("The text that is new.", "The user")]
    attention: Annotated[
        str | UnsetType,
        about("Path of the token's row, if rows are kept.", "/generate/r1/attention/0"),
    ] = UNSET


class TokenFrame(AnalysisFrame, kw_only=True):
    """The answer while it comes."""

    tokens_out: Annotated[int, about("Tokens that were generated so far.", 3)]


class ReasoningFrame(Frame, kw_only=True):
    """The whole reasoning, where a marker ends it, unless it is dropped."""

    reasoning: Annotated[str, about("The text.", "The user asks for a name.")]


class RemovedFrame(Removed, kw_only=True):
    """What mods took back, which a client drops."""

    request_id: Annotated[str, about("Name of the request.", "r1")]
    model_id: Annotated[str, about("The model that answers.", "demo")]
    reasoning_characters: Annotated[
        int | UnsetType, about("So many of the last characters of reasoning.", 4)
    ] = UNSET


class ErrorFrame(Frame, kw_only=True):
    """A failure once the stream has begun, in place of the usage."""

    code: Annotated[str, about("Kind of the failure for programs.", "MODEL_CHANGED")]
    error_type: Annotated[str, about("Wider kind of the failure.", "unavailable")]
    message: Annotated[str, about("What was wrong, and what to do.", "the model was switched")]


class UsageFrame(Frame, kw_only=True):
    """What it took."""

    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 14)]
    output_tokens: Annotated[int, about("Tokens that were generated; marks of reasoning count.", 4)]
    latency_ms: Annotated[int, about("Milliseconds from admission to the end.", 20)]
    decode_tps: Annotated[float, about("``output_tokens`` by these, a second.", 200.0)]
    reasoning_tokens: Annotated[int, about("Tokens of the reasoning.", 2)]
    final_tokens: Annotated[int, about("Tokens of the answer.", 2)]
    reasoning_ratio: Annotated[float, about("Share of the output that is reasoning, 0..1.", 0.5)]
    messages_left_out: Annotated[
        int | UnsetType, about("Messages of the conversation that did not fit into the prompt.", 2)
    ] = UNSET


class EndFrame(Struct, kw_only=True):
    """The end, always the last."""

    request_id: Annotated[str, about("Name of the request.", "r1")]
    status: Annotated[Literal["ok", "error"], about("Whether it went well.")]
    stop_reason: Annotated[
        Literal["stop", "stop_sequence", "length", "cancelled", "error"], about("Why it ended.")
    ]
