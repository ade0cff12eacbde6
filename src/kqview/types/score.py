"""Score: log-probabilities and ranks that a model gives the tokens of a text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenScore(Protocol):
    """One token's part of a Score."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top_logprobs(self) -> list[tuple[int, float]]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """The result of `Engine.score` for one text.

    Every array has one entry per token. The first token has no score, because nothing precedes it;
    with ``last``, only the last tokens have one.

    Attributes:
        ids: Ids of the text.
        logprobs: float32 ``(n_tokens,)``: natural logarithm of the probability of each token given
            those before it, before bias, temperature and grammar; NaN without a score.
        ranks: int32 ``(n_tokens,)``: number of tokens that the model ranks higher at that place, 0
            for its first choice; of equally probable tokens the lower id ranks higher. -1 without
            a score.
        top_logprobs: For each token, the most probable ids at its place with their logprobs, best
            first; an empty list without a score. None unless requested.
    """

    ids: list[int]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    top_logprobs: list[list[tuple[int, float]]] | None = None

    @property
    def n_scored(self) -> int:
        """Number of tokens with a score."""
        return int((self.ranks >= 0).sum())

    @property
    def total(self) -> float:
        """Sum of the logprobs: the logprob of the scored tokens as a sequence."""
        return float(self.logprobs[self.ranks >= 0].sum(dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether every scored token is the model's first choice."""
        return not (self.ranks > 0).any()

    @property
    def perplexity(self) -> float:
        """exp of the mean negative logprob, inf beyond a float; NaN if no token has a score."""
        if not self.n_scored:
            return math.nan
        mean = -self.total / self.n_scored
        return math.exp(mean) if mean < 709 else math.inf

    @classmethod
    def empty(cls, ids: Sequence[int], *, has_top: bool) -> "Score":
        """Return a score without values; `set` fills them in."""
        n = len(ids)
        return cls(
            list(ids),
            np.full(n, np.nan, np.float32),
            np.full(n, -1, np.int32),
            [[] for _ in range(n)] if has_top else None,
        )

    def set(self, start: int, scores: Sequence[TokenScore]) -> None:
        """Fill in the scores of tokens, beginning with *start*."""
        end = start + len(scores)
        self.logprobs[start:end] = [one.logprob for one in scores]
        self.ranks[start:end] = [one.rank for one in scores]
        if self.top_logprobs is not None:
            self.top_logprobs[start:end] = [one.top_logprobs for one in scores]

    def __repr__(self) -> str:
        """One line, with counts in place of arrays."""
        return (
            f"Score(n_tokens={len(self.ids)}, n_scored={self.n_scored}, total={self.total:.6g}, "
            f"perplexity={self.perplexity:.6g})"
        )
