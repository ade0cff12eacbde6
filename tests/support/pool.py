"""Several tiny models for tests of the pool, which differ in the size of their vocabulary."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec

import kqview.server.models.model_entry
from kqview import Engine
from kqview.engine import check_opening
from kqview.server import Settings
from kqview.server.config import Config, ModelConfig
from tests.support import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pytest

NAMES = ("ada", "bob", "cleo", "dan")
N_CTX = 512
WITHIN_S = 60.0  # until a test fails; nothing is measured with it


def write_models(folder: Path) -> Path:
    """Write a file for each of `NAMES`, and "broken.gguf", into *folder*."""
    for i, name in enumerate(NAMES):
        tiny_gguf.write_preset(folder / f"{name}.gguf", "tiny_llama", seed=i, n_vocab=n_vocab(name))
    tiny_gguf.write_truncated(folder / "broken.gguf", folder / "ada.gguf")
    return folder


def n_vocab(name: str) -> int:
    """Size of the vocabulary of a model."""
    return 320 + NAMES.index(name)


def config_of(
    folder: Path,
    *names: str,
    n_fit: int = 2,
    models: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> Config:
    """A configuration of models of *folder*, of which *n_fit* fit into the budget.

    Args:
        folder: As of `write_models`.
        names: Which; all without any.
        n_fit: How many fit.
        models: Further options of a model by its id.
        settings: Further settings.
    """
    needs = check_opening(folder / f"{NAMES[-1]}.gguf", n_ctx=N_CTX, n_threads=1)
    budget = sum(one.needed_bytes for one in needs) * n_fit + 1024
    given: dict[str, Any] = {"n_threads": 1, "n_ctx": N_CTX, "models_budget_bytes": budget}
    tables: dict[str, dict[str, Any]] = {
        name: {"path": str(folder / f"{name}.gguf"), **(models or {}).get(name, {})}
        for name in names or NAMES
    }
    return Config(
        settings=Settings(**given | settings),
        models={name: msgspec.convert(table, ModelConfig) for name, table in tables.items()},
    )


class Gate:
    """Holds each load of an engine until `open`; knows which files were begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._has_begun = threading.Event()
        self._is_open = threading.Event()

    def open(self) -> None:
        """Let loads go on."""
        self._is_open.set()

    def wait(self) -> None:
        """Wait until a load has begun; blocks."""
        assert self._has_begun.wait(WITHIN_S)

    def engine(self, path: Any, *, progress: Callable[[float], object], **options: Any) -> Engine:
        """What is called in place of Engine."""
        self.begun.append(str(path))
        progress(0.5)
        self._has_begun.set()
        assert self._is_open.wait(WITHIN_S)
        return Engine(path, progress=progress, **options)


def gated(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate before every load from here on."""
    gate = Gate()
    monkeypatch.setattr(kqview.server.models.model_entry, "Engine", gate.engine)
    return gate
