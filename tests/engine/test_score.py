"""Engine.score: the log-probability of given tokens, compared with what `generate` reports."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, Score
from kqview.errors import (
    ClosedError,
    InvalidToken,
    PromptTooLong,
    RequestError,
    UnsupportedModel,
)
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

STORY = "Mirelda found a key. Then Mirelda, who had looked for it all day, sat down in the garden."
# Steps of one token and of many round differently: in float32, and where weights have 8 bits.
EXACT = 1e-4
QUANTISED = 2e-2
PRECISE: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_threads=1, n_slots=2, n_ctx=512, kv_type="f32") as engine:
        yield engine


def expected(engine: Engine, ids: Sequence[int]) -> tuple[list[float], list[int]]:
    """Logprobs and ranks of all tokens but the first, from a request for each."""
    logprobs: list[float] = []
    ranks: list[int] = []
    for n in range(1, len(ids)):
        options: dict[str, Any] = {"temperature": 0.0, "top_logprobs": engine.model.n_vocab}
        # The bias chooses, so that no token ends the text; logprobs are those before it.
        token = next(engine.generate(ids[:n], max_tokens=1, logit_bias={ids[n]: 1e9}, **options))
        assert token.top_logprobs is not None
        order = [id_ for id_, _ in token.top_logprobs]
        logprobs.append(dict(token.top_logprobs)[ids[n]])
        ranks.append(order.index(ids[n]))
    return logprobs, ranks


def test_scores_are_the_logprobs_of_each_token_after_those_before_it(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ctx=64, **PRECISE)
    ids = random_ids(24)
    score = engine.score(ids)
    logprobs, ranks = expected(engine, ids)
    assert score.ids == ids
    assert score.logprobs.dtype == np.float32
    assert math.isnan(score.logprobs[0])
    assert score.ranks[0] == -1
    np.testing.assert_allclose(score.logprobs[1:], logprobs, atol=EXACT)
    assert np.abs(score.ranks[1:] - ranks).max() <= 1  # two may be equal but for rounding
    assert score.n_scored == len(ids) - 1
    assert score.total == pytest.approx(sum(logprobs), abs=EXACT * len(ids))
    assert score.perplexity == pytest.approx(math.exp(-np.mean(logprobs)), rel=EXACT)


def test_perplexity_of_a_story_is_that_of_its_tokens_one_by_one(engine: Engine) -> None:
    ids = engine.tokenize(STORY)
    logprobs, _ = expected(engine, ids)
    perplexity = engine.score(STORY).perplexity
    assert perplexity == pytest.approx(math.exp(-np.mean(logprobs)), rel=QUANTISED)
    assert engine.score(ids[::-1]).perplexity > perplexity


def test_top_logprobs_are_the_best_tokens_of_each_place(engine: Engine) -> None:
    ids = engine.tokenize(STORY, add_special=False)[:12]
    score = engine.score(ids, top_logprobs=3)
    assert score.top_logprobs is not None
    assert score.top_logprobs[0] == []
    for i in range(1, len(ids)):
        n_vocab = engine.model.n_vocab
        [token] = engine.generate(ids[:i], max_tokens=1, temperature=0, top_logprobs=n_vocab)
        assert token.top_logprobs is not None
        known, best = dict(token.top_logprobs), [value for _, value in token.top_logprobs[:3]]
        got = score.top_logprobs[i]
        assert [value for _, value in got] == pytest.approx(best, abs=QUANTISED)
        for id_, logprob in got:
            assert known[id_] == pytest.approx(logprob, abs=QUANTISED)
        assert (score.ranks[i] == 0) == (got[0][0] == ids[i])


def test_text_is_scored_as_its_ids(engine: Engine) -> None:
    score = engine.score(STORY)
    assert score.ids == engine.tokenize(STORY)
    np.testing.assert_array_equal(score.logprobs, engine.score(score.ids).logprobs)


def test_what_the_model_generates_greedily_is_its_first_choice(engine: Engine) -> None:
    prompt = engine.tokenize("Anna is a", add_special=False)
    generation = engine.generate(prompt, max_tokens=12, temperature=0, ignore_eos=True)
    generation.read()
    ids = prompt + generation.tokens
    score = engine.score(ids, last=12, top_logprobs=1)
    assert score.top_logprobs is not None
    best = [top[0][1] for top in score.top_logprobs[-12:]]
    assert score.logprobs[-12:] == pytest.approx(best, abs=QUANTISED)
    assert score.is_greedy == (score.ranks[-12:] == 0).all()
    other = next(id_ for id_ in range(300, 400) if id_ != ids[-1])
    assert not engine.score([*ids[:-1], other], last=1).is_greedy


@pytest.mark.parametrize("last", [1, 5, 30, 10_000])
def test_last_tokens_alone_are_scored_and_the_rest_may_come_out_of_the_cache(
    engine: Engine, last: int
) -> None:
    ids = engine.tokenize(STORY, add_special=False)
    whole = engine.score(ids)
    for _ in range(2):
        part = engine.score(ids, last=last)
        n = min(last, len(ids) - 1)
        assert part.n_scored == n
        assert np.isnan(part.logprobs[:-n]).all()
        np.testing.assert_allclose(part.logprobs[-n:], whole.logprobs[-n:], atol=QUANTISED)


def test_prefix_is_evaluated_once_and_no_score_is_lost(engine: Engine) -> None:
    ids = engine.tokenize(STORY, add_special=False)
    whole = engine.score(ids)
    before = engine.stats().prefill_tokens
    part = engine.score(ids, last=3)
    assert engine.stats().prefill_tokens - before == 4  # the last three, and the one before them
    np.testing.assert_allclose(part.logprobs[-3:], whole.logprobs[-3:], atol=QUANTISED)
    before = engine.stats().prefill_tokens
    np.testing.assert_array_equal(engine.score(ids).logprobs, whole.logprobs)
    assert engine.stats().prefill_tokens - before == len(ids)


def test_long_text_in_many_steps_has_the_scores_of_one(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    ids = random_ids(700)
    whole = make_engine(tiny_llama, n_ctx=1024, n_ubatch=1024, **PRECISE).score(ids)
    parts = make_engine(tiny_llama, n_ctx=1024, n_ubatch=64, **PRECISE).score(ids)
    assert whole.n_scored == parts.n_scored == 699
    np.testing.assert_allclose(whole.logprobs[1:], parts.logprobs[1:], atol=EXACT)


def test_single_token_has_nothing_to_score(engine: Engine) -> None:
    score = engine.score([5])
    assert score.n_scored == 0
    assert score.total == 0
    assert math.isnan(score.perplexity)
    assert score.top_logprobs is None


def test_coroutine_scores_without_blocking_its_loop(engine: Engine) -> None:
    async def both() -> tuple[Score, list[Score]]:
        return await asyncio.gather(
            engine.ascore(STORY), engine.ascore([STORY, "Anna is a"], top_logprobs=1)
        )

    one, two = asyncio.run(both())
    np.testing.assert_allclose(one.logprobs, two[0].logprobs, atol=QUANTISED, equal_nan=True)
    assert two[1].ids == engine.tokenize("Anna is a")


@pytest.mark.parametrize(
    ("texts", "options", "error", "parameter"),
    [
        ("", {"add_special": False}, RequestError, "texts"),
        ([[1], []], {}, RequestError, "texts"),
        ([1, 10**6], {}, InvalidToken, "texts"),
        ([7] * 2000, {}, PromptTooLong, "texts"),
        (b"x", {}, RequestError, "texts"),
        ([1, 2], {"last": 0}, RequestError, "last"),
        ([1, 2], {"last": [1, 1]}, RequestError, "last"),
        ([[1, 2]], {"last": [True]}, RequestError, "last"),
        ([1, 2], {"top_logprobs": -1}, RequestError, "top_logprobs"),
        ([1, 2], {"top_logprobs": 1001}, RequestError, "top_logprobs"),
        ([1, 2], {"priority": "high"}, RequestError, "priority"),
    ],
)
def test_argument_that_cannot_be_is_named(
    engine: Engine, texts: Any, options: Any, error: type[RequestError], parameter: str
) -> None:
    with pytest.raises(error) as refused:
        engine.score(texts, **options)
    assert parameter in str(refused.value)


def test_encoder_scores_nothing(make_engine: MakeEngine, bert: Path) -> None:
    with pytest.raises(UnsupportedModel, match="bert"):
        make_engine(bert).score([1, 2, 3])


def test_closed_engine_says_so(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_ctx=64)
    engine.close()
    with pytest.raises(ClosedError):
        engine.score([1, 2])


async def test_options_of_the_async_twin_may_be_none(engine: Engine) -> None:
    none: dict[str, Any] = {"priority": None, "add_special": None, "parse_special": None}
    assert (await engine.ascore("Tom", **none)).ids == engine.score("Tom").ids


@pytest.mark.parametrize("last", [None, 3, 200])
@pytest.mark.parametrize("deterministic", [False, True])
def test_attend_scores_in_the_same_evaluation(last: int | None, deterministic: bool):
    with Engine.demo(n_ctx=512, n_threads=1) as engine:
        ids = (engine.tokenize(STORY) * 12)[:260]
        options: dict[str, Any] = {"last": last, "top_logprobs": 2, "deterministic": deterministic}
        expected = engine.score(ids, **options)
        n_evaluated = engine.stats().prefill_tokens
        found = engine.attend(ids, Capture("probs", hidden=[1]), score=True, **options)
        rows, score = found.array(), found.score
        assert engine.stats().prefill_tokens - n_evaluated <= len(ids)
    assert rows.shape[2] == found.hidden.shape[1] == min(last or len(ids), len(ids))
    assert score is not None
    assert score.ids == ids
    np.testing.assert_array_equal(score.ranks >= 0, expected.ranks >= 0)
    np.testing.assert_allclose(score.logprobs, expected.logprobs, atol=1e-3)
    assert score.top_logprobs is not None
    assert [len(one) for one in score.top_logprobs] == [2 * (rank >= 0) for rank in score.ranks]


def test_attend_without_scores_has_none_and_no_top_logprobs():
    with Engine.demo(n_ctx=64, n_threads=1) as engine:
        assert engine.attend([1, 2, 3]).score is None
        with pytest.raises(RequestError, match="pass score=True"):
            engine.attend([1, 2, 3], top_logprobs=2)
        (one, two) = engine.attend([[1, 2, 3], [4, 5]], score=True)
        assert one.score is not None
        assert two.score is not None
        assert [one.score.n_scored, two.score.n_scored] == [2, 1]
