"""Several slots: requests share a batch and stay each other's strangers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, errors
from tests.support.rows import KINDS, Kind, forward, largest_error, near, random_ids, same_rows

if TYPE_CHECKING:
    from pathlib import Path

    from kqview.types import Token

    from .conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")
N_SLOTS = 4
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_slots": N_SLOTS}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
PROMPTS = [random_ids(n, seed=n) for n in (17, 40, 23, 31)]


def together(engine: Engine, prompts: list[list[int]], *options: dict[str, Any]) -> list[Any]:
    """Tokens of all prompts, submitted at once and each read by a thread of its own."""
    each = options if len(options) > 1 else options * len(prompts)
    generations = [engine.generate(p, **o) for p, o in zip(prompts, each, strict=True)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(list, generations))


def alone(engine: Engine, prompt: list[int], **options: Any) -> list[Token]:
    return list(engine.generate(prompt, **options))


# ---- values


@pytest.mark.needs("host layers")
def test_neighbours_change_no_greedy_token(make_engine: MakeEngine, tiny_llama: Path) -> None:
    options = {"max_tokens": 30, **GREEDY}
    single = make_engine(tiny_llama, kv_type="f32", flash_attn=False)
    want = [[t.id for t in alone(single, prompt, **options)] for prompt in PROMPTS]
    engine = make_engine(tiny_llama, **EXACT)
    for _ in range(3):
        got = together(engine, PROMPTS, options)
        assert [[t.id for t in tokens] for tokens in got] == want
    assert engine.stats().n_decodes < 3 * 4 * 30  # they did share steps


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("flash_attn", "limit"), [(False, 1e-5), (True, 2e-3)])
def test_each_request_has_the_rows_of_its_own_sequence(
    make_engine: MakeEngine, tiny_llama: Path, kind: Kind, flash_attn: bool, limit: float
) -> None:
    engine = make_engine(
        tiny_llama, **{**EXACT, "flash_attn": flash_attn}, attention_kernel="llama.cpp"
    )
    options = {"max_tokens": 12, "capture": kind, **GREEDY}
    for prompt, tokens in zip(PROMPTS, together(engine, PROMPTS, options), strict=True):
        result = forward(tiny_llama, prompt, tokens, flash_attn=flash_attn)
        assert largest_error(tokens, result, kind, prompt) <= near(limit)


def test_requests_capture_what_each_asked_for(make_engine: MakeEngine, tiny_llama: Path) -> None:
    captures = [
        None,
        Capture("probs"),
        Capture("logits", layers=(2, 0), heads=(1,)),
        Capture("scores", reduce="mean_heads", hidden=(1,)),
    ]
    engine = make_engine(tiny_llama, **EXACT)
    options = [{"max_tokens": 9, "capture": capture, **GREEDY} for capture in captures]
    got = together(engine, PROMPTS, *options)
    assert all(token.attention is None for token in got[0])
    for prompt, tokens, capture in zip(PROMPTS, got, captures, strict=True):
        if capture is None:
            continue
        single = make_engine(tiny_llama, kv_type="f32", flash_attn=False)
        want = alone(single, prompt, max_tokens=9, capture=capture, **GREEDY)
        for a, b in zip(want, tokens, strict=True):
            np.testing.assert_allclose(a.attention, b.attention, rtol=1e-4, atol=near(1e-5))
            if capture.hidden:
                np.testing.assert_allclose(a.hidden, b.hidden, rtol=1e-4, atol=near(1e-5, "states"))
    assert engine.stats().pool.n_leased == 3 * 9


def test_a_hole_in_the_middle_keeps_rows_right(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    options = [
        {"max_tokens": n, "capture": "probs", "slot": i, **GREEDY}
        for i, n in enumerate((30, 3, 30, 30))
    ]
    for prompt, tokens in zip(PROMPTS, together(engine, PROMPTS, *options), strict=True):
        result = forward(tiny_llama, prompt, tokens)
        assert largest_error(tokens, result, "probs", prompt) <= near(1e-5)


def test_a_prompt_that_arrives_in_the_middle_changes_nothing(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ubatch=16, **EXACT)
    running = engine.generate(PROMPTS[0], max_tokens=40, capture="probs", **GREEDY)
    tokens = [next(running) for _ in range(5)]
    late = engine.attend(PROMPTS[1], "probs")
    tokens += running
    result = forward(tiny_llama, PROMPTS[0], tokens)
    assert largest_error(tokens, result, "probs", PROMPTS[0]) <= near(1e-5)
    whole = late.array()
    want = make_engine(tiny_llama, kv_type="f32", flash_attn=False).attend(PROMPTS[1]).array()
    np.testing.assert_allclose(whole, want, atol=near(1e-5))  # type: ignore[arg-type]


# ---- who gets which slot


@pytest.mark.parametrize("slot", [4, -1, 99, 1.0, True, "1", np.zeros(2, int)], ids=repr)
def test_slots_that_are_not_there_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, slot: Any
) -> None:
    with pytest.raises(errors.UnknownSlot, match=r"0\.\.3"):
        make_engine(tiny_llama, **EXACT).generate(PROMPTS[0], slot=slot)


@pytest.mark.parametrize("n_slots", [0, 257, 10**6])
def test_number_of_slots_has_a_limit(
    make_engine: MakeEngine, tiny_llama: Path, n_slots: int
) -> None:
    with pytest.raises(errors.RequestError, match="n_slots"):
        make_engine(tiny_llama, n_slots=n_slots)


# ---- who waits for whom


def test_a_slow_consumer_pauses_only_itself(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, run_ahead=4, **EXACT)
    slow = engine.generate(PROMPTS[0], max_tokens=50, **GREEDY)
    next(slow)
    for prompt in PROMPTS[1:]:
        assert len(alone(engine, prompt, max_tokens=50, **GREEDY)) == 50
    assert engine.slots[0].n_tokens <= len(PROMPTS[0]) + 5
    assert len(list(slow)) == 49


# ---- one prompt, several answers


@pytest.mark.parametrize("flash_attn", [False, True])
def test_one_prompt_is_evaluated_once_for_several_requests(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    prompt = random_ids(200)
    engine = make_engine(
        tiny_llama, n_ubatch=32, **{**EXACT, "flash_attn": flash_attn}, attention_kernel="llama.cpp"
    )
    options = [
        {"max_tokens": 8, "capture": "probs", "seed": i, "ignore_eos": True} for i in range(N_SLOTS)
    ]
    got = together(engine, [prompt] * N_SLOTS, *options)
    assert engine.stats().prefill_tokens <= 200 + (N_SLOTS - 1)
    assert len({tuple(t.id for t in tokens) for tokens in got}) > 1
    for tokens in got:
        result = forward(tiny_llama, prompt, tokens, flash_attn=flash_attn)
        assert largest_error(tokens, result, "probs", prompt) <= near(5e-3 if flash_attn else 1e-5)


def test_a_fork_outlives_the_request_it_came_from(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    prompt = random_ids(100)
    engine = make_engine(tiny_llama, n_ubatch=32, **EXACT)
    first = engine.generate(prompt, max_tokens=20, capture="probs", **GREEDY)
    second = engine.generate([*prompt[:80], 1, 2, 3], max_tokens=20, capture="probs", **GREEDY)
    first.close()
    tokens = list(second)
    result = forward(tiny_llama, [*prompt[:80], 1, 2, 3], tokens)
    assert largest_error(tokens, result, "probs", [*prompt[:80], 1, 2, 3]) <= near(1e-5)
    # What a busy slot generated is its own.
    third = engine.generate(prompt, max_tokens=5, capture="probs", **GREEDY)
    again = make_engine(tiny_llama, kv_type="f32", flash_attn=False)
    want = alone(again, prompt, max_tokens=5, capture="probs", **GREEDY)
    assert [t.id for t in third] == [t.id for t in want]


def test_rows_of_slots_of_every_plan_alternate(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    options = {"max_tokens": 4, "capture": "probs", **GREEDY}
    first = together(engine, PROMPTS, options)
    for _ in range(10):
        for a, b in zip(first, together(engine, PROMPTS, options), strict=True):
            assert [t.id for t in a] == [t.id for t in b]
            for x, y in zip(a, b, strict=True):
                np.testing.assert_allclose(x.attention, y.attention, atol=near(1e-5))
    assert same_rows(first[0], first[0])


def test_generations_are_listed_and_cancelled(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_slots=2)
    assert (engine.generations, engine.cancel_all()) == ((), 0)
    options = {"max_tokens": 200, **GREEDY}
    first, second, third = (engine.generate(one, **options) for one in PROMPTS[:3])
    next(first), next(second)
    assert engine.generations == (first, second, third)
    assert first.slot is not None
    assert engine.slots[first.slot].cancel()
    assert first.finish_reason == "cancelled"
    assert engine.generations == (second, third)
    assert engine.cancel_all() == 2
    assert [one.finish_reason for one in (second, third)] == ["cancelled"] * 2
    assert engine.generations == ()
    assert len(list(engine.generate(PROMPTS[0], max_tokens=3, **GREEDY))) == 3
    assert not any(slot.cancel() for slot in engine.slots)
