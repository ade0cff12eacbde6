"""Figures by matplotlib: one head as a heat map, all heads as a grid, the cost of captures."""

# matplotlib's own annotations leave keyword arguments open.
# pyright: reportUnknownMemberType=false

import io
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kqview.arguments import invalid, to_index
from kqview.coloured.rows import Rows
from kqview.durable import WholeFile
from kqview.errors import InvalidCapture, RequestError, shown
from kqview.extras import needed
from kqview.types import Token
from kqview.types.capture import Kind
from kqview.viz.source import AttentionSource, WeightArray, probabilities, rows_of, select_head

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI: Final = 150
INK: Final = "#1f2933"  # text
FAINT: Final = "#9aa5b1"  # secondary text, lines


def require_matplotlib(name: str) -> Any:
    """Import matplotlib.figure for the function or option *name*.

    Raises:
        KqviewError: matplotlib is not installed.
    """
    return needed("matplotlib.figure", f"{name} needs", 'run pip install "kqview[viz]"')


def new_figure(name: str, width: float, height: float) -> "Figure":
    """A figure of *width* x *height* inches for the function *name*.

    It belongs to the caller alone: pyplot, with its list of open figures and its window system, is
    not involved.

    Raises:
        KqviewError: matplotlib is not installed.
    """
    figure: Figure = require_matplotlib(name).Figure(
        figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white"
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12)  # pyright: ignore
    figure._repr_png_ = partial(_to_png, figure)  # pyright: ignore[reportAttributeAccessIssue]
    return figure


def _to_png(figure: "Figure") -> bytes:
    """The picture as a notebook shows it, whatever its backend."""
    with io.BytesIO() as stream:
        figure.savefig(stream, format="png")
        return stream.getvalue()


def save_figure(figure: "Figure", path: "Path") -> None:
    """Write *figure* to *path*, in the format of its suffix; PNG without one.

    Raises:
        OSError: *path* cannot be written; an old file stays.
    """
    with WholeFile(path) as file:
        figure.savefig(file.stream, format=path.suffix[1:] or "png")  # pyright: ignore[reportUnknownMemberType]


# ---- heat map


_WHITE_TO_DARK: Final = ("#ffffff", "#d3e4f3", "#85bcdc", "#3181bd", "#0a4a90", "#08274f")
_BEYOND: Final = "#f0f1f3"  # cells of tokens that a query does not see
_GRID: Final = "#e4e7eb"
_N_LABEL_CHARACTERS: Final = 14
_MAX_INCHES: Final = 15.0  # of all cells; larger pictures get smaller cells
_CELL_INCHES: Final = 0.22
_LEAST_LABEL_INCHES: Final = 0.12  # smaller cells share a label


def heatmap(
    attention: AttentionSource | tuple[WeightArray, ...],
    tokens: Sequence[str | Token] | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    kind: Kind | None = None,
    causal: bool = True,
    hide_first: bool = False,
    title: str | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw one head: a row for each query, a column for each token before it.

    The figure belongs to the caller: ``heatmap(...).savefig("head.png")``; a notebook shows it. The
    values are copied; no view is kept.

    Args:
        attention: Tokens of a generation; those without attention are skipped. Or a Generation,
            whose remaining tokens are taken; the result of `Engine.attend` or `Engine.map`, or a
            `Saved`. Or an array of shape ``(n_query, n_context)``,
            ``(n_layers, n_heads, n_context)`` (one token) or
            ``(n_layers, n_heads, n_query, n_context)``, whose queries are the last n_query of the
            n_context tokens; or an object whose ``array()`` returns such an array.
        tokens: Texts or Token objects of the context, from its first token on. None takes the texts
            that tokens and the result of `Engine.attend` bring, and shows positions for an array.
            If the generated tokens of a generation are omitted, their own texts are taken.
        layer: The model's layer, negative ones counted from the last captured one; for an array, an
            index into its first axis. None chooses the sharpest head, as `kqview demo` does.
        head: The model's head, or an index likewise; None chooses the sharpest.
        kind: Kind of the values; None for that of the tokens, "probs" for an array. "probs" are
            drawn from white at 0 to dark at the largest value, other kinds from blue over white at
            0 to red.
        causal: Whether a query of an array sees only itself and the tokens before it; other cells
            stay empty.
        hide_first: Leave the first column empty and out of the colour scale. Idle heads put their
            mass there, which makes all others pale.
        title: Title of the picture; None for the layer and head.
        ax: Axes to draw into, at their size, instead of into a new figure.

    Raises:
        RequestError: The shape is not supported, there is nothing to draw, or *tokens* is not of
            the length of the context.
        InvalidCapture: ``top_k`` or ``spans`` left the rows without a value per token, or *layer*
            or *head* was not captured or is out of range.
        KqviewError: matplotlib is not installed.
    """
    require_matplotlib("heatmap")
    rows, _ = rows_of(attention, tokens, kind, causal=causal)
    check_columns(rows)
    heading = ""
    i_layer, i_head = 0, 0
    if rows.is_matrix:
        if layer is not None or head is not None:
            raise RequestError(
                "layer or head is given, but the rows have neither; omit both", parameter="layer"
            )
    else:
        n_heads: Sequence[int] = rows.n_heads
        if layer is not None:
            layer = place_of("layer", layer, rows.layers, len(n_heads))
            n_heads = (n_heads[layer],)
        if head is not None:
            head = place_of("head", head, rows.heads, min(n_heads))
        i_layer, i_head = _choose(rows, layer, head)
        names = rows.layer_names[i_layer], rows.head_names(i_layer)[i_head]
        heading = f"layer {names[0]}, " + (rows.reduce or f"head {names[1]}")
    values = np.full((len(rows.rows), max(rows.n_columns)), np.nan)
    for i, row in enumerate(rows.rows):
        values[i, : row.n_columns] = row.whole(rows.kind)[i_layer][i_head]
    if hide_first:
        values[:, 0] = np.nan
    texts = [_text(text) for text in rows.texts]
    if title is None:
        what = "query" if rows.n_prompt is None else "generated token"
        title = f"{heading}: " if heading else ""
        title += f"each row is a {what}, each column a token before it"
    return _draw_heatmap(
        values,
        [texts[at] for at in rows.at],
        texts[: values.shape[1]],
        rows.kind,
        title,
        rows.n_prompt,
        ax,
    )


def check_columns(rows: Rows) -> None:
    """Refuse rows without a value for each token.

    Raises:
        InvalidCapture: ``top_k`` or ``spans`` left them so.
    """
    short = "spans" if rows.has_spans else "top_k" if rows.rows[0].places is not None else None
    if short is not None:
        raise InvalidCapture(
            f"{short} left the rows without a value per token; capture without {short}",
            parameter="attention",
        )


def place_of(name: str, wanted: object, captured: tuple[int, ...], n: int) -> int:
    """The index of the model's layer or head *wanted* in rows with *n* of them.

    Raises:
        InvalidCapture: It was not captured, or is out of range.
        RequestError: It is no whole number.
    """
    index = to_index(wanted)
    if index is None:
        raise invalid(name, f"the index of a {name}", shown(wanted))
    if -n <= index < 0:
        return index + n
    if captured and index not in captured:
        raise InvalidCapture(
            f"{name} {index} was not captured; there are {list(captured)}", parameter=name
        )
    place = captured.index(index) if captured else index
    if not 0 <= place < n:
        raise InvalidCapture(f"{name} {index} is out of range; there are {n}", parameter=name)
    return place


def _choose(rows: Rows, layer: int | None, head: int | None) -> tuple[int, int]:
    if layer is not None and head is not None:
        return layer, head
    # Good enough for a choice: the scale of the model, which logits lack, hardly changes it.
    softened = "probs" if rows.kind == "probs" else "scores"
    return select_head(
        [
            [probabilities(heads, softened, 1.0) for heads in row.whole(rows.kind)]
            for row in rows.rows
        ],
        layer=layer,
        head=head,
    )


def _text(text: str) -> str:
    """The label of a token: one short line, without the space before a word."""
    shown = text.strip(" ") or "␣"
    shown = shown.replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)
    if len(shown) > _N_LABEL_CHARACTERS:
        shown = shown[: _N_LABEL_CHARACTERS - 1] + "…"
    return shown


def _draw_heatmap(
    values: NDArray[np.float64],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    kind: str,
    title: str,
    n_prompt: int | None,
    axes: "Axes | None",
) -> "Figure":
    n_rows, n_columns = values.shape
    cell = min(_CELL_INCHES, _MAX_INCHES / max(n_rows, n_columns))
    step = max(1, math.ceil(_LEAST_LABEL_INCHES / cell))
    size = float(np.clip(cell * step * 72 * 0.62, 5.0, 9.0))
    has_parts = n_prompt is not None and n_prompt < n_columns
    height = _label_inches(column_labels, size) + (0.78 if has_parts else 0.6)
    figure, axes = axes_for(
        "heatmap",
        title,
        axes,
        max(4.5, cell * n_columns + _label_inches(row_labels, size) + 1.3),
        max(1.8, cell * n_rows + height),
    )
    image = axes.imshow(
        np.ma.masked_invalid(values),
        interpolation="nearest",
        aspect="equal",
        **scale_of(kind, largest_in(values) or 1.0),  # all zeros are drawn white
    )
    # Token texts are not formulas: "$x$" is literal.
    text: dict[str, Any] = {"fontsize": size, "color": INK, "parse_math": False}
    axes.set_xticks(range(0, n_columns, step), column_labels[::step], rotation=90, **text)
    axes.set_yticks(range(0, n_rows, step), row_labels[::step], **text)
    axes.tick_params(length=0, pad=3)
    axes.set_xticks([i - 0.5 for i in range(n_columns + 1)], minor=True)
    axes.set_yticks([i - 0.5 for i in range(n_rows + 1)], minor=True)
    axes.grid(which="minor", color=_GRID, linewidth=min(0.5, cell * 2.5))
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if n_prompt is not None and has_parts:
        axes.axvline(n_prompt - 0.5, color=FAINT, linewidth=1.0)
        for place, part in ((-0.5, "prompt"), (n_prompt - 0.5, "generated")):
            axes.text(place, -0.75, part, fontsize=8, color=FAINT, va="bottom")
    axes.set_anchor("NW")
    add_colour_bar(figure, axes, image, kind, shrink=0.9)
    return figure


def _label_inches(labels: Sequence[str], size: float) -> float:
    return 0.1 + max(map(len, labels)) * size * 0.62 / 72


def scale_of(kind: str, largest: float) -> dict[str, Any]:
    """Colours of values of *kind* up to *largest*: from white at 0, or from blue to red."""
    from matplotlib import colormaps
    from matplotlib.colors import LinearSegmentedColormap

    is_probs = kind == "probs"
    colours = (
        LinearSegmentedColormap.from_list("kqview", _WHITE_TO_DARK)
        if is_probs
        else colormaps["RdBu_r"]
    )
    least = 0.0 if is_probs else -largest
    return {"cmap": colours.with_extremes(bad=_BEYOND), "vmin": least, "vmax": largest}


def largest_in(values: NDArray[Any]) -> float:
    """The largest magnitude; 0 without a finite value."""
    finite = values[np.isfinite(values)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def axes_for(
    name: str, title: str, axes: "Axes | None", width: float, height: float
) -> "tuple[Figure, Axes]":
    """*axes* with *title*, or those of a new figure for the function *name*."""
    text: dict[str, Any] = {"fontsize": 10, "color": INK, "parse_math": False}
    if axes is not None:
        axes.set_title(title, loc="left", **text)
        return cast("Figure", axes.figure), axes
    figure = new_figure(name, width, height)
    # Not the title of the axes: a small picture is narrower than its title.
    figure.suptitle(title, x=0.01, ha="left", **text)
    return figure, figure.add_subplot()


def add_colour_bar(figure: "Figure", axes: "Axes", image: Any, kind: str, **options: Any) -> None:
    """Draw the scale of *image*, values of *kind*, beside *axes*."""
    bar = figure.colorbar(image, ax=axes, fraction=0.03, pad=0.01, aspect=18, **options)
    bar.set_label("probability" if kind == "probs" else kind, fontsize=8.5, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK, length=2, labelfontfamily="sans-serif")
    bar.outline.set_visible(False)  # pyright: ignore


# ---- grid: a square for each head, a row for each layer


N_PIXELS_MAX: Final = 64  # of a side of a square; larger rows are reduced to their largest values
_GAP: Final = 0.08  # between squares, as a part of one
_MAX_GRID_INCHES: Final = 14.0
_SQUARE_INCHES: Final = 0.8
_LEAST_STEP_INCHES: Final = 0.2


def head_grid(
    attention: AttentionSource | tuple[WeightArray, ...],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    kind: Kind | None = None,
    causal: bool = True,
    hide_first: bool = True,
    shared_scale: bool = False,
    title: str | None = None,
    ax: "Axes | None" = None,
) -> "Figure":
    """Draw all heads at once, to find those worth a `heatmap`.

    A square is one head: a row for each query or generated token, from top to bottom, a column for
    each token before it. More rows or columns than 64 are reduced to their largest values, so that
    lines stay visible. The figure belongs to the caller, as that of `heatmap`.

    Args:
        attention: As for `heatmap`.
        layers: The model's layers to draw, in this order; None for all that were captured. For an
            array, indices into its first axis.
        heads: The heads to draw, likewise.
        kind: As for `heatmap`.
        causal: As for `heatmap`.
        hide_first: Leave the first column empty and out of the colour scales. Idle heads put their
            mass there, which makes all others pale.
        shared_scale: Whether one scale, drawn beside the squares, holds for all. Otherwise each
            square goes from white to dark at its own largest value, and squares compare in their
            pattern alone.
        title: Title of the picture; None for what a square is.
        ax: Axes to draw into, at their size, instead of into a new figure.

    Raises:
        RequestError: The shape is not supported, there is nothing to draw, or there are no heads to
            choose from.
        InvalidCapture: ``top_k`` or ``spans`` left the rows without a value per token, or a layer
            or head was not captured or is out of range.
        KqviewError: matplotlib is not installed.
    """
    require_matplotlib("head_grid")
    rows, _ = rows_of(attention, None, kind, causal=causal)
    check_columns(rows)
    if rows.is_matrix:
        raise RequestError(
            "attention is one matrix without layers and heads; use heatmap", parameter="attention"
        )
    i_layers = _places("layer", layers, rows.layers, len(rows.n_heads))
    i_heads = _places("head", heads, rows.heads, max(rows.n_heads[i] for i in i_layers))
    found = _squares(rows, hide_first)
    squares = [[found[i][j] if j < rows.n_heads[i] else None for j in i_heads] for i in i_layers]
    largest = max(largest_in(one) for line in squares for one in line if one is not None)
    picture = _picture(squares, rows.kind, largest if shared_scale else None)
    most_heads = max(i_layers, key=lambda i: rows.n_heads[i])
    head_names = rows.head_names(most_heads)
    if title is None:
        what = "query" if rows.n_prompt is None else "generated token"
        title = f"Each square is a head: a row for each {what}, a column for each token before it"
    return _draw_grid(
        picture,
        [str(rows.layer_names[i]) for i in i_layers],
        [rows.reduce or str(head_names[j]) for j in i_heads],
        rows.kind,
        largest if shared_scale else None,
        title,
        ax,
    )


def _places(
    name: str, wanted: Sequence[int] | None, captured: tuple[int, ...], n: int
) -> list[int]:
    """The indices of the model's layers or heads *wanted* in rows with *n* of them."""
    if wanted is None:
        return list(range(n))
    places = [place_of(name, one, captured, n) for one in wanted]
    if not places:
        raise RequestError(f"{name}s is empty; name one, or omit it", parameter=f"{name}s")
    return places


def _squares(rows: Rows, hide_first: bool) -> list[NDArray[np.float32]]:
    """The heads of each layer, ``(n_heads, n_lines, n_columns)``; NaN where nothing is seen.

    Lines and columns are `N_PIXELS_MAX` at most.
    """
    n_rows, n_columns = len(rows.rows), max(rows.n_columns)
    n_high, n_wide = min(n_rows, N_PIXELS_MAX), min(n_columns, N_PIXELS_MAX)
    squares = [np.full((n, n_high, n_wide), np.nan, np.float32) for n in rows.n_heads]
    starts = -(-np.arange(n_wide) * n_columns // n_wide)  # the first column of each pixel
    for i, row in enumerate(rows.rows):
        for square, layer in zip(squares, row.whole(rows.kind), strict=True):
            values = np.where(np.isneginf(layer), np.nan, layer).astype(np.float32)
            if hide_first:
                values[:, 0] = np.nan
            begins = starts[starts < values.shape[1]]
            line = square[:, i * n_high // n_rows, : len(begins)]
            np.fmax(line, np.fmax.reduceat(values, begins, axis=1), out=line)
    return squares


def _picture(
    squares: Sequence[Sequence[NDArray[np.float32] | None]], kind: str, largest: float | None
) -> NDArray[np.float64]:
    """The squares as one picture of colours, ``(height, width, 4)``; clear between them."""
    high, wide = next(one.shape for line in squares for one in line if one is not None)
    gap_high, gap_wide = (max(1, round(_GAP * n)) for n in (high, wide))
    step_high, step_wide = high + gap_high, wide + gap_wide
    picture = np.zeros((len(squares) * step_high, len(squares[0]) * step_wide, 4))
    colours = scale_of(kind, 1.0)["cmap"]
    for i, line in enumerate(squares):
        for j, square in enumerate(line):
            if square is None:
                continue
            scale = (largest_in(square) if largest is None else largest) or 1.0
            parts = square / scale if kind == "probs" else (square / scale + 1) / 2
            top, left = i * step_high + gap_high // 2, j * step_wide + gap_wide // 2
            picture[top : top + high, left : left + wide] = colours(np.ma.masked_invalid(parts))
    return picture


def _draw_grid(
    picture: NDArray[np.float64],
    layer_names: Sequence[str],
    head_names: Sequence[str],
    kind: str,
    largest: float | None,
    title: str,
    axes: "Axes | None",
) -> "Figure":
    n_layers, n_heads = len(layer_names), len(head_names)
    side = min(_SQUARE_INCHES, _MAX_GRID_INCHES / max(n_layers, n_heads))
    step = max(1, round(_LEAST_STEP_INCHES / side + 0.49))
    width = max(4.5, side * n_heads + 1.0 + (largest is not None))
    figure, axes = axes_for("head_grid", title, axes, width, side * n_layers + 1)
    axes.imshow(picture, interpolation="nearest", aspect="equal", extent=(0, n_heads, n_layers, 0))
    text: dict[str, Any] = {"fontsize": 8.5, "color": INK}
    axes.set_xticks([i + 0.5 for i in range(0, n_heads, step)], head_names[::step], **text)
    axes.set_yticks([i + 0.5 for i in range(0, n_layers, step)], layer_names[::step], **text)
    axes.set_xlabel("head", fontsize=9, color=INK)
    axes.set_ylabel("layer", fontsize=9, color=INK)
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0, pad=3, top=False, labeltop=True, bottom=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_anchor("NW")
    if largest is not None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        scale = scale_of(kind, largest)
        norm = Normalize(scale["vmin"], scale["vmax"])
        add_colour_bar(figure, axes, ScalarMappable(norm, scale["cmap"]), kind)
    return figure


# ---- overhead plot


Record = Mapping[str, Any]

# Distinct in hue and lightness (Okabe and Ito), each with its own marker for the colour-blind.
_STYLES: Final = (
    ("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"), ("#e69f00", "v"),
    ("#56b4e9", "P"), ("#5b3a8c", "X"), ("#7f7f00", "*"), ("#333333", "<"),
)  # fmt: skip


def overhead_plot(records: Sequence[Record], *, title: str | None = None) -> "Figure":
    """Draw the extra time per decoded token of each capture, by context.

    One panel per setting of flash attention, one line per capture: the median ratio of the pairs,
    and a bar up to its upper 95 % bound. The grey band is the difference between two runs without
    capture, if the sweep measured it. The last of several records of a row counts.

    Args:
        records: Lines from ``kqview bench --json`` or ``bench/contexts.py --save``; records of
            other rows are ignored.
        title: Title above the panels; None for the processor and commit of the last record.

    Raises:
        ValueError: No record is a row of a sweep.
        KqviewError: matplotlib is not installed.
    """
    rows = list({r["row"]: r for r in records if "capture" in r and "median_ratio" in r}.values())
    if not rows:
        raise ValueError(
            f"none of {len(records)} records is a row of a sweep; "
            "write some with kqview bench --json FILE or bench/contexts.py --save"
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
    panels[0].set_ylabel("extra time per decoded token, %", color=INK)
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
        # Side by side, so that bars of one context do not cover each other.
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
