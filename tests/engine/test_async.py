"""``async for`` over generations: same tokens, no thread, no blocked loop, clean cancellation."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import errors
from tests.support.engines import KEPT, REFUSED, keep_slot
from tests.support.processes import n_threads
from tests.support.rows import random_ids
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable
    from pathlib import Path

    from kqview import Engine, Generation
    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

PROMPT = random_ids(12)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


async def collect(generation: Generation) -> list[Token]:
    return [token async for token in generation]


def within(awaitable: Awaitable[Any], timeout_s: float = 30) -> Any:
    """Run to the end in a loop of its own."""

    async def main() -> Any:
        return await asyncio.wait_for(awaitable, timeout_s)

    return asyncio.run(main())


@pytest.mark.parametrize("run_ahead", [0, 8])
def test_async_and_sync_iteration_give_the_same(
    make_engine: MakeEngine, tiny_llama: Path, run_ahead: int
) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "seed": 3, "capture": "probs", "top_logprobs": 2}
    want = list(make_engine(tiny_llama, run_ahead=run_ahead).generate(PROMPT, **options))
    engine = make_engine(tiny_llama, run_ahead=run_ahead)
    generation = engine.generate(PROMPT, **options)
    got = within(collect(generation))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one.id, one.text, one.index, one.logprob) == (
            other.id,
            other.text,
            other.index,
            other.logprob,
        )
        np.testing.assert_array_equal(one.attention, other.attention)
    assert generation.finish_reason == "length"
    assert within(collect(generation)) == []


async def test_many_generations_at_once_share_one_slot(engine: Engine) -> None:
    prompts = [random_ids(10, seed=seed) for seed in range(40)]
    want = [[t.id for t in engine.generate(p, max_tokens=12, **GREEDY)] for p in prompts]
    generations = [engine.generate(p, max_tokens=12, **GREEDY) for p in prompts]
    got = await asyncio.wait_for(asyncio.gather(*map(collect, generations)), 30)
    assert [[token.id for token in tokens] for tokens in got] == want


def test_two_loops_in_two_threads_share_an_engine(engine: Engine) -> None:
    want = [token.id for token in engine.generate(PROMPT, max_tokens=20, **GREEDY)]
    found: list[list[int]] = []

    async def many() -> None:
        for _ in range(10):
            tokens = await collect(engine.generate(PROMPT, max_tokens=20, **GREEDY))
            found.append([token.id for token in tokens])

    threads = [threading.Thread(target=lambda: within(many()), daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [want] * 20


async def test_no_thread_is_started_and_none_is_hopped_to(
    make_engine: MakeEngine, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny_llama, run_ahead=0)

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a call went to another thread")

    monkeypatch.setattr(asyncio.AbstractEventLoop, "run_in_executor", refuse)
    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
    monkeypatch.setattr(asyncio, "to_thread", refuse)
    before = threading.active_count()
    n_before = n_threads()
    seen = 0
    async for _ in engine.generate(PROMPT, max_tokens=50, **GREEDY):
        assert threading.active_count() == before
        assert n_threads() <= n_before
        seen += 1
    assert seen == 50


async def ticks(gaps: list[float]) -> None:
    last = time.monotonic()
    while True:
        await asyncio.sleep(0.001)
        now = time.monotonic()
        gaps.append(now - last)
        last = now


async def test_loop_goes_on_during_a_slow_prefill(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ctx=2048, flash_attn=False)
    gaps: list[float] = []
    ticker = asyncio.create_task(ticks(gaps))
    started = time.monotonic()
    tokens = await collect(engine.generate(random_ids(2000), max_tokens=2, **GREEDY))
    duration = time.monotonic() - started
    ticker.cancel()
    assert len(tokens) == 2
    assert len(gaps) > 10
    assert max(gaps) < 0.8 * duration  # one that blocks has one gap, as long as all of it


def work() -> None:
    time.sleep(0.001)


async def test_loop_goes_on_while_tokens_are_always_there(engine: Engine) -> None:
    gaps: list[float] = []
    ticker = asyncio.create_task(ticks(gaps))
    await asyncio.sleep(0)
    started = time.monotonic()
    async for _ in engine.generate(PROMPT, max_tokens=400, **GREEDY):
        work()  # slower than the engine, so that it never has to wait
    duration = time.monotonic() - started
    ticker.cancel()
    assert len(gaps) > 20
    assert max(gaps) < 0.8 * duration  # one that blocks has one gap, as long as all of it


async def test_aclose_from_another_task_ends_the_iteration(engine: Engine) -> None:
    holder = engine.generate(PROMPT, max_tokens=100, **GREEDY)
    await anext(holder)
    queued = engine.generate(PROMPT, max_tokens=100, **GREEDY)
    consuming = asyncio.create_task(collect(queued))
    await asyncio.sleep(0)  # the task runs as far as its wait
    await asyncio.gather(*(queued.aclose() for _ in range(3)))
    assert await asyncio.wait_for(consuming, 10) == []
    assert len(await collect(holder)) == 99


async def test_cancelled_wait_ends_a_generation_that_something_keeps_alive(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    # Issue 10: a stored exception kept the generation, and with it the slot, for ever.
    engine = make_engine(tiny_llama, run_ahead=0, n_ubatch=4)
    kept: list[Any] = []

    async def consume(*, in_prompt: bool) -> None:
        if in_prompt:  # in blocks of four rows
            kept.append(engine.attend(PROMPT))
        else:
            kept.append(engine.generate(PROMPT, max_tokens=100, **GREEDY))
        await anext(kept[-1])
        await until(lambda: engine.stats().n_queued == 0 and engine.slots[0].is_busy)
        asyncio.current_task().cancel()  # pyright: ignore[reportOptionalMemberAccess]
        while True:
            await anext(kept[-1])

    for in_prompt in (False, True):
        results = await asyncio.gather(consume(in_prompt=in_prompt), return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        await until(lambda: not engine.slots[0].is_busy)
    assert kept[0].finish_reason == "cancelled"
    assert await collect(kept[0]) == []
    await asyncio.wait_for(kept[0].aclose(), 20)
    assert len(await collect(engine.generate(PROMPT, max_tokens=3, **GREEDY))) == 3


async def test_wait_with_a_limit_that_keeps_its_task_loses_no_token(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, run_ahead=0)
    want = [token.id for token in engine.generate(PROMPT, max_tokens=60, **GREEDY)]
    generation = engine.generate(PROMPT, max_tokens=60, **GREEDY)
    got: list[int] = []
    n_timeouts = 0
    while len(got) < 60:
        task = asyncio.ensure_future(anext(generation))
        while not (await asyncio.wait({task}, timeout=0))[0]:
            n_timeouts += 1
        got.append(task.result().id)
    assert got == want
    assert n_timeouts > 0


async def test_cancelled_task_drops_its_generation(engine: Engine) -> None:
    taken: list[int] = []

    async def consume() -> None:
        async for token in engine.generate(PROMPT, max_tokens=400, **GREEDY):
            taken.append(token.id)
            if len(taken) == 5:
                await asyncio.Event().wait()

    task = asyncio.create_task(consume())
    await until(lambda: len(taken) == 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    await until(lambda: not engine.slots[0].is_busy)
    assert engine.slots[0].tokens == PROMPT + taken[:-1]
    assert len(await collect(engine.generate(PROMPT, max_tokens=3, **GREEDY))) == 3


async def test_cancelled_wait_leaves_other_waits_alone(engine: Engine) -> None:
    holder = engine.generate(PROMPT, max_tokens=30, **GREEDY)
    await anext(holder)
    tasks = [
        asyncio.create_task(collect(engine.generate(PROMPT, max_tokens=3, **GREEDY)))
        for _ in range(6)
    ]
    await asyncio.sleep(0)  # each task runs as far as its wait
    for task in tasks[::2]:
        task.cancel()
    await asyncio.gather(*tasks[::2], return_exceptions=True)
    assert len(await collect(holder)) == 29
    kept = await asyncio.wait_for(asyncio.gather(*tasks[1::2]), 20)
    assert [len(tokens) for tokens in kept] == [3, 3, 3]


async def test_second_task_on_one_generation_is_refused_and_the_first_goes_on(
    engine: Engine,
) -> None:
    holder = engine.generate(PROMPT, max_tokens=30, **GREEDY)
    await anext(holder)
    queued = engine.generate(PROMPT, max_tokens=3, **GREEDY)
    first = asyncio.create_task(collect(queued))
    await asyncio.sleep(0)  # the task runs as far as its wait
    with pytest.raises(errors.BusyError, match="iterate it once"):
        await anext(queued)
    with pytest.raises(errors.BusyError, match="iterate it once"):
        next(queued)
    await holder.aclose()
    assert len(await asyncio.wait_for(first, 20)) == 3


async def test_waiting_for_a_slot_that_the_same_task_holds_raises_busy_error(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **KEPT)
    *parked, holder = keep_slot(engine, PROMPT)
    await anext(holder)
    waiting = engine.generate(PROMPT, max_tokens=3, **REFUSED, **GREEDY)
    for _ in range(2):
        with pytest.raises(errors.BusyError, match=holder.request_id):
            await anext(waiting)
    # Blocking the loop would be the same deadlock.
    with pytest.raises(errors.BusyError, match=holder.request_id):
        next(waiting)
    for one in (holder, *parked):
        await one.aclose()
    assert len(await collect(waiting)) == 3


def test_closing_the_engine_wakes_coroutines_that_wait(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)

    async def main() -> None:
        holder = engine.generate(PROMPT, max_tokens=100, **GREEDY)
        await anext(holder)
        waiting = [asyncio.create_task(collect(engine.generate(PROMPT))) for _ in range(3)]
        await asyncio.sleep(0)  # each task runs as far as its wait
        engine.close()
        for task in waiting:
            with pytest.raises(errors.ClosedError):
                await task
        with pytest.raises(errors.ClosedError):
            await collect(holder)
        await holder.aclose()

    within(main())


@pytest.mark.full
def test_loops_that_ended_leave_no_descriptor(engine: Engine) -> None:

    def n_open(engine: Engine) -> int:
        within(collect(engine.generate(PROMPT, max_tokens=2, **GREEDY)))
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = n_open(engine)
    for _ in range(20):
        after = n_open(engine)
    assert after == before
