"""Run: one request's tokens, and every way in which it ends, without a transport."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine
from kqview.errors import ClosedError
from kqview.server import Settings
from kqview.server.errors import ShuttingDown, TimedOut
from kqview.server.models.run import AttentionWanted, GenerateRequest
from kqview.server.models.service import Service
from kqview.types import Sampling
from tests.support.engines import KEPT, keep_slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kqview.server.models.run import Run

WITHIN_S = 60.0  # until a test fails; no measure of anything


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.demo(n_threads=1, n_slots=2, n_ctx=4096) as engine:
        yield engine


def request(**given: Any) -> GenerateRequest:
    sampling = Sampling(temperature=0.7, seed=1, ignore_eos=True, stop=given.pop("stop", ()))
    defaults = {"prompt": "Tom has", "max_tokens": 4000, "request_id": "one"}
    return GenerateRequest(**{**defaults, "sampling": sampling, **given})


async def start(engine: Engine, **given: Any) -> tuple[Service, Run]:
    service = Service(engine, Settings())
    return service, await service.start(request(**given))


def busy(engine: Engine) -> int:
    return sum(slot.is_busy for slot in engine.stats().slots)


def wait_free(engine: Engine) -> None:
    end_s = time.monotonic() + WITHIN_S
    while busy(engine):
        assert time.monotonic() < end_s
        time.sleep(0.001)


async def test_tokens_come_in_order_and_the_run_is_over_at_the_end(engine: Engine):
    service, run = await start(engine, max_tokens=5)
    assert service.find(request_id="one") == [run]
    indices = [step.token.index async for step in run]
    assert indices == list(range(5))
    assert run.is_over
    assert not service.runs
    assert (run.finish_reason, run.n_tokens, run.usage.completion_tokens) == ("length", 5, 5)
    assert run.ended_s is not None
    assert run.elapsed_s == run.ended_s - run.started_s
    assert service.last_of().finish_reason == "length"


async def test_same_seed_gives_the_same_text_and_samples_give_others(engine: Engine):
    texts: list[str] = []
    for name in ("a", "b"):
        _, run = await start(engine, max_tokens=12, request_id=name)
        async with run:
            _ = [step async for step in run]
        texts.append(run.text)
    assert texts[0] == texts[1]
    service, run = await start(engine, max_tokens=12, n_samples=3)
    async with run:
        ids: dict[int, list[int]] = {}
        async for step in run:
            ids.setdefault(step.sample, []).append(step.token.id)
    assert sorted(ids) == [0, 1, 2]
    assert run.text == texts[0]
    assert ids[1] != ids[0]
    assert busy(engine) == 0
    assert not service.runs


async def test_stop_text_is_part_of_the_text(engine: Engine):
    _, run = await start(engine, max_tokens=200, stop=(".",))
    async with run:
        pieces = [step.token.text async for step in run]
    assert run.finish_reason == "stop_sequence"
    assert run.text.endswith(".")
    assert "".join(pieces).startswith(run.text)


@pytest.mark.parametrize("n_samples", [1, 2])
async def test_end_with_an_error_is_raised_where_it_is_iterated(engine: Engine, n_samples: int):
    service, run = await start(engine, n_samples=n_samples)
    async with run, asyncio.timeout(WITHIN_S):
        await anext(run)
        run.end(TimedOut("late"))
        with pytest.raises(TimedOut, match="late"):
            async for _ in run:
                pass
    assert run.finish_reason == "error"
    assert not service.runs
    assert busy(engine) == 0


@pytest.mark.parametrize("n_samples", [1, 2])
async def test_end_without_an_error_is_a_cancellation(engine: Engine, n_samples: int):
    _, run = await start(engine, n_samples=n_samples)
    async with run, asyncio.timeout(WITHIN_S):
        await anext(run)
        run.end()
        async for _ in run:
            pass
    assert run.finish_reason == "cancelled"


async def test_first_reason_for_an_end_is_kept(engine: Engine):
    _, run = await start(engine)
    async with run:
        run.end(TimedOut("first"))
        run.end(ShuttingDown("second"))
        with pytest.raises(TimedOut):
            await anext(run)
    run.end(ShuttingDown("after the end"))
    assert isinstance(run.error, TimedOut)


async def test_end_reaches_a_run_that_waits_for_a_slot():
    with Engine.demo(n_threads=1, n_ctx=1024, **KEPT) as engine:
        held = await asyncio.to_thread(keep_slot, engine, engine.tokenize("Tom has"))
        run = await Service(engine, Settings()).start(request(attention=AttentionWanted()))
        async with run, asyncio.timeout(WITHIN_S):
            asyncio.get_running_loop().call_later(0.05, run.end, TimedOut("late"))
            with pytest.raises(TimedOut):
                await anext(run)
        for generation in held:
            await asyncio.to_thread(generation.close)
        assert busy(engine) == 0


async def test_error_of_the_engine_is_raised_and_kept(engine: Engine):
    service, run = await start(engine)
    async with run, asyncio.timeout(WITHIN_S):
        await anext(run)
        await asyncio.to_thread(engine.close)
        with pytest.raises(ClosedError):
            async for _ in run:
                pass
    assert isinstance(run.error, ClosedError)
    assert not service.runs


async def test_who_ended_it_knows_better_than_the_closed_engine(engine: Engine):
    _, run = await start(engine)
    async with run, asyncio.timeout(WITHIN_S):
        run.end(ShuttingDown("bye"))
        await asyncio.to_thread(engine.close)
        with pytest.raises(ShuttingDown):
            async for _ in run:
                pass


@pytest.mark.parametrize("n_samples", [1, 3])
async def test_close_frees_the_slots_and_is_idempotent(engine: Engine, n_samples: int):
    service, run = await start(engine, n_samples=n_samples)
    await anext(run)
    async with asyncio.timeout(WITHIN_S):
        await run.aclose()
        assert busy(engine) == 0
        await run.aclose()
    assert not service.runs


@pytest.mark.parametrize("n_samples", [1, 2])
async def test_cancelled_task_closes_its_run_even_when_it_is_cancelled_twice(
    engine: Engine, n_samples: int
):
    service, run = await start(engine, n_samples=n_samples)

    has_begun = asyncio.Event()

    async def consume() -> None:
        async with run:
            async for _ in run:
                has_begun.set()

    task = asyncio.create_task(consume())
    await has_begun.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not service.runs
    await asyncio.to_thread(wait_free, engine)


async def test_failure_of_one_sample_that_is_no_error_of_ours_ends_the_run(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    _, run = await start(engine, n_samples=2)

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(run.generations[0], name)

        async def __anext__(self) -> Any:
            raise ZeroDivisionError

    monkeypatch.setattr(run, "generations", (run.generations[0], Broken()))
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(ZeroDivisionError):
            async for _ in run:
                pass
        await run.aclose()


async def test_rows_are_free_while_the_consumer_waits(engine: Engine):
    wanted = AttentionWanted(prompt=True)
    service, run = await start(engine, attention=wanted, prompt=[5] * 64, max_tokens=1)
    async with run:
        async for block in run.prompt_blocks():
            assert isinstance(block.rows, np.ndarray)
            n_bytes = block.rows.nbytes
            del block
            # The token's row may be there already; the block's, 64 times as much, are not.
            assert engine.stats().pool.leased_bytes < n_bytes / 2
        async for step in run:
            assert step.n_bytes == 4 * 8 * 64 * 4
            del step
            gc.collect()
            assert engine.stats().pool.n_leased == 0
    assert not service.runs


async def test_prompt_rows_are_empty_where_nobody_asked(engine: Engine):
    _, run = await start(engine, attention=AttentionWanted(), max_tokens=1)
    async with run:
        assert [block async for block in run.prompt_blocks()] == []
