"""The copy of attention from the device to the host alone: how fast, and how long after the step.

The figures of the copies are the tap's own, see `device_copies`; what they are held to is measured
here: the same number of bytes copied to page-locked memory by the driver alone (pinned.py).
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
    from kqview.bench.rows import LeftOut

# name -> most that the ratio's bound may be: 80 % of the bandwidth; the limit itself
COPY_CASES = {"cuda-copy": 1 / 0.8, "cuda-step-to-view": 1.0}
LIMIT_MS = 0.5  # from the end of a step to its view


@dataclass(frozen=True)
class DeviceCopies:
    """What the tap counted between two readings of its counters."""

    n_copies: int
    n_bytes: int
    copy_ms: float  # of all copies, by events on the device
    step_to_view_ms: float  # of all copies: from the end of the step's compute to the published row


def device_copies(before: EngineStats, after: EngineStats) -> DeviceCopies:
    """HOOK: the tap's figures, from fields that EngineStats does not have yet.

    Raises:
        NotHere: This version does not count them.
    """
    fields = ("device_copies", "device_copy_bytes", "device_copy_s", "step_to_view_s")
    missing = [name for name in fields if not hasattr(after, name)]
    if missing:
        raise NotHere(f"this version does not count it: EngineStats has no {', '.join(missing)}")
    n, n_bytes, copy_s, view_s = (getattr(after, f) - getattr(before, f) for f in fields)
    return DeviceCopies(n, n_bytes, copy_s * 1000, view_s * 1000)


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
    with open_engine(settings, flash_attn=True, n_ctx=n_context + 256) as engine:
        runs = LockstepRuns(settings, engine, 1, n_context)
        capture = Capture("logits")
        runs.stamps_s(settings.n_tokens, capture)
        for _ in range(settings.n_pairs):
            before = engine.stats()
            runs.stamps_s(settings.n_tokens, capture)
            found = device_copies(before, engine.stats())
            if found.n_copies == 0:
                raise NotHere("no row was copied from a device; are the layers on one?")
            if name == "cuda-step-to-view":
                pairs.add(LIMIT_MS, found.step_to_view_ms / found.n_copies)
            else:
                (limit_ms,) = pinned.copy_ms(found.n_bytes // found.n_copies, 1)
                pairs.add(limit_ms, found.copy_ms / found.n_copies)
    is_copy = name == "cuda-copy"
    return Timing(
        name=name,
        what="the tap's copy of a token's rows"
        if is_copy
        else "from the end of a step to its view",
        baseline="the driver's copy to page-locked memory" if is_copy else f"{LIMIT_MS} ms",
        work=f"logits of all heads at {n_context} tokens; the 7B shape, {settings.device}",
        pairs=pairs,
        target=settings.target(COPY_CASES[name]),
        command=f"python bench/cuda.py --row {name} {settings.flags}",
    )
