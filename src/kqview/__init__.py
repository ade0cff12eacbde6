"""kqview: llama.cpp in your process, with the attention of each generated token as a numpy view."""

import logging
from importlib.metadata import version

from kqview import errors
from kqview.engine import Engine
from kqview.generation.prompt import PromptAttention
from kqview.generation.stream import Generation
from kqview.lora import LoraAdapter
from kqview.machine import system_info
from kqview.mods import Mod, mod
from kqview.slot import Slot
from kqview.types import (
    Capture,
    Classification,
    EngineHealth,
    EngineStats,
    ModelInfo,
    PoolStats,
    PromptBlock,
    Sampling,
    Score,
    SlotStats,
    Token,
    Usage,
)

# A library is silent until its user configures logging.
logging.getLogger("kqview").addHandler(logging.NullHandler())

__version__ = version("kqview")

__all__ = [
    "Capture",
    "Classification",
    "Engine",
    "EngineHealth",
    "EngineStats",
    "Generation",
    "LoraAdapter",
    "Mod",
    "ModelInfo",
    "PoolStats",
    "PromptAttention",
    "PromptBlock",
    "Sampling",
    "Score",
    "Slot",
    "SlotStats",
    "Token",
    "Usage",
    "errors",
    "mod",
    "system_info",
]
