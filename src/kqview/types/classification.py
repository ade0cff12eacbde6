"""Classification: what a classifier head says of a text."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Classification:
    """The result of `Engine.classify` for one text.

    Attributes:
        label: The label with the highest score.
        score: Its score, 0..1.
        scores: Score of each label, in the order of ``ModelInfo.classifier_labels`` ("LABEL_0" and
            so on where the file names none). Several add up to 1 (softmax); the score of a single
            one, such as a reranker's, is the sigmoid of its value.
        raw: What the head gave, in that order: logits, but of Qwen3 rerankers, to whose graph
            llama.cpp adds a softmax, probabilities.
    """

    label: str
    score: float
    scores: Mapping[str, float]
    raw: tuple[float, ...]
