"""Results of a sweep as values, JSON lines and tables, and the machine facts that go with them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kqview import __version__, system_info
from kqview.bench.pairs import Pairs, Spread
from kqview.durable import append_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CELL_LEGEND: Final = "% more than without capture: median (upper 95 % bound)"

OFF: Final = "off"
"""Name of the run without capture; as a row of its own it shows the noise."""


@dataclass(frozen=True)
class LeftOut:
    """A row that was not measured, and why."""

    name: str
    reason: str
    is_failure: bool = False  # an error, not a limit of this build, model or machine


def by_reason(left_out: Iterable[LeftOut]) -> dict[str, list[str]]:
    """Names of the rows that were not measured, by reason."""
    names: dict[str, list[str]] = {}
    for row in left_out:
        names.setdefault(row.reason, []).append(row.name)
    return names


@dataclass(frozen=True)
class SweepRow:
    """A decoded token with a capture against one without, at one context.

    Attributes:
        capture: Name of the capture, a key of `sweep.captures`, or `OFF`.
        flash_attn: Whether flash attention was on.
        n_context: Number of tokens before the first decoded one.
        bytes_per_token: Size of the captured rows of one token.
        pairs: Times of both.
    """

    capture: str
    flash_attn: bool
    n_context: int
    bytes_per_token: int
    pairs: Pairs

    @property
    def name(self) -> str:
        """Name of the row, equal for equal work."""
        return row_name(self.capture, self.n_context, flash_attn=self.flash_attn)

    def to_record(self) -> dict[str, Any]:
        """The row for JSON, with all times and the statistics derived from them."""
        record = {"row": self.name, **asdict(self)}
        record["median_ratio"] = self.pairs.median_ratio
        record["upper_bound"] = self.pairs.upper_bound
        return record


def row_name(capture: str, n_context: int, *, flash_attn: bool) -> str:
    """Name of the row with these settings."""
    return f"context-{n_context}-{'flash' if flash_attn else 'plain'}-{capture}"


@dataclass(frozen=True)
class SweepTable:
    """Rows of one setting of flash attention as text: a line per capture, a column per context."""

    flash_attn: bool
    columns: list[str]
    lines: list[list[str]]


def tables(rows: Sequence[SweepRow]) -> list[SweepTable]:
    """Arrange *rows* in tables; captures and settings keep their order.

    A cell is `overhead`. The first line has the median times without capture of each column.
    """
    found: list[SweepTable] = []
    for flash_attn in dict.fromkeys(row.flash_attn for row in rows):
        of_setting = [row for row in rows if row.flash_attn == flash_attn]
        contexts = sorted({row.n_context for row in of_setting})
        lines = [["none: ms a token", "", *(_baseline(of_setting, c) for c in contexts)]]
        for capture in dict.fromkeys(row.capture for row in of_setting):
            by_context = {row.n_context: row for row in of_setting if row.capture == capture}
            largest = by_context[max(by_context)]
            lines.append(
                [
                    "none, once more" if capture == OFF else capture,
                    byte_text(largest.bytes_per_token),
                    *(overhead(by_context[c].pairs) if c in by_context else "" for c in contexts),
                ]
            )
        columns = ["capture", "bytes a token", *(f"{c:,} tokens" for c in contexts)]
        found.append(SweepTable(flash_attn, columns, lines))
    return found


def overhead(pairs: Pairs) -> str:
    """Extra time of the candidate in percent: the median, and its upper 95 % bound in brackets."""
    upper = pairs.upper_bound
    bound = "" if upper is None else f" ({(upper - 1) * 100:+.1f})"
    return f"{(pairs.median_ratio - 1) * 100:+.1f}{bound}"


def byte_text(n_bytes: int) -> str:
    """A readable number of bytes."""
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes} B" if n_bytes else ""


def _baseline(rows: Iterable[SweepRow], n_context: int) -> str:
    times_ms = [ms for r in rows if r.n_context == n_context for ms in r.pairs.baseline_ms]
    return f"{Spread.of(times_ms).median:.2f}"


# ---- JSON lines


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line to *path* and sync it, so an interrupted run keeps its rows.

    Raises:
        OSError: *path* cannot be written; it stays as it was.
        ValueError: *record* has a value that JSON cannot express.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(record, allow_nan=False))


# ---- facts


_PACKAGE: Final = Path(__file__).resolve().parents[1]


def machine_facts() -> dict[str, Any]:
    """The facts needed to interpret a time.

    Keys: date (UTC, ISO 8601), machine, system, cpu, n_cores, devices (without the CPU),
    nvidia_driver (or None), load_average (of the last minute), kqview, kqview_commit,
    llama_cpp_commit.
    """
    build = system_info()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": cpu_name(),
        "n_cores": os.cpu_count(),
        "devices": [d["description"] for d in build["devices"] if d["type"] != "CPU"],
        "nvidia_driver": build["nvidia_driver"],
        "load_average": round(os.getloadavg()[0], 2),
        "kqview": __version__,
        "kqview_commit": _commit(),
        "llama_cpp_commit": build["llama_cpp_commit"],
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the CPU with family, model and vector set, as virtual machines may hide the name."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
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
    """Commit of this package's checkout, with "-dirty" if files differ from it.

    An installed package may lie inside another repository, which must not count.
    """
    root = _PACKAGE.parents[1]
    if _PACKAGE.parent.name != "src" or not (root / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"
