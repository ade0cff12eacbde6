"""Bodies of the MIA4 API. Types alone: msgspec reads, checks and writes them."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kqview.server.api.wire.mods_field import ModsField

Object = dict[str, Any]

Name = Annotated[str, Meta(min_length=1, max_length=256)]
# Safe in logs, headers and paths.
RequestId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:+=@~-]{1,64}$")]


# ---- requests


class GenerateBody(Struct, kw_only=True):
    """A turn of a conversation.

    Attributes:
        prompt: What the user says, such as "Who is Anna?".
        session_id: The conversation that it continues or begins, such as "s1"; without it, nothing
            is kept.
        model: Id of a configured model, such as "demo"; the default model if not given.
        overrides: Fields of sampling, ``reasoning_preset``, ``max_output_tokens`` and
            ``attention``, such as {"temperature": 0.7, "max_output_tokens": 64}; unknown names are
            listed in ``filtered_out``.
        mods: Mods of the server's folder that steer the answer, such as ["stop_early"], or objects
            with a ``name`` and that mod's options.
        request_id: Name for ``POST /cancel/{request_id}``, such as "r1"; without it, the header
            ``X-Request-Id``, or one that the server chooses.
    """

    prompt: str
    session_id: Name | None = None
    model: Name | None = None
    overrides: Annotated[Object, Meta(max_length=64)] | None = None
    mods: ModsField | None = None
    request_id: RequestId | None = None


# ---- replies


class Config(Struct):
    """What a page shows.

    Attributes:
        ui_mode: Whether it shows what only admins may do.
        reasoning_presets: What ``overrides.reasoning_preset`` may name, such as ["brief"].
    """

    ui_mode: Literal["admin", "user"]
    reasoning_presets: list[str]


class Models(Struct, kw_only=True):
    """Every model, loaded or not.

    Attributes:
        models: What is known of each, such as [{"id": "demo", "state": "loaded", "context_length":
            2048}].
        data: The same in OpenAI's form, such as [{"id": "demo", "object": "model"}].
        object: Always "list".
    """

    models: list[Object]
    data: list[Object]
    object: Literal["list"] = "list"


class Cancelled(Struct):
    """Reply to a cancellation.

    Attributes:
        request_id: Name of the request, such as "r1".
        state: "cancelling", or "ended" if it had ended before.
    """

    request_id: str
    state: Literal["cancelling", "ended"]


class Prompt(Struct):
    """The prompt of a request.

    Attributes:
        request_id: Name of the request, such as "r1".
        ids: Its ids, such as [1, 259].
        texts: The text that each completes, such as ["", " a"]. A character spread over several ids
            is the text of the last one; the others have "".
    """

    request_id: str
    ids: list[int]
    texts: list[str]


class Session(Struct, kw_only=True):
    """A conversation that the server keeps.

    Attributes:
        session_id: Its name, as the client chose it, such as "s1".
        title: How it begins, such as "Who is Anna?".
        model: Model that answered last, such as "demo".
        n_messages: Messages in it, such as 2.
        created_s: When it began, in seconds since 1970, such as 1767225600.0.
        used_s: When it was last used, the same, such as 1767225600.0.
    """

    session_id: str
    title: str
    model: str
    n_messages: int
    created_s: float
    used_s: float


class Sessions(Struct):
    """Conversations of the caller's key.

    Attributes:
        sessions: The conversations, the most recently used first.
    """

    sessions: list[Session]


class SessionMessage(Struct):
    """What the user said, or what was answered.

    Attributes:
        role: Who speaks: "user" or "assistant", such as "user".
        content: What was said, such as "Who is Anna?".
    """

    role: str
    content: str


class WholeSession(Session, kw_only=True):
    """A conversation with its messages.

    Attributes:
        messages: The messages, the oldest first.
    """

    messages: list[SessionMessage]


class KeptRow(Struct):
    """The attention row of one token that is kept.

    Attributes:
        seq: Index of the token, from 0, such as 0.
        token_id: Its id, such as 259.
        text: The text that it completes, such as " t".
        shape: Shape of the values, such as [4, 8, 6], whose last axis is the tokens before this
            one, or the spans that were asked for; empty for "sparse" and "viz", which are JSON.
    """

    seq: int
    token_id: int
    text: str
    shape: tuple[int, ...]


class KeptAttention(Struct, kw_only=True):
    """The rows that are kept of a request.

    Attributes:
        request_id: Name of the request, such as "r1".
        values: What rows hold: "logits", "scores" or "probs", such as "probs".
        format: Format of the rows, such as "per_layer".
        dtype: Type of their values, such as "float32"; little-endian.
        layers: Layers that they are of, in the order of their first axis, such as [0, 1, 2, 3].
        n_left_out: Rows that did not fit into the memory for them, such as 0.
        rows: The rows, the oldest first.
    """

    request_id: str
    values: str
    format: str
    dtype: str
    layers: tuple[int, ...]
    n_left_out: int
    rows: list[KeptRow]
