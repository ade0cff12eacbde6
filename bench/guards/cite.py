"""Do citations by attention name the sources whose removal makes a sentence unlikely?

The truth is the model's own: the drop of a sentence's log-probability when one source is left out.
"top source": how often the named source is the one with the largest drop; "Spearman": correlation
of the scores with the drops over the six sources. The sentences of an answer are copied from two
sources, or say what the trades of these people are in other words. Baseline: BM25 between sentence
and source.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
from rerank import by_words
from trials import HELD_OUT_SEED, Trial, mean_of, open_model, options, print_table

from kqview import guards, heads
from kqview.heads import measures
from kqview.heads.calibration import spearman
from kqview.heads.examples import TRADES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kqview import Engine


def drops_of(engine: Engine, sources: list[str], question: str, answer: str) -> Any:
    """How much less likely each sentence is without a source's text, (n_sources, n_sentences)."""
    found: list[Any] = []
    for left_out in (None, *sources):
        rest = [one for one in sources if one is not left_out]
        given = measures.answered(engine, rest, question, answer)
        logprobs = engine.score(given.ids, last=len(given.answer)).logprobs[-len(given.answer) :]
        found.append([logprobs[one.start : one.stop].sum() for one in given.sentences])
    return np.array(found[0]) - np.array(found[1:])


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
        for one in made:
            for kind, answer in (("copied", one["answer"]), ("paraphrased", paraphrased(one))):
                texts = one["sources"], one["question"], answer
                drops = drops_of(engine, *texts)
                sentences = measures.answered(engine, *texts).sentences
                scores = {"BM25": [by_words(sentence.text, texts[0]) for sentence in sentences]}
                for name, file in files.items():
                    scores[f"attention, {name}"] = [
                        list(c.scores) for c in guards.cite(engine, *texts, file)
                    ]
                for name, of_sentences in scores.items():
                    of = rows.setdefault((name, kind), {"top source": [], "Spearman": []})
                    for values, drop in zip(of_sentences, drops.T, strict=True):
                        of["top source"].append(float(np.argmax(values) == np.argmax(drop)))
                        of["Spearman"].append(spearman(np.asarray(values), drop))
    trials = [
        Trial(name, f"{kind}, {figure}", mean_of(values), len(values))
        for (name, kind), of in rows.items()
        for figure, values in of.items()
    ]
    print_table("value", trials)


if __name__ == "__main__":
    main()
