"""Console: the command line around one or more benchmarks, its progress line and its tables."""

from __future__ import annotations

import argparse
import fnmatch
import sys
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from models import NotHere
from processes import end_on_sigterm
from report import (
    COUNT_COLUMNS,
    Count,
    Row,
    SoFar,
    Timing,
    chosen_name,
    facts,
    finished,
    read_records,
    save_file,
    to_record,
)
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from settings import Settings, add_options, settings_of

from kqview.bench.pairs import Pairs, alternate
from kqview.bench.records import (
    CELL_LEGEND,
    LeftOut,
    SweepRow,
    append_record,
    by_reason,
    tables,
)
from kqview.bench.sweep import is_failure

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

    # Rows of one benchmark by name, with the seconds that each takes on two cores.
    Weights = Mapping[str, float]
    Measure = Callable[[Settings, "ProgressLine"], Iterator[Row | SoFar | LeftOut]]
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

    def tick(self, n: int = 1) -> None:
        """*n* parts of the row are done."""
        self._progress.advance(self._task, n * self._step)

    def pairs(
        self, name: str, baseline: Callable[[], float], candidate: Callable[[], float], n_pairs: int
    ) -> Pairs:
        """Measure row *name*: two things in turn, a tick for each pair."""
        self.start(name, n_pairs)
        pairs = Pairs()
        for pair in alternate(baseline, candidate, n_pairs):
            pairs.add(*pair)
            self.tick()
        return pairs


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
    """Rows, and notes that say what is not among them; what is just not there is no failure."""

    rows: list[Row] = field(default_factory=list[Row])
    left_out: list[LeftOut] = field(default_factory=list[LeftOut])

    @property
    def notes(self) -> list[str]:
        """A line for each reason, with the rows that it kept from being measured."""
        found = by_reason(self.left_out).items()
        return [f"not measured: {', '.join(names)}; {reason}" for reason, names in found]

    @property
    def has_failed(self) -> bool:
        """Whether something is broken."""
        return any(row.is_failure for row in self.left_out)


def attempt(name: str, measure: Callable[..., Row], *args: Any) -> Row | LeftOut:
    """The row that *measure* returns; an error of it does not take the rows after it along."""
    try:
        return measure(*args)
    except Exception as error:
        return _left_out(name, error)


def _left_out(name: str, error: Exception) -> LeftOut:
    has_failed = not isinstance(error, NotHere) and is_failure(error)
    if has_failed:
        traceback.print_exc()
    return LeftOut(name, str(error) or type(error).__name__, has_failed)


def collect(
    benchmarks: Sequence[Benchmark], settings: Settings, about: Mapping[str, Any]
) -> Outcome:
    """Measure the chosen rows of all benchmarks; with --save each is on disk when it is done."""
    weights = {
        name: weight
        for rows, _ in benchmarks
        for name, weight in rows.items()
        if settings.chosen([name])
    }
    if not settings.is_quick and settings.device == "cpu":
        minutes = max(1, round(sum(weights.values()) / 60))
        print(f"bench: this takes about {minutes} min on 2 cores with 20 pairs", file=sys.stderr)
    outcome = Outcome()
    with progress_line(weights) as line:
        for rows, measure in benchmarks:
            settled: list[str] = []
            try:
                for row in measure(settings, line):
                    if isinstance(row, SoFar):
                        if settings.save:
                            append_record(save_file(settings.save, about), to_record(row, about))
                        continue
                    settled.append(row.name)
                    if isinstance(row, LeftOut):
                        outcome.left_out.append(row)
                        continue
                    outcome.rows.append(row)
                    if settings.save:
                        append_record(save_file(settings.save, about), to_record(row, about))
            except Exception as error:
                names = settings.chosen(rows)
                done = {chosen_name(row, names) for row in settled}
                outcome.left_out += [_left_out(n, error) for n in names if n not in done]
    return outcome


def show(rows: Sequence[Row], notes: Sequence[str]) -> None:
    """Print the tables to stdout."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    timings = [row for row in rows if isinstance(row, Timing)]
    for work in dict.fromkeys(row.work for row in timings):
        table = Table(title=work)
        table.add_column("row", no_wrap=True)
        for column in (
            "ms: p10 / median / p90", "against", "ratio", "upper 95 %", "pairs", "target", "met",
        ):  # fmt: skip
            table.add_column(column)
        for row in timings:
            if row.work == work:
                _, ours, _, theirs, ratio, upper, n_pairs, target, verdict, _ = row.cells()
                table.add_row(row.name, ours, theirs, ratio, upper, n_pairs, target, verdict)
        console.print(table)
    for sweep in tables([row for row in rows if isinstance(row, SweepRow)]):
        flash = "on" if sweep.flash_attn else "off"
        table = Table(
            *sweep.columns, title=f"a decoded token, flash attention {flash}", caption=CELL_LEGEND
        )
        for cells in sweep.lines:
            table.add_row(*cells)
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
        console.print(note, highlight=False, markup=False)


def chosen_rows(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """The *names* that one of the shell *patterns* matches, in their order.

    Raises:
        SystemExit: A pattern matches none of them; the message says which there are.
    """
    patterns = list(patterns)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise SystemExit(f"bench: no row {pattern!r}; there are {', '.join(names)}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]


def main(question: str | None, weights: Weights, measure: Measure, **defaults: object) -> None:
    """Run one benchmark as a program of its own; *defaults* of options other than the shared."""
    parser = argparse.ArgumentParser(description=question)
    parser.add_argument(
        "--row", action="append", metavar="NAME",
        help="this row only, or those of a pattern such as '*-logits'; may be repeated",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names of the rows; no more")
    parser.add_argument(
        "--missing", action="store_true",
        help="leave out rows that the file of --save has from this build on this machine",
    )  # fmt: skip
    add_options(parser)
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    rows = None if args.row is None else chosen_rows(args.row, weights)
    if args.list:
        print(*(weights if rows is None else rows), sep="\n")
        return
    settings = settings_of(args, rows)
    about = facts(settings)
    if args.missing and settings.save and save_file(settings.save, about).is_file():
        done = finished(read_records(save_file(settings.save, about)), about)
        settings = replace(settings, rows=frozenset(settings.chosen(weights)) - done)
        if not settings.rows:
            print("nothing to measure: every row is saved")
            return
    end_on_sigterm()
    outcome = collect([(weights, measure)], settings, about)
    show(outcome.rows, outcome.notes)
    if settings.save and outcome.rows:
        print(f"saved {save_file(settings.save, about)}")
    if outcome.has_failed or not (outcome.rows or args.missing):
        raise SystemExit(1)
