"""Config: what a server's configuration file says beyond the flags: models, presets, sessions, UI.

Tables alone, without defaults that depend on the machine. `Config.of` makes one of plain settings:
a single model with defaults. ``kqview config init`` prints the docstring of a table above its keys.
"""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, get_type_hints

import msgspec
from msgspec import Meta

from kqview.server.settings import AttentionKernel, FlashAttn, Pooling, Settings
from kqview.server.settings_table import (
    Count,
    CountOrMinusOne,
    Name,
    Names,
    Size,
    setting,
)

MARKER: Final = "===FINAL==="
"""Stands between reasoning and answer if a configuration names no other marker."""

UNNAMED: Final = "default"
"""Id of a model without a name; if it is the only one, clients see the name in its file."""


def _tag(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", text):
        raise ValueError("write the name of a tag without brackets, such as analysis")
    return text


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig:
    """How reasoning is told from the answer, and what becomes of it. Fields of a passport win."""

    marker: Name | None = setting(
        None,
        "ends the reasoning of models without tags; without it, ===FINAL=== if the prompt "
        "contains that, such as a system prompt that asks for it",
    )
    max_tokens: Size | None = setting(
        None,
        "most tokens of reasoning, after which it ends and the answer begins; without it, there "
        "is no limit",
    )
    drop_from_history: bool | None = setting(
        None, "whether reasoning is neither sent nor stored; without it, true"
    )


@dataclass(frozen=True, kw_only=True)
class Postproc:
    """How an answer is taken apart."""

    reasoning: ReasoningConfig = setting(ReasoningConfig())


@dataclass(frozen=True, kw_only=True)
class Harmony:
    """Answers as <analysis>...</analysis><final>...</final>."""

    enabled: bool = setting(False, "whether models are expected to answer so")
    analysis_tag: str = setting("analysis", "tag around the reasoning", check=_tag)
    final_tag: str = setting("final", "tag around the answer", check=_tag)


@dataclass(frozen=True, kw_only=True)
class PromptConfig:
    """What the prompt asks of the model."""

    harmony: Harmony = setting(Harmony())


@dataclass(frozen=True, kw_only=True)
class Llm:
    """What holds for all models."""

    stop: Names = setting((), "texts that end an answer")
    postproc: Postproc = setting(Postproc())
    prompt: PromptConfig = setting(PromptConfig())
    reasoning_presets: Mapping[str, Mapping[str, Any]] = setting(
        {},
        "presets by name: fields that a request has in overrides, such as temperature = 0.2, and "
        "reasoning_max_tokens",
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Marks of a model that clients are shown."""

    experimental: bool = setting(False)
    deprecated: bool = setting(False)
    alias: bool = setting(False)
    reusable: bool = setting(True)
    internal: bool = setting(False)
    stub: bool = setting(False)


@dataclass(frozen=True, kw_only=True)
class Passport:
    """The model's own defaults."""

    version: Size = setting(1, "shown to clients, beside the hash")
    sampling: Mapping[str, Any] = setting(
        {}, "fields that a request has in overrides, such as temperature = 0.7"
    )
    postproc: Postproc = setting(Postproc())


@dataclass(frozen=True, kw_only=True)
class SystemPrompt:
    """A text, or a file that has it, which the text replaces when a configuration is read."""

    text: str | None = setting(None, "the text")
    file: str | None = setting(None, "a file with the text", place="text")
    version: Size = setting(1, "shown to clients, beside the hash")


def _of_settings(name: str) -> Any:
    """A field that is the setting *name* for one model; without it, the setting applies."""
    spec = Settings.__dataclass_fields__[name]
    return dataclasses.field(default=None, metadata={**spec.metadata, "restart": False})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One of several models, by the id that requests name.

    A key that is also a setting applies to this model alone; without it, the setting applies.
    """

    path: str | None = setting(None, "GGUF file; without it, the bundled demo model", place="file")
    role: str = setting("primary", 'shown to clients, such as "primary"')
    capabilities: tuple[str, ...] = setting(("chat",), "shown to clients")
    flags: Flags = setting(Flags())
    passport: Passport = setting(Passport())
    system_prompt: SystemPrompt | None = setting(
        None,
        'put before every chat of the mia4 dialect: {text = "..."} or {file = "..."}, with '
        "version = 1",
    )
    pinned: bool = setting(
        False, "whether it is loaded at the start and never unloaded to make room"
    )
    n_ctx: Count | None = _of_settings("n_ctx")
    n_slots: Count | None = _of_settings("n_slots")
    n_threads: Count | None = _of_settings("n_threads")
    n_gpu_layers: CountOrMinusOne | None = _of_settings("n_gpu_layers")
    kv_type: str | None = _of_settings("kv_type")
    flash_attn: FlashAttn | None = _of_settings("flash_attn")
    attention_kernel: AttentionKernel | None = _of_settings("attention_kernel")
    lora: Names | None = _of_settings("lora")
    chat_template: str | None = _of_settings("chat_template")
    pooling: Pooling | None = _of_settings("pooling")


@dataclass(frozen=True, kw_only=True)
class ChatSessions:
    """Conversations that the mia4 dialect keeps."""

    ttl_s: Annotated[float, Meta(gt=0)] = setting(
        3600.0, "seconds from its last use until a session is forgotten"
    )
    max_messages: Count = setting(
        50, "most messages of a session; the oldest turns, a prompt and its answer, leave first"
    )
    max_sessions: Count = setting(
        1000,
        "most sessions; beyond it, the key with most sessions loses its least recently used one",
    )
    max_bytes: Size = setting(
        2**28,
        "most bytes of all messages; sessions leave in the same way. One session may have an "
        "eighth of it",
    )
    database: str | None = setting(
        None,
        "SQLite file that keeps them across restarts; without it, they are in memory only",
        place="new",
        restart=True,
    )
    states_dir: str | None = setting(
        None,
        "folder for the KV cache of each session (SES1), so that a returning one goes on without "
        "evaluating its history; without it, none is kept",
        place="new",
        restart=True,
    )
    max_state_bytes: Size = setting(
        2**36, "most bytes of all files in states_dir; the oldest leave first"
    )


@dataclass(frozen=True, kw_only=True)
class Ui:
    """What pages show."""

    mode: Literal["admin", "user"] = setting("user", "sent by /config")


@dataclass(frozen=True, kw_only=True)
class Persona:
    """A text file that is put after the system prompt; read when it changes."""

    file: str | None = setting(
        None,
        "the file; without it, there is no persona. A first line version: N is its version",
        place="text",
    )


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
    models: Mapping[str, ModelConfig]
    llm: Llm = Llm()
    sessions: ChatSessions = ChatSessions()
    ui: Ui = Ui()
    persona: Persona = Persona()

    @classmethod
    def of(cls, settings: Settings) -> "Config":
        """The model of *settings* alone, with defaults."""
        name = settings.aliases[0] if settings.aliases else UNNAMED
        return cls(settings=settings, models={name: ModelConfig(path=settings.model)})


TABLES: Final = get_type_hints(Config)
"""The tables beside ``[server]`` and ``[models.ID]``, by name."""
del TABLES["settings"], TABLES["models"]
