"""Pairs: how every benchmark of kqview compares two ways of doing the same work.

Alternation and statistics only: pure functions and values, no engine, no output.

A pair is one run of each way, back to back. The order changes from pair to pair, so a drift of the
machine cancels out. The published figure is the median of the ratios (candidate / baseline) with
its upper 95 % bound. The bound is an order statistic: the k-th smallest ratio for the smallest k
with P(Binomial(n, 1/2) < k) >= 0.95. It is exact for any distribution and needs no resampling, but
at least 5 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import comb
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, 0 <= q <= 1, interpolated between the two nearest of *values*."""
    if not values:
        raise ValueError("values is empty; pass at least 1")
    return float(np.quantile(values, q))


def median_upper_bound(values: Sequence[float], confidence: float = 0.95) -> float | None:
    """One-sided upper confidence bound of the median; None if there are too few *values*."""
    n = len(values)
    below = 0.0  # P(fewer than k of n values lie below the median)
    for k in range(1, n + 1):
        below += comb(n, k - 1) / 2**n
        if below >= confidence:
            return sorted(values)[k - 1]
    return None


@dataclass(frozen=True)
class Spread:
    """The 10 %, 50 % and 90 % quantiles of measurements."""

    p10: float
    median: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(quantile(values, 0.1), quantile(values, 0.5), quantile(values, 0.9))

    def __str__(self) -> str:
        digits = 0 if self.median >= 1000 else 2
        return " / ".join(f"{value:,.{digits}f}" for value in (self.p10, self.median, self.p90))


@dataclass
class Pairs:
    """Times of both ways, pair by pair, in milliseconds for the same work."""

    baseline_ms: list[float] = field(default_factory=list[float])
    candidate_ms: list[float] = field(default_factory=list[float])

    def add(self, baseline_ms: float, candidate_ms: float) -> None:
        """Append one pair."""
        self.baseline_ms.append(baseline_ms)
        self.candidate_ms.append(candidate_ms)

    @property
    def ratios(self) -> list[float]:
        """Candidate / baseline of each pair."""
        return [c / b for b, c in zip(self.baseline_ms, self.candidate_ms, strict=True)]

    @property
    def median_ratio(self) -> float:
        """Median of the ratios, which is not the ratio of the medians."""
        return quantile(self.ratios, 0.5)

    @property
    def upper_bound(self) -> float | None:
        """Upper 95 % bound of the median ratio, None with fewer than 5 pairs."""
        return median_upper_bound(self.ratios)


def alternate(
    baseline: Callable[[], float], candidate: Callable[[], float], n_pairs: int
) -> Iterator[tuple[float, float]]:
    """Yield (baseline ms, candidate ms) of *n_pairs* pairs, run in the order A B, B A, A B, ..."""
    ways = {"baseline": baseline, "candidate": candidate}
    for times in rounds(ways, n_pairs):
        yield times["baseline"], times["candidate"]


def rounds(ways: Mapping[str, Callable[[], float]], n_rounds: int) -> Iterator[dict[str, float]]:
    """Yield the results of all *ways* for each round, run in the order A B C, C B A, A B C, ...

    The ways of a round share one run of the baseline, which takes half the time of separate pairs.
    A drift cancels out as in pairs: a way that runs i places after the baseline in one round runs i
    places before it in the next.
    """
    order = list(ways)
    for i in range(n_rounds):
        times = {name: ways[name]() for name in (order if i % 2 == 0 else reversed(order))}
        yield {name: times[name] for name in order}


def step_ms(stamps_s: Sequence[float], n_skip: int = 0) -> float:
    """Median time of a step from the arrival times of tokens, without the first *n_skip* steps."""
    steps = [after - before for before, after in pairwise(stamps_s)]
    return quantile(steps[n_skip:], 0.5) * 1000.0


def mean_step_ms(stamps_s: Sequence[float]) -> float:
    """Mean time of a step over the run, for comparison with tools that time only whole runs."""
    return (stamps_s[-1] - stamps_s[0]) / (len(stamps_s) - 1) * 1000.0
