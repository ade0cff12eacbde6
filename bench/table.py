"""The table of README.md: what do capture and our loop cost, compared with the targets?

Runs every benchmark that has no table of its own and rewrites the table between its markers; with
--quick it only prints. With --from it measures nothing and takes the newest saved row of each name
with the same flags, so rows may come from several runs, even an interrupted one. Every row names
the command that measures it. With --of it is one benchmark, or the few of a name in TABLES, with a
table of its own in README.md: rows of one table come from one machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import alone
import contexts
import counts
import curve
import decode
import embed
import engines
import eval_callback
import extract
import gaps
import hf
import kernel
import long_slots
import loop
import mods
import opening
import prefill
import reuse
import score
import server
import server_peers
import session_return
import slots
import slow_readers
import speculation
import state
import state_http
import wheel
from console import collect, show
from processes import end_on_sigterm
from report import (
    chosen_name,
    facts,
    from_record,
    markdown,
    newest,
    read_records,
    replace_marked,
    save_file,
)
from settings import add_options, settings_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from report import Row

README = Path(__file__).resolve().parent / "README.md"
BENCHMARKS = {
    module.__name__: (module.WEIGHTS, module.measure)
    for module in (
        decode,
        prefill,
        loop,
        slots,
        long_slots,
        opening,
        wheel,
        gaps,
        speculation,
        mods,
        embed,
        engines,
        eval_callback,
        hf,
        contexts,
        kernel,
        curve,
        alone,
        state,
        state_http,
        reuse,
        score,
        extract,
        session_return,
        server,
        server_peers,
        slow_readers,
        counts,
    )
}
# Several benchmarks that share a table of their own.
TABLES = {
    "basics": ("decode", "prefill", "loop", "slots", "counts"),
    "attention": ("kernel", "alone", "long_slots", "score", "eval_callback"),
}


def main() -> None:
    """Measure everything or read it, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--no-write", action="store_true", help="leave README.md as it is")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE.jsonl",
        help="measure nothing, take the rows that --save has kept with the same flags",
    )  # fmt: skip
    parser.add_argument(
        "--of", choices=sorted({*BENCHMARKS, *TABLES}),
        help="this benchmark alone, or those that share a table: "
        + "; ".join(f"{name} is {', '.join(of)}" for name, of in TABLES.items()),
    )  # fmt: skip
    args = parser.parse_args()
    settings = settings_of(args)
    names = TABLES.get(args.of, (args.of,)) if args.of else without_table()
    benchmarks = [BENCHMARKS[name] for name in names]
    has_failed = False
    if args.source:
        row_names = [name for weights, _ in benchmarks for name in weights]
        rows, notes, abouts = saved(read_records(args.source), settings.flags, row_names)
    else:
        about = facts(settings)
        end_on_sigterm()
        outcome = collect(benchmarks, settings, about)
        rows, notes, abouts = outcome.rows, outcome.notes, [about]
        has_failed = outcome.has_failed
        if settings.save:
            print(f"saved {save_file(settings.save, about)}")
    show(rows, notes)
    if not settings.is_quick and not args.no_write:
        table = markdown(rows, notes, abouts)
        markers = (f"<!-- {args.of}: begin -->", f"<!-- {args.of}: end -->") if args.of else ()
        text = replace_marked(README.read_text("utf-8"), table, *markers)
        README.write_text(text, encoding="utf-8")
        print("wrote the table in README.md")
    if has_failed:
        raise SystemExit(1)


def without_table() -> list[str]:
    """Benchmarks that have no table of their own in README.md."""
    in_tables = {name for names in TABLES.values() for name in names}
    text = README.read_text("utf-8")
    return [
        name
        for name in BENCHMARKS
        if name not in in_tables and f"<!-- {name}: begin -->" not in text
    ]


def saved(
    records: Sequence[Mapping[str, Any]], flags: str, names: Sequence[str]
) -> tuple[list[Row], list[str], list[Mapping[str, Any]]]:
    """Rows of *names* with *flags*, in this order; notes on what is missing; the rows' facts."""
    records = [record for record in records if chosen_name(record["row"], names)]
    found, notes = newest(records, flags)
    if not found:
        known = ", ".join(f"`{words}`" for words in dict.fromkeys(r["flags"] for r in records))
        raise SystemExit(
            f"bench: none of these rows was saved with `{flags}`; there are some with {known}"
        )
    chosen_by = {record["row"]: chosen_name(record["row"], names) for record in found}
    place = {name: i for i, name in enumerate(names)}
    found.sort(key=lambda record: place.get(chosen_by[record["row"]], len(names)))
    missing = [name for name in names if name not in chosen_by.values()]
    if missing:
        notes.append(f"no row saved: {', '.join(missing)}")
    return [from_record(record) for record in found], notes, found


if __name__ == "__main__":
    main()
