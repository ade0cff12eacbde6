"""Branches: of several continuations the one that its sources say best, sentence by sentence."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from kqview.arguments import whole_number
from kqview.engine import Engine
from kqview.generation.stream import Generation
from kqview.guards.mods import back_and_new, check_spans, ends_sentence, sentence_score
from kqview.guards.scores import GroundedSentence
from kqview.heads.file import Floats, HeadFile, checked_layers, checked_numbers
from kqview.heads.measures import Prompt, pairs_of
from kqview.types import Capture, Sampling, Token

_SAMPLING: Final = Sampling()
_N_SEEDS: Final = 2**32 - 1


def best_grounded(
    engine: Engine,
    prompt: Prompt,
    heads: HeadFile | None = None,
    *,
    n: int = 3,
    max_tokens: int = 256,
    sampling: Sampling = _SAMPLING,
) -> Iterator[GroundedSentence]:
    """Generate a text of which each sentence is the best grounded of *n*.

    Experimental, like `grounding`, by which sentences are judged. Where `TakeBackUngrounded` tries
    again what it took back, this generates *n* sentences in as many slots at once, keeps the best
    one, and goes on from there in branches of its slot (`Engine.branch`): the prompt and what is
    kept are evaluated once.

    Args:
        engine: The engine; *n* of its slots are used, which nobody else may use meanwhile.
        prompt: The prompt; its spans are the sources, as of `source_prompt`.
        heads: A head file for "grounding"; None for all heads alike, without a threshold.
        n: Number of continuations, from 1 to the slots of the engine.
        max_tokens: Most tokens of the text.
        sampling: How tokens are chosen. With a temperature of 0 all continuations are the same; a
            seed is that of the first one, and the others have those that follow it.

    Yields:
        Each sentence as soon as it is chosen. Their texts, joined, are the text. It ends where the
        first continuation ends it, or the best one does, or the context is full.

    Raises:
        RequestError: *n* or *max_tokens* is out of range, or the prompt has no span or one outside
            of it.
        BusyError: Others use the slots.
        HeadFileError: *heads* are of another model.
        KqviewError: As `Engine.generate`.
    """
    whole_number("n", n, low=1, high=len(engine.slots))
    whole_number("max_tokens", max_tokens, low=1)
    check_spans(prompt)
    layers = checked_layers(heads, "grounding", engine) or engine.model.attention_layers
    numbers = checked_numbers(heads, engine.model)
    spans = [*prompt.spans, (len(prompt.ids), None)]
    capture = Capture(layers=layers, heads=numbers, spans=spans)
    return _sentences(engine, prompt, heads, n, max_tokens, sampling, capture)


def _sentences(
    engine: Engine,
    prompt: Prompt,
    heads: HeadFile | None,
    n: int,
    max_tokens: int,
    sampling: Sampling,
    capture: Capture,
) -> Iterator[GroundedSentence]:
    threshold = None if heads is None else heads.thresholds.get("grounded")
    answer: list[int] = []
    kept: int | None = None
    seed = sampling.seed
    if n > 1:  # slots that hold nothing of the prompt would evaluate it once more
        with engine.generate(prompt.ids, max_tokens=1, trace=False) as evaluated:
            next(evaluated)
        kept = evaluated.slot
    while len(answer) < max_tokens:
        slots = [kept]
        if kept is not None and n > 1:
            slots += (one.id for one in engine.branch(kept, n - 1))
        with ExitStack() as stack:
            attempts: list[_Attempt] = []
            for slot in slots:
                options: dict[str, Any] = {"sampling": replace(sampling, seed=seed)}
                generation = engine.generate(
                    [*prompt.ids, *answer], slot=slot, capture=capture, trace=False,
                    max_tokens=max_tokens - len(answer), **options,
                )  # fmt: skip
                attempts.append(_Attempt(stack.enter_context(generation)))
                seed = None if seed is None else (seed + 1) % _N_SEEDS
            running: list[_Attempt] = [*attempts]
            while running:  # a token of each in turn: they share steps
                running = [one for one in running if one.advance(engine)]
        found = [one for one in attempts if one.ids]
        if not attempts[0].ids:
            return
        pairs = pairs_of(capture.layers or (), found[0].rows, capture.heads)
        places = range(len(answer), max_tokens)
        scores = [sentence_score(heads, pairs, prompt, one.sums, places) for one in found]
        best = found[int(np.argmax(scores))]
        text = engine.detokenize(best.ids)
        yield GroundedSentence(
            text, len(answer), len(answer) + len(best.ids), max(scores), threshold
        )
        answer += best.ids
        if best.is_last or len(prompt.ids) + len(answer) > engine.n_ctx:
            return
        kept = best.generation.slot


@dataclass(slots=True)
class _Attempt:
    """A continuation up to the end of its sentence.

    Attributes:
        generation: It.
        ids: Its tokens, without one that ends the text.
        sums: What each looked at: the sources, and the answer so far; ``(n_pairs, 2)``.
        rows: Rows of the first one, by layer.
        is_last: Whether the text ends with it.
    """

    generation: Generation
    ids: list[int] = field(default_factory=list[int])
    sums: list[Floats] = field(default_factory=list[Floats])
    rows: list[Any] = field(default_factory=list[Any])
    is_last: bool = False

    def advance(self, engine: Engine) -> bool:
        """Take a token; False once there is nothing more to take."""
        token: Token | None = next(self.generation, None)
        if token is None or token.id in (engine.model.eos_token_id, engine.model.eot_token_id):
            self.is_last = True
            return False
        self.ids.append(token.id)
        rows = [*token.attention]
        self.sums.append(back_and_new(np.concatenate(rows)))
        if not self.rows:
            self.rows = [one.copy() for one in rows]
        if ends_sentence(engine.token_bytes(token.id)) and engine.detokenize(self.ids).strip():
            self.generation.close()
            return False
        return True
