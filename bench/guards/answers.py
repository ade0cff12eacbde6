"""Are answers better that are judged by their grounding while they are written?

A source about four people and a question about one of them, whose city and colour the answer should
name. "right": the share of these two that it names; "wrong": whether it names a city or colour that
is not this person's, made up or swapped. `TakeBackUngrounded` and `best_grounded` sample as "one
answer" does, which is what they must beat; "best of 3 by log-probability" is the same work without
attention, and a temperature of 0 costs nothing. Differences are in pairs, by question.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from grounding import swapped
from trials import HELD_OUT_SEED, Trial, mean_of, open_model, options, print_table

from kqview import Sampling, guards, heads
from kqview.heads.examples import CITIES, COLOURS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MOST_TOKENS = 40
N_ANSWERS = 3


def judged(one: Mapping[str, Any], answer: str) -> dict[str, float]:
    """How the answer to an example is: share of right facts, and whether one is wrong."""
    name = one["question"].split()[2]
    said = re.search(rf"{name} is a \w+ living in (\w+) and owns a (\w+)", one["source"])
    assert said is not None
    words = set(re.findall(r"\w+", answer))
    named = words & {*CITIES, *COLOURS}
    return {
        "right": sum(fact in words for fact in said.groups()) / 2,
        "wrong": float(bool(named - set(said.groups()))),
    }


def main() -> None:
    given = options(n=60, n_calibration=96)
    made = heads.made_examples("grounding", given.n, seed=HELD_OUT_SEED)
    examples = heads.made_examples("grounding", given.calibration)
    half = [swapped(one) if i % 4 == 1 else one for i, one in enumerate(examples)]
    with open_model(given, n_slots=N_ANSWERS, n_ctx=512) as engine:
        file = heads.calibrate(engine, "grounding", half, progress=True)

        def plain(prompt: guards.Prompt, seed: int, temperature: float = 1.0) -> Any:
            return engine.generate(
                prompt.ids, max_tokens=MOST_TOKENS, temperature=temperature, seed=seed,
                top_logprobs=1,
            )  # fmt: skip

        def likeliest(prompt: guards.Prompt, seed: int) -> str:
            found: list[tuple[float, str]] = []
            for i in range(N_ANSWERS):
                generation = plain(prompt, seed + i)
                logprobs = [token.logprob for token in generation]
                found.append((sum(logprobs) / max(1, len(logprobs)), generation.text))
            return max(found)[1]

        def taken_back(prompt: guards.Prompt, seed: int) -> str:
            guard = guards.TakeBackUngrounded(engine, prompt, file, retries=N_ANSWERS - 1)
            return engine.generate(
                prompt.ids, max_tokens=MOST_TOKENS, temperature=1.0, seed=seed, mods=[guard],
                capture=guard.capture, trace=False,
            ).read()  # fmt: skip

        def grounded(prompt: guards.Prompt, seed: int) -> str:
            sampling = Sampling(temperature=1.0, seed=seed)
            found = guards.best_grounded(
                engine, prompt, file, n=N_ANSWERS, max_tokens=MOST_TOKENS, sampling=sampling
            )
            return "".join(sentence.text for sentence in found)

        ways: dict[str, Callable[[guards.Prompt, int], str]] = {
            "one answer": lambda prompt, seed: plain(prompt, seed).read(),
            "temperature 0": lambda prompt, seed: plain(prompt, seed, 0).read(),
            f"best of {N_ANSWERS} by log-probability": likeliest,
            f"TakeBackUngrounded, {len(file.heads)} heads": taken_back,
            f"best_grounded of {N_ANSWERS}, {len(file.heads)} heads": grounded,
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for i, one in enumerate(made):
            prompt = guards.source_prompt(engine, [one["source"]], one["question"])
            for name, way in ways.items():
                found[name].append(judged(one, way(prompt, 1000 * i)))
    trials: list[Trial] = []
    for name, facts in found.items():
        for figure in ("right", "wrong"):
            values = [one[figure] for one in facts]
            more_than = [a - b[figure] for a, b in zip(values, found["one answer"], strict=True)]
            trials.append(Trial(name, figure, mean_of(values), given.n))
            trials.append(Trial(name, f"{figure}, less one answer's", mean_of(more_than), given.n))
    print_table("value", trials)


if __name__ == "__main__":
    main()
