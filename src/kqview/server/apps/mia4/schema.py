"""Bodies of the MIA4 API. Types alone: msgspec reads, checks and writes them."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from kqview.server.api.wire.citations import DocumentsField, GroundingField, HeadsField, UrlFacts
from kqview.server.api.wire.event_parts import Removed
from kqview.server.api.wire.mods_field import ModsField
from kqview.server.apps.conversation_store import ConversationInfo, TurnMessage
from kqview.server.web.described import about

Object = dict[str, Any]

Name = Annotated[str, Meta(min_length=1, max_length=256)]
# Safe in logs, headers and paths.
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:+=@~-]{1,64}$")]


StopReason = Literal["stop", "stop_sequence", "length", "cancelled", "error"]

_RequestName = Annotated[str, about("Name of the request.", "r1")]
_ModelId = Annotated[str, about("The model that answers.", "demo")]
_Seq = Annotated[int, about("Number of the frame among those of its name, from 0.", 0)]
_RowPath = Annotated[
    str | UnsetType, about("Path of the token's row, if rows are kept.", "/generate/r1/attention/0")
]


# ---- requests


class GenerateBody(Struct, kw_only=True):
    """A turn of a conversation."""

    prompt: Annotated[str, about("What the user says.", "Who is Anna?")]
    session_id: Annotated[
        Name | None,
        about("The conversation that it continues or begins; without it, nothing is kept.", "s1"),
    ] = None
    model: Annotated[
        Name | None, about("Id of a configured model; the default model if not given.", "demo")
    ] = None
    overrides: Annotated[
        Annotated[Object, Meta(max_length=64)] | None,
        about(
            "Fields of sampling, ``reasoning_preset``, ``max_output_tokens`` and ``attention``; "
            "unknown names are listed in ``filtered_out``.",
            {"temperature": 0.7, "max_output_tokens": 64},
        ),
    ] = None
    mods: Annotated[
        ModsField | None,
        about(
            "Mods of the server's folder that steer the answer, or objects with a ``name`` and "
            "that mod's options.",
            ["stop_early"],
        ),
    ] = None
    system: Annotated[
        str | None,
        about(
            'System prompt of this turn, in place of the model\'s own; "" for none.', "Be brief."
        ),
    ] = None
    documents: DocumentsField = None
    citation_heads: HeadsField = None
    grounding: GroundingField = None
    replaces: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about(
            "Up to so many of the conversation's last messages are not in the prompt, and this "
            "turn replaces them once there is an answer: 2 to ask the last question again.",
            2,
        ),
    ] = None
    request_id: Annotated[
        RequestId | None,
        about(
            "Name for ``POST /cancel/{request_id}``; without it, the header ``X-Request-Id``, "
            "or one that the server chooses.",
            "r1",
        ),
    ] = None


# ---- replies


class PageConfig(Struct):
    """What a page shows."""

    ui_mode: Annotated[Literal["admin", "user"], about("Whether it shows what only admins may do.")]
    reasoning_presets: Annotated[
        list[str], about("What ``overrides.reasoning_preset`` may name.", ["brief"])
    ]


class ModelCards(Struct, kw_only=True):
    """Every model, loaded or not."""

    models: Annotated[
        list[Object],
        about(
            "What is known of each.", [{"id": "demo", "state": "loaded", "context_length": 2048}]
        ),
    ]
    data: Annotated[
        list[Object], about("The same in OpenAI's form.", [{"id": "demo", "object": "model"}])
    ]
    object: Annotated[Literal["list"], about('Always "list".')] = "list"


class Cancelled(Struct):
    """Reply to a cancellation."""

    request_id: Annotated[str, about("Name of the request.", "r1")]
    state: Annotated[
        Literal["cancelling", "ended"], about('"cancelling", or "ended" if it had ended before.')
    ]


class PromptTokens(Struct):
    """The prompt of a request."""

    request_id: Annotated[str, about("Name of the request.", "r1")]
    ids: Annotated[list[int], about("Its ids.", [1, 259])]
    texts: Annotated[
        list[str],
        about(
            "The text that each completes. A character spread over several ids is the text of "
            'the last one; the others have "".',
            ["", " a"],
        ),
    ]


class SessionList(Struct):
    """Conversations of the caller's key."""

    sessions: Annotated[
        list[ConversationInfo], about("The conversations, the most recently used first.")
    ]


class WholeSession(ConversationInfo, frozen=True, kw_only=True):
    """A conversation with its messages."""

    messages: Annotated[Sequence[TurnMessage], about("The messages, the oldest first.")]


class TurnRow(Struct):
    """The attention row of one token that is kept."""

    seq: Annotated[int, about("Index of the token, from 0.", 0)]
    token_id: Annotated[int, about("Its id.", 259)]
    text: Annotated[str, about("The text that it completes.", " t")]
    shape: Annotated[
        tuple[int, ...],
        about(
            "Shape of the values, whose last axis is the tokens before this one, or the spans "
            'that were asked for; empty for "sparse" and "viz", which are JSON.',
            [4, 8, 6],
        ),
    ]


class TurnRows(Struct, kw_only=True):
    """The rows that are kept of a request."""

    request_id: Annotated[str, about("Name of the request.", "r1")]
    values: Annotated[str, about('What rows hold: "logits", "scores" or "probs".', "probs")]
    format: Annotated[str, about("Format of the rows.", "per_layer")]
    dtype: Annotated[str, about("Type of their values; little-endian.", "float32")]
    layers: Annotated[
        tuple[int, ...],
        about("Layers that they are of, in the order of their first axis.", [0, 1, 2, 3]),
    ]
    n_left_out: Annotated[int, about("Rows that did not fit into the memory for them.", 0)]
    rows: Annotated[list[TurnRow], about("The rows, the oldest first.")]


# ---- frames of a turn: named Server-Sent Events


class AnalysisFrame(Struct, kw_only=True):
    """Reasoning while it comes, unless it is dropped."""

    event: ClassVar = "analysis"
    seq: _Seq
    text: Annotated[str, about("The text that is new.", "The user")]
    attention: _RowPath = UNSET
    request_id: _RequestName
    model_id: _ModelId


class ReasoningFrame(Struct, kw_only=True):
    """Where a marker ends the reasoning: the whole of it, unless it is dropped."""

    event: ClassVar = "reasoning"
    request_id: _RequestName
    model_id: _ModelId
    reasoning: Annotated[str, about("The text.", "The user asks for a name.")]


class TokenFrame(Struct, kw_only=True):
    """The answer while it comes."""

    event: ClassVar = "token"
    seq: _Seq
    text: Annotated[str, about("The text that is new.", "Anna")]
    tokens_out: Annotated[int, about("Tokens that were generated so far.", 3)]
    attention: _RowPath = UNSET
    request_id: _RequestName
    model_id: _ModelId


class CitationFrame(UrlFacts, kw_only=True):
    """What a sentence of the answer that has ended is from, if there are ``documents``."""

    event: ClassVar = "citation"
    request_id: _RequestName
    model_id: _ModelId


class RemovedFrame(Removed, kw_only=True):
    """Tokens that a mod took back, which a client drops."""

    event: ClassVar = "removed"
    reasoning_characters: Annotated[
        int | UnsetType, about("So many of the last characters of reasoning.", 4)
    ] = UNSET
    request_id: _RequestName
    model_id: _ModelId


class UsageFrame(Struct, kw_only=True):
    """What the answer took."""

    event: ClassVar = "usage"
    request_id: _RequestName
    model_id: _ModelId
    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 14)]
    output_tokens: Annotated[int, about("Tokens that were generated; marks of reasoning count.", 4)]
    latency_ms: Annotated[int, about("Milliseconds from admission to the end.", 20)]
    decode_tps: Annotated[float, about("``output_tokens`` by these, a second.", 200.0)]
    reasoning_tokens: Annotated[
        int, about("Tokens of the reasoning; its marks are none of them.", 2)
    ]
    final_tokens: Annotated[int, about("Tokens of the answer, without marks.", 2)]
    reasoning_ratio: Annotated[float, about("Share of the output that is reasoning, 0..1.", 0.5)]
    messages_left_out: Annotated[
        int | UnsetType, about("Messages of the conversation that did not fit into the prompt.", 2)
    ] = UNSET


class ErrorFrame(Struct, kw_only=True):
    """A failure once the stream has begun, in place of the usage."""

    event: ClassVar = "error"
    request_id: _RequestName
    model_id: _ModelId
    code: Annotated[str, about("Kind of the failure for programs.", "MODEL_CHANGED")]
    error_type: Annotated[str, about("Wider kind of the failure.", "unavailable")]
    message: Annotated[str, about("What was wrong, and what to do.", "the model was switched")]


class EndFrame(Struct, kw_only=True):
    """The end, always the last."""

    event: ClassVar = "end"
    request_id: _RequestName
    status: Annotated[Literal["ok", "error"], about("Whether it went well.", "ok")]
    stop_reason: Annotated[StopReason, about("Why it ended.", "length")]


Frame: TypeAlias = (
    AnalysisFrame
    | ReasoningFrame
    | TokenFrame
    | CitationFrame
    | RemovedFrame
    | UsageFrame
    | ErrorFrame
    | EndFrame
)
FRAMES: Final = get_args(Frame)
"""Every frame, in the order in which they come."""


class TurnFailure(Struct, kw_only=True):
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
