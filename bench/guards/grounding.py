"""Does the lookback ratio tell sentences that the source says from those it does not?

A source about four people and an answer about one. In half of the answers, city and colour are
changed: to others ("made up"), or to those of another person in the source ("swapped"), where words
alone say nothing. Or all answers stay as they were, and in half of the sources one fact, the city
or the colour, is changed: to one that the source does not have ("source changed"), or with that of
another person ("source swapped"). Heads are calibrated on changed answers only. Baselines: the
share of the answer's words that the source has, and the mean log-probability that the model gives
the answer.
"""

from __future__ import annotations

import random
import re
from typing import Any

from trials import HELD_OUT_SEED, Trial, auroc_of, open_model, options, print_table

from kqview import guards, heads
from kqview.heads import measures
from kqview.heads.examples import CITIES, COLOURS


def swapped(one: Any) -> Any:
    """The example with city and colour of another person of the source."""
    if one["is_grounded"]:
        return one
    name = one["question"].split()[2]
    others = [text for text in one["source"].split("bicycle.") if text.strip() and name not in text]
    city, colour = re.findall(r"living in (\w+) and owns a (\w+)", others[0])[0]
    return {**one, "answer": f"{name} lives in {city} and owns a {colour} bicycle."}


def of_source(one: Any, place: int, *, is_swapped: bool) -> Any:
    """The example with the true answer, and one fact of the source changed if it is not grounded.

    Args:
        one: The example.
        place: 0 for the city, 1 for the colour.
        is_swapped: Whether another person has that fact then, and the first one theirs.
    """
    if one["is_grounded"]:
        return one
    name, source = one["question"].split()[2], one["source"]
    facts = re.findall(r"(\w+) is a \w+ living in (\w+) and owns a (\w+)", source)
    known = {who: (city, colour) for who, city, colour in facts}
    said = known.pop(name)
    taken = {one[place] for one in known.values()} | {said[place]}
    rng = random.Random(source)
    new = rng.choice([fact for fact in (CITIES, COLOURS)[place] if fact not in taken])
    sentences = {who: f"{who} is{text}" for who, text in re.findall(r"(\w+) is(.*?\.)", source)}
    changes = {name: new}
    if is_swapped:  # with somebody who has another one
        other = next(who for who, has in known.items() if has[place] != said[place])
        changes = {name: known[other][place], other: said[place]}
    for who, fact in changes.items():
        before = said if who == name else known[who]
        sentences[who] = sentences[who].replace(f" {before[place]} ", f" {fact} ")
    answer = f"{name} lives in {said[0]} and owns a {said[1]} bicycle."
    return {**one, "source": " ".join(sentences.values()), "answer": answer}


def words_of(one: Any) -> float:
    words = re.findall(r"\w+", one["answer"])
    return sum(word in one["source"] for word in words) / len(words)


def main() -> None:
    given = options(n=48, n_calibration=60)
    made = heads.made_examples("grounding", given.n, seed=HELD_OUT_SEED)
    numbered = [*enumerate(made)]
    conditions = {
        "made up": made,
        "swapped": [swapped(one) for one in made],
        "source changed": [of_source(one, i // 2 % 2, is_swapped=False) for i, one in numbered],
        "source swapped": [of_source(one, i // 2 % 2, is_swapped=True) for i, one in numbered],
    }
    calibration = heads.made_examples("grounding", given.calibration)
    half = [swapped(one) if i % 4 == 1 else one for i, one in enumerate(calibration)]
    with open_model(given) as engine:
        file = heads.calibrate(engine, "grounding", half, progress=True)

        def scores_of(one: Any) -> dict[str, float]:
            texts = [one["source"]], one["question"], one["answer"]
            pair = measures.answered(engine, *texts)
            logprob = engine.score(pair.ids, last=len(pair.answer)).total / len(pair.answer)
            return {
                "words of the source": words_of(one),
                "log-probability of the answer": logprob,
                "lookback, all heads": guards.grounding(engine, *texts)[0].score,
                f"lookback, {len(file.heads)} calibrated heads": guards.grounding(
                    engine, *texts, file
                )[0].score,
            }

        known: dict[str, dict[str, float]] = {}  # those that are grounded are in all conditions
        for examples in conditions.values():
            for one in examples:
                key = str(one)
                known[key] = known.get(key) or scores_of(one)
    trials: list[Trial] = []
    for method in next(iter(known.values())):
        for condition, examples in conditions.items():
            scores = [known[str(one)][method] for one in examples]
            judge = auroc_of(scores, [float(one["is_grounded"]) for one in examples])
            trials.append(Trial(method, condition, judge, given.n))
    print_table("AUROC", trials)


if __name__ == "__main__":
    main()
