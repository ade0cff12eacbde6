"""Config: what a server's configuration file says beyond the flags: models, presets, sessions, UI.

Structs alone, without defaults that depend on the machine. `Config.of` makes one of plain settings:
a single model with defaults.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from kqview.server.settings import FlashAttn, Pooling, Settings

MARKER: Final = "===FINAL==="
"""Stands between reasoning and answer if a configuration names no other marker."""

UNNAMED: Final = "default"
"""Id of a model without a name; if it is the only one, clients see the name in its file."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Reasoning(_Table, frozen=True):
    """Table ``[llm.postproc.reasoning]``, and the same of a passport, whose fields win.

    Attributes:
        marker: Ends the reasoning of models without tags; None: as in ``[llm]``.
        max_tokens: Most tokens of reasoning, after which it ends and the answer begins; None: as in
            ``[llm]``, or without a limit there.
        drop_from_history: Whether reasoning is neither sent nor stored; None: as in ``[llm]``.
    """

    marker: str | None = None
    max_tokens: int | None = None
    drop_from_history: bool | None = None


class Postproc(_Table, frozen=True):
    """Table ``postproc``."""

    reasoning: Reasoning = Reasoning()


class Harmony(_Table, frozen=True):
    """Table ``[llm.prompt.harmony]``: answers as ``<analysis>...</analysis><final>...</final>``."""

    enabled: bool = False
    analysis_tag: str = "analysis"
    final_tag: str = "final"


class Prompt(_Table, frozen=True):
    """Table ``[llm.prompt]``."""

    harmony: Harmony = Harmony()


class Llm(_Table, frozen=True):
    """Table ``[llm]``: what holds for all models.

    Attributes:
        stop: Texts that end an answer.
        postproc: How an answer is taken apart.
        prompt: What the prompt asks of the model.
        reasoning_presets: Fields of `overrides` by the name of a preset; and
            ``reasoning_max_tokens``.
    """

    stop: tuple[str, ...] = ()
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
    """Table ``passport`` of a model: its own defaults."""

    version: int = 1
    sampling: Mapping[str, Any] = {}
    postproc: Postproc = Postproc()


class SystemPrompt(_Table, frozen=True):
    """Table ``system_prompt`` of a model: a text, or a file that has it."""

    text: str | None = None
    file: str | None = None
    version: int = 1


class Model(_Table, frozen=True):
    """Table ``[models.ID]``.

    Attributes:
        path: GGUF file; None for the bundled demo model.
        role: Shown to clients, such as "primary".
        capabilities: Shown to clients.
        flags: Shown to clients.
        passport: The model's own defaults.
        system_prompt: Put before every chat of the mia4 dialect.
        pinned: Whether it is loaded at the start and never leaves.
        n_ctx: This and the following fields are options of this model alone; None takes the
            server's setting of the same name.
    """

    path: str | None = None
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
    lora: tuple[str, ...] | None = None
    chat_template: str | None = None
    pooling: Pooling | None = None


class ChatSessions(_Table, frozen=True):
    """Table ``[sessions]``: conversations that the mia4 dialect keeps.

    Attributes:
        ttl_s: Seconds after its last use that a session is forgotten.
        max_messages: Most messages of a session; the oldest turns, a prompt and its answer, leave
            first.
        max_sessions: Most sessions; of the key that has most, the one unused for longest leaves
            first.
        max_bytes: Most bytes of all messages; sessions leave in the same way. One session may have
            an eighth of it.
        database: SQLite file that keeps them over a restart; None keeps them in memory.
        states_dir: Folder for the KV cache of each session (SES1), so that a returning one goes on
            without evaluating its history; None keeps none.
        max_state_bytes: Most bytes of all files in ``states_dir``; the oldest leave first.
    """

    ttl_s: float = 3600.0
    max_messages: int = 50
    max_sessions: int = 1000
    max_bytes: int = 2**28
    database: str | None = None
    states_dir: str | None = None
    max_state_bytes: int = 2**36


class Ui(_Table, frozen=True):
    """Table ``[ui]``."""

    mode: Literal["admin", "user"] = "user"


class Persona(_Table, frozen=True):
    """Table ``[persona]``: a text file that is put after the system prompt; read when it changes.

    Attributes:
        file: The file; None for no persona. A first line ``version: N`` is its version.
    """

    file: str | None = None


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
