"""Bodies of the MIA4 API. Types alone: msgspec reads, checks and writes them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kqview.server.api.wire.mods_field import ModsField
from kqview.server.apps.conversation_store import ConversationInfo, Message
from kqview.server.web.described import about

Object = dict[str, Any]

Name = Annotated[str, Meta(min_length=1, max_length=256)]
# Safe in logs, headers and paths.
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:+=@~-]{1,64}$")]


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
    request_id: Annotated[
        RequestId | None,
        about(
            "Name for ``POST /cancel/{request_id}``; without it, the header ``X-Request-Id``, "
            "or one that the server chooses.",
            "r1",
        ),
    ] = None


# ---- replies


class Config(Struct):
    """What a page shows."""

    ui_mode: Annotated[Literal["admin", "user"], about("Whether it shows what only admins may do.")]
    reasoning_presets: Annotated[
        list[str], about("What ``overrides.reasoning_preset`` may name.", ["brief"])
    ]


class Models(Struct, kw_only=True):
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


class Prompt(Struct):
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


class Sessions(Struct):
    """Conversations of the caller's key."""

    sessions: Annotated[
        list[ConversationInfo], about("The conversations, the most recently used first.")
    ]


class WholeSession(ConversationInfo, frozen=True, kw_only=True):
    """A conversation with its messages."""

    messages: Annotated[Sequence[Message], about("The messages, the oldest first.")]


class KeptRow(Struct):
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


class KeptAttention(Struct, kw_only=True):
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
    rows: Annotated[list[KeptRow], about("The rows, the oldest first.")]
