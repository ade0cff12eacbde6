"""Scores: the guards as functions, each one or two prompts on an engine.

All of them are measures of `kqview.heads.measures`, weighed by a head file, or evenly over all
heads without one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kqview.arguments import whole_number
from kqview.engine import Engine
from kqview.heads import measures
from kqview.heads.file import HeadFile, checked_layers, weighed
from kqview.types.text import Ids


def rerank(
    engine: Engine,
    query: str,
    documents: Sequence[str],
    heads: HeadFile | None = None,
    *,
    permutations: int = 1,
    request_id: str | None = None,
) -> list[float]:
    """Score documents by how much the query attends to them.

    Experimental without a head file, where it does not beat BM25 on SmolLM2, see the page.

    In-context re-ranking (Chen et al., 2410.02642): all documents in one prompt, the attention that
    the query's tokens pay to each, less what a query without content ("N/A") pays. The documents
    are evaluated once for both. Outliers among a document's tokens, which the paper leaves out,
    count here.

    Args:
        engine: An engine whose model generates text.
        query: What is asked.
        documents: Texts. Those that do not fit in one prompt are spread over several, and one that
            does not fit alone is cut into pieces, of which the best counts; a warning is logged.
        heads: A head file for "rerank" or "needle"; None for all heads alike.
        permutations: Orders of the documents, the given one and random ones, over which scores are
            averaged, because places in a prompt count too. Each costs as much as one.
        request_id: Name of its prompts in ``engine.generations``, by which they can be cancelled.

    Returns:
        One score for each document, in their order; higher is better. Scores compare within one
        call only.

    Raises:
        RequestError: The query or a document is empty, or there is none; *permutations* is not a
            whole number of at least 1.
        PromptTooLong: The query leaves no room for documents.
        HeadFileError: *heads* are of another model.
        KqviewError: As `Engine.attend`.
    """
    asked = measures.checked_text("query", query)
    given = measures.checked_texts("documents", documents)
    layers = checked_layers(heads, "rerank", engine)
    n = whole_number("permutations", permutations, low=1)
    scores = np.zeros(len(given))
    for seed in range(n):
        order = list(range(len(given)))
        if seed:
            random.Random(seed).shuffle(order)
        found = measures.rerank(engine, asked, [given[i] for i in order], layers, request_id)
        scores[order] += weighed(heads, "rerank", found.values, found.pairs) / n
    return scores.tolist()


@dataclass(frozen=True, slots=True)
class InjectionScore:
    """Whether data contain orders.

    Attributes:
        score: Higher is more suspicious: 1 less the attention that the instruction still gets.
        threshold: Score from which it counts; None where no head file says.
    """

    score: float
    threshold: float | None = None

    @property
    def is_injected(self) -> bool | None:
        """Whether the score reaches the threshold; None without one."""
        return None if self.threshold is None else self.score >= self.threshold

    def __float__(self) -> float:
        return self.score


def injection_score(
    engine: Engine, instruction: str, data: str, heads: HeadFile | None = None
) -> InjectionScore:
    """Tell, before the first token, whether *data* distract the model from its instruction.

    Experimental: on SmolLM2 it does not beat a list of words, see the page.

    Attention Tracker (Hung et al., 2411.00348): the last token of the prompt attends less to the
    instruction when the data contain another one that the model follows. One prompt, of which one
    row is captured.

    Args:
        engine: An engine whose model generates text.
        instruction: The instruction, the system message of the chat.
        data: What is not trusted, the user's message.
        heads: A head file for "injection"; None for all heads alike, without a threshold.

    Raises:
        RequestError: A text is empty.
        PromptTooLong: They have more tokens than a slot.
        HeadFileError: *heads* are of another model.
        KqviewError: As `Engine.attend`.
    """
    texts = measures.checked_text("instruction", instruction), measures.checked_text("data", data)
    layers = checked_layers(heads, "injection", engine)
    found = measures.injection(engine, *texts, layers)
    return judged_injection(heads, found)


def judged_injection(heads: HeadFile | None, found: measures.Measures) -> InjectionScore:
    """The score of a measured prompt."""
    score = weighed(heads, "injection", found.values, found.pairs)[0]
    threshold = None if heads is None else heads.thresholds.get("injected")
    return InjectionScore(float(score), threshold)


@dataclass(frozen=True, slots=True)
class Citation(measures.Sentence):
    """A sentence of an answer and where it is from.

    Attributes:
        scores: One for each source; higher is more likely.
    """

    scores: tuple[float, ...]

    @property
    def source(self) -> int:
        """Number of the source with the highest score."""
        return max(range(len(self.scores)), key=self.scores.__getitem__)


def cite(
    engine: Engine,
    sources: Sequence[str],
    question: str,
    answer: str | Ids,
    heads: HeadFile | None = None,
) -> list[Citation]:
    """Name the source of each sentence of an answer.

    Experimental: on SmolLM2 it does not beat BM25 where sentences are copied, see the page.

    AT2 (Cohen-Wang et al., 2504.13752): attention of the sentence's tokens to each source, weighed
    by what leaving sources out did to the probability of answers. One prompt.

    Args:
        engine: An engine whose model generates text.
        sources: Texts that the answer may be from, at most 511.
        question: What was asked about them; the prompt is that of `source_prompt`.
        answer: The answer, such as ``generation.tokens``, or its text.
        heads: A head file for "cite" or "needle"; None for all heads alike.

    Returns:
        A Citation for each sentence.

    Raises:
        RequestError: A text is empty, or there is no source.
        PromptTooLong: They have more tokens than a slot; leave sources out, or `rerank` them.
        HeadFileError: *heads* are of another model.
        KqviewError: As `Engine.attend`.
    """
    given = _answered(engine, sources, question, answer)
    layers = checked_layers(heads, "cite", engine)
    return [
        Citation(
            one.text, one.start, one.stop,
            tuple(weighed(heads, "cite", found.values, found.pairs).tolist()),
        )
        for one, found in zip(given.sentences, measures.cite(engine, given, layers), strict=True)
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroundedSentence(measures.Sentence):
    """A sentence of an answer and whether its sources say it.

    Attributes:
        score: With a head file, the probability that it is grounded; without, the mean lookback
            ratio of all heads, from 0 to 1.
        threshold: Score from which it counts as grounded; None where no head file says.
    """

    score: float
    threshold: float | None = None

    @property
    def is_grounded(self) -> bool | None:
        """Whether the score reaches the threshold; None without one."""
        return None if self.threshold is None else self.score >= self.threshold


def grounding(
    engine: Engine,
    sources: Sequence[str],
    question: str,
    answer: str | Ids,
    heads: HeadFile | None = None,
) -> list[GroundedSentence]:
    """Tell of each sentence of an answer whether it is from the sources.

    Experimental: on SmolLM2 it does not beat the answer's log-probability, see the page.

    Lookback Lens (Chuang et al., 2407.07071): how much each head looks at the sources rather than
    at the answer so far, per token, in the mean over the sentence. The paper's context is the whole
    prompt; here it is the sources. One prompt.

    Args:
        engine: An engine whose model generates text.
        sources: Texts that the answer should be from, at most 511.
        question: What was asked about them; the prompt is that of `source_prompt`.
        answer: The answer, such as ``generation.tokens``, or its text.
        heads: A head file for "grounding"; None for all heads alike, without a threshold.

    Returns:
        A GroundedSentence for each sentence.

    Raises:
        RequestError: As for `cite`, like the other errors.
    """
    given = _answered(engine, sources, question, answer)
    layers = checked_layers(heads, "grounding", engine)
    found = measures.grounding(engine, given, layers)
    scores = weighed(heads, "grounding", found.values, found.pairs)
    threshold = None if heads is None else heads.thresholds.get("grounded")
    return [
        GroundedSentence(one.text, one.start, one.stop, float(score), threshold)
        for one, score in zip(given.sentences, scores, strict=True)
    ]


def _answered(
    engine: Engine, sources: Sequence[str], question: str, answer: str | Ids
) -> measures.Answered:
    given = measures.checked_texts("sources", sources)
    return measures.answered(engine, given, measures.checked_text("question", question), answer)
