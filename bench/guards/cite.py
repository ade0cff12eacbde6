"""Do citations by attention name the sources whose removal makes a sentence unlikely?

The truth is the model's own: the drop of a sentence's log-probability when one source is left out.
"top source": how often the named source is the one with the largest drop; "Spearman": correlation
of the scores with the drops over the six sources. The sentences of an answer are copied from two
sources, or say what the trades of these people are in other words. Sentences of one answer share
their prompt, so intervals draw examples, not sentences. Beside the heads: BM25 between sentence and
source; and, where at2 is installed, the weights that its trainer learns from as many examples.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from rerank import by_words
from trials import HELD_OUT_SEED, Trial, mean_of, open_model, options, print_table

from kqview import guards, heads
from kqview.heads import measures
from kqview.heads.calibration import spearman
from kqview.heads.examples import TRADES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kqview import Engine


N_ABLATIONS: Final = 16  # of each example that at2 learns from, as many as `heads.calibrate` has


def drops_of(engine: Engine, sources: list[str], question: str, answers: list[str]) -> list[Any]:
    """How much less likely each sentence is without a source's text.

    Returns:
        ``(n_sources, n_sentences)`` for each answer.
    """
    found: list[list[Any]] = [[] for _ in answers]
    for left_out in (None, *sources):
        rest = [one for one in sources if one is not left_out]
        for answer, of in zip(answers, found, strict=True):  # their prompt is evaluated once
            given = measures.answered(engine, rest, question, answer)
            score = engine.score(given.ids, last=len(given.answer))
            logprobs = score.logprobs[-len(given.answer) :]
            of.append([logprobs[one.start : one.stop].sum() for one in given.sentences])
    return [np.array(of[0]) - np.array(of[1:]) for of in found]


def by_at2(engine: Engine, examples: Sequence[Mapping[str, Any]]) -> heads.HeadFile:
    """The weights that at2's own trainer learns, from ablations as of the task "cite".

    Its features are the attention of a sentence to a source, which kqview measures
    (tests/clients/test_at2.py has them beside each other); loss, optimiser, their settings and the
    sampling of examples are at2's. All examples train: it sets none apart.
    """
    of_at2: Any = import_module("at2.attribution.trainer")  # has no types
    shape = engine.model.n_layer, engine.model.n_head
    found: list[tuple[Any, Any]] = []
    for one in examples:
        texts = one["sources"], one["question"], one["answer"]
        rng = np.random.default_rng(len(texts[0]))
        kept = (rng.random((N_ABLATIONS, len(texts[0]))) < 0.5).astype(np.float64)
        measured = measures.cite(engine, measures.answered(engine, *texts))
        features = np.stack([(2 * kept - 1) @ sentence.values for sentence in measured])
        found.append((features, measures.ablate(engine, *texts, kept).logprobs.T))

    class Trainer(of_at2.LinearScoreEstimatorTrainer):
        @property
        def task_datas(self) -> list[dict[str, int]]:
            return [{"num_targets": len(features)} for features, _ in found]

        def get_features_and_outputs(self, i: int) -> tuple[Any, Any]:
            return found[i]

    with TemporaryDirectory() as folder:
        trainer = Trainer(
            folder, examples, None, None, None, of_at2.AttentionFeatureExtractor(*shape),
            num_masks=N_ABLATIONS,
        )  # fmt: skip
        estimator = trainer.train(batch_size=len(found), device="cpu", print_every=10**6)
    weights = estimator.linear.weight.detach().numpy().reshape(shape)
    return heads.HeadFile(
        task="cite", model=heads.ModelKey.of(engine.model, engine.fingerprint()),
        heads=tuple(heads.Head(i, j, float(weights[i, j])) for i, j in np.ndindex(shape)),
    )  # fmt: skip


def paraphrased(one: Mapping[str, Any]) -> str:
    """The answer of the example in words that its sources do not have."""
    trades = re.findall(r" is a (\w+) living", one["answer"])
    first, second = (TRADES[trade] for trade in trades)
    return f"One person {first}. Another one {second}."


def main() -> None:
    given = options(n=12, n_calibration=16, needles=24)
    made = heads.made_examples("cite", given.n, seed=HELD_OUT_SEED)
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    with open_model(given) as engine:
        files: dict[str, heads.HeadFile | None] = {"all heads": None}
        tasks: dict[heads.Task, int] = {"needle": given.needles, "cite": given.calibration}
        for task, n in tasks.items():
            if n:
                file = heads.calibrate(engine, task, heads.made_examples(task, n), progress=True)
                files[f"{len(file.heads)} heads of {task}"] = file
        if given.calibration and find_spec("at2"):
            made_for_at2 = heads.made_examples("cite", given.calibration)
            files["estimator of at2"] = by_at2(engine, made_for_at2)
        for one in made:
            answers = {"copied": one["answer"], "paraphrased": paraphrased(one)}
            all_drops = drops_of(engine, one["sources"], one["question"], [*answers.values()])
            for (kind, answer), drops in zip(answers.items(), all_drops, strict=True):
                texts = one["sources"], one["question"], answer
                sentences = measures.answered(engine, *texts).sentences
                scores = {"BM25": [by_words(sentence.text, texts[0]) for sentence in sentences]}
                for name, file in files.items():
                    scores[f"attention, {name}"] = [
                        list(c.scores) for c in guards.cite(engine, *texts, file)
                    ]
                for name, of_sentences in scores.items():
                    of = rows.setdefault((name, kind), {"top source": [], "Spearman": []})
                    pairs = [*zip(map(np.asarray, of_sentences), drops.T, strict=True)]
                    is_top = [np.argmax(values) == np.argmax(drop) for values, drop in pairs]
                    of["top source"].append(float(np.mean(is_top)))
                    of["Spearman"].append(float(np.mean([spearman(*pair) for pair in pairs])))
    trials = [
        Trial(name, f"{kind}, {figure}", mean_of(values), len(values))
        for (name, kind), of in rows.items()
        for figure, values in of.items()
    ]
    print_table("value", trials)


if __name__ == "__main__":
    main()
