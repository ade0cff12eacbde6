"""Events of mods: log-probabilities of a forward pass, and the prompt as the kit reads it."""

from __future__ import annotations

import numpy as np
import pytest

from kqview.errors import RequestError
from kqview.mods import ForwardPass, Prefilled
from kqview.mods.events import ContextInfo


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact = logits.astype(np.float64)
    return exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())


@pytest.mark.parametrize("k", [1, 5, 100, 5000])
@pytest.mark.parametrize("n_vocab", [100, 3001])
def test_top_k_logprob_equals_a_float64_log_softmax(k: int, n_vocab: int):
    logits = np.random.default_rng(3).normal(0, 30, n_vocab).round(0).astype(np.float32)
    logprobs, ids = ForwardPass("r", 1, logits).top_k_logprob(k)
    expected = log_softmax(logits)
    order = np.argsort(-expected, kind="stable")[:k]
    assert logprobs.shape == ids.shape == (1, min(k, n_vocab))
    assert ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(logprobs[0], expected[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_vocab", [50, 5000])
def test_top_k_logprob_of_equal_logits_names_lower_ids_first(n_vocab: int):
    logits = np.zeros(n_vocab, np.float32)
    logits[40] = 1.0
    _, ids = ForwardPass("r", 1, logits).top_k_logprob(4)
    assert ids.tolist() == [[40, 0, 1, 2]]


def test_top_k_logprob_of_a_masked_token_is_minus_infinity():
    logits = np.array([0.0, -np.inf, 0.0], np.float32)
    logprobs, ids = ForwardPass("r", 1, logits).top_k_logprob(3)
    assert ids.tolist() == [[0, 2, 1]]
    assert logprobs[0, 2] == -np.inf
    assert logprobs[0, 0] == pytest.approx(-np.log(2))


@pytest.mark.parametrize("k", [0, -1, 1.5, None, True])
def test_top_k_logprob_refuses_a_k_that_is_no_count(k: object):
    with pytest.raises(RequestError, match="k must be"):
        ForwardPass("r", 1, np.zeros(3, np.float32)).top_k_logprob(k)  # type: ignore[arg-type]


def test_prompt_is_read_as_ids_and_as_the_public_kit_does():
    event = Prefilled("r", 0, 8, ContextInfo(np.array([5, 6, 7], np.int32)))
    assert event.prompt_ids == [5, 6, 7]
    info = event.context_info
    assert list(info.tokens[: info._prompt_len]) == [5, 6, 7]
    assert Prefilled("r", 0, 8).prompt_ids == []
