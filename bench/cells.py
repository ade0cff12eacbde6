"""Cells: KV caches of long prompts, evaluated once a machine and kept in the cache folder.

A prompt of 16,384 tokens takes a minute. Its cells are the same in every engine of one model, type
of cache and setting of flash attention, so rows, processes and later runs share them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from models import model_path
from peers.build import cache_root

from kqview.bench.sweep import prompt_ids
from kqview.errors import StateError

if TYPE_CHECKING:
    from pathlib import Path

    from settings import Settings

    from kqview import Engine


def folder() -> Path:
    """Where they are kept."""
    path = cache_root() / "bench-cells"
    path.mkdir(parents=True, exist_ok=True)
    return path


def name(settings: Settings, *, flash_attn: bool, kv_type: str = "f16") -> str:
    """Name of the file of a prompt of ``settings.n_context`` tokens, without its suffix."""
    way = "flash" if flash_attn else "plain"  # without flash attention values are transposed
    cache = "" if kv_type == "f16" else f"-{kv_type}"
    return f"{model_path(settings).stem}-{settings.n_context}-{way}{cache}"


def fill(
    settings: Settings, engine: Engine, *, flash_attn: bool, kv_type: str = "f16"
) -> list[int]:
    """Bring one prompt of ``settings.n_context`` tokens into every slot and return its ids.

    Args:
        settings: The model's shape and the length.
        engine: Opened by `runs.open_engine`.
        flash_attn: As *engine* was opened.
        kv_type: The same.
    """
    prompt = prompt_ids(settings.n_context, engine.model.n_vocab)
    path = folder() / f"{name(settings, flash_attn=flash_attn, kv_type=kv_type)}.ses1"
    first, *others = engine.slots
    try:
        first.restore_file(path)
    except (OSError, StateError):  # not there yet, or of another version
        options = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        engine.generate(prompt, slot=first.id, **options).read()
        first.save_file(path)
    for slot in others:
        slot.restore_file(path)
    return prompt
