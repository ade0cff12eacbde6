"""Config: what a server's configuration file says beyond the flags: models, presets, sessions, UI.

Structs alone, without defaults that depend on the machine. `Config.of` makes one of plain settings:
a single model with defaults. The docstring of a table is the help that ``kqview config init``
prints for its keys.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, Literal, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta

from kqview.server.settings import AttentionKernel, FlashAttn, Pooling, Settings

MARKER: Final = "===FINAL==="
"""Stands between reasoning and answer if a configuration names no other marker."""

UNNAMED: Final = "default"
"""Id of a model without a name; if it is the only one, clients see the name in its file."""


# What a path names, as `kqview.server.settings.Place`; relative ones begin at the file's folder.
_File = Annotated[str, Meta(extra={"place": "file"})]
_TextFile = Annotated[str, Meta(extra={"place": "text"})]
_NewFile = Annotated[str, Meta(extra={"place": "new", "restart": True})]
_NewFolder = Annotated[str, Meta(extra={"place": "new", "restart": True})]
# A text that may also be ``{file = "..."}``.
_Text = Annotated[str, Meta(extra={"is_text": True})]
_Count = Annotated[int, Meta(ge=1)]
_Size = Annotated[int, Meta(ge=0)]
_Name = Annotated[str, Meta(min_length=1)]
_Tag = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z_][A-Za-z0-9_.-]*\Z",
        extra={"expected": "the name of a tag without brackets, such as analysis"},
    ),
]


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Reasoning(_Table, frozen=True):
    """Table ``[llm.postproc.reasoning]``: what is not the answer. Fields of a passport win.

    Attributes:
        marker: Ends the reasoning of models without tags; without it, ===FINAL=== if the prompt
            contains that, such as a system prompt that asks for it.
        max_tokens: Most tokens of reasoning, after which it ends and the answer begins; without it,
            there is no limit.
        drop_from_history: Whether reasoning is neither sent nor stored; without it, true.
    """

    marker: _Name | None = None
    max_tokens: _Size | None = None
    drop_from_history: bool | None = None


class Postproc(_Table, frozen=True):
    """Table ``postproc``."""

    reasoning: Reasoning = Reasoning()


class Harmony(_Table, frozen=True):
    """Table ``[llm.prompt.harmony]``: answers as ``<analysis>...</analysis><final>...</final>``.

    Attributes:
        enabled: Whether models are expected to answer so.
        analysis_tag: Tag around the reasoning.
        final_tag: Tag around the answer.
    """

    enabled: bool = False
    analysis_tag: _Tag = "analysis"
    final_tag: _Tag = "final"


class Prompt(_Table, frozen=True):
    """Table ``[llm.prompt]``."""

    harmony: Harmony = Harmony()


class Llm(_Table, frozen=True):
    """Table ``[llm]``: what holds for all models.

    Attributes:
        stop: Texts that end an answer.
        postproc: How an answer is taken apart.
        prompt: What the prompt asks of the model.
        reasoning_presets: Presets by name: fields that a request has in `overrides`, such as
            temperature = 0.2, and reasoning_max_tokens.
    """

    stop: tuple[_Name, ...] = ()
    postproc: Postproc = Postproc()
    prompt: Prompt = Prompt()
    reasoning_presets: Mapping[str, Mapping[str, Any]] = {}


class Flags(_Table, frozen=True):
    """Table ``flags`` of a model; shown to clients."""

    experimental: bool = False
    deprecated: bool = False
    alias: bool = False
    reusable: bool = True
    internal: bool = False
    stub: bool = False


class Passport(_Table, frozen=True):
    """Table ``passport`` of a model: its own defaults.

    Attributes:
        version: Shown to clients, beside the hash.
        sampling: Fields that a request has in `overrides`, such as temperature = 0.7.
        postproc: How its answers are taken apart, over ``[llm]``.
    """

    version: _Size = 1
    sampling: Mapping[str, Any] = {}
    postproc: Postproc = Postproc()


class SystemPrompt(_Table, frozen=True):
    """Table ``system_prompt`` of a model: a text, or a file that has it.

    Attributes:
        text: The text.
        file: A file with the text; replaced by the text when a configuration is read.
        version: Shown to clients, beside the hash.
    """

    text: str | None = None
    file: _TextFile | None = None
    version: _Size = 1


class Model(_Table, frozen=True):
    """Table ``[models.ID]``: one of several models, by the id that requests name.

    A key that is also a setting applies to this model alone; without it, the setting applies.

    Attributes:
        path: GGUF file; without it, the bundled demo model.
        role: Shown to clients, such as "primary".
        capabilities: Shown to clients.
        flags: Shown to clients.
        passport: The model's own defaults.
        system_prompt: Put before every chat of the mia4 dialect: {text = "..."} or
            {file = "..."}, with version = 1.
        pinned: Whether it is loaded at the start and never unloaded to make room.
    """

    path: _File | None = None
    role: str = "primary"
    capabilities: tuple[str, ...] = ("chat",)
    flags: Flags = Flags()
    passport: Passport = Passport()
    system_prompt: SystemPrompt | None = None
    pinned: bool = False
    n_ctx: int | None = None
    n_slots: int | None = None
    n_threads: int | None = None
    n_gpu_layers: int | None = None
    kv_type: str | None = None
    flash_attn: FlashAttn | None = None
    attention_kernel: AttentionKernel | None = None
    lora: tuple[_File, ...] | None = None
    chat_template: _Text | None = None
    pooling: Pooling | None = None


class ChatSessions(_Table, frozen=True):
    """Table ``[sessions]``: conversations that the mia4 dialect keeps.

    Attributes:
        ttl_s: Seconds from its last use until a session is forgotten.
        max_messages: Most messages of a session; the oldest turns, a prompt and its answer, leave
            first.
        max_sessions: Most sessions; beyond it, the key with most sessions loses its least recently
            used one.
        max_bytes: Most bytes of all messages; sessions leave in the same way. One session may have
            an eighth of it.
        database: SQLite file that keeps them across restarts; without it, they are in memory only.
        states_dir: Folder for the KV cache of each session (SES1), so that a returning one goes on
            without evaluating its history; without it, none is kept.
        max_state_bytes: Most bytes of all files in ``states_dir``; the oldest leave first.
    """

    ttl_s: Annotated[float, Meta(gt=0)] = 3600.0
    max_messages: _Count = 50
    max_sessions: _Count = 1000
    max_bytes: _Size = 2**28
    database: _NewFile | None = None
    states_dir: _NewFolder | None = None
    max_state_bytes: _Size = 2**36


class Ui(_Table, frozen=True):
    """Table ``[ui]``.

    Attributes:
        mode: What pages show; sent by ``/config``.
    """

    mode: Literal["admin", "user"] = "user"


class Persona(_Table, frozen=True):
    """Table ``[persona]``: a text file that is put after the system prompt; read when it changes.

    Attributes:
        file: The file; without it, there is no persona. A first line ``version: N`` is its version.
    """

    file: _TextFile | None = None


def facts_of(annotation: Any) -> Mapping[str, Any]:
    """What an annotation of these tables says besides a type, such as ``place``.

    Of a list, that of its elements; of a union, that of its first member that has any.
    """
    for meta in getattr(annotation, "__metadata__", ()):
        if isinstance(meta, Meta) and meta.extra:
            return cast("Mapping[str, Any]", meta.extra)
    for one in get_args(annotation):
        if inner := facts_of(one):
            return inner
    return {}


@cache
def annotations_of(table: type) -> Mapping[str, Any]:
    """The fields of a table with their annotations."""
    return get_type_hints(table, include_extras=True)


@cache
def needing_restart(table: type) -> tuple[str, ...]:
    """Fields of a table that cannot change while the server runs."""
    hints = annotations_of(table)
    return tuple(name for name, hint in hints.items() if facts_of(hint).get("restart"))


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """A whole configuration: the settings, and what a file says beyond them.

    Attributes:
        settings: What flags and environment say as well.
        models: Models by id, the default one first.
        llm: What holds for all models.
        sessions: Conversations.
        ui: What clients show.
        persona: Text after the system prompt.
    """

    settings: Settings
    models: Mapping[str, Model]
    llm: Llm = Llm()
    sessions: ChatSessions = ChatSessions()
    ui: Ui = Ui()
    persona: Persona = Persona()

    @classmethod
    def of(cls, settings: Settings) -> "Config":
        """The model of *settings* alone, with defaults."""
        name = settings.aliases[0] if settings.aliases else UNNAMED
        return cls(settings=settings, models={name: Model(path=settings.model)})
