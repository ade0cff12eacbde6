"""Write the GPU table into README.md from the JSON lines that ``cuda.sh run`` saved, or print it.

python bench/cuda_table.py bench/results/FILE.jsonl [--flags "--threads 16 ..."] [--print]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from console import show
from cuda import WEIGHTS
from report import from_record, markdown, newest, replace_marked

from kqview.bench.records import read_records

README = Path(__file__).resolve().parent / "README.md"
MARKERS = ("<!-- cuda: begin -->", "<!-- cuda: end -->")


def main() -> None:
    """Take the newest line of each row that has the chosen flags."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, metavar="FILE.jsonl")
    parser.add_argument(
        "--flags", help="take rows with these flags; default: those of the newest row"
    )
    parser.add_argument(
        "--print", action="store_true", dest="is_print", help="print it; README.md stays as it is"
    )
    args = parser.parse_args()
    records = [record for record in read_records(args.source) if record.get("row") in WEIGHTS]
    if not records:
        raise SystemExit(f"bench: {args.source} has no row of bench/cuda.py")
    found, notes = newest(records, args.flags or records[-1]["flags"])
    order = list(WEIGHTS)
    found.sort(key=lambda record: order.index(record["row"]))
    missing = [name for name in WEIGHTS if name not in {record["row"] for record in found}]
    if missing:
        notes.append(f"no row saved: {', '.join(missing)}")
    if args.is_print:
        show([from_record(record) for record in found], notes)
        return
    table = markdown([from_record(record) for record in found], notes, found, "cuda.py")
    README.write_text(replace_marked(README.read_text("utf-8"), table, *MARKERS), encoding="utf-8")
    print(f"wrote {len(found)} rows into README.md")


if __name__ == "__main__":
    main()
