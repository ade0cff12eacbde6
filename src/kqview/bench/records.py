"""Records: what a sweep found, as values, JSON lines and the cells of a table; and the facts about
the machine and the commits that the figures belong to.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kqview import __version__, _core
from kqview.bench.pairs import Pairs, Spread
from kqview.state.durable import append_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

CELL_LEGEND: Final = "% more than without capture: median (upper 95 % bound)"

OFF: Final = "off"
"""Name of the way that captures nothing; as a row of its own it shows what the noise is worth."""


@dataclass(frozen=True)
class LeftOut:
    """A row that was not measured, and why."""

    name: str
    reason: str
    is_failure: bool = False  # not just a thing that this build, model or machine does not have


def by_reason(left_out: Iterable[LeftOut]) -> dict[str, list[str]]:
    """Names of the rows that each reason kept from being measured."""
    names: dict[str, list[str]] = {}
    for row in left_out:
        names.setdefault(row.reason, []).append(row.name)
    return names


@dataclass(frozen=True)
class SweepRow:
    """A decoded token with a capture against one without, at one context.

    Attributes:
        capture: Name of the way to capture, a key of `sweep.captures`, or `OFF`.
        flash_attn: Whether flash attention was on.
        n_context: Tokens before the first one that was decoded.
        bytes_per_token: Bytes that the capture hands out for one token.
        pairs: Times of both.
    """

    capture: str
    flash_attn: bool
    n_context: int
    bytes_per_token: int
    pairs: Pairs

    @property
    def name(self) -> str:
        """Name of the row, the same for the same piece of work."""
        return row_name(self.capture, self.n_context, flash_attn=self.flash_attn)

    def to_record(self) -> dict[str, Any]:
        """The row for JSON, with every single time and what follows from them."""
        record = {"row": self.name, **asdict(self)}
        record["median_ratio"] = self.pairs.median_ratio
        record["upper_bound"] = self.pairs.upper_bound
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> SweepRow | None:
        """The row of a record, None where it is one of another sort."""
        if "capture" not in record or "pairs" not in record:
            return None
        return cls(
            record["capture"], record["flash_attn"], record["n_context"],
            record["bytes_per_token"], Pairs(**record["pairs"]),
        )  # fmt: skip


def row_name(capture: str, n_context: int, *, flash_attn: bool) -> str:
    """Name of a row before it is measured."""
    return f"context-{n_context}-{'flash' if flash_attn else 'plain'}-{capture}"


@dataclass(frozen=True)
class SweepTable:
    """Rows of one setting of flash attention as text: a line a capture, a column a context."""

    flash_attn: bool
    columns: list[str]
    lines: list[list[str]]


def tables(rows: Sequence[SweepRow]) -> list[SweepTable]:
    """Arrange *rows*; captures and settings keep the order in which they come.

    A cell is `overhead`. The first line has the times without capture: median of all runs of a
    column.
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
    """What the candidate costs more, in percent: median, and in brackets the upper 95 % bound."""
    upper = pairs.upper_bound
    bound = "" if upper is None else f" ({(upper - 1) * 100:+.1f})"
    return f"{(pairs.median_ratio - 1) * 100:+.1f}{bound}"


def byte_text(n_bytes: int) -> str:
    """Bytes as a person reads them."""
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes} B" if n_bytes else ""


def _baseline(rows: Iterable[SweepRow], n_context: int) -> str:
    times_ms = [ms for r in rows if r.n_context == n_context for ms in r.pairs.baseline_ms]
    return f"{Spread.of(times_ms).median:.2f}"


# ---- JSON lines


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line to *path*, on the disk when this returns; a run that is stopped keeps it.

    Raises:
        OSError: *path* cannot be written; it is as it was.
        ValueError: *record* holds what JSON does not know.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, json.dumps(record, allow_nan=False))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of *path*, oldest first; lines that were cut short are left out.

    Raises:
        OSError: *path* cannot be read.
        ValueError: It holds no record at all.
    """
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict):
            records.append(record)  # pyright: ignore[reportUnknownArgumentType]
    if not records:
        raise ValueError(f"{path} has no line of JSON; name a file that --save wrote")
    return records


# ---- facts


_PACKAGE: Final = Path(__file__).resolve().parents[1]


def machine_facts() -> dict[str, Any]:
    """What has to be known to read a time.

    Keys: date (UTC, ISO 8601), machine, system, cpu, n_cores, devices (other than the CPU),
    nvidia_driver (None without one), load_average (of the minute before, None where the system has
    none), kqview, kqview_commit, llama_cpp_commit.
    """
    build = _core.build_info()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": cpu_name(),
        "n_cores": os.cpu_count(),
        "devices": [d["description"] for d in build["devices"] if d["type"] != "CPU"],
        "nvidia_driver": build["nvidia_driver"],
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "kqview": __version__,
        "kqview_commit": _commit(),
        "llama_cpp_commit": build["llama_cpp_commit"],
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, with family, model and vectors: virtual machines may hide it."""
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
    """Commit of the checkout that the package lies in, "-dirty" where files differ from it.

    An installed package may lie inside somebody else's repository, which is not asked.
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
