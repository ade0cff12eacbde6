"""Engines that fail on purpose, and models without an engine: what only the core offers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest import mock

from kqview import Capture, Engine, Generation, _core, errors
from kqview.engine_options import context_options

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def open_engine(
    model: str | os.PathLike[str],
    *,
    poisons_blocks: bool = False,
    aborted_decodes: Sequence[int] = (),
    learns_costs: bool = True,
    **options: Any,
) -> Engine:
    """An Engine with the core's options for tests.

    Args:
        model: As of Engine.
        poisons_blocks: Overwrite the memory of views that were given back.
        aborted_decodes: Decodes, counted from 1, that llama.cpp is made to abort midway.
        learns_costs: False: steps are taken to cost what they are before any is known, so that how
            many tokens are guessed does not depend on the machine.
        **options: Those of Engine.
    """

    def with_faults(given: Mapping[str, Any]) -> _core.EngineOptions:
        made = context_options(given)
        made.poisons_blocks = poisons_blocks
        made.aborted_decodes = list(aborted_decodes)
        if not learns_costs:
            made.max_gap_ms = -1.0
        return made

    with mock.patch("kqview.engine.context_options", with_faults):
        return Engine(model, **options)


KEPT: dict[str, Any] = {"attention_budget_bytes": 15 * 2**12, "run_ahead": 8}
"""Options of an Engine with one slot for `keep_slot`."""
REFUSED: dict[str, Any] = {"capture": Capture("probs", on_full="wait")}
"""Options of a generation that waits for that slot."""


def keep_slot(engine: Engine, prompt: Sequence[int]) -> list[Generation]:
    """Held generations, the last of which is not parked for one that captures attention.

    The rows ahead of the others take more than half of the budget.
    """
    held: list[Generation] = []
    while True:
        one = engine.generate(
            list(prompt), request_id=f"holder-{len(held)}", temperature=0, ignore_eos=True,
            capture=Capture("probs", on_full="wait", wait_s=60),
        )  # fmt: skip
        try:
            next(one)
        except errors.BusyError:
            one.close()
            return held
        held.append(one)


def load_vocabulary(path: str | os.PathLike[str]) -> _core.Model:
    """The vocabulary of a GGUF file, without its weights."""
    options = _core.ModelOptions()
    options.path = os.fspath(path)
    options.vocabulary_only = True
    return _core.Model.load(options)
