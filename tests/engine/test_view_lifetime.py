"""Views keep their bytes for as long as they are held, and blocks come back when they are not."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture
from kqview.errors import ClosedError, PoolExhausted
from tests.support.engines import open_engine
from tests.support.rows import forward, largest_error, near, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine
    from kqview.types import Token

    from .conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")
PROMPT = random_ids(20)
BLOCK_BYTES = 4096  # smallest block: rows of the tiny models up to 85 columns


def checksum(rows: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(rows))


def generate(engine: Engine, capture: Capture | str = "probs", **options: Any) -> Any:
    return engine.generate(PROMPT, ignore_eos=True, capture=capture, **options)


# ---- held views


@pytest.mark.parametrize("poison", [False, True])
def test_1000_held_views_keep_their_bytes_while_10000_tokens_pass(
    make_engine: MakeEngine, tiny_llama: Path, poison: bool
) -> None:
    engine = make_engine(tiny_llama, poisons_blocks=poison)
    held: list[Any] = []
    sums: list[int] = []
    for turn in range(60):
        prompt = random_ids(3, seed=turn)
        for token in engine.generate(prompt, max_tokens=200, ignore_eos=True, capture="probs"):
            if turn % 12 == 0:
                held.append(token.attention)
                sums.append(checksum(token.attention))
        assert len(held) == 200 * (turn // 12 + 1)
    del token
    stats = engine.stats()
    assert stats.n_tokens == 12_000
    assert stats.pool.n_leased == 1000
    # The others ran in memory that was given back again and again.
    assert stats.pool.n_reused > 10_000
    assert [checksum(rows) for rows in held] == sums
    # What was given back is overwritten only by the poison or by the next rows: these are neither.
    assert all(abs(float(rows.sum()) - 12) < 1e-3 for rows in held)


@pytest.mark.parametrize("poison", [False, True])
def test_pool_is_full_again_when_views_are_dropped(
    make_engine: MakeEngine, tiny_llama: Path, poison: bool
) -> None:
    engine = make_engine(tiny_llama, poisons_blocks=poison)
    generation = generate(engine, max_tokens=100)
    tokens = list(generation)
    pool = engine.stats().pool
    assert pool.n_leased == 100
    # Where a device has the layers, blocks are made ahead.
    assert pool.leased_bytes == pool.peak_leased_bytes <= pool.allocated_bytes
    rng = np.random.default_rng(0)
    for n_left in range(99, -1, -1):
        tokens.pop(int(rng.integers(len(tokens))))
        assert engine.stats().pool.n_leased == n_left
    assert engine.stats().pool.leased_bytes == 0


@pytest.mark.full
def test_tokens_that_nobody_took_give_their_blocks_back(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, run_ahead=8)
    generation = generate(engine, max_tokens=100)
    kept = next(generation)
    generation.close()
    assert engine.stats().pool.n_leased == 1
    del kept
    assert engine.stats().pool.n_leased == 0
    dropped = generate(engine, max_tokens=100)
    next(dropped)
    dropped_handle = dropped._source.handle
    del dropped
    gc.collect()
    dropped_handle.cancel()
    dropped_handle.wait_settled()
    assert engine.stats().pool.n_leased == 0


def test_views_outlive_generation_close_and_engine(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, poisons_blocks=True)
    generation = generate(engine, max_tokens=30)
    rows = [token.attention for token in generation]
    sums = [checksum(one) for one in rows]
    part = rows[7][1, 2]
    expected = part.copy()
    del generation
    engine.close()
    assert [checksum(one) for one in rows] == sums
    assert engine.stats().pool.n_leased == 30
    rows.clear()
    assert engine.stats().pool.n_leased == 1
    np.testing.assert_array_equal(part, expected)


def test_views_outlive_an_engine_that_was_deleted(tiny_llama: Path) -> None:
    from kqview import Engine

    engine = open_engine(tiny_llama, n_ctx=256, n_threads=1, poisons_blocks=True)
    rows = [token.attention for token in generate(engine, max_tokens=30)]
    sums = [checksum(one) for one in rows]
    del engine
    gc.collect()
    # Somebody else's memory would be taken by this one.
    with Engine(tiny_llama, n_ctx=256, n_threads=1) as other:
        run(other, PROMPT, 100, capture="logits")
    assert [checksum(one) for one in rows] == sums


def test_close_while_generating_leaves_views_and_ends_with_closed_error(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, run_ahead=2, poisons_blocks=True)
    generation = generate(engine, max_tokens=400)
    rows = [next(generation).attention for _ in range(20)]
    sums = [checksum(one) for one in rows]
    while engine.stats().slots[0].state != "paused":  # tokens wait to be taken
        time.sleep(0.001)
    engine.close()
    with pytest.raises(ClosedError):
        rows.extend(token.attention for token in generation)
    assert [checksum(one) for one in rows[:20]] == sums


def test_views_dropped_by_other_threads_go_back(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    tokens = run(engine, PROMPT, 200, capture="probs")

    def drop(mine: list[Token]) -> None:
        while mine:
            mine.pop()

    parts = [tokens[i::4] for i in range(4)]
    tokens.clear()
    threads = [threading.Thread(target=drop, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.stats().pool.n_leased == 0


# ---- a full budget


def test_raise_ends_the_generation_and_leaves_its_tokens(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    budget = 16 * BLOCK_BYTES
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=False, attention_budget_bytes=budget)
    generation = generate(engine, max_tokens=50)
    tokens: list[Token] = []
    with pytest.raises(PoolExhausted) as caught:
        tokens.extend(generation)
    assert len(tokens) == len(generation.tokens) == 16
    assert generation.finish_reason == "error"
    # What the next row needs, what is held of what, by how many views.
    numbers = [int(number) for number in re.findall(r"\d+", str(caught.value))]
    assert {3 * 4 * (20 + 16) * 4, budget, 16} <= set(numbers)
    assert largest_error(tokens, forward(tiny_llama, PROMPT, tokens), "probs", PROMPT) <= near(1e-5)
    # The engine goes on once there is room.
    tokens.clear()
    assert len(run(engine, PROMPT, 16, capture="probs")) == 16


def test_message_of_a_full_budget_counts_blocks(make_engine: MakeEngine, tiny_llama: Path) -> None:
    # Rows of 101 columns fit in a block of 4864 bytes; those of 102 take one of 5760.
    engine = make_engine(tiny_llama, attention_budget_bytes=10_500)
    generation = engine.generate(random_ids(101), ignore_eos=True, capture="probs", max_tokens=2)
    held = [next(generation)]
    with pytest.raises(PoolExhausted) as caught:
        held.append(next(generation))
    numbers = [int(number) for number in re.findall(r"\d+", str(caught.value))]
    assert numbers[:4] == [3 * 4 * 102 * 4, 5760, 4864, 10_500]


def test_row_larger_than_the_budget_is_pool_exhausted_at_once(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, attention_budget_bytes=BLOCK_BYTES)
    on_full = Capture("probs", on_full="raise")
    with pytest.raises(PoolExhausted, match=str(BLOCK_BYTES)):
        next(engine.generate(random_ids(200), max_tokens=5, capture=on_full))
    assert len(run(engine, PROMPT, 5)) == 5


def test_wait_goes_on_when_another_thread_drops_views(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, attention_budget_bytes=8 * BLOCK_BYTES)
    held: list[Token] = []
    ids: list[int] = []
    arrived = threading.Semaphore(0)

    def consume() -> None:
        for token in generate(engine, Capture("probs", on_full="wait", wait_s=30), max_tokens=60):
            ids.append(token.id)
            held.append(token)
            arrived.release()

    consumer = threading.Thread(target=consume)
    consumer.start()
    for _ in range(60 // 4):
        for _ in range(4):
            assert arrived.acquire(timeout=30)
        del held[:4]
    consumer.join(30)
    assert not consumer.is_alive()
    assert len(ids) == 60
    assert engine.stats().dropped_rows == 0


def test_wait_is_pool_exhausted_when_nobody_drops_views(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, attention_budget_bytes=8 * BLOCK_BYTES)
    wait_s = 0.4
    generation = generate(engine, Capture("probs", on_full="wait", wait_s=wait_s), max_tokens=60)
    tokens = [next(generation) for _ in range(8)]
    started = time.monotonic()
    with pytest.raises(PoolExhausted, match=str(8 * BLOCK_BYTES)):
        next(generation)
    assert time.monotonic() - started >= 0.9 * wait_s
    assert all(token.attention is not None for token in tokens)


@pytest.mark.parametrize("budget", [64, BLOCK_BYTES - 1])  # a row has 960 bytes
def test_rows_larger_than_the_budget_are_not_waited_for(
    make_engine: MakeEngine, tiny_llama: Path, budget: int
) -> None:
    engine = make_engine(tiny_llama, attention_budget_bytes=budget)
    # Longer than any limit of a test.
    with pytest.raises(PoolExhausted, match=str(budget)):
        next(generate(engine, Capture("probs", on_full="wait", wait_s=3600)))


def test_drop_goes_on_without_attention_and_counts(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, attention_budget_bytes=8 * BLOCK_BYTES)
    generation = generate(engine, Capture("probs", on_full="drop"), max_tokens=60)
    tokens = [next(generation) for _ in range(30)]
    assert [token.attention is not None for token in tokens] == [True] * 8 + [False] * 22
    n_with = 8
    tokens.clear()
    for token in generation:
        n_with += token.attention is not None
    assert n_with > 8  # room again, rows again
    assert engine.stats().dropped_rows == 60 - n_with


@pytest.mark.parametrize("on_full", ["raise", "wait", "drop"])
def test_consumer_that_keeps_no_view_never_fills_a_small_budget(
    make_engine: MakeEngine, tiny_llama: Path, on_full: Any
) -> None:
    # The token in the consumer's hand and the next one, whatever the engine would run ahead.
    engine = make_engine(tiny_llama, attention_budget_bytes=2 * BLOCK_BYTES, run_ahead=8)
    capture = Capture("probs", on_full=on_full, wait_s=30)
    for _ in range(40):
        assert sum(1 for _ in generate(engine, capture, max_tokens=60)) == 60
    assert engine.stats().dropped_rows == 0
    assert engine.stats().pool.peak_leased_bytes <= 2 * BLOCK_BYTES


# ---- the end of the process

AT_EXIT = """
import sys
from kqview import Engine
engine = Engine(sys.argv[1], n_ctx=256, n_threads=1)
generation = engine.generate(list(range(20)), max_tokens=200, ignore_eos=True, capture="probs")
tokens = [next(generation) for _ in range(20)]
kept = [tokens[3].attention[1], memoryview(tokens[4].attention)]
{ending}
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "ending",
    [
        "",
        "engine.close()",
        "del generation; engine.close(); del engine",
        "import builtins; builtins.kept = kept",
        "kept.append(kept)",
        "import threading; threading.Thread(target=lambda: list(generation)).start()",
        "for token in generation: tokens.append(token)",
    ],
    ids=["running", "closed", "deleted", "in_builtins", "cycle", "thread", "finished"],
)  # fmt: skip
def test_interpreter_ends_quietly_with_views_alive(tiny_llama: Path, ending: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT.format(ending=ending), str(tiny_llama)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
