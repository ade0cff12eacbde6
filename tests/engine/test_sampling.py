"""Sampling as a caller sees it: ids that come, probabilities reported, options refused."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine, Sampling, errors
from tests.support.rows import random_ids
from tests.support.tiny_gguf import END_OF_TEXT, IM_END

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

PROMPT = random_ids(12)
OPEN: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(tiny_llama, n_ctx=512, n_threads=1, kv_type="f32", flash_attn=False) as engine:
        list(engine.generate(PROMPT, max_tokens=1))  # from here on every prompt is cached alike
        yield engine


def tokens_of(engine: Engine, n: int = 40, **options: Any) -> list[Token]:
    tokens = list(engine.generate(PROMPT, max_tokens=n, ignore_eos=True, **options))
    assert len(tokens) == n
    return tokens


def ids_of(engine: Engine, n: int = 40, **options: Any) -> list[int]:
    return [token.id for token in tokens_of(engine, n, **options)]


# ---- repeatable


def test_greedy_gives_the_same_every_time(engine: Engine) -> None:
    first = ids_of(engine, temperature=0)
    assert ids_of(engine, temperature=0) == first
    assert ids_of(engine, temperature=0, seed=5) == first


@pytest.mark.parametrize(
    "options",
    [
        OPEN,
        {},
        OPEN | {"mirostat": 1},
        OPEN | {"mirostat": 2},
        OPEN | {"xtc_probability": 0.5, "xtc_threshold": 0.01},
        OPEN | {"dry_multiplier": 0.8, "repeat_penalty": 1.3, "typical_p": 0.9},
    ],
    ids=str,
)
def test_seed_repeats_a_run_and_another_one_differs(
    engine: Engine, options: dict[str, Any]
) -> None:
    first = ids_of(engine, seed=11, **options)
    assert ids_of(engine, seed=11, **options) == first
    assert ids_of(engine, seed=12, **options) != first


def test_without_seed_runs_differ(engine: Engine) -> None:
    assert len({tuple(ids_of(engine, **OPEN)) for _ in range(4)}) == 4


def test_seed_repeats_a_run_on_another_engine(make_engine: MakeEngine, tiny_llama: Path) -> None:
    runs = [ids_of(make_engine(tiny_llama), seed=3, **OPEN) for _ in range(2)]
    assert runs[0] == runs[1]


def test_sampling_object_and_options_mean_the_same(engine: Engine) -> None:
    options: dict[str, Any] = OPEN | {
        "seed": 4,
        "repeat_penalty": 1.2,
        "logit_bias": {65: 2.0},
        "banned_tokens": [66, 67],
        "top_logprobs": 3,
    }
    one = tokens_of(engine, **options)
    generation = engine.generate(
        PROMPT, max_tokens=40, sampling=Sampling(ignore_eos=True, **options)
    )
    for token, other in zip(one, generation, strict=True):
        assert (token.id, token.logprob, token.top_logprobs) == (
            other.id,
            other.logprob,
            other.top_logprobs,
        )


# ---- what is chosen


@pytest.mark.parametrize(
    "options",
    [{"top_k": 1}, {"temperature": 1e-6}, {"min_p": 1.0}, {"top_p": 1e-6}, {"temperature": 1e-38}],
    ids=str,
)
def test_options_that_leave_the_best_token_alone_are_greedy(
    engine: Engine, options: dict[str, Any]
) -> None:
    want = ids_of(engine, temperature=0)
    assert ids_of(engine, seed=1, **(OPEN | options)) == want


def test_top_k_chooses_among_the_k_best(engine: Engine) -> None:
    for token in tokens_of(engine, seed=2, **(OPEN | {"top_k": 3, "top_logprobs": 3})):
        assert token.top_logprobs is not None
        assert token.id in dict(token.top_logprobs)


def test_banned_tokens_never_come(engine: Engine) -> None:
    banned = sorted(set(ids_of(engine, temperature=0)))
    assert not set(ids_of(engine, temperature=0, banned_tokens=banned)) & set(banned)
    assert not set(ids_of(engine, seed=1, banned_tokens=banned, **OPEN)) & set(banned)
    biased = dict.fromkeys(banned, -math.inf)
    assert not set(ids_of(engine, seed=1, logit_bias=biased, **OPEN)) & set(banned)


@pytest.mark.parametrize("steered", [{}, {"stopping": lambda ids: False}], ids=["plain", "steered"])
def test_text_does_not_end_before_min_tokens(engine: Engine, steered: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {"temperature": 0, "logit_bias": {END_OF_TEXT: 1e5}, **steered}
    for n in (0, 1, 6):
        generation = engine.generate(PROMPT, max_tokens=9, min_tokens=n, **wanted)
        tokens = list(generation)
        assert (generation.finish_reason, len(tokens)) == ("stop", n)
    cut = engine.generate(PROMPT, max_tokens=4, min_tokens=9, **wanted)
    assert (len(list(cut)), cut.finish_reason) == (4, "length")


@pytest.mark.parametrize("steered", [{}, {"stopping": lambda ids: False}], ids=["plain", "steered"])
def test_begin_suppress_bans_the_first_token_only(engine: Engine, steered: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {"temperature": 0, "logit_bias": {300: 1e5, 301: 1e4}, **steered}
    assert ids_of(engine, 3, **wanted) == [300, 300, 300]
    assert ids_of(engine, 3, begin_suppress=[300], **wanted) == [301, 300, 300]
    with pytest.raises(errors.InvalidToken, match="begin_suppress"):
        engine.generate(PROMPT, begin_suppress=[320])


def test_seed_of_llama_cpp_that_means_random_is_none() -> None:
    assert [Sampling(seed=seed).seed for seed in (-1, 2**32 - 1, 0)] == [None, None, 0]


def test_logit_bias_forces_a_token(engine: Engine) -> None:
    assert ids_of(engine, seed=1, logit_bias={300: 1e5}, **OPEN) == [300] * 40
    assert ids_of(engine, temperature=0, logit_bias={300: 1e38}) == [300] * 40


def test_ban_outweighs_bias(engine: Engine) -> None:
    assert 300 not in ids_of(engine, temperature=0, logit_bias={300: 1e5}, banned_tokens=[300])


def test_penalty_keeps_tokens_from_coming_again(engine: Engine) -> None:
    ids = ids_of(engine, temperature=0, presence_penalty=1e4, repeat_last_n=-1)
    assert len(set(ids)) == 40
    assert not set(ids) & set(PROMPT)  # the prompt counts
    assert len(set(ids_of(engine, temperature=0))) < 40


def test_sampled_frequencies_follow_the_reported_probabilities(engine: Engine) -> None:
    n_runs = 2000
    first = [tokens_of(engine, 1, top_logprobs=320, seed=seed, **OPEN)[0] for seed in range(n_runs)]
    assert first[0].top_logprobs is not None
    logits = dict(first[0].top_logprobs)
    # Reported are the model's own probabilities; temperature flattens what is drawn from.
    weights = np.exp(np.array([logits[id_] for id_ in range(320)]) / OPEN["temperature"])
    weights[[END_OF_TEXT, IM_END]] = 0  # ignored
    expected = weights / weights.sum() * n_runs
    counts = np.bincount([token.id for token in first], minlength=320)
    often = expected >= 5
    chi2 = float(((counts - expected)[often] ** 2 / expected[often]).sum())
    n_free = int(often.sum())
    assert n_free > 20
    assert chi2 < n_free + 5 * math.sqrt(2 * n_free)


def test_grammar_holds_at_every_token(engine: Engine) -> None:
    generation = engine.generate(
        PROMPT, max_tokens=60, seed=1, grammar="root ::= ([a-c] [0-9] [0-9]){5,8}", **OPEN
    )
    text = generation.read()
    assert len(text) in (15, 18, 21, 24)
    assert all(c in "abc" for c in text[::3])
    assert all(c in "0123456789" for i, c in enumerate(text) if i % 3)


# ---- logprobs


def test_logprobs_come_only_when_asked_for(engine: Engine) -> None:
    for token in tokens_of(engine, 5, temperature=0):
        assert token.logprob is None
        assert token.top_logprobs is None
    for token in tokens_of(engine, 5, temperature=0, top_logprobs=0):
        assert token.logprob is not None
        assert token.logprob <= 0
        assert token.top_logprobs == []


@pytest.mark.parametrize("k", [1, 5, 319, 320])
def test_top_logprobs_are_the_k_best_in_order(engine: Engine, k: int) -> None:
    for token in tokens_of(engine, 10, temperature=0, top_logprobs=k):
        assert token.top_logprobs is not None
        values = [logprob for _, logprob in token.top_logprobs]
        assert len(values) == len(dict(token.top_logprobs)) == k
        assert values == sorted(values, reverse=True)
        assert token.top_logprobs[0] == (token.id, token.logprob)  # greedy takes the best


def test_logprobs_of_the_whole_vocabulary_sum_to_one(engine: Engine) -> None:
    for token in tokens_of(engine, 10, seed=1, top_logprobs=320, **OPEN):
        assert token.top_logprobs is not None
        assert math.isclose(sum(math.exp(p) for _, p in token.top_logprobs), 1, abs_tol=1e-4)
        assert dict(token.top_logprobs)[token.id] == token.logprob


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {97: 50.0, 98: -math.inf}}, {"banned_tokens": [97, 98]},
        {"grammar": "root ::= [x-z]+"}, {"repeat_penalty": 3.0, "presence_penalty": 5.0},
        {"temperature": 3.0, "top_k": 2, "seed": 1},
    ],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_top_logprobs_are_before_bias_grammar_and_samplers(
    engine: Engine, changes: dict[str, Any]
) -> None:
    [plain] = tokens_of(engine, 1, temperature=0, top_logprobs=320)
    [token] = tokens_of(engine, 1, **{"temperature": 0, **changes}, top_logprobs=320)
    assert plain.top_logprobs is not None
    assert token.top_logprobs is not None
    assert dict(token.top_logprobs) == pytest.approx(dict(plain.top_logprobs), abs=1e-4)
    assert token.logprob == dict(token.top_logprobs)[token.id]  # whichever was chosen
    options = {"temperature": 1.0, **changes, "post_sampling_probs": True, "top_logprobs": 320}
    [after] = tokens_of(engine, 1, **options)
    assert after.top_logprobs is not None
    assert dict(after.top_logprobs) != pytest.approx(dict(plain.top_logprobs), abs=1e-4)


# ---- probabilities after the samplers, against the formulas


def drawn_from(logits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Probabilities that llama.cpp's chain draws from, in float64; 0 for what it has cut off."""
    order = np.argsort(-logits, kind="stable")
    order = order[np.isfinite(logits[order])]
    if n_sigma := options.get("top_n_sigma"):
        lowest = logits[order].max() - n_sigma * logits[order].std()
        order = order[logits[order] >= lowest]
    order = order[: options["top_k"] or None]
    n_keep = options.get("min_keep", 0)

    def weights(temperature: float = 1.0) -> np.ndarray:
        exponents = np.exp((logits[order] - logits[order[0]]) / temperature)
        return exponents / exponents.sum()

    if options["top_p"] < 1:
        n = int(np.argmax(np.cumsum(weights()) >= options["top_p"])) + 1
        order = order[: max(n, n_keep)]
    if options["min_p"] > 0:
        n = int((weights() >= options["min_p"] * weights()[0]).sum())
        order = order[: max(n, n_keep)]
    temperature = options["temperature"]
    if spread := options.get("dynatemp_range"):
        shares = weights()
        shares = shares[shares > 0]
        entropy = -float((shares * np.log(shares)).sum()) / math.log(len(order))
        low, high = max(0.0, temperature - spread), temperature + spread
        temperature = low + (high - low) * entropy ** options.get("dynatemp_exponent", 1.0)
    found = np.zeros(len(logits))
    found[order] = weights(temperature)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
        {"top_n_sigma": 1.0},
        {"top_n_sigma": 1.5, "top_k": 5},
        {"top_n_sigma": 2.0, "top_p": 0.7, "temperature": 0.6},
        {"top_n_sigma": 1e30},
        {"dynatemp_range": 0.5, "temperature": 1.0},
        {"dynatemp_range": 0.5, "temperature": 1.0, "dynatemp_exponent": 8.0},
        {"dynatemp_range": 3.0, "temperature": 0.8, "top_k": 10},
        {"dynatemp_range": 1.0, "temperature": 0.0},
        {"top_p": 0.05},
        {"top_p": 0.05, "min_keep": 7},
        {"min_p": 0.9, "min_keep": 4},
        {"min_p": 0.9, "min_keep": 10**9},
    ],
    ids=str,
)
def test_probabilities_after_the_samplers_are_those_of_the_formulas(
    engine: Engine, options: dict[str, Any]
) -> None:
    options = OPEN | options
    (raw,) = tokens_of(engine, 1, seed=1, top_logprobs=320, **options)
    (token,) = tokens_of(engine, 1, seed=1, top_logprobs=320, post_sampling_probs=True, **options)
    assert raw.top_logprobs is not None
    assert token.top_logprobs is not None
    logits = np.array([dict(raw.top_logprobs)[id_] for id_ in range(320)], dtype=np.float64)
    logits[[END_OF_TEXT, IM_END]] = -np.inf  # ignored
    want = drawn_from(logits, options)
    found = dict(token.top_logprobs)
    assert set(found) == set(np.flatnonzero(want > 1e-30).tolist())
    for id_, logprob in found.items():
        assert math.exp(logprob) == pytest.approx(want[id_], rel=1e-3)
    values = [logprob for _, logprob in token.top_logprobs]
    assert values == sorted(values, reverse=True)
    assert token.id == raw.id  # what is reported does not change what is drawn
    assert token.logprob == found[token.id]


def test_probabilities_after_the_samplers_of_greedy_mirostat_and_grammars(engine: Engine) -> None:
    for options in (
        {"temperature": 0},
        {"temperature": 0, "grammar": "root ::= [a-c]+"},
        OPEN | {"top_k": 1},
    ):
        for token in tokens_of(engine, 5, top_logprobs=3, post_sampling_probs=True, **options):
            assert (token.logprob, token.top_logprobs) == (0, [(token.id, 0)])
    for options in (
        {"mirostat": 1},
        {"mirostat": 2},
        {"grammar": "root ::= [a-c]+"},
        {"grammar": "root ::= [a-c]+", "top_k": 2},
        {"grammar": "root ::= [a-c]+", "top_n_sigma": 0.5},
    ):
        options = OPEN | {"top_logprobs": 320, "post_sampling_probs": True, "seed": 3} | options
        for token in tokens_of(engine, 10, **options):
            assert token.top_logprobs is not None
            assert token.logprob == dict(token.top_logprobs)[token.id]
            assert sum(math.exp(p) for _, p in token.top_logprobs) == pytest.approx(1, abs=1e-4)
    (token,) = tokens_of(engine, 1, top_logprobs=0, post_sampling_probs=True, **OPEN)
    assert token.top_logprobs == []


def test_grammar_holds_where_no_likely_token_is_allowed(engine: Engine) -> None:
    options = OPEN | {"top_n_sigma": 0.01, "grammar": "root ::= [a-c] [0-9] [0-9]"}
    text = engine.generate(PROMPT, max_tokens=9, seed=1, **options).read()
    assert len(text) == 3
    assert text[0] in "abc"
    assert text[1:].isdecimal()


@pytest.mark.parametrize(
    "options",
    [
        {"dynatemp_range": 1000, "dynatemp_exponent": 1000},
        {"dynatemp_range": 1e-38, "temperature": 1e-38},
        {"dynatemp_range": 1000, "temperature": 3e38},
        {"dynatemp_range": 1, "logit_bias": {5: 3e38}},
        {"dynatemp_range": 1, "logit_bias": dict.fromkeys(range(300), -3e38)},
        {"top_n_sigma": 3e38, "logit_bias": {5: 3e38, 6: -3e38}},
        {"top_n_sigma": 1e-38},
        {"top_n_sigma": 1, "dynatemp_range": 1, "mirostat": 2},
    ],
    ids=str,
)
def test_extreme_options_choose_a_token(engine: Engine, options: dict[str, Any]) -> None:
    for token in tokens_of(engine, 5, top_logprobs=5, post_sampling_probs=True, **(OPEN | options)):
        assert token.logprob is not None
        assert math.isfinite(token.logprob)


# ---- out of range


def test_ids_of_sampling_outside_the_vocabulary_are_refused(engine: Engine) -> None:
    with pytest.raises(errors.InvalidToken, match="logit_bias"):
        engine.generate(PROMPT, logit_bias={320: 1.0})
    with pytest.raises(errors.InvalidToken, match="banned_tokens"):
        engine.generate(PROMPT, banned_tokens=[320])
    for name, value in {"banned_tokens": range(320), "top_logprobs": 321, "top_k": -1}.items():
        before = engine.stats().n_requests
        with pytest.raises(errors.InvalidSampling, match=name.partition("_")[0]):
            engine.generate(PROMPT, **{name: value})
        assert engine.stats().n_requests == before


@pytest.mark.parametrize("grammar", ["root :: x", 'a ::= "x"', 'root ::= "x', "root ::= root"])
def test_grammar_that_does_not_parse_is_invalid_sampling(engine: Engine, grammar: str) -> None:
    with pytest.raises(errors.InvalidSampling, match="grammar"):
        list(engine.generate(PROMPT, grammar=grammar))


@pytest.mark.parametrize("sign", ["é", "日", "😀"])
def test_grammar_error_quotes_a_whole_character(engine: Engine, sign: str) -> None:
    with pytest.raises(errors.InvalidSampling, match=f"column 10: .*'{sign}'"):
        engine.generate(PROMPT, grammar=f"root ::= {sign}")
    assert len(ids_of(engine, 3, temperature=0)) == 3


@pytest.mark.parametrize("options", [{"grammar": "\ud800"}, {"dry_sequence_breakers": ["\ud800"]}])
def test_option_with_surrogates_is_refused(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(errors.RequestError, match="surrogate"):
        engine.generate(PROMPT, **options)
