"""Scores of sentences against plain numpy, whatever the request shows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kqview.errors import RequestError
from kqview.server.api.koboldai import pruning
from kqview.server.api.wire.attention import dense
from kqview.server.models.run import AttentionWanted
from tests.support.dream import QWEN, plan_from

N_LAYER, N_HEAD, N_PROMPT = 3, 4, 10
SENTENCES = [
    pruning.Sentence(1, 1, 0, 4),
    pruning.Sentence(1, 2, 4, 7),
    pruning.Sentence("b", "c", 7, 10),
]


def full_rows(n_tokens: int = 5, seed: int = 0) -> list[np.ndarray]:
    """Softmax rows of *n_tokens* generated tokens."""
    rng = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    for i in range(n_tokens):
        scores = np.exp(rng.standard_normal((N_LAYER, N_HEAD, N_PROMPT + i)) * 2)
        rows.append((scores / scores.sum(-1, keepdims=True)).astype(np.float32))
    return rows


def captured_by_engine(wanted: AttentionWanted, rows: np.ndarray) -> np.ndarray:
    """What the engine would hand out: its reductions, in plain numpy."""
    reduce = wanted.capture(QWEN).reduce
    if wanted.format == "aggregated" and wanted.aggregation == "last_layer":
        rows = rows[-1:]
    if reduce == "mean":
        return rows.mean(axis=(0, 1))
    if reduce == "max":
        return rows.max(axis=(0, 1))
    return rows.mean(axis=1) if reduce == "mean_heads" else rows


SHOWN = [
    None,
    AttentionWanted("probs"),
    AttentionWanted("probs", format="viz"),
    AttentionWanted("probs", format="sparse", top_k=3),
    *(
        AttentionWanted("probs", format="aggregated", aggregation=mode)  # type: ignore[arg-type]
        for mode in ("mean", "max", "last_layer", "weighted_layers")
    ),
]


@pytest.mark.parametrize("shown", SHOWN, ids=str)
def test_scores_are_the_largest_mean_attention_whatever_is_shown(shown: AttentionWanted | None):
    captured = pruning.watched(shown)
    scores = pruning.SentenceScores(SENTENCES, N_PROMPT, 1.0)
    rows = full_rows()
    for row in rows:
        scores.add(pruning.mean_row(captured, captured_by_engine(captured, row)))
    means = np.stack([row.mean(axis=(0, 1))[:N_PROMPT] for row in rows])
    found = {(one.turn_id, one.sentence_id): one.max_attention for one in scores.prunable()}
    assert len(found) == len(SENTENCES)
    for one in SENTENCES:
        expected = means[:, one.start : one.end].max()
        assert found[one.turn_id, one.sentence_id] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shown", SHOWN[1:], ids=str)
def test_watching_changes_nothing_of_what_is_shown(shown: AttentionWanted):
    captured = pruning.watched(shown)
    for row in full_rows(2):
        alone, _ = dense(shown, captured_by_engine(shown, row))
        reduced = pruning.reduced(shown, captured, captured_by_engine(captured, row))
        watched, _ = dense(shown, reduced)
        assert watched.dtype == alone.dtype
        np.testing.assert_allclose(watched, alone, rtol=1e-5)


def test_rows_of_a_prompt_are_reduced_as_those_of_a_token():
    shown = AttentionWanted("probs", format="aggregated", aggregation="max", prompt=True)
    block = np.random.default_rng(1).random((N_LAYER, N_HEAD, 6, N_PROMPT), np.float32)
    made = pruning.reduced(shown, pruning.watched(shown), block)
    np.testing.assert_array_equal(made, block.max(axis=(0, 1)))


def test_layers_that_differ_in_heads_weigh_the_same():
    rows = (np.full((2, 4), 0.5, np.float32), np.full((6, 4), 0.1, np.float32))
    captured = pruning.watched(AttentionWanted("probs"))
    np.testing.assert_allclose(pruning.mean_row(captured, rows), np.full(4, 0.3), rtol=1e-6)


def test_prunable_are_those_below_the_threshold_the_least_first():
    row = np.array([0.3, 0.02, 0.02, 0.02, 0.05, 0.01, 0.01, 0.2, 0.09, 0.09], np.float32)
    scores = pruning.SentenceScores(SENTENCES, N_PROMPT, 0.25)
    scores.add(row)
    assert [(one.turn_id, one.sentence_id) for one in scores.prunable()] == [(1, 2), ("b", "c")]
    uniform = pruning.SentenceScores(SENTENCES, N_PROMPT, None)  # 1 / n_prompt
    uniform.add(row)
    assert [one.sentence_id for one in uniform.prunable()] == [2]


def test_nothing_is_prunable_before_a_token_came():
    assert pruning.SentenceScores(SENTENCES, N_PROMPT, None).prunable() == []


IDS = {"input_ids": [1] * N_PROMPT}
ONE = {"turn_id": 1, "sentence_id": 1, "start": 0, "end": 2}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": "text", "sentences": [ONE]}, "send input_ids"),
        ({**IDS, "sentences": [ONE, {**ONE, "end": 11}]}, "sentences[1] is 0 to 11"),
        ({**IDS, "sentences": [{**ONE, "start": -1}]}, "sentences[0]"),
        ({**IDS, "sentences": [{**ONE, "start": 2}]}, "sentences[0] is 2 to 2"),
        ({**IDS, "sentences": [ONE] * 11}, "11 sentences and 10"),
        ({**IDS, "sentences": [ONE], "prune_below": 1.5}, "prune_below"),
        ({**IDS, "sentences": [ONE], "prune_below": float("nan")}, "prune_below"),
        (
            {**IDS, "sentences": [ONE], "return_attention": True, "attention_values": "logits"},
            "attention_values is 'logits'",
        ),
        (
            {**IDS, "sentences": [ONE], "return_attention": True, "attention_spans": [[0, 2]]},
            "attention_spans are sums",
        ),
    ],
)
def test_sentences_that_cannot_be_watched_are_refused(fields: dict[str, Any], says: str):
    with pytest.raises(RequestError) as caught:
        plan_from(fields)
    assert says in str(caught.value)


def test_watching_needs_no_attention_in_the_reply():
    plan = plan_from({**IDS, "sentences": [ONE]})
    assert plan.rows is None
    assert plan.request.attention == AttentionWanted("probs", format="aggregated")
    assert msgspec.to_builtins(plan.scores.prunable() if plan.scores else None) == []
