"""Pruning: which sentences of a prompt could be left out, because no generated token used them.

The score of a sentence is the largest attention that any of its positions got from any generated
token. The attention of a token to a position is the mean of its row's probabilities over layers and
heads (of those that the request keeps; every layer weighs the same). A sentence is prunable if its
score is below the threshold, by default ``1 / n_prompt``: what each position would get if the first
row were uniform.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from msgspec import Struct

from kqview.errors import RequestError
from kqview.server.models.run import AttentionWanted
from kqview.server.web.described import about
from kqview.types.token import Array, Attention


class Sentence(Struct):
    """A range of the prompt whose attention is watched."""

    turn_id: Annotated[int | str, about("The client's; it is returned unchanged.", 1)]
    sentence_id: Annotated[int | str, about("The same.", 2)]
    start: Annotated[int, about("Position in ``input_ids`` where it begins.", 0)]
    end: Annotated[int, about("Position before which it ends.", 5)]


class PrunableSentence(Struct):
    """A sentence that got little attention from the generated tokens."""

    turn_id: Annotated[int | str, about("That of the request.", 1)]
    sentence_id: Annotated[int | str, about("That of the request.", 2)]
    max_attention: Annotated[float, about("The most that it got from a token.", 0.004)]


def check_sentences(
    sentences: Sequence[Sentence], threshold: float | None, n_prompt: int | None
) -> None:
    """Refuse sentences that are not ranges of the prompt.

    Args:
        sentences: The request's.
        threshold: The request's ``prune_below``.
        n_prompt: Length of ``input_ids``, None if the prompt is text.

    Raises:
        RequestError: The message names the field.
    """
    if n_prompt is None:
        raise RequestError(
            "sentences are positions in input_ids, which are missing; "
            "send input_ids in place of prompt"
        )
    if len(sentences) > n_prompt:
        raise RequestError(
            f"there are {len(sentences)} sentences and {n_prompt} positions in input_ids; "
            "send each sentence once"
        )
    for i, sentence in enumerate(sentences):
        if not 0 <= sentence.start < sentence.end <= n_prompt:
            raise RequestError(
                f"sentences[{i}] is {sentence.start} to {sentence.end}, input_ids has "
                f"{n_prompt} positions; start is inclusive, end exclusive and above start"
            )
    if threshold is not None and not 0 <= threshold <= 1:
        raise RequestError(f"prune_below is {threshold}, a share of attention; allowed is 0 to 1")


def watched(shown: AttentionWanted | None) -> AttentionWanted:
    """What to capture so that both *shown* and `mean_row` can be computed from it.

    Raises:
        RequestError: The rows shown are not probabilities, or not of every column.
    """
    if shown is None:
        return AttentionWanted("probs", format="aggregated")
    if shown.kind != "probs":
        raise RequestError(
            f"attention_values is {shown.kind!r}, but sentences need probabilities; ask for 'probs'"
        )
    if shown.spans is not None:
        raise RequestError(
            "attention_spans are sums over ranges, but sentences need every column; leave one out",
            parameter="attention_spans",
        )
    if shown.format == "aggregated" and shown.aggregation in ("max", "last_layer"):
        return replace(shown, format="per_layer", dtype="float32")
    return shown


def reduced(shown: AttentionWanted, captured: AttentionWanted, rows: Attention) -> Attention:
    """Rows as the engine would have reduced them for *shown* alone; see `watched`."""
    if captured.format == shown.format:
        return rows
    layers = tuple(rows)
    if shown.aggregation == "max":
        return np.stack([layer.max(axis=0) for layer in layers]).max(axis=0)
    return layers[-1].mean(axis=0)


def mean_row(captured: AttentionWanted, rows: Attention) -> Array:
    """Mean over layers and heads of a token's rows, shape ``(n_context,)``, float32.

    Args:
        captured: What `watched` returned.
        rows: ``token.attention`` of a generation with it.
    """
    if captured.format == "aggregated" and captured.aggregation == "mean":
        assert isinstance(rows, np.ndarray)
        return rows
    layers = tuple(rows)
    if captured.format in ("per_layer", "viz"):  # heads are still there
        layers = tuple(layer.mean(axis=0, dtype=np.float32) for layer in layers)
    return np.stack(layers).mean(axis=0, dtype=np.float32)


class SentenceScores:
    """Scores of sentences while tokens come; one thread at a time."""

    def __init__(
        self, sentences: Sequence[Sentence], n_prompt: int, threshold: float | None
    ) -> None:
        """Watch *sentences*, which `check_sentences` accepted."""
        self._sentences = sentences
        self._threshold = 1 / n_prompt if threshold is None else threshold
        self._largest = np.zeros(n_prompt, np.float32)
        self._n_rows = 0

    def add(self, row: Array) -> None:
        """Add the `mean_row` of one generated token."""
        self._n_rows += 1
        np.maximum(self._largest, row[: len(self._largest)], out=self._largest)

    def prunable(self) -> list[PrunableSentence]:
        """Sentences below the threshold, the one with the least attention first.

        Empty before the first token, when nothing is known.
        """
        if not self._n_rows:
            return []
        scores = [float(self._largest[one.start : one.end].max()) for one in self._sentences]
        found = [
            PrunableSentence(one.turn_id, one.sentence_id, score)
            for one, score in zip(self._sentences, scores, strict=True)
            if score < self._threshold
        ]
        return sorted(found, key=lambda one: one.max_attention)
