"""Report: rows of the table and facts about the machine, and the forms that they are written in.

Forms: a table on the terminal, JSON lines, Markdown between the markers of README.md.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from kqview import json_input
from kqview.bench.pairs import Pairs, Spread
from kqview.bench.records import CELL_LEGEND, SweepRow, machine_facts, tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from settings import Settings

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Timing:
    """A row of times: *what* against *baseline*, smaller ratios are better."""

    name: str
    what: str
    baseline: str
    work: str  # what a time is the time of
    pairs: Pairs
    target: float | None  # most that the upper bound may be
    command: str

    @property
    def verdict(self) -> str:
        """ "yes", "no" or "" for a row without target; "?" with too few pairs for a bound."""
        if self.target is None:
            return ""
        upper = self.pairs.upper_bound
        if upper is None:
            return "?"
        return "yes" if upper <= self.target else "no"

    def cells(self) -> list[str]:
        """The row as text, in the order of TIMING_COLUMNS."""
        upper = self.pairs.upper_bound
        return [
            self.what,
            str(Spread.of(self.pairs.candidate_ms)),
            self.baseline,
            str(Spread.of(self.pairs.baseline_ms)),
            f"{self.pairs.median_ratio:.3f}",
            "" if upper is None else f"{upper:.3f}",
            str(len(self.pairs.ratios)),
            "" if self.target is None else f"<= {self.target:.3f}",
            self.verdict,
            f"`{self.command}`",
        ]


@dataclass(frozen=True)
class Count:
    """A row of what noise cannot touch, each per decoded token at the named context."""

    name: str
    what: str
    nodes_added: int
    bytes_written: int
    dot_products: int
    instructions: int | None  # None: perf does not count them on this machine
    command: str

    def cells(self) -> list[str]:
        """The row as text, in the order of COUNT_COLUMNS."""
        return [
            self.what,
            f"{self.nodes_added:,}",
            f"{self.bytes_written:,}",
            f"{self.dot_products:,}",
            "not counted" if self.instructions is None else f"{self.instructions:,}",
            f"`{self.command}`",
        ]


@dataclass(frozen=True)
class SoFar:
    """A row whose rounds are not over: saved in case that the run is cut off."""

    row: Timing

    @property
    def name(self) -> str:
        """Name of the row."""
        return self.row.name


TIMING_COLUMNS = (
    "kqview", "ms: p10 / median / p90", "against", "ms: p10 / median / p90", "ratio", "upper 95 %",
    "pairs", "target", "met", "command",
)  # fmt: skip
COUNT_COLUMNS = (
    "capture", "nodes added", "bytes written", "dot products", "instructions", "command",
)  # fmt: skip
Row = Timing | Count | SweepRow


def facts(settings: Settings) -> dict[str, Any]:
    """The machine, the commits and the flags that figures belong to."""
    return {
        **machine_facts(),
        # Where the checkout came without its history, who brought it says which one it is.
        **({"kqview_commit": commit} if (commit := os.environ.get("KQVIEW_BENCH_COMMIT")) else {}),
        **({"build": build} if (build := os.environ.get("KQVIEW_BENCH_BUILD")) else {}),
        "flags": settings.flags,
        "n_context": settings.n_context,
        "is_quick": settings.is_quick,
    }


def to_record(row: Row | SoFar, about: Mapping[str, Any]) -> dict[str, Any]:
    """The row for JSON: the facts, every single time, and what follows from them."""
    if isinstance(row, SoFar):
        return {**to_record(row.row, about), "is_partial": True}
    if isinstance(row, SweepRow):
        return {**about, **row.to_record()}
    record = {"row": row.name, **about, **asdict(row)}
    if isinstance(row, Timing):
        record["median_ratio"] = row.pairs.median_ratio
        record["upper_bound"] = row.pairs.upper_bound
    return record


def from_record(record: Mapping[str, Any]) -> Row:
    """The row that `to_record` made a record of.

    Raises:
        KeyError: It is a record of something else.
    """
    sort = SweepRow if "capture" in record else Timing if "pairs" in record else Count
    values = {field.name: record[field.name] for field in fields(sort)}
    if "pairs" in values:
        values["pairs"] = Pairs(**values["pairs"])
    return sort(**values)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of *path*, oldest first; incomplete lines are skipped.

    Raises:
        OSError: *path* cannot be read.
        ValueError: *path* has no record.
    """
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json_input.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)  # pyright: ignore[reportUnknownArgumentType]
    if not records:
        raise ValueError(f"{path} has no JSON line; pass a file written with --json or --save")
    return records


def save_file(path: Path, about: Mapping[str, Any]) -> Path:
    """The file that ``--save PATH`` means: *path*, or in a folder the file of the day."""
    return path if path.suffix == ".jsonl" else path / f"{about['date'][:10]}.jsonl"


def chosen_name(row: str, names: Iterable[str]) -> str:
    """The one of *names* that *row* was chosen by, "" if none: a sweep's rows begin with it."""
    return max((name for name in names if row.startswith(name)), key=len, default="")


def newest(
    records: Sequence[Mapping[str, Any]], flags: str
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The newest record of each row that was measured with *flags*, and notes on the others.

    Records of another processor than the newest one's are left out as well. Of a row that was
    always cut off it is the record with the most pairs.
    """
    same = [record for record in records if record["flags"] == flags]
    cpu = same[-1]["cpu"] if same else ""
    kept: dict[str, Mapping[str, Any]] = {}
    for record in same:
        if record["cpu"] == cpu and _rank(record) >= _rank(kept.get(record["row"])):
            kept[record["row"]] = record
    notes: list[str] = []
    if cut := [name for name, record in kept.items() if record.get("is_partial")]:
        notes.append(f"cut off before all pairs were measured: {', '.join(cut)}")
    for reason, names in _others(records, flags, cpu, kept).items():
        notes.append(f"saved, but {reason}: {', '.join(names)}")
    return list(kept.values()), notes


def _rank(record: Mapping[str, Any] | None) -> float:
    """Of two records of a row the one of the higher rank counts, of equal ones the newer."""
    if record is None:
        return 0
    return len(record["pairs"]["baseline_ms"]) if record.get("is_partial") else float("inf")


def finished(records: Iterable[Mapping[str, Any]], about: Mapping[str, Any]) -> set[str]:
    """Names of the rows that *records* has complete, of the same build, GPUs and flags."""
    # Where cuda.sh names the build, a change of the benchmarks' files is none of the build.
    build = "build" if "build" in about else "kqview_commit"
    keys = ("flags", "devices", "llama_cpp_commit", build)
    return {
        record["row"]
        for record in records
        if not record.get("is_partial") and all(record.get(key) == about.get(key) for key in keys)
    }


def _others(
    records: Sequence[Mapping[str, Any]], flags: str, cpu: str, kept: Mapping[str, object]
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for record in records:
        if record["row"] in kept:
            continue
        reason = f"with `{record['flags']}`" if record["flags"] != flags else f"on {record['cpu']}"
        names = found.setdefault(reason, [])
        if record["row"] not in names:
            names.append(record["row"])
    return found


def markdown(
    rows: Sequence[Row],
    notes: Sequence[str],
    abouts: Sequence[Mapping[str, Any]],
    script: str = "table.py",
) -> str:
    """The published tables with the machine above and the notes below them.

    Args:
        rows: All rows.
        notes: What is not among them.
        abouts: Facts of the runs that the rows come from, at least one.
        script: The program that measures all of them.
    """
    timings = [row for row in rows if isinstance(row, Timing)]
    counts = [row for row in rows if isinstance(row, Count)]
    parts = [_headline(abouts, script)]
    for work in dict.fromkeys(row.work for row in timings):
        cells = [row.cells() for row in timings if row.work == work]
        parts.append(
            f"**{work[0].upper()}{work[1:]}**\n\n" + _markdown_table(TIMING_COLUMNS, cells)
        )
    for table in tables([row for row in rows if isinstance(row, SweepRow)]):
        flash = "on" if table.flash_attn else "off"
        parts.append(
            f"**A decoded token by context, flash attention {flash}**, {CELL_LEGEND}; "
            "`python bench/contexts.py`\n\n" + _markdown_table(table.columns, table.lines)
        )
    if counts:
        parts.append(
            "**What noise cannot touch**, for each decoded token\n\n"
            + _markdown_table(COUNT_COLUMNS, [row.cells() for row in counts])
        )
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def _headline(abouts: Sequence[Mapping[str, Any]], script: str) -> str:
    last = abouts[-1]
    kqview, llama_cpp = (
        ", ".join(dict.fromkeys(about[key][:12] for about in abouts))
        for key in ("kqview_commit", "llama_cpp_commit")
    )
    dates = sorted(about["date"] for about in abouts)
    date = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    loads = [about["load_average"] for about in abouts if about["load_average"] is not None]
    load = f"at most {max(loads)}" if loads else "unknown"
    devices = "".join(f"{name}, " for name in last.get("devices", ()))
    return (
        f"{devices}{last['cpu']}, {last['n_cores']} cores, {last['machine']} {last['system']}; "
        f"kqview {kqview}, llama.cpp {llama_cpp}; {date}, load average before a run {load}; "
        f"`python bench/{script} {last['flags']}`"
    )


def replace_marked(text: str, replacement: str, begin: str = BEGIN, end: str = END) -> str:
    """*text* with what lies between its two markers replaced.

    Raises:
        ValueError: A marker is missing or they are in the wrong order.
    """
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"report.replace_marked: markers missing; put {begin} and {end} back")
    return f"{before}{begin}\n{replacement}\n{end}{after}"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines)
