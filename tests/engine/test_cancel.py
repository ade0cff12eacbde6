"""Cancelling: the slot is rolled back to the last token handed out, and what follows builds on it.

The cache is F32 and flash attention is off: greedy ids then do not depend on how a sequence was cut
into batches, so that a continued slot can be compared with a fresh engine.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine, Generation
from kqview.errors import OutOfMemory
from kqview.generation.source import Consumer
from tests.support import tiny_gguf
from tests.support.engines import KEPT, REFUSED, keep_slot
from tests.support.rows import random_ids
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")
PROMPT = random_ids(16)
N_TOKENS = 40
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": N_TOKENS}
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, backend: str) -> Iterator[list[int]]:
    """What the prompt goes on with on an engine that never cancelled anything."""
    with Engine(tiny_llama, n_ctx=512, n_threads=1, **EXACT) as engine:
        yield [token.id for token in engine.generate(PROMPT, **GREEDY)]


def take(generation: Generation, n: int) -> list[int]:
    return [next(generation).id for _ in range(n)]


def close(generation: Generation) -> None:
    generation.close()


def cancel(generation: Generation) -> None:
    generation.cancel()
    generation.close()  # waits until it is carried out


def leave(generation: Generation) -> None:
    with generation:
        pass


def aclose(generation: Generation) -> None:
    asyncio.run(generation.aclose())


@pytest.mark.parametrize("end", [close, cancel, leave, aclose])
@pytest.mark.parametrize("run_ahead", [0, 8])
@pytest.mark.parametrize("n_taken", [0, 1, 3, 12])
def test_slot_keeps_prompt_and_tokens_handed_out_without_the_last(
    make_engine: MakeEngine,
    tiny_llama: Path,
    expected: list[int],
    end: Callable[[Generation], None],
    run_ahead: int,
    n_taken: int,
) -> None:
    engine = make_engine(tiny_llama, run_ahead=run_ahead, **EXACT)
    generation = engine.generate(PROMPT, **GREEDY)
    taken = take(generation, n_taken)
    if n_taken == 0 and run_ahead:
        wait_until(lambda: engine.stats().n_tokens == run_ahead)
    end(generation)
    assert generation.finish_reason == "cancelled"
    assert taken == expected[:n_taken]
    kept = engine.slots[0].tokens
    if n_taken or run_ahead:
        assert kept == PROMPT + taken[:-1]
    else:
        assert kept == PROMPT[: len(kept)]  # perhaps not evaluated yet
    assert not engine.slots[0].is_busy
    assert list(generation) == []
    # What is there is reused, and goes on as if nothing had happened.
    again = engine.generate(PROMPT + taken, **GREEDY | {"max_tokens": N_TOKENS - n_taken})
    assert [token.id for token in again] == expected[n_taken:]
    cached = again.usage.cached_tokens
    assert cached == min(len(kept), len(PROMPT) + n_taken - 1)


@pytest.mark.parametrize("n_taken", [0, 3, 5])
@pytest.mark.parametrize("end", [close, aclose, None])
def test_generation_computed_to_its_end_rolls_back_to_what_was_taken(
    make_engine: MakeEngine,
    tiny_llama: Path,
    expected: list[int],
    n_taken: int,
    end: Callable[[Generation], None] | None,
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    n_kept = len(PROMPT) + max(n_taken - 1, 0)
    for n_computed in range(5, 105, 5):  # often: the roll-back is not to be overtaken
        generation = engine.generate(PROMPT, **GREEDY | {"max_tokens": 5})
        taken = take(generation, n_taken)
        wait_until(lambda n=n_computed: engine.stats().n_tokens == n)
        wait_until(lambda: not engine.slots[0].is_busy)
        if end:
            end(generation)
        del generation
        if not end:
            wait_until(lambda: engine.slots[0].n_tokens == n_kept)
        assert engine.slots[0].tokens == PROMPT + taken[:-1]
    assert taken == expected[:n_taken]


def test_generation_that_was_taken_to_its_end_leaves_the_slot_alone_when_dropped(
    make_engine: MakeEngine, tiny_llama: Path, expected: list[int]
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    stop = expected[expected.index(expected[-1])]
    generation = engine.generate(PROMPT, stop_tokens=[stop], **GREEDY)
    taken = [token.id for token in generation]
    assert generation.finish_reason == "stop_token"
    kept = engine.slots[0].tokens
    assert kept == PROMPT + taken  # the stop token was sampled, all others are decoded
    generation.close()
    del generation
    assert [token.id for token in engine.generate(kept, **GREEDY | {"max_tokens": 1})] == [stop]
    assert engine.slots[0].tokens == kept


def test_stop_sequence_rolls_back_to_the_token_that_completed_it(
    make_engine: MakeEngine, tiny_llama: Path, expected: list[int]
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    text = engine.detokenize(expected[:6])
    generation = engine.generate(PROMPT, stop=[text[-2:]], **GREEDY)
    taken = [token.id for token in generation]
    assert generation.finish_reason == "stop_sequence"
    generation.close()
    assert taken == expected[: len(taken)]
    assert engine.slots[0].tokens == PROMPT + taken[:-1]
    assert generation.usage.completion_tokens == len(taken)


def test_cancelling_from_another_thread_ends_a_wait(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **KEPT)
    holders = keep_slot(engine, PROMPT)
    queued = engine.generate(PROMPT, **REFUSED, **GREEDY)
    found: list[list[Any]] = []
    thread = threading.Thread(target=lambda: found.append(list(queued)), daemon=True)
    thread.start()
    threading.Event().wait(0.1)
    queued.close()
    thread.join(20)
    assert found == [[]]
    assert queued.finish_reason == "cancelled"
    assert queued.usage.prompt_tokens == len(PROMPT)
    del holders


@pytest.mark.parametrize(
    ("raised", "reason"), [(KeyboardInterrupt, "cancelled"), (MemoryError, "error")]
)
def test_whatever_iterating_raises_ends_the_generation_and_frees_its_slot(
    make_engine: MakeEngine, tiny_llama: Path, raised: type[BaseException], reason: str
) -> None:
    engine = make_engine(tiny_llama)
    kept = engine.generate(PROMPT, **GREEDY)
    taken = take(kept, 3)

    class Failing(dict[int, bytes]):
        def __missing__(self, token_id: int) -> bytes:
            raise raised

    kept._transcript._token_bytes = Failing()
    with pytest.raises(raised):
        next(kept)
    wait_until(lambda: not engine.slots[0].is_busy)
    kept.close()
    assert kept.finish_reason == reason
    assert list(kept) == []
    assert kept.tokens == taken
    assert len(list(engine.generate(PROMPT, **GREEDY))) == N_TOKENS


def test_rows_of_a_prompt_that_do_not_fit_one_array_free_the_slot(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ubatch=4, run_ahead=0)
    kept = engine.attend(PROMPT)
    kept._budget_bytes = 1
    with pytest.raises(OutOfMemory):
        kept.array()
    wait_until(lambda: not engine.slots[0].is_busy)
    assert len(list(engine.generate(PROMPT, **GREEDY))) == N_TOKENS


def test_model_that_cannot_truncate_goes_on_after_a_cancellation(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = tiny_gguf.write_mamba(tmp_path / "mamba.gguf")
    engine = make_engine(model)
    options = GREEDY | {"max_tokens": 20}
    expected = [token.id for token in make_engine(model).generate(PROMPT, **options)]
    generation = engine.generate(PROMPT, **options)
    taken = take(generation, 3)
    threading.Event().wait(0.05)
    assert engine.stats().n_tokens == 3  # it never runs ahead of what it could take back
    generation.close()
    assert taken == expected[:3]
    assert engine.slots[0].tokens == PROMPT + taken[:-1]
    again = engine.generate(PROMPT + taken, **options | {"max_tokens": 17})
    assert [token.id for token in again] == expected[3:]
    assert again.usage.cached_tokens == len(PROMPT) + 2
    # A prompt that parts from the cache earlier goes on from a checkpoint.
    other = engine.generate(PROMPT, **options)
    assert [token.id for token in other] == expected
    assert other.usage.cached_tokens == len(PROMPT) - 1


def test_a_holder_is_gone_when_it_is_dropped_though_another_thread_looks_at_it(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **KEPT)
    looks, goes_on = threading.Event(), threading.Event()

    class Watched(dict[int, Consumer]):
        """Whose look from another thread takes as long as that thread does not run."""

        def get(self, core_id: int, default: Any = None) -> Any:
            found = super().get(core_id, default)
            if threading.current_thread() is not threading.main_thread():
                looks.set()
                goes_on.wait(30)
            return found

    engine._submission._consumers._consumers = Watched()
    holders = keep_slot(engine, PROMPT)
    with ThreadPoolExecutor(1) as threads, closing(engine):
        waiting = threads.submit(lambda: take(engine.generate(PROMPT, **REFUSED, **GREEDY), 3))
        assert looks.wait(30)
        del holders
        threading.Timer(0.1, goes_on.set).start()
        # It does not wait for itself: what it held is gone.
        assert take(engine.generate(PROMPT, **REFUSED, **GREEDY), 3) == waiting.result(30)


@pytest.mark.needs("host layers")
def test_threads_that_take_close_cancel_and_drop_at_once_get_the_right_tokens(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, poisons_blocks=True, **EXACT)
    prompts = [random_ids(5 + 3 * i, seed=i) for i in range(6)]
    options = GREEDY | {"max_tokens": 20}
    expected = [[token.id for token in engine.generate(p, **options)] for p in prompts]
    deadline = time.monotonic() + 3

    async def take_async(generation: Generation, n: int) -> list[int]:
        async with generation:
            return [(await anext(generation)).id for _ in range(n)]

    async def take_many() -> list[list[int]]:
        generations = [engine.generate(prompt, **options) for prompt in prompts]
        return await asyncio.gather(*(take_async(one, 20) for one in generations))

    def take_some(rng: random.Random) -> None:
        i, n, end = rng.randrange(6), rng.randrange(21), rng.randrange(6)
        if end == 0:
            assert asyncio.run(take_many()) == expected
            return
        generation = engine.generate(prompts[i], capture=rng.choice([None, "probs"]), **options)
        if end == 1:
            taken = asyncio.run(take_async(generation, n))
        else:
            taken = take(generation, n)
            if end in (2, 3):
                [generation.close, generation.cancel][end - 2]()
        del generation
        assert taken == expected[i][:n]

    failures: list[Exception] = []

    def work(seed: int) -> int:
        rng = random.Random(seed)
        n_done = 0
        try:
            while not n_done or time.monotonic() < deadline:
                take_some(rng)
                n_done += 1
        except Exception as error:
            failures.append(error)  # it holds what this thread held, for which others may wait
            engine.close()
        return n_done

    with ThreadPoolExecutor(6) as threads:
        works = [threads.submit(work, seed) for seed in range(6)]
        late = wait(works, timeout=55).not_done
        found = engine.stats() if late else None
        if late:
            engine.close()  # ends them
    if failures:
        raise failures[0]
    assert found is None
    assert min(one.result() for one in works) > 0
    wait_until(lambda: not engine.slots[0].is_busy)
    assert engine.stats().n_queued == 0
    assert engine.stats().pool.n_leased == 0
