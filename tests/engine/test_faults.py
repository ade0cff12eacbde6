"""Failures in the middle of work: decodes of llama.cpp, a full cache, no memory for attention.

Who is hit gets a typed error or the documented end, everybody else goes on with the right tokens,
and the slots work afterwards. ``aborted_decodes`` makes llama.cpp itself abort a decode midway,
when some keys and values of the step are written already.
"""

from __future__ import annotations

import gc
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, errors
from tests.support import tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Generation
    from kqview.types import Token

    from .conftest import MakeEngine

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPTS = [random_ids(n, seed=n) for n in (9, 40, 23, 31)]
N_TOKENS = 6


def take_all(generation: Generation) -> tuple[list[Token], errors.KqviewError | None]:
    """What it hands out, and the error that ended it."""
    tokens: list[Token] = []
    try:
        tokens.extend(generation)
    except errors.KqviewError as error:
        assert generation.finish_reason == "error"
        return tokens, error
    return tokens, None


def together(engine: Engine, prompts: list[list[int]], **options: Any) -> list[Any]:
    generations = [engine.generate(prompt, **options) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        return list(threads.map(take_all, generations))


def ids_of(tokens: list[Token]) -> list[int]:
    return [token.id for token in tokens]


def alone(make_engine: MakeEngine, model: Path, prompt: list[int], n_tokens: int) -> list[Token]:
    engine = make_engine(model, **EXACT)
    return list(engine.generate(prompt, max_tokens=n_tokens, capture="probs", **GREEDY))


# ---- decodes that fail


@pytest.mark.needs("host layers")
@pytest.mark.full
def test_decode_that_fails_at_any_step_ends_its_requests_alone(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    options = {"max_tokens": N_TOKENS, "capture": "probs", **GREEDY}
    want = [alone(make_engine, tiny_llama, prompt, N_TOKENS) for prompt in PROMPTS]

    def failed_at(i_failed: int) -> int:
        engine = make_engine(
            tiny_llama, n_slots=4, n_ubatch=16, aborted_decodes=[i_failed], **EXACT
        )
        failures = 0
        for (tokens, error), whole in zip(together(engine, PROMPTS, **options), want, strict=True):
            if error:
                assert isinstance(error, errors.DecodeError)
                failures += 1
            else:
                assert len(tokens) == N_TOKENS
            for token, right in zip(tokens, whole, strict=False):
                assert token.id == right.id
                np.testing.assert_allclose(token.attention, right.attention, atol=1e-5)
        assert engine.stats().n_failed == failures >= 1
        for slot, (prompt, whole) in enumerate(zip(PROMPTS, want, strict=True)):
            again = engine.generate(prompt, slot=slot, **options)
            assert ids_of(list(again)) == ids_of(whole)
        del again, tokens, token, error
        gc.collect()  # an error has a traceback, whose frames have the views and the error
        assert engine.stats().pool.n_leased == 0
        engine.close()
        return failures

    n_failed = [failed_at(i) for i in range(1, 15)]
    while max(n_failed) == 1:  # a step that slots share fails too, once requests overlap
        n_failed.append(failed_at(8))


@pytest.mark.needs("host layers")
def test_decode_that_fails_leaves_a_recurrent_slot_usable(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = tiny_gguf.write_mamba(tmp_path / "mamba.gguf")
    options = {"max_tokens": N_TOKENS, **GREEDY}
    want = ids_of(list(make_engine(model).generate(PROMPTS[0], **options)))
    # A prompt takes two decodes: its last token is one of its own.
    engine = make_engine(model, aborted_decodes=[1, 5])
    for n_before in (0, 2):
        generation = engine.generate(PROMPTS[0], **options)
        tokens, error = take_all(generation)
        assert isinstance(error, errors.DecodeError)
        assert ids_of(tokens) == want[:n_before]
    assert ids_of(list(engine.generate(PROMPTS[0], **options))) == want


# ---- a full cache


# ---- no memory for attention


def test_each_policy_without_memory_ends_as_it_says_and_hinders_nobody(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    n_tokens = 40
    engine = make_engine(tiny_llama, n_slots=4, attention_budget_bytes=100_000, **EXACT)
    held = list(engine.generate(PROMPTS[3], max_tokens=15, capture="probs", **GREEDY))
    captures = [
        Capture("probs", on_full="raise"),
        Capture("probs", on_full="wait", wait_s=0.2),
        Capture("probs", on_full="drop"),
        None,
    ]
    generations = [
        engine.generate(prompt, max_tokens=n_tokens, capture=capture, **GREEDY)
        for prompt, capture in zip(PROMPTS, captures, strict=True)
    ]
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(take_all, generations))
    for (tokens, _), prompt in zip(results, PROMPTS, strict=True):
        want = ids_of(alone(make_engine, tiny_llama, prompt, n_tokens))
        assert ids_of(tokens) == want[: len(tokens)]
    assert isinstance(results[0][1], errors.PoolExhausted)
    assert isinstance(results[1][1], errors.PoolExhausted)
    assert [len(tokens) for tokens, _ in results[2:]] == [n_tokens, n_tokens]
    n_dropped = sum(token.attention is None for token in results[2][0])
    assert n_dropped == engine.stats().dropped_rows > 0
    assert len(held) == 15


def test_request_behind_one_that_ran_out_of_memory_starts_while_the_views_are_held(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, attention_budget_bytes=20_000, **EXACT)
    first = engine.generate(PROMPTS[0], max_tokens=100, capture="probs", **GREEDY)
    held = [next(first)]
    queued = engine.generate(PROMPTS[1], max_tokens=5, **GREEDY)
    taken: list[int] = []
    has_begun = threading.Event()

    def take() -> None:
        has_begun.set()
        taken.extend(token.id for token in queued)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert has_begun.wait(20)
    with pytest.raises(errors.PoolExhausted):
        held.extend(first)
    thread.join(20)
    assert taken == ids_of(alone(make_engine, tiny_llama, PROMPTS[1], 5))
    assert held


# ---- signals


def test_work_on_a_slot_that_waits_for_a_long_step_ends_on_a_signal(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ctx=2048, n_slots=2, n_ubatch=2048)
    engine.generate(PROMPTS[0], max_tokens=1, slot=1, **GREEDY).read()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def save_again_and_again() -> None:
        for seed in range(1000):
            running = engine.generate(random_ids(2000, seed), max_tokens=1, slot=0, **GREEDY)
            engine.slots[1].save()
            running.close()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            save_again_and_again()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    blob = engine.slots[1].save()
    assert engine.slots[1].restore(blob) == len(blob)
