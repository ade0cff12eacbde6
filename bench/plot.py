"""Plot saved rows: the cost of capture by context, or the time of a token by context.

python bench/plot.py bench/results/2026-11-20.jsonl --out bench/results/contexts.png
python bench/plot.py bench/results/2026-11-22.jsonl --of curve --out bench/results/curve.png
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import curve
from report import read_records

from kqview.bench.pairs import Spread
from kqview.viz import overhead_plot
from kqview.viz.figures import FAINT, INK, new_figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

# way of curve.WAYS -> (colour, line, marker)
_STYLES = {
    "stock": ("#9aa5b1", "-", "o"),
    "plain": ("#52606d", "--", "s"),
    "ours": ("#0b69a3", "-", "^"),
    "logits": ("#c65d21", "-", "D"),
}


def curve_plot(records: Sequence[Mapping[str, Any]], *, title: str | None = None) -> Figure:
    """Draw the milliseconds of a decoded token over the context, a line for each way.

    A marker is the median of the runs, its bar goes from the 10 % to the 90 % quantile.

    Args:
        records: Lines that ``bench/curve.py --save`` wrote; those of other rows are ignored, and
            the last one of a row counts.
        title: Title; None for the work, the processor and the commit of the last record.

    Raises:
        ValueError: No record is a row of curve.py.
        KqviewError: matplotlib is not installed.
    """
    rows = {record["row"]: record for record in records if record.get("row") in curve.CASES}
    if not rows:
        raise ValueError(
            f"none of {len(records)} records is a row of bench/curve.py; write some with --save"
        )
    times: dict[str, dict[int, Spread]] = {way: {} for way in curve.WAYS}
    for name, row in rows.items():
        n_context, way = curve.CASES[name]
        times[way][n_context] = Spread.of(row["pairs"]["candidate_ms"])
        times[curve.BASELINE][n_context] = Spread.of(row["pairs"]["baseline_ms"])
    figure = new_figure("curve_plot", 7.6, 4.4)
    axes = figure.subplots()
    for way, (_, _, text) in curve.WAYS.items():
        found = sorted(times[way].items())
        medians = [spread.median for _, spread in found]
        colour, line, marker = _STYLES[way]
        axes.errorbar(
            [n_context for n_context, _ in found], medians,
            yerr=[
                [spread.median - spread.p10 for _, spread in found],
                [spread.p90 - spread.median for _, spread in found],
            ],
            color=colour, linestyle=line, marker=marker, markersize=5, linewidth=1.8,
            elinewidth=1.0, capsize=2, label=text,
        )  # fmt: skip
    contexts = sorted({n_context for by_context in times.values() for n_context in by_context})
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{n_context:,}" for n_context in contexts])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of context", color=INK)
    axes.set_ylabel("ms a token", color=INK)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(FAINT)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    last = list(rows.values())[-1]
    about = f"{last['work']}\n{last['cpu']}, kqview {last['kqview_commit'][:12]}"
    figure.suptitle(
        title or about[0].upper() + about[1:], fontsize=11, color=INK, x=0.01, ha="left"
    )
    return figure


PLOTS = {"contexts": overhead_plot, "curve": curve_plot}


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="FILE.jsonl", help="rows to plot")
    parser.add_argument(
        "--of", choices=PLOTS, default="contexts", help="the benchmark that wrote the rows"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE.png", help="picture to write"
    )
    parser.add_argument("--title", help="title of the picture; default: processor and commit")
    args = parser.parse_args()
    PLOTS[args.of](read_records(args.source), title=args.title).savefig(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
