"""Does the lookback ratio tell sentences that the source says from those it does not?

A source about four people and an answer about one. In half of the answers, city and colour are
changed: to others ("made up"), or to those of another person in the source ("swapped"), where words
alone say nothing. Baselines: the share of the answer's words that the source has, and the mean
log-probability that the model gives the answer.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trials import HELD_OUT_SEED, Trial, auroc_of, open_model, options, print_table

from kqview import guards, heads
from kqview.heads import measures

if TYPE_CHECKING:
    from collections.abc import Callable


def swapped(one: Any) -> Any:
    """The example with city and colour of another person of the source."""
    if one["is_grounded"]:
        return one
    name = one["question"].split()[2]
    others = [text for text in one["source"].split("bicycle.") if text.strip() and name not in text]
    city, colour = re.findall(r"living in (\w+) and owns a (\w+)", others[0])[0]
    return {**one, "answer": f"{name} lives in {city} and owns a {colour} bicycle."}


def words_of(one: Any) -> float:
    words = re.findall(r"\w+", one["answer"])
    return sum(word in one["source"] for word in words) / len(words)


def main() -> None:
    given = options(n=48, n_calibration=60)
    made = heads.made_examples("grounding", given.n, seed=HELD_OUT_SEED)
    conditions = {"made up": made, "swapped": [swapped(one) for one in made]}
    calibration = heads.made_examples("grounding", given.calibration)
    half = [swapped(one) if i % 4 == 1 else one for i, one in enumerate(calibration)]
    trials: list[Trial] = []

    def add(method: str, score: Callable[[Any], float]) -> None:
        for condition, examples in conditions.items():
            scores = [score(one) for one in examples]
            labels = [float(one["is_grounded"]) for one in examples]
            judge = auroc_of(scores, labels)
            trials.append(Trial(method, condition, judge, given.n))

    add("words of the source", words_of)
    with open_model(given) as engine:

        def likelihood(one: Any) -> float:
            pair = measures.answered(engine, [one["source"]], one["question"], one["answer"])
            return engine.score(pair.ids, last=len(pair.answer)).total / len(pair.answer)

        def lookback(one: Any, file: Any = None) -> float:
            texts = [one["source"]], one["question"], one["answer"]
            return guards.grounding(engine, *texts, file)[0].score

        file = heads.calibrate(engine, "grounding", half, progress=True)
        add("log-probability of the answer", likelihood)
        add("lookback, all heads", lookback)
        add(f"lookback, {len(file.heads)} calibrated heads", lambda one: lookback(one, file))
    print_table("AUROC", trials)


if __name__ == "__main__":
    main()
