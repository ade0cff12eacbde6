"""What an attack reports: how often each outcome came, and what must not have happened."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

N_WRONG_KEPT = 20


@dataclass
class Summary:
    """Outcome of one attack.

    Attributes:
        name: Which attack.
        seed: Repeats it.
        counts: How often each outcome came, such as the name of a typed error.
        figures: Measured values with their unit in the key, such as ``worst_gap_ms``.
        wrong: What must not happen, the first `N_WRONG_KEPT` in words; ``n_wrong`` counts all.
    """

    name: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    n_wrong: int = 0

    def count(self, outcome: str, n: int = 1) -> None:
        """Count one *outcome*."""
        self.counts[outcome] += n

    def fail(self, what: str) -> None:
        """Note that *what* happened, which must not."""
        self.n_wrong += 1
        if len(self.wrong) < N_WRONG_KEPT:
            self.wrong.append(what)

    def __str__(self) -> str:
        lines = [f"{self.name}: seed {self.seed}, {sum(self.counts.values())} attempts"]
        lines += [f"  {n:9d}  {outcome}" for outcome, n in sorted(self.counts.items())]
        lines += [f"  {value:9.1f}  {name}" for name, value in sorted(self.figures.items())]
        lines += [f"  WRONG      {what}" for what in self.wrong]
        if self.n_wrong > len(self.wrong):
            lines.append(f"  WRONG      and {self.n_wrong - len(self.wrong)} more")
        return "\n".join(lines)


def main(run: Callable[[float, int], Summary], argv: list[str] | None = None) -> int:
    """Run one attack from the command line; the exit status is 1 where something was wrong.

    Args:
        run: Takes seconds and a seed.
        argv: Arguments; those of the process when None.
    """
    parser = argparse.ArgumentParser(description=sys.modules[run.__module__].__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    summary = run(given.minutes * 60, given.seed)
    print(summary)
    return 1 if summary.n_wrong else 0
