"""kqview: llama.cpp in your process, with the attention of each generated token as a numpy view."""

import logging
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING

from kqview import errors
from kqview.engine import Engine
from kqview.engine_options import EngineOptions
from kqview.generation.prompt import PromptAttention
from kqview.generation.stream import Generation
from kqview.lora import LoraAdapter
from kqview.machine import system_info
from kqview.mods import Mod, mod
from kqview.saved import Saved, SavedFolder, load, save, stack
from kqview.slot import Slot
from kqview.submission import GenerateOptions
from kqview.types import (
    Capture,
    ChatPrompt,
    Classification,
    EngineHealth,
    EngineStats,
    Finished,
    ModelInfo,
    PoolStats,
    PromptBlock,
    Reply,
    Sampling,
    Score,
    SlotMessage,
    SlotStats,
    Token,
    Tokenized,
    ToolCall,
    Usage,
)

if TYPE_CHECKING:
    from kqview import viz as viz

# A library is silent until its user configures logging.
logging.getLogger("kqview").addHandler(logging.NullHandler())

__version__ = version("kqview")


def __getattr__(name: str) -> ModuleType:
    """Load `kqview.viz` when it is first used."""
    if name == "viz":
        return import_module("kqview.viz")
    raise AttributeError(f"module 'kqview' has no attribute {name!r}")


__all__ = [
    "Capture",
    "ChatPrompt",
    "Classification",
    "Engine",
    "EngineHealth",
    "EngineOptions",
    "EngineStats",
    "Finished",
    "GenerateOptions",
    "Generation",
    "LoraAdapter",
    "Mod",
    "ModelInfo",
    "PoolStats",
    "PromptAttention",
    "PromptBlock",
    "Reply",
    "Sampling",
    "Saved",
    "SavedFolder",
    "Score",
    "Slot",
    "SlotMessage",
    "SlotStats",
    "Token",
    "Tokenized",
    "ToolCall",
    "Usage",
    "errors",
    "load",
    "mod",
    "save",
    "stack",
    "system_info",
]
