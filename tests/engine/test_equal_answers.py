"""Equal requests have equal answers: whatever a slot's cache held before, and whatever else runs.

A default request evaluates the last token of its prompt on its own, whether the others came from
the cache or not. ``deterministic=True`` shares no step either.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import errors
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kqview import Engine, Token
    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.full

N_REQUESTS = 30
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(params=["f32", "f16"])
def kv_type(request: pytest.FixtureRequest) -> str:
    return request.param


def answers(engine: Engine, how: dict[str, Any], **options: Any) -> list[list[int]]:
    """The ids of N_REQUESTS requests of different lengths, one after the other."""
    return [
        [
            token.id
            for token in engine.generate(
                random_ids(5 + 3 * i, seed=i), max_tokens=12, seed=i, ignore_eos=True,
                **how, **options,
            )
        ]
        for i in range(N_REQUESTS)
    ]  # fmt: skip


def same_bits(left: Sequence[Token], right: Sequence[Token]) -> bool:
    return all(
        one.id == other.id
        and np.array_equal(one.rows, other.rows)
        and one.top_logprobs == other.top_logprobs
        for one, other in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_cold_and_warm_requests_have_equal_texts(
    make_engine: MakeEngine, tiny_llama: Path, how: dict[str, Any], kv_type: str
) -> None:
    engine = make_engine(tiny_llama, kv_type=kv_type, n_slots=4)
    cold = answers(engine, how, cache_prompt=False)
    assert answers(engine, how, cache_prompt=False) == cold
    warm: list[list[int]] = []
    for i in range(N_REQUESTS):
        prompt = random_ids(5 + 3 * i, seed=i)
        options: dict[str, Any] = {"max_tokens": 12, "seed": i, "ignore_eos": True, **how}
        engine.generate(prompt, **options, cache_prompt=False).read()
        again = engine.generate(prompt, **options)
        warm.append([token.id for token in again])
        assert again.usage.cached_tokens == len(prompt) - 1
    assert warm == cold


def test_a_warm_request_has_the_rows_and_logprobs_of_a_cold_one(
    make_engine: MakeEngine, tiny_llama: Path, kv_type: str
) -> None:
    engine = make_engine(tiny_llama, kv_type=kv_type)
    options: dict[str, Any] = {
        "max_tokens": 10, "capture": "probs", "top_logprobs": 3, "ignore_eos": True, **GREEDY,
    }  # fmt: skip
    for n in (2, 33, 120):
        cold, warm = (list(engine.generate(random_ids(n, seed=n), **options)) for _ in range(2))
        assert same_bits(cold, warm)


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_deterministic_requests_have_equal_texts_while_other_slots_are_busy(
    make_engine: MakeEngine, tiny_llama: Path, how: dict[str, Any], kv_type: str
) -> None:
    # Prompts of up to 92 tokens, in chunks of 64: others would change how they are cut.
    engine = make_engine(tiny_llama, kv_type=kv_type, n_slots=4, n_ubatch=64)
    want = answers(engine, how, deterministic=True)
    ends = threading.Event()

    def keep_busy(i: int) -> None:
        while not ends.is_set():
            prompt = random_ids(10 + 7 * i, seed=i)
            engine.generate(prompt, max_tokens=30, seed=i, ignore_eos=True).read()

    threads = [threading.Thread(target=keep_busy, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        assert answers(engine, how, deterministic=True) == want
    finally:
        ends.set()
        for thread in threads:
            thread.join()


def test_two_deterministic_requests_at_once_share_no_step(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_slots=2)
    options: dict[str, Any] = {
        "max_tokens": 40, "deterministic": True, "capture": "probs", "top_logprobs": 1,
        "ignore_eos": True, **GREEDY,
    }  # fmt: skip
    prompts = [random_ids(20, seed=1), random_ids(50, seed=2)]
    alone = [list(engine.generate(prompt, **options)) for prompt in prompts]
    before = engine.stats()
    both = [engine.generate(prompt, **options) for prompt in prompts]
    found: list[list[Token]] = [[], []]
    while any(len(one) < 40 for one in found):
        for taken, generation in zip(found, both, strict=True):
            if (token := next(generation, None)) is not None:
                taken.append(token)
    assert all(same_bits(one, other) for one, other in zip(found, alone, strict=True))
    assert engine.stats().since(before).n_decodes == 2 * (1 + 40)
    assert {generation.usage.cached_tokens for generation in both} == {0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": 1}, "deterministic must be True or False"),
        ({"deterministic": True, "reuse": "prefix"}, "reuse is 'prefix'"),
    ],
)
def test_what_contradicts_deterministic_is_refused(
    make_engine: MakeEngine, tiny_llama: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(errors.RequestError, match=message) as caught:
        make_engine(tiny_llama).generate([1, 2], **options)
    assert caught.value.parameter == "deterministic"
