"""Bodies of the MIA4 API. Types alone: msgspec reads, checks and writes them."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kqview.server.api.wire.mods_field import ModsField
from kqview.server.web.described import example

Object = dict[str, Any]

Name = Annotated[str, Meta(min_length=1, max_length=256)]
# Safe in logs, headers and paths.
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:+=@~-]{1,64}$")]


# ---- requests


class GenerateBody(Struct, kw_only=True):
    """A turn of a conversation.

    Attributes:
        prompt: What the user says.
        session_id: The conversation that it continues or begins; without it, nothing is kept.
        model: Id of a configured model; the default model if not given.
        overrides: Fields of sampling, ``reasoning_preset``, ``max_output_tokens`` and
            ``attention``; unknown names are listed in ``filtered_out``.
        mods: Mods of the server's folder that steer the answer, or objects with a ``name`` and that
            mod's options.
        request_id: Name for ``POST /cancel/{request_id}``; without it, the header ``X-Request-Id``,
            or one that the server chooses.
    """

    prompt: Annotated[str, example("Who is Anna?")]
    session_id: Annotated[Name | None, example("s1")] = None
    model: Annotated[Name | None, example("demo")] = None
    overrides: Annotated[
        Annotated[Object, Meta(max_length=64)] | None,
        example({"temperature": 0.7, "max_output_tokens": 64}),
    ] = None
    mods: Annotated[ModsField | None, example(["stop_early"])] = None
    request_id: Annotated[RequestId | None, example("r1")] = None


# ---- replies


class Config(Struct):
    """What a page shows.

    Attributes:
        ui_mode: Whether it shows what only admins may do.
        reasoning_presets: What ``overrides.reasoning_preset`` may name.
    """

    ui_mode: Literal["admin", "user"]
    reasoning_presets: Annotated[list[str], example(["brief"])]


class Models(Struct, kw_only=True):
    """Every model, loaded or not.

    Attributes:
        models: What is known of each.
        data: The same in OpenAI's form.
        object: Always "list".
    """

    models: Annotated[
        list[Object], example([{"id": "demo", "state": "loaded", "context_length": 2048}])
    ]
    data: Annotated[list[Object], example([{"id": "demo", "object": "model"}])]
    object: Literal["list"] = "list"


class Cancelled(Struct):
    """Reply to a cancellation.

    Attributes:
        request_id: Name of the request.
        state: "cancelling", or "ended" if it had ended before.
    """

    request_id: Annotated[str, example("r1")]
    state: Literal["cancelling", "ended"]


class Prompt(Struct):
    """The prompt of a request.

    Attributes:
        request_id: Name of the request.
        ids: Its ids.
        texts: The text that each completes. A character spread over several ids is the text of the
            last one; the others have "".
    """

    request_id: Annotated[str, example("r1")]
    ids: Annotated[list[int], example([1, 259])]
    texts: Annotated[list[str], example(["", " a"])]


class Session(Struct, kw_only=True):
    """A conversation that the server keeps.

    Attributes:
        session_id: Its name, as the client chose it.
        title: How it begins.
        model: Model that answered last.
        n_messages: Messages in it.
        created_s: When it began, in seconds since 1970.
        used_s: When it was last used, the same.
    """

    session_id: Annotated[str, example("s1")]
    title: Annotated[str, example("Who is Anna?")]
    model: Annotated[str, example("demo")]
    n_messages: Annotated[int, example(2)]
    created_s: Annotated[float, example(1767225600.0)]
    used_s: Annotated[float, example(1767225600.0)]


class Sessions(Struct):
    """Conversations of the caller's key.

    Attributes:
        sessions: The conversations, the most recently used first.
    """

    sessions: list[Session]


class SessionMessage(Struct):
    """What the user said, or what was answered.

    Attributes:
        role: Who speaks: "user" or "assistant".
        content: What was said.
    """

    role: Annotated[str, example("user")]
    content: Annotated[str, example("Who is Anna?")]


class WholeSession(Session, kw_only=True):
    """A conversation with its messages.

    Attributes:
        messages: The messages, the oldest first.
    """

    messages: list[SessionMessage]


class KeptRow(Struct):
    """The attention row of one token that is kept.

    Attributes:
        seq: Index of the token, from 0.
        token_id: Its id.
        text: The text that it completes.
        shape: Shape of the values, whose last axis is the tokens before this one, or the spans that
            were asked for; empty for "sparse" and "viz", which are JSON.
    """

    seq: Annotated[int, example(0)]
    token_id: Annotated[int, example(259)]
    text: Annotated[str, example(" t")]
    shape: Annotated[tuple[int, ...], example([4, 8, 6])]


class KeptAttention(Struct, kw_only=True):
    """The rows that are kept of a request.

    Attributes:
        request_id: Name of the request.
        values: What rows hold: "logits", "scores" or "probs".
        format: Format of the rows.
        dtype: Type of their values; little-endian.
        layers: Layers that they are of, in the order of their first axis.
        n_left_out: Rows that did not fit into the memory for them.
        rows: The rows, the oldest first.
    """

    request_id: Annotated[str, example("r1")]
    values: Annotated[str, example("probs")]
    format: Annotated[str, example("per_layer")]
    dtype: Annotated[str, example("float32")]
    layers: Annotated[tuple[int, ...], example([0, 1, 2, 3])]
    n_left_out: Annotated[int, example(0)]
    rows: list[KeptRow]
