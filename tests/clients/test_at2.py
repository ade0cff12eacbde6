"""AT2's own package computes the scores of `guards.cite` from the weights of a head file."""

# Neither at2 nor transformers has types that pyright can follow, nor need they be installed.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kqview import Engine, guards
from kqview.heads import Head, HeadFile, ModelKey, measures

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("at2", reason="needs at2; python -m tests.clients --only at2")
torch = pytest.importorskip("torch")

SOURCES = ["the cat sat", "a dog ran", "no more"]
QUESTION = "who ran?"
ANSWER = "a dog. the cat."


def test_scores_are_those_of_at2(tiny_llama: Path):
    from at2.attribution.attributors import ScoreEstimationAttributor
    from at2.attribution.features import AttentionFeatureExtractor
    from at2.attribution.score_estimators import LinearScoreEstimator

    from tests.support.hf_llama import hf_llama

    with Engine(tiny_llama, n_ctx=128, n_threads=1, kv_type="f32") as engine:
        model = engine.model
        shape = model.n_layer, model.n_head
        weights = np.random.default_rng(0).random(shape)
        heads = HeadFile(
            task="cite", model=ModelKey.of(model, engine.fingerprint()),
            heads=tuple(Head(i, j, weights[i, j]) for i, j in np.ndindex(shape)),
        )  # fmt: skip
        given = measures.answered(engine, SOURCES, QUESTION, ANSWER)
        found = guards.cite(engine, SOURCES, QUESTION, ANSWER, heads)
    theirs = hf_llama(tiny_llama)
    with torch.no_grad():
        hidden = theirs(torch.tensor([given.ids]), output_hidden_states=True).hidden_states
    task = SimpleNamespace(
        model=theirs, hidden_states=[one[:, :-1] for one in hidden], num_sources=len(SOURCES),
        source_token_ranges=given.prompt.spans,
        target_token_range=(len(given.prompt.ids), len(given.ids)), target_ids=given.answer,
    )  # fmt: skip
    estimator = LinearScoreEstimator(AttentionFeatureExtractor(*shape, model_type="llama"))
    estimator.linear.weight.data[:] = torch.from_numpy(weights.reshape(1, -1))
    attributor = ScoreEstimationAttributor(task, estimator)
    for one in found:
        scores = attributor.get_attribution_scores(token_start=one.start, token_end=one.stop)
        assert scores == pytest.approx(one.scores, abs=1e-3)
