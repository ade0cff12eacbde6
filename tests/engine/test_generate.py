"""Generation: what iterating, ending, sharing the slot and closing the engine do."""

from __future__ import annotations

import gc
import os
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, Generation, errors
from tests.support.engines import KEPT, REFUSED, keep_slot
from tests.support.processes import n_threads
from tests.support.rows import random_ids
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")
PROMPT = random_ids(12)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def ids_of(engine: Engine, prompt: list[int], n: int) -> list[int]:
    return [token.id for token in engine.generate(prompt, max_tokens=n, **GREEDY)]


class Thread(threading.Thread):
    """A daemon thread that keeps what its call returned or raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.result: object = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.result = error

    def get(self, timeout: float = 20) -> Any:
        self.join(timeout)
        assert not self.is_alive(), "the call did not return"
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


# ---- iteration


def test_generation_counts_and_ends_at_max_tokens(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    generation = engine.generate(PROMPT, max_tokens=7, **GREEDY)
    assert generation.finish_reason is None
    tokens = list(generation)
    assert [token.index for token in tokens] == list(range(7))
    assert generation.tokens == [token.id for token in tokens]
    assert generation.text == "".join(token.text for token in tokens)
    assert generation.finish_reason == "length"
    usage = generation.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (12, 0, 7)
    assert usage.prefill_s > 0
    assert usage.decode_s > 0
    assert not engine.slots[0].is_busy
    assert engine.slots[0].tokens == PROMPT + generation.tokens[:-1]


def test_second_loop_goes_on_and_then_ends(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    generation = engine.generate(PROMPT, max_tokens=9, **GREEDY)
    first = [next(generation).id for _ in range(4)]
    second = [token.id for token in generation]
    assert len(second) == 5
    assert first + second == generation.tokens
    assert list(generation) == []
    assert next(generation, None) is None


def test_slot_is_free_as_soon_as_the_last_token_is_seen(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, run_ahead=0)
    for _ in range(200):
        list(engine.generate(PROMPT, max_tokens=2, **GREEDY))
        assert not engine.slots[0].is_busy


def test_second_thread_on_one_generation_is_refused_and_the_first_goes_on(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **KEPT)
    blockers = keep_slot(engine, PROMPT)
    queued = engine.generate(PROMPT, max_tokens=3, **REFUSED, **GREEDY)
    first = Thread(lambda: [token.id for token in queued])
    wait_until(lambda: is_busy_error(queued))
    assert queued.finish_reason is None
    for blocker in blockers:
        blocker.close()
    assert first.get() == ids_of(engine, PROMPT, 3)
    assert queued.finish_reason == "length"


def is_busy_error(generation: Generation) -> bool:
    try:
        generation._source.handle.try_next()  # does not wait where it is too early
    except errors.BusyError as error:
        return "iterate it once" in str(error)
    return False


def test_read_returns_all_text_and_with_block_closes(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    with engine.generate(PROMPT, max_tokens=6, **GREEDY) as generation:
        next(generation)
        text = generation.read()
    assert text == generation.text
    assert generation.finish_reason == "length"
    with engine.generate(PROMPT, max_tokens=6, **GREEDY) as generation:
        next(generation)
    assert generation.finish_reason == "cancelled"
    assert not engine.slots[0].is_busy


# ---- several generations


def test_generations_queue_for_the_slot_by_priority_then_arrival(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    blocker = engine.generate(PROMPT, max_tokens=50, **GREEDY)
    next(blocker)
    first, second, urgent = (
        engine.generate(PROMPT, max_tokens=50, priority=priority, **GREEDY)
        for priority in (0, 0, 5)
    )
    assert engine.stats().n_queued == 3
    blocker.close()
    in_order = [urgent, first, second]
    while in_order:
        now = in_order.pop(0)
        wait_until(lambda generation=now: generation.slot == 0)
        assert [generation.slot for generation in in_order] == [None] * len(in_order)
        assert len(list(now)) == 50


def test_waiting_for_a_slot_that_the_same_thread_holds_raises_busy_error(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **KEPT)
    *parked, holder = keep_slot(engine, PROMPT)
    waiting = engine.generate(PROMPT, max_tokens=3, **REFUSED, **GREEDY)
    for _ in range(2):
        with pytest.raises(errors.BusyError, match=f"{holder.request_id} .*cancel_all"):
            next(waiting)
        assert waiting.finish_reason is None
    for one in (holder, *parked):
        one.close()
    assert [token.id for token in waiting] == ids_of(engine, PROMPT, 3)


def test_holder_that_finishes_by_itself_is_no_reason_for_busy_error(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    for n_left in (1, 8):  # what the engine computes ahead
        holder = engine.generate(PROMPT, max_tokens=3 + n_left, **GREEDY)
        for _ in range(3):
            next(holder)
        assert len(ids_of(engine, PROMPT, 3)) == 3
        assert len(list(holder)) == n_left


def test_untaken_generation_of_the_same_thread_is_waited_for_a_little(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **KEPT)
    *parked, kept = keep_slot(engine, PROMPT)
    capture = Capture("probs", on_full="wait")
    holder = engine.generate(PROMPT, max_tokens=100, capture=capture, **GREEDY)
    kept.close()
    wait_until(lambda: engine.stats().pool.n_leased >= 14)  # it runs ahead
    waiting = engine.generate(PROMPT, max_tokens=3, **REFUSED, **GREEDY)
    with pytest.raises(errors.BusyError, match=holder.request_id):
        next(waiting)
    # Handed to a thread meanwhile, it is no deadlock.
    late = Thread(lambda: threading.Event().wait(0.1) or sum(1 for _ in holder))
    assert len(list(waiting)) == 3
    assert late.get() == 100
    for one in parked:
        one.close()


def test_waiting_for_a_slot_that_another_thread_holds_goes_on_until_it_is_free(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **KEPT)
    release = threading.Event()
    is_held = threading.Event()

    def hold() -> None:
        holders = keep_slot(engine, PROMPT)
        is_held.set()
        release.wait(20)
        for one in holders:
            one.close()

    holding = Thread(hold)
    assert is_held.wait(20)
    waiting = engine.generate(PROMPT, max_tokens=3, **REFUSED, **GREEDY)
    timer = threading.Timer(0.3, release.set)
    timer.start()
    assert len(list(waiting)) == 3
    assert release.is_set()
    holding.get()


def test_thread_that_waits_for_a_slot_does_not_keep_the_holder_alive(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    holder: Generation | None = engine.generate(PROMPT, max_tokens=100, **GREEDY)
    next(holder)
    waiting = engine.generate(PROMPT, max_tokens=3, **GREEDY)
    thread = Thread(lambda: list(waiting))
    threading.Event().wait(0.2)
    holder = None
    assert len(thread.get()) == 3


def test_full_queue_is_refused_and_cancelled_requests_do_not_count(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    holder = engine.generate(PROMPT, max_tokens=100, **GREEDY)
    next(holder)
    queued = [engine.generate(PROMPT, **GREEDY) for _ in range(1024)]
    with pytest.raises(errors.QueueFull, match="1024"):
        engine.generate(PROMPT, **GREEDY)
    assert (engine.stats().n_refused, engine.stats().n_queued) == (1, 1024)
    queued.pop().cancel()
    queued.append(engine.generate(PROMPT, **GREEDY))
    del queued
    assert engine.stats().n_queued == 0


# ---- dropping and closing


def test_ten_thousand_dropped_generations_leave_nothing(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    expected = ids_of(engine, PROMPT, 5)
    for i in range(10_000):
        generation = engine.generate(PROMPT, max_tokens=50, capture="probs", **GREEDY)
        if i % 50 == 0:
            assert next(generation).attention is not None
        if i == 1000:
            gc.collect()
            before = resources()
    del generation
    assert ids_of(engine, PROMPT, 5) == expected
    gc.collect()
    after = resources()
    assert after[0] == before[0]
    assert after[1] <= before[1]
    assert after[2] - before[2] < 8 * 2**20
    assert engine.stats().pool.n_leased == 0
    assert engine.stats().n_queued == 0


def resources() -> tuple[int, int, int]:
    """Open descriptors, threads and resident bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[1])
    return len(os.listdir("/proc/self/fd")), n_threads(), pages * os.sysconf("SC_PAGE_SIZE")


def test_closing_the_engine_ends_generations_after_the_tokens_already_there(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    reference = make_engine(tiny_llama)
    expected = list(reference.generate(PROMPT, max_tokens=9, capture="probs", **GREEDY))
    engine = make_engine(tiny_llama, poisons_blocks=True)
    generation = engine.generate(PROMPT, max_tokens=100, capture="probs", **GREEDY)
    queued = engine.generate(PROMPT, max_tokens=100, **GREEDY)
    tokens = [next(generation)]
    wait_until(lambda: engine.stats().n_tokens == 9)
    engine.close()
    with pytest.raises(errors.ClosedError, match="closed"):
        tokens.extend(generation)
    assert len(tokens) == 9
    assert generation.finish_reason == "error"
    assert list(generation) == []
    with pytest.raises(errors.ClosedError):
        next(queued)
    for token, want in zip(tokens, expected, strict=True):
        assert token.id == want.id
        np.testing.assert_array_equal(token.attention, want.attention)
    generation.close()
    queued.close()


def test_closing_the_engine_wakes_threads_that_wait(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **KEPT)
    holders = keep_slot(engine, PROMPT)
    waiting = [engine.generate(PROMPT, **REFUSED, **GREEDY) for _ in range(3)]
    threads = [Thread(lambda g=generation: next(g)) for generation in waiting]
    threading.Event().wait(0.1)
    engine.close()
    for thread in threads:
        with pytest.raises(errors.ClosedError):
            thread.get()
    del holders


def test_engine_that_is_dropped_ends_when_its_last_generation_does(tiny_llama: Path) -> None:
    before = n_threads()
    engine = Engine(tiny_llama, n_ctx=128, n_threads=1)
    generation = engine.generate(PROMPT, max_tokens=20, capture="probs", **GREEDY)
    del engine
    tokens = list(generation)
    assert len(tokens) == 20
    del generation
    gc.collect()
    wait_until(lambda: n_threads() <= before)
    assert float(np.asarray(tokens[3].attention).sum()) > 0


def test_two_engines_in_two_threads_give_what_each_gives_alone(
    make_engine: MakeEngine, tiny_llama: Path, tiny_qwen2: Path
) -> None:
    jobs = [
        (tiny_llama, Capture("probs", layers=[2, 0]), False),
        (tiny_qwen2, Capture("logits", heads=[1, 3], dtype="float16"), True),
    ]

    def rows(engine: Engine, capture: Capture) -> list[tuple[int, np.ndarray]]:
        found: list[tuple[int, np.ndarray]] = []
        for start in range(6):
            prompt = random_ids(9 + start, seed=start)
            for token in engine.generate(prompt, max_tokens=25, capture=capture, **GREEDY):
                found.append((token.id, np.array(token.attention)))
        return found

    def open_engine(model: Path, flash_attn: bool) -> Engine:
        return make_engine(model, flash_attn=flash_attn, kv_type="f32")

    alone = [rows(open_engine(model, flash), capture) for model, capture, flash in jobs]
    together = [
        Thread(partial(rows, open_engine(model, flash), capture)) for model, capture, flash in jobs
    ]
    for thread, want in zip(together, alone, strict=True):
        for got, one in zip(thread.get(60), want, strict=True):
            assert got[0] == one[0]
            np.testing.assert_array_equal(got[1], one[1])
