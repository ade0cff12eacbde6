"""kqview: llama.cpp in your process, with the attention of each generated token as a numpy view."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from kqview import errors

if TYPE_CHECKING:
    from kqview import guards as guards, heads as heads, ray as ray, viz as viz
    from kqview.corpora import extract, open_corpus
    from kqview.edit import Edit
    from kqview.edits import ControlVector, patch, vector
    from kqview.engine import Engine
    from kqview.engine_options import EngineOptions
    from kqview.generation.stream import Generation, PromptAttention
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

    __version__: str

# A library is silent until its user configures logging.
logging.getLogger("kqview").addHandler(logging.NullHandler())

# Where each name is: loaded when it is first used, so that `kqview -h` waits for none of it.
_HOMES: Final = {
    name: module
    for module, names in {
        "corpora": "extract open_corpus",
        "edit": "Edit",
        "edits": "ControlVector patch vector",
        "engine": "Engine",
        "engine_options": "EngineOptions",
        "generation.stream": "Generation PromptAttention",
        "lora": "LoraAdapter",
        "machine": "system_info",
        "mods": "Mod mod",
        "saved": "Saved SavedFolder load save stack",
        "slot": "Slot",
        "submission": "GenerateOptions",
        "types": (
            "Capture ChatPrompt Classification EngineHealth EngineStats Finished "
            "ModelInfo PoolStats PromptBlock Reply Sampling Score SlotMessage SlotStats "
            "Token Tokenized ToolCall Usage"
        ),
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    """Load a public name, a module such as `kqview.viz`, or the version."""
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("kqview")
    elif name in _HOMES:
        value = getattr(import_module(f"kqview.{_HOMES[name]}"), name)
    elif not name.startswith("_") and find_spec(f"kqview.{name}") is not None:
        return import_module(f"kqview.{name}")
    else:
        raise AttributeError(f"module 'kqview' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Capture",
    "ChatPrompt",
    "Classification",
    "ControlVector",
    "Edit",
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
    "extract",
    "load",
    "mod",
    "open_corpus",
    "patch",
    "save",
    "stack",
    "system_info",
    "vector",
]
