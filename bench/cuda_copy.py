"""Attention copied from the device to the host: how fast, and how long after the end of a step?

The figures are the engine's own counters. The baseline is measured here: the driver copies the same
number of bytes to page-locked memory (pinned.py). For the copy's row the engine waits for the
copies at the end of each step, so that their time is known and not only bounded; the other row
measures an engine in its usual mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pinned
from console import attempt
from models import NotHere
from report import Timing
from runs import LockstepRuns, open_engine

from kqview import Capture
from kqview.bench.pairs import Pairs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview import EngineStats
    from kqview.bench.records import LeftOut

# name -> most that the ratio's bound may be: 80 % of the bandwidth; the limit itself
COPY_CASES = {"cuda-copy": 1 / 0.8, "cuda-step-to-view": 1.0}
LIMIT_MS = 0.5  # from the end of a step to its view


@dataclass(frozen=True)
class DeviceCopies:
    """What a step brought on average between two readings of the engine's counters."""

    n_bytes: int
    copy_ms: float  # from when the rows could leave the device to when they had arrived
    step_to_view_ms: float  # from the end of the step's compute to the published row


def device_copies(before: EngineStats, after: EngineStats) -> DeviceCopies:
    """The figures of the steps between both readings.

    Raises:
        NotHere: No step brought rows from a device.
    """
    made = after.since(before)
    n = made.captured_steps
    if n == 0 or made.device_copies == 0:
        raise NotHere("no row was copied from a device; are the layers on one?")
    return DeviceCopies(
        made.device_copy_bytes // n, made.device_copy_s / n * 1000, made.step_to_view_mean_s * 1000
    )


def measure_copies(
    settings: Settings, line: ProgressLine, n_context: int
) -> Iterator[Timing | LeftOut]:
    """Both rows, at one context, one slot, logits of all heads."""
    for name in settings.chosen(COPY_CASES):
        line.start(name, 1)
        yield attempt(name, _measure, settings, name, n_context)
        line.tick()


def _measure(settings: Settings, name: str, n_context: int) -> Timing:
    if settings.device == "cpu":
        raise NotHere("rows of layers on the host are written where the view shows them: no copy")
    pairs = Pairs()
    is_copy = name == "cuda-copy"
    with open_engine(settings, flash_attn=True, n_ctx=n_context + 256) as engine:
        engine._core.await_copies(is_copy)
        runs = LockstepRuns(settings, engine, 1, n_context)
        capture = Capture("logits")
        runs.stamps_s(settings.n_tokens, capture)
        for _ in range(settings.n_pairs):
            before = engine.stats()
            runs.stamps_s(settings.n_tokens, capture)
            found = device_copies(before, engine.stats())
            if is_copy:
                (limit_ms,) = pinned.copy_ms(found.n_bytes, 1)
                pairs.add(limit_ms, found.copy_ms)
            else:
                pairs.add(LIMIT_MS, found.step_to_view_ms)
    return Timing(
        name=name,
        what="the tap's copy of a token's rows"
        if is_copy
        else "from the end of a step to its view",
        baseline="the driver's copy to page-locked memory" if is_copy else f"{LIMIT_MS} ms",
        work=f"logits of all heads at {n_context} tokens; the 7B shape, {settings.device}",
        pairs=pairs,
        target=settings.target(COPY_CASES[name]),
        command=f"python bench/cuda_cost.py --row {name} {settings.flags}",
    )
