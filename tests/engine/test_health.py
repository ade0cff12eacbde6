"""Liveness: what ``engine.health`` shows, and ``close`` in the middle of a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kqview import EngineHealth, errors
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine
    from tests.engine.conftest import MakeEngine

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
N_PROMPT = 2000


def wait_for_step(engine: Engine, n_steps: int) -> None:
    for _ in range(4000):
        health = engine.health()
        if health.n_steps == n_steps and health.phase == "decoding":
            return
        time.sleep(0.002)
    pytest.fail(f"no step {n_steps}: {engine.health()}")


def test_health_shows_a_step_that_runs_and_its_signs_of_life(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ctx=N_PROMPT, n_ubatch=N_PROMPT, n_batch=N_PROMPT)
    assert engine.health().phase == "waiting"
    generation = engine.generate(random_ids(N_PROMPT - 8), max_tokens=1, **GREEDY)
    wait_for_step(engine, 1)
    started_s, longest_s = time.monotonic(), 0.0
    while (health := engine.health()).phase == "decoding":
        longest_s = max(longest_s, health.quiet_s)
        time.sleep(0.001)
    # One step, and yet there was a sign of life in between: a long prompt is no stall.
    assert health.n_steps == 1
    assert 0 < longest_s < 0.7 * (time.monotonic() - started_s)
    assert len(list(generation)) == 1
    engine.close()
    assert engine.health().phase == "ended"
    assert engine.health().stall(0) is None


def test_close_breaks_a_long_step_off_and_its_request_gets_closed_error(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    # Issue 10: close() waited for the step, however long.
    options: dict[str, Any] = {"n_ctx": N_PROMPT, "n_ubatch": N_PROMPT, "n_batch": N_PROMPT}
    prompt = random_ids(N_PROMPT - 8)
    engine = make_engine(tiny_llama, flash_attn=False, **options)
    generation = engine.generate(prompt, max_tokens=1, capture="probs", **GREEDY)
    wait_for_step(engine, 1)
    engine.close()
    assert engine.stats().n_decodes == 0  # it was broken off
    assert not engine.health().is_lost
    with pytest.raises(errors.ClosedError):
        next(generation)


def test_close_refuses_what_is_no_time(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    for wrong in (-1, True, "1", None, float("nan")):
        with pytest.raises(errors.RequestError, match="timeout_s"):
            engine.close(timeout_s=wrong)  # pyright: ignore[reportArgumentType]
    engine.close(timeout_s=5)


@pytest.mark.parametrize(
    ("health", "is_stalled"),
    [
        (EngineHealth("waiting", 1e6, 3, is_lost=False), False),
        (EngineHealth("decoding", 1.0, 3, is_lost=False), False),
        (EngineHealth("decoding", 3.0, 3, is_lost=False), True),
        (EngineHealth("sampling", 3.0, 3, is_lost=False), True),
        (EngineHealth("ended", 3.0, 3, is_lost=False), False),
        (EngineHealth("ended", 0.0, 3, is_lost=True), True),
    ],
)
def test_stall_is_told_by_silence_in_a_phase_that_works(
    health: EngineHealth, *, is_stalled: bool
) -> None:
    assert bool(health.stall(2.0)) is is_stalled
    if is_stalled and not health.is_lost:
        assert "3.0 s" in (health.stall(2.0) or "")
