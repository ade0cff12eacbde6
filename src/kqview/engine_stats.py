"""The counters of the core as EngineStats."""

from collections.abc import Callable
from typing import Any

from kqview.types import EngineStats, PoolStats, SlotStats


def engine_stats(raw: dict[str, Any], name_of: Callable[[int], str | None]) -> EngineStats:
    """What the core's ``stats()`` returned; *name_of* gives the ``request_id`` of a core's id."""
    pool = PoolStats(**raw.pop("pool"))
    slots = tuple(
        SlotStats(i, state, n_tokens, name_of(request))
        for i, (state, n_tokens, request) in enumerate(raw.pop("slots"))
    )
    return EngineStats(**raw, slots=slots, pool=pool)
