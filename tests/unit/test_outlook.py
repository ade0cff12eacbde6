"""`_core.outlook`, which traces take from each row of logits, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from kqview import _core
from kqview.errors import KqviewError


def softmax_logs(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64."""
    x = logits.astype(np.float64)
    x -= x.max()
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
@pytest.mark.parametrize("n_vocab", [1, 7, 127, 128, 129, 768, 5003])
def test_best_tokens_and_entropy_are_those_of_the_softmax(n_vocab: int, spread: float):
    logits = np.random.default_rng(n_vocab).normal(0, spread, n_vocab).astype(np.float32)
    logits[::3] = np.round(logits[::3])  # some are equal
    top, entropy = _core.outlook(logits, 20)
    logs = softmax_logs(logits)
    assert [token for token, _ in top] == np.argsort(-logits, kind="stable")[:20].tolist()
    assert [one for _, one in top] == pytest.approx(logs[[token for token, _ in top]], abs=1e-4)
    assert entropy == pytest.approx(-(np.exp(logs) * logs).sum(), rel=1e-5, abs=1e-6)


def test_tokens_of_minus_infinity_are_left_out():
    logits = np.full(300, -np.inf, np.float32)
    logits[[5, 130, 299]] = 2.0
    top, entropy = _core.outlook(logits, 20)
    assert [token for token, _ in top] == [5, 130, 299]
    assert entropy == pytest.approx(np.log(3), rel=1e-6)


def test_logits_that_are_no_numbers_are_an_error():
    logits = np.zeros(300, np.float32)
    logits[7] = np.nan
    with pytest.raises(KqviewError, match="NaN"):
        _core.outlook(logits, 20)
