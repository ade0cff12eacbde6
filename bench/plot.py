"""Plot the cost of capture by context from rows that `bench/contexts.py --save` wrote.

python bench/plot.py bench/results/2026-11-20.jsonl --out bench/results/contexts.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kqview.bench.records import read_records
from kqview.viz import overhead_plot


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, metavar="FILE.jsonl", help="rows to plot")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.png", help="picture to write"
    )
    parser.add_argument("--title", help="title of the picture; default: processor and commit")
    args = parser.parse_args()
    overhead_plot(read_records(args.source), title=args.title).savefig(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
