"""kqview: llama.cpp in your process, with the attention of each generated token as a numpy view."""

import logging
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from kqview import errors as errors

if TYPE_CHECKING:
    from kqview import guards as guards, heads as heads, ray as ray, viz as viz
    from kqview.corpora import (
        extract as extract,
        open_corpus as open_corpus,
    )
    from kqview.edit import Edit as Edit
    from kqview.edits import (
        ControlVector as ControlVector,
        patch as patch,
        vector as vector,
    )
    from kqview.engine import Engine as Engine
    from kqview.engine_options import EngineOptions as EngineOptions
    from kqview.generation.stream import (
        Generation as Generation,
        PromptAttention as PromptAttention,
    )
    from kqview.lora import LoraAdapter as LoraAdapter
    from kqview.machine import system_info as system_info
    from kqview.mods import (
        Mod as Mod,
        mod as mod,
    )
    from kqview.saved import (
        Saved as Saved,
        SavedFolder as SavedFolder,
        load as load,
        save as save,
        stack as stack,
    )
    from kqview.slot import Slot as Slot
    from kqview.submission import GenerateOptions as GenerateOptions
    from kqview.types import (
        Capture as Capture,
        ChatPrompt as ChatPrompt,
        Classification as Classification,
        EngineHealth as EngineHealth,
        EngineStats as EngineStats,
        Finished as Finished,
        ModelInfo as ModelInfo,
        PoolStats as PoolStats,
        PromptBlock as PromptBlock,
        Reply as Reply,
        Sampling as Sampling,
        Score as Score,
        SlotMessage as SlotMessage,
        SlotStats as SlotStats,
        Token as Token,
        Tokenized as Tokenized,
        ToolCall as ToolCall,
        Usage as Usage,
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
    return sorted({*globals(), *_HOMES})


if not TYPE_CHECKING:  # type checkers read only literal lists, and the imports above without one
    __all__ = sorted([*_HOMES, "errors"])
