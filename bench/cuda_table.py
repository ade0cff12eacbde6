"""Write the GPU tables into README.md from the JSON lines that ``cuda.sh`` saved, or print them.

python bench/cuda_table.py FILE.jsonl... [--flags "--threads 16 ..."] [--print]

A table for each machine, that is each GPU and processor: figures of two never stand in one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console import show
from cuda_cost import WEIGHTS
from report import from_record, markdown, newest, read_records, replace_marked

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

README = Path(__file__).resolve().parent / "README.md"
MOST_NAMES = 6  # of rows that are missing
MARKERS = ("<!-- cuda: begin -->", "<!-- cuda: end -->")


def main() -> None:
    """Take the newest line of each row and machine that has the chosen flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, nargs="+", metavar="FILE.jsonl")
    parser.add_argument(
        "--flags", help="take rows with these flags; default: those of a machine's newest row"
    )
    parser.add_argument(
        "--print", action="store_true", dest="is_print", help="print it; README.md stays as it is"
    )
    args = parser.parse_args()
    machines = by_machine(record for path in args.source for record in read_records(path))
    if not machines:
        names = ", ".join(map(str, args.source))
        raise SystemExit(f"bench: no row of bench/cuda_cost.py in {names}")
    tables = [table for records in machines if (table := _newest(records, args.flags))[0]]
    if not tables:
        raise SystemExit(f"bench: no row with the flags {args.flags}")
    if args.is_print:
        for found, notes in tables:
            if len(tables) > 1:
                print(machine_name(found[0]))
            show([from_record(record) for record in found], notes)
        return
    text = "\n\n".join(
        markdown([from_record(record) for record in found], notes, found, "cuda_cost.py")
        for found, notes in tables
    )
    README.write_text(replace_marked(README.read_text("utf-8"), text, *MARKERS), encoding="utf-8")
    n_rows = sum(len(found) for found, _ in tables)
    print(f"wrote {n_rows} rows into README.md")


def machine_name(record: Mapping[str, Any]) -> str:
    """The GPUs and the processor of a record."""
    return ", ".join([*record.get("devices", ()), record["cpu"]])


def by_machine(records: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rows of bench/cuda_cost.py, oldest first, in a list for each machine.

    A row that several files have is one: calls carry the rows of earlier ones along.
    """
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record.get("date", "")):
        if record.get("row") in WEIGHTS:
            of_machine = found.setdefault(machine_name(record), [])
            if record not in of_machine:
                of_machine.append(record)
    return list(found.values())


def _newest(
    records: list[Mapping[str, Any]], flags: str | None
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The rows of a machine in the order of bench/cuda_cost.py, and notes."""
    found, notes = newest(records, flags or records[-1]["flags"])
    found.sort(key=lambda record: list(WEIGHTS).index(record["row"]))
    missing = [name for name in WEIGHTS if name not in {record["row"] for record in found}]
    if missing:
        more = f" and {len(missing) - MOST_NAMES} more" if len(missing) > MOST_NAMES else ""
        notes.append(f"no row saved: {', '.join(missing[:MOST_NAMES])}{more}")
    return found, notes


if __name__ == "__main__":
    main()
