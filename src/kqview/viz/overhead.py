"""Overhead plot: what capture costs against the context, from the JSON lines of a sweep."""

# matplotlib's own annotations leave keyword arguments open.
# pyright: reportUnknownMemberType=false

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from kqview.viz.figures import FAINT, INK, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Record = Mapping[str, Any]

# Distinct in hue and in lightness (Okabe and Ito), with a marker each for those who see no hues.
_STYLES: Final = (
    ("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#e69f00", "v"),
    ("#56b4e9", "P"), ("#5b3a8c", "X"), ("#7f7f00", "*"), ("#333333", "<"),
)  # fmt: skip


def overhead_plot(records: Sequence[Record], *, title: str | None = None) -> "Figure":
    """Draw how much dearer a decoded token is with each capture, by context.

    A panel for each setting of flash attention, a line for each capture: the median of the pairs'
    ratios, and a bar up to its upper 95 % bound. The grey band is what two runs without capture
    differ by, where the sweep has measured that. Of several records of a row the last one counts.

    Args:
        records: Lines that ``kqview bench --json`` or ``bench/contexts.py --save`` wrote; those of
            other rows are ignored.
        title: Line above the panels, None for the processor and the commit of the last record.

    Raises:
        ValueError: No record is a row of a sweep.
        KqviewError: matplotlib is not installed.
    """
    rows = list({r["row"]: r for r in records if "capture" in r and "median_ratio" in r}.values())
    if not rows:
        raise ValueError(
            f"overhead_plot: none of {len(records)} records is a row of a sweep; "
            "measure some with kqview bench --json FILE or bench/contexts.py --save"
        )
    settings = sorted({bool(row["flash_attn"]) for row in rows}, reverse=True)
    captures = list(dict.fromkeys(row["capture"] for row in rows if row["capture"] != "off"))
    styles = {name: _STYLES[i % len(_STYLES)] for i, name in enumerate(captures)}
    figure = new_figure("overhead_plot", 1.6 + 4.2 * len(settings), 4.4)
    panels = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for axes, flash_attn in zip(panels, settings, strict=True):
        of_setting = [row for row in rows if bool(row["flash_attn"]) == flash_attn]
        _draw_panel(axes, of_setting, styles)
        state = "on" if flash_attn else "off"
        axes.set_title(f"flash attention {state}", fontsize=10, color=INK, loc="left")
    panels[0].set_ylabel("a decoded token costs more by, %", color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    last = rows[-1]
    about = f"{last.get('cpu', '')}, kqview {last.get('kqview_commit', '')}".strip(", ")
    figure.suptitle(
        title or f"Cost of capture by context\n{about}", fontsize=11, color=INK, x=0.01, ha="left"
    )
    return figure


def _draw_panel(
    axes: "Axes", rows: Sequence[Record], styles: Mapping[str, tuple[str, str]]
) -> None:
    contexts = sorted({row["n_context"] for row in rows})
    places = {n_context: i for i, n_context in enumerate(contexts)}
    noise = sorted((r for r in rows if r["capture"] == "off"), key=lambda r: r["n_context"])
    if noise:
        places_of_noise = [places[row["n_context"]] for row in noise]
        width = [
            max(abs(_percent(row["median_ratio"])), _percent(row["upper_bound"] or 1.0))
            for row in noise
        ]
        axes.fill_between(
            places_of_noise, [-w for w in width], width,
            color="#e4e7eb", linewidth=0, label="no capture, twice", zorder=0,
        )  # fmt: skip
    for i, (name, (colour, marker)) in enumerate(styles.items()):
        line = sorted((r for r in rows if r["capture"] == name), key=lambda r: r["n_context"])
        if not line:
            continue
        # Side by side, so that bars of the same context do not hide each other.
        shift = (i - (len(styles) - 1) / 2) * min(0.06, 0.5 / len(styles))
        medians = [_percent(row["median_ratio"]) for row in line]
        above = [
            max(0.0, _percent(row["upper_bound"] or row["median_ratio"]) - median)
            for row, median in zip(line, medians, strict=True)
        ]
        axes.errorbar(
            [places[row["n_context"]] + shift for row in line], medians,
            yerr=[[0.0] * len(line), above],
            color=colour, marker=marker, markersize=5, linewidth=1.6, elinewidth=1.0,
            capsize=2, label=name,
        )  # fmt: skip
    axes.axhline(0.0, color=FAINT, linewidth=0.8, zorder=1)
    axes.set_xticks(list(places.values()), [f"{n:,}" for n in contexts])
    axes.set_xlim(-0.4, len(contexts) - 0.6)
    axes.set_xlabel("tokens of context", color=INK)
    axes.grid(axis="y", color="#e4e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)


def _percent(ratio: float) -> float:
    return (ratio - 1.0) * 100.0
