"""Report: rows of the table, the machine they come from, and the forms both leave in.

Forms: a table on the terminal, JSON lines, Markdown between the markers of README.md.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness import Pairs, Spread
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

    def cells(self, spread: type[Spread]) -> list[str]:
        """The row as text, in the order of TIMING_COLUMNS."""
        upper = self.pairs.upper_bound
        return [
            self.what,
            str(spread.of(self.pairs.candidate_ms)),
            self.baseline,
            str(spread.of(self.pairs.baseline_ms)),
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


TIMING_COLUMNS = (
    "kqview", "ms: p10 / median / p90", "against", "ms: p10 / median / p90", "ratio", "upper 95 %",
    "pairs", "target", "met", "command",
)  # fmt: skip
COUNT_COLUMNS = (
    "capture", "nodes added", "bytes written", "dot products", "instructions", "command",
)  # fmt: skip
Row = Timing | Count


def facts(settings: Settings) -> dict[str, Any]:
    """The machine, the commits and the flags that figures belong to."""
    import kqview
    from kqview import _core

    build = _core.build_info()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": _cpu_name(),
        "n_cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "kqview": kqview.__version__,
        "kqview_commit": _commit(),
        "llama_cpp_commit": build["llama_cpp_commit"],
        "flags": settings.flags,
        "n_context": settings.n_context,
        "is_quick": settings.is_quick,
    }


def as_json(row: Row, about: dict[str, Any]) -> str:
    """One line of JSON: the facts, the row with every single time, and what follows from them."""
    data: dict[str, Any] = {"row": row.name, **about, **asdict(row)}
    if isinstance(row, Timing):
        data["median_ratio"] = row.pairs.median_ratio
        data["upper_bound"] = row.pairs.upper_bound
    return json.dumps(data)


def append_json(path: Path, rows: Sequence[Row], about: dict[str, Any]) -> Path:
    """Append the rows to *path*; in a folder to a file of the day. Returns the file."""
    if path.suffix != ".jsonl":
        path = path / f"{about['date'][:10]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(as_json(row, about) + "\n" for row in rows)
    return path


def markdown(
    rows: Sequence[Row], notes: Sequence[str], about: dict[str, Any], spread: type[Spread]
) -> str:
    """The published tables with the machine above and the notes below them."""
    timings = [row for row in rows if isinstance(row, Timing)]
    counts = [row for row in rows if isinstance(row, Count)]
    parts = [
        f"{about['cpu']}, {about['n_cores']} cores, {about['machine']} {about['system']}; "
        f"kqview {about['kqview_commit']}, llama.cpp {about['llama_cpp_commit'][:12]}; "
        f"{about['date']}, load average before the run {about['load_average']}; "
        f"`python bench/table.py {about['flags']}`, {about['n_context']} tokens of context"
    ]
    for work in dict.fromkeys(row.work for row in timings):
        cells = [row.cells(spread) for row in timings if row.work == work]
        parts.append(
            f"**{work[0].upper()}{work[1:]}**\n\n" + _markdown_table(TIMING_COLUMNS, cells)
        )
    if counts:
        parts.append(
            "**What noise cannot touch**, for each decoded token\n\n"
            + _markdown_table(COUNT_COLUMNS, [row.cells() for row in counts])
        )
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join(parts)


def replace_marked(text: str, replacement: str) -> str:
    """*text* with what lies between its two markers replaced.

    Raises:
        ValueError: A marker is missing or they are in the wrong order.
    """
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not found_begin or not found_end:
        raise ValueError(f"report.replace_marked: markers missing; put {BEGIN} and {END} back")
    return f"{before}{BEGIN}\n{replacement}\n{END}{after}"


def _markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (columns, *rows)]
    lines.insert(1, "|" + "---|" * len(columns))
    return "\n".join(lines)


def _cpu_name() -> str:
    """The processor's name, with family, model and vectors: virtual machines may hide it."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or "unknown processor"
    name = fields.get("model name") or platform.processor() or "unknown processor"
    flags = fields.get("flags", "").split()
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), "")
    family, model = fields.get("cpu family"), fields.get("model")
    return name + (f" (family {family}, model {model}, {widest})" if family and widest else "")


def _commit() -> str:
    """Commit of this checkout, with "-dirty" where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"
