"""Bodies of the MIA4 API. Types alone: msgspec reads, checks and writes them."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from kqview.server.api.mods_field import ModsField

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
        model: Id of the model; None for the default one.
        overrides: Fields of sampling, ``reasoning_preset``, ``max_output_tokens`` and
            ``attention``; unknown names are listed in ``filtered_out``.
        mods: Mods of the server's folder that steer the answer: names, or objects with a ``name``
            and that mod's options.
        request_id: Id for `POST /cancel/{request_id}`; without it, the header ``X-Request-Id``,
            or one that the server chooses.
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
        reasoning_presets: What ``overrides.reasoning_preset`` may name.
    """

    ui_mode: Literal["admin", "user"]
    reasoning_presets: list[str]


class Models(Struct, kw_only=True):
    """Every model, loaded or not; ``data`` is the list in OpenAI's form."""

    models: list[Object]
    data: list[Object]
    object: Literal["list"] = "list"


class Cancelled(Struct):
    """Reply to a cancellation; ``state`` is "cancelling", or "ended" if it had ended before."""

    request_id: str
    state: Literal["cancelling", "ended"]


class Prompt(Struct):
    """The prompt of a request: its ids, each with the text that it completes.

    A character spread over several ids is the text of the last one; the others have "".
    """

    request_id: str
    ids: list[int]
    texts: list[str]


class Session(Struct, kw_only=True):
    """A conversation that the server keeps; times are in seconds since 1970."""

    session_id: str
    title: str
    model: str
    n_messages: int
    created_s: float
    used_s: float


class Sessions(Struct):
    """Conversations of the caller's key, the most recently used first."""

    sessions: list[Session]


class SessionMessage(Struct):
    """What the user said, or what was answered."""

    role: str
    content: str


class WholeSession(Session, kw_only=True):
    """A conversation with its messages, the oldest first."""

    messages: list[SessionMessage]


class KeptRow(Struct):
    """The attention row of one token that is kept; its last axis is the context before it."""

    seq: int
    token_id: int
    text: str
    shape: tuple[int, ...]


class KeptAttention(Struct, kw_only=True):
    """The rows that are kept of a request."""

    request_id: str
    values: str
    format: str
    dtype: str
    layers: tuple[int, ...]
    n_left_out: int
    rows: list[KeptRow]
