"""The first table: what does capture cost, and what does our loop cost, against the targets?

Runs every benchmark and rewrites the table in README.md between its markers; with --quick it prints
only. Every row names the command that measures it alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import counts
import decode
import eval_callback
import loop
import prefill
from console import collect, show
from harness import Spread
from report import append_json, facts, markdown, replace_marked
from settings import add_options, settings_of

README = Path(__file__).resolve().parent / "README.md"
BENCHMARKS = [
    (module.WEIGHTS, module.measure) for module in (counts, decode, prefill, loop, eval_callback)
]


def main() -> None:
    """Measure everything, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--no-write", action="store_true", help="leave README.md as it is")
    args = parser.parse_args()
    settings = settings_of(args)
    about = facts(settings)
    outcome = collect(BENCHMARKS, settings)
    show(outcome.rows, outcome.notes)
    if settings.save:
        print(f"saved {append_json(settings.save, outcome.rows, about)}")
    if not settings.is_quick and not args.no_write:
        table = markdown(outcome.rows, outcome.notes, about, Spread)
        README.write_text(replace_marked(README.read_text("utf-8"), table), encoding="utf-8")
        print("wrote the table in README.md")
    if outcome.has_failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
