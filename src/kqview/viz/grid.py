"""All heads as one figure of small multiples: a square for each head, a row for each layer."""

# matplotlib's own annotations leave keyword arguments open.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kqview.coloured.rows import Rows
from kqview.errors import RequestError
from kqview.types.capture import Kind
from kqview.viz.figures import (
    INK,
    add_colour_bar,
    axes_for,
    check_columns,
    largest_in,
    place_of,
    require_matplotlib,
    scale_of,
)
from kqview.viz.source import AttentionSource, WeightArray, rows_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

N_PIXELS_MAX: Final = 64  # of a side of a square; larger rows are reduced to their largest values
_GAP: Final = 0.08  # between squares, as a part of one
_MAX_INCHES: Final = 14.0
_SQUARE_INCHES: Final = 0.8
_LEAST_LABEL_INCHES: Final = 0.2


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
    return _draw(
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


def _draw(
    picture: NDArray[np.float64],
    layer_names: Sequence[str],
    head_names: Sequence[str],
    kind: str,
    largest: float | None,
    title: str,
    axes: "Axes | None",
) -> "Figure":
    n_layers, n_heads = len(layer_names), len(head_names)
    side = min(_SQUARE_INCHES, _MAX_INCHES / max(n_layers, n_heads))
    step = max(1, round(_LEAST_LABEL_INCHES / side + 0.49))
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
