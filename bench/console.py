"""Console: the command line around one or more benchmarks, its progress line and its tables."""

from __future__ import annotations

import argparse
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from harness import Spread
from models import PeersMissing
from report import COUNT_COLUMNS, Count, Row, Timing, append_json, facts
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from settings import Settings, add_options, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    # Rows of one benchmark by name, with the seconds that each takes on two cores.
    Weights = Mapping[str, float]
    Measure = Callable[[Settings, "ProgressLine"], Iterator[Row]]
    Benchmark = tuple[Weights, Measure]


class ProgressLine:
    """One line on a terminal: what is measured, how much is done, the time left. Else nothing."""

    def __init__(self, progress: Progress, weights: Weights) -> None:
        self._progress = progress
        self._weights = weights
        self._task = progress.add_task("", total=sum(weights.values()))
        self._step = 0.0
        self._done = 0.0

    def start(self, name: str, n_ticks: int) -> None:
        """Row *name* begins and will tick *n_ticks* times."""
        self._progress.update(self._task, description=name, completed=self._done)
        self._step = self._weights[name] / n_ticks
        self._done += self._weights[name]

    def tick(self) -> None:
        """A part of the row is done."""
        self._progress.advance(self._task, self._step)


@contextmanager
def progress_line(weights: Weights) -> Generator[ProgressLine]:
    """A progress line on stderr for the rows of *weights*."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield ProgressLine(progress, weights)


@dataclass
class Outcome:
    """Rows, and notes that say what is not among them; a missing stock program is no failure."""

    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])
    has_failed: bool = False


def collect(benchmarks: Sequence[Benchmark], settings: Settings) -> Outcome:
    """Measure the chosen rows of all benchmarks; one that fails does not take the others along."""
    weights = {
        name: weight
        for rows, _ in benchmarks
        for name, weight in rows.items()
        if settings.chosen([name])
    }
    outcome = Outcome()
    with progress_line(weights) as line:
        for rows, measure in benchmarks:
            try:
                for row in measure(settings, line):
                    outcome.rows.append(row)
            except Exception as error:
                names = {row.name for row in outcome.rows}
                left_out = ", ".join(name for name in settings.chosen(rows) if name not in names)
                outcome.notes.append(f"not measured: {left_out}; {error}")
                if not isinstance(error, PeersMissing):
                    outcome.has_failed = True
                    traceback.print_exc()
    return outcome


def show(rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Print the tables to stdout."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    timings = [row for row in rows if isinstance(row, Timing)]
    for work in dict.fromkeys(row.work for row in timings):
        table = Table(title=work)
        table.add_column("row", no_wrap=True)
        for column in ("ms: p10 / median / p90", "against", "ratio", "upper 95 %", "target", "met"):
            table.add_column(column)
        for row in timings:
            if row.work == work:
                _, ours, _, theirs, ratio, upper, _, target, verdict, _ = row.cells(Spread)
                table.add_row(row.name, ours, theirs, ratio, upper, target, verdict)
        console.print(table)
    counts = [row for row in rows if isinstance(row, Count)]
    if counts:
        table = Table(title="what noise cannot touch, for each token")
        table.add_column("row", no_wrap=True)
        for column in COUNT_COLUMNS[1:-1]:
            table.add_column(column)
        for row in counts:
            table.add_row(row.name, *row.cells()[1:-1])
        console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def main(question: str | None, weights: Weights, measure: Measure) -> None:
    """Run one benchmark as a program of its own."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument(
        "--row", action="append", choices=list(weights), help="this row only; may be repeated"
    )
    add_options(parser)
    args = parser.parse_args()
    settings = settings_of(args, args.row)
    about = facts(settings)
    outcome = collect([(weights, measure)], settings)
    show(outcome.rows, outcome.notes)
    if settings.save and outcome.rows:
        print(f"saved {append_json(settings.save, outcome.rows, about)}")
    if outcome.has_failed or not outcome.rows:
        raise SystemExit(1)
