"""`Engine.stats`: what the engine does and did; `Engine.health`: whether its thread still moves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from kqview import EngineHealth, errors
from tests.support.rows import random_ids
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine
    from tests.engine.conftest import MakeEngine

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPT = random_ids(30)


def test_fresh_engine_has_idle_slots_and_no_speed(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    stats = make_engine(tiny_llama, n_slots=3).stats()
    assert [(s.id, s.state, s.n_tokens, s.request_id) for s in stats.slots] == [
        (i, "idle", 0, None) for i in range(3)
    ]
    assert (stats.tokens_per_s, stats.prefill_tokens_per_s, stats.busy_s) == (0.0, 0.0, 0.0)
    assert stats.uptime_s > 0


def test_slots_say_who_works_in_them(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_slots=2, run_ahead=4)
    running = engine.generate(PROMPT, max_tokens=50, request_id="mine", slot=1, **GREEDY)
    next(running)
    deadline_s = time.monotonic() + 20
    n_ahead = len(PROMPT) + 4
    while time.monotonic() < deadline_s:
        idle, busy = engine.stats().slots
        if (busy.state, busy.n_tokens) == ("paused", n_ahead):
            break
        time.sleep(0.001)
    assert (idle.state, idle.is_busy, idle.request_id) == ("idle", False, None)
    assert (busy.state, busy.is_busy, busy.request_id) == ("paused", True, "mine")
    assert busy.n_tokens == engine.slots[1].n_tokens == n_ahead
    queued = engine.generate(PROMPT, max_tokens=5, slot=1, **GREEDY)
    assert engine.stats().n_queued == 1
    running.close()
    assert len(list(queued)) == 5
    stats = engine.stats()
    assert stats.n_queued == 0
    assert not any(slot.is_busy for slot in stats.slots)


@pytest.mark.needs("host layers")
def test_counters_tell_how_generations_ended(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, aborted_decodes=[1])
    with pytest.raises(errors.DecodeError):
        engine.generate(PROMPT, **GREEDY).read()
    engine.generate(PROMPT, max_tokens=5, **GREEDY).read()
    with engine.generate(PROMPT, max_tokens=500, **GREEDY) as closed:
        next(closed)
    holder = engine.generate(PROMPT, max_tokens=500, **GREEDY)
    next(holder)
    engine.generate(PROMPT, **GREEDY).close()  # in the queue
    holder.close()
    stats = engine.stats()
    assert (stats.n_failed, stats.n_finished, stats.n_cancelled) == (1, 1, 3)
    assert stats.n_requests == 4


def test_tokens_and_seconds_give_the_speed_of_an_interval(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    engine.generate(PROMPT, max_tokens=3, **GREEDY).read()
    before = engine.stats()
    prompt = random_ids(100, seed=1)
    started_s = time.monotonic()
    engine.generate(prompt, max_tokens=200, **GREEDY).read()
    took_s = time.monotonic() - started_s
    time.sleep(took_s)  # no part of any speed
    made = engine.stats().since(before)
    assert (made.n_requests, made.n_finished, made.n_tokens) == (1, 1, 200)
    assert made.prefill_tokens == 100
    assert made.decode_tokens == 199  # the first one comes of the prompt
    assert made.n_decodes == 201  # the prompt's last token goes on its own
    assert made.prefill_s > 0
    assert made.decode_s > 0
    assert made.uptime_s >= 2 * took_s
    assert made.busy_s < 1.5 * took_s  # without the sleep, which took as long again
    assert made.tokens_per_s == pytest.approx(199 / made.decode_s)
    assert made.prefill_tokens_per_s == pytest.approx(100 / made.prefill_s)
    assert made.slots == engine.stats().slots


def test_stats_of_a_closed_engine_stay(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    running = engine.generate(PROMPT, max_tokens=400, **GREEDY)
    next(running)
    engine.close()
    with pytest.raises(errors.ClosedError):
        running.read()
    stats = engine.stats()
    assert stats.n_failed == 1
    assert not any(slot.is_busy for slot in stats.slots)


# ---- health, and close() in the middle of a step

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
    wait_until(lambda: engine.health().phase == "waiting")
    generation = engine.generate(random_ids(N_PROMPT - 8), max_tokens=1, **GREEDY)
    wait_for_step(engine, 1)
    n_signs, quiet_s = 0, 0.0
    while (health := engine.health()).phase == "decoding":
        n_signs += health.quiet_s < quiet_s
        quiet_s = health.quiet_s
        time.sleep(0.001)
    # One step, and yet there were signs of life in between: a long prompt is no stall.
    assert n_signs > 0
    assert engine.stats().n_decodes <= 2  # the prompt's last token goes on its own
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
