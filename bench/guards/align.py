"""Do the heads that AlignAtt reads look at the token of the source that is copied next?

Made sentences about invented people are copied: all of them ("in order"), the one about a person
("one sentence"), or all from the last to the first ("reversed"). "aligned": how often the position
of the source that gets most is that of the token which is written next. The answer is given to the
model, so every token counts, and no figure depends on whether it obeys.

"premature" and "late": the source is cut within the second half of a sentence, and
`AlignAttByHeads` (frontier 1) stops before all but the last token that has arrived are written, or
goes on behind it.

Heads are those of a needle file. Baselines: all heads alike; the diagonal, which goes through the
source as evenly as the answer goes on (given the length of both); and the place behind the longest
piece of the source that ends as the answer so far does, which needs no attention but only works
where words are copied. Intervals draw examples.
"""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING

import numpy as np
from trials import HELD_OUT_SEED, Trial, mean_of, open_model, options, print_table

from kqview import Capture, heads
from kqview.heads import measures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kqview import Engine
    from kqview.heads import HeadFile
    from kqview.heads.measures import Prompt

FRONTIER = 1
N_CUTS = 2  # of each example


def by_heads(
    engine: Engine, prompt: Prompt, answer: Sequence[int], files: dict[str, HeadFile | None]
) -> dict[str, list[int]]:
    """The place in the source that gets most when each token of *answer* is predicted, by file.

    Rows are averaged as `AlignAtt` and `AlignAttByHeads` average them.
    """
    start, stop = prompt.spans[0]
    attention = engine.attend([*prompt.ids, *answer[:-1]], Capture(), last=len(answer))
    rows = [*attention.array()]
    pairs = measures.pairs_of(attention.layers, rows)
    source = measures.joined(rows)[..., start:stop].astype(np.float32)  # (n_pairs, n_answer, ...)
    found: dict[str, list[int]] = {}
    for name, file in files.items():
        weights = np.ones(len(pairs)) if file is None else file.weights(pairs)
        found[name] = np.tensordot(weights, source, axes=1).argmax(axis=-1).tolist()
    return found


def copied(engine: Engine, order: str, source: str, texts: Sequence[str]) -> Prompt:
    """The prompt of an order to copy; its spans are the source and the texts in it."""
    prompt = measures.chat_prompt(engine, f"{order}\n\n{source}", [order, *texts])
    _, *spans = prompt.spans
    return measures.Prompt(prompt.ids, [(spans[0][0], spans[-1][1]), *spans])


def diagonal(n_source: int, n_answer: int) -> list[int]:
    """Places of an answer that goes evenly through the source."""
    return [min(i * n_source // n_answer, n_source - 1) for i in range(n_answer)]


def longest_match(source: Sequence[int], answer: Sequence[int]) -> list[int]:
    """Places behind the longest piece of the source that the answer so far ends with."""
    found: list[int] = []
    for i in range(len(answer)):
        lengths = [0] * len(source)  # of the match that ends before each place
        for place in range(1, len(source)):
            while lengths[place] < min(place, i) and (
                source[place - 1 - lengths[place]] == answer[i - 1 - lengths[place]]
            ):
                lengths[place] += 1
        found.append(int(np.argmax(lengths)))
    return found


def stopped_at(places: Sequence[int], n_source: int) -> int:
    """Number of tokens that AlignAtt writes; one more than there are places if it never stops."""
    stops = (i for i, place in enumerate(places) if place >= n_source - FRONTIER)
    return next(stops, len(places))


def is_right(places: Sequence[int], truth: Sequence[int]) -> float:
    """The share of places that are the true ones."""
    return float(np.mean([one == other for one, other in zip(places, truth, strict=True)]))


def main() -> None:
    given = options(n=24, n_calibration=24)
    made = heads.made_examples("grounding", given.n, seed=HELD_OUT_SEED)
    rows: dict[tuple[str, str], list[list[float]]] = {}  # values of each example
    with open_model(given) as engine:
        file = heads.calibrate(
            engine, "needle", heads.made_examples("needle", given.calibration), progress=True
        )
        files = {"attention, all heads": None, f"attention, {len(file.heads)} heads": file}

        def places_of(prompt: Prompt, answer: Sequence[int]) -> dict[str, list[int]]:
            start, stop = prompt.spans[0]
            return {
                "diagonal": diagonal(stop - start, len(answer)),
                "longest match": longest_match(prompt.ids[start:stop], answer),
                **by_heads(engine, prompt, answer, files),
            }

        def add(method: str, figure: str, number: int, value: float) -> None:
            of = rows.setdefault((method, figure), [[] for _ in made])
            of[number].append(value)

        def align(
            number: int, condition: str, order: str, texts: list[str], truth: Sequence[int]
        ) -> None:
            """Judge the places of an answer that has the sentences *truth*."""
            prompt = copied(engine, order, " ".join(texts), texts)
            source, *spans = prompt.spans
            wanted = [at - source[0] for j in truth for at in range(*spans[j])]
            answer = [prompt.ids[source[0] + at] for at in wanted]
            for method, places in places_of(prompt, answer).items():
                add(method, f"{condition}, aligned", number, is_right(places, wanted))

        def cut(number: int, condition: str, order: str, texts: list[str], begun: int) -> None:
            """Judge where an answer stops that copies a source, cut off, from a sentence on."""
            prompt = copied(engine, order, " ".join(texts), texts)
            source, *spans = prompt.spans
            answer = prompt.ids[spans[begun][0] : source[1]]
            # one step more: what would be written then has not arrived
            for method, places in places_of(prompt, [*answer, answer[-1]]).items():
                n_written = stopped_at(places, source[1] - source[0])
                is_early = n_written < len(answer) - FRONTIER
                add(method, f"{condition}, premature", number, float(is_early))
                add(method, f"{condition}, late", number, float(n_written > len(answer)))

        for i, one in enumerate(made):
            rng = random.Random(i)
            texts = re.findall(r"\S.*?\.", one["source"])
            chosen = rng.randrange(1, len(texts))  # the first one would be on the diagonal
            all_of = "Repeat this text word for word."
            one_of = f"Repeat only what this text says about {texts[chosen].split()[0]}."
            align(i, "in order", all_of, texts, range(len(texts)))
            align(i, "one sentence", one_of, texts, [chosen])
            backwards = "Repeat these sentences, the last one first."
            align(i, "reversed", backwards, texts, range(len(texts))[::-1])
            words = texts[chosen].split()
            for n_words in rng.sample(range(len(words) // 2, len(words)), N_CUTS):
                arrived = [*texts[:chosen], " ".join(words[:n_words])]
                cut(i, "in order", all_of, arrived, 0)
                cut(i, "one sentence", one_of, arrived, chosen)
    trials = [
        Trial(method, figure, mean_of([float(np.mean(one)) for one in values]), len(values))
        for (method, figure), values in rows.items()
    ]
    print_table("share", trials)


if __name__ == "__main__":
    main()
