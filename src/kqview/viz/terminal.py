"""Heat map of attention for a terminal, drawn with rich.

Cells are coloured if the terminal has colours, else characters of ``RAMP``. No array is kept.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len, set_cell_size
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

Weights = NDArray[np.floating[Any]]

RAMP: Final = " .:-=+*#%@"
"""Characters for values from 0 to 1, for terminals without colours."""

_MARKS: Final = "abcdefghijkl"
_N_LABEL_CELLS: Final = 14
_PALETTE: Final = ((12, 8, 38), (86, 16, 110), (187, 55, 84), (249, 142, 9), (252, 255, 164))


class TerminalHeatmap:
    """A rich renderable with one line per row and one cell per column.

    Rows grow to the right with the context. If the columns do not all fit, those with the most mass
    are shown, in order. The columns with the most mass get a letter and an entry in the legend.

    Attributes:
        shown: Columns that are drawn, ascending.
    """

    def __init__(
        self,
        rows: Sequence[Weights],
        row_labels: Sequence[str],
        column_labels: Sequence[str],
        *,
        width: int,
    ) -> None:
        """Lay it out.

        Args:
            rows: Probabilities of each token, shape ``(n_context,)``.
            row_labels: Token text of each row.
            column_labels: Token text of each column of the longest row.
            width: Width in cells.

        Raises:
            ValueError: There are fewer labels than rows or columns.
        """
        n_columns = max((len(row) for row in rows), default=0)
        if len(row_labels) < len(rows) or len(column_labels) < n_columns:
            raise ValueError(
                f"{len(row_labels)} row_labels and {len(column_labels)} column_labels for "
                f"{len(rows)} rows and {n_columns} columns; pass a label for each"
            )
        self._n_contexts = [len(row) for row in rows]
        self._weights = np.zeros((len(rows), n_columns))  # 0 beyond a row's context
        for i, row in enumerate(rows):
            self._weights[i, : len(row)] = row
        mass = self._weights.sum(axis=0)
        label_cells = min(_N_LABEL_CELLS, max([1, *(cell_len(label(t)) for t in row_labels)]))
        self._row_labels = [label(text, label_cells) for text in row_labels]
        self._column_labels = [label(text) for text in column_labels]
        n_free = max(1, width - label_cells - 1)
        self._cell = 2 if 2 * n_columns <= n_free else 1  # terminal cells per column
        by_mass = np.argsort(-mass, kind="stable")
        self.shown = [int(column) for column in np.sort(by_mass[: n_free // self._cell])]
        n_marks = min(len(_MARKS), len(self.shown))
        marked = sorted(int(column) for column in by_mass[:n_marks] if mass[column] > 0)
        self._marks = dict(zip(marked, _MARKS, strict=False))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines, coloured if *console* has colours."""
        if not self.shown:
            return
        has_colour = console.color_system is not None and not console.no_color
        margin = " " * (cell_len(self._row_labels[0]) + 1)
        header = "".join(self._marks.get(column, " ").ljust(self._cell) for column in self.shown)
        yield Text(f"{margin}{header.rstrip()}", no_wrap=True)
        for i in range(len(self._n_contexts)):
            yield self._line(i, has_colour)
        yield from self._legend()

    def _line(self, i: int, has_colour: bool) -> Text:
        line = Text(f"{self._row_labels[i]} ", no_wrap=True, end="\n")
        for column in self.shown:
            if column >= self._n_contexts[i]:
                break
            level = float(np.clip(self._weights[i, column], 0.0, 1.0)) ** 0.5
            if has_colour:
                line.append(" " * self._cell, Style(bgcolor=_colour(level)))
            else:
                line.append(RAMP[min(int(level * len(RAMP)), len(RAMP) - 1)] * self._cell)
        return line

    def _legend(self) -> RenderResult:
        n_columns = self._weights.shape[1]
        total = float(self._weights.sum()) or 1.0
        if len(self.shown) < n_columns:
            share = float(self._weights[:, self.shown].sum()) / total
            yield Text(
                f"{len(self.shown)} of {n_columns} context tokens fit; "
                f"they have {share:.0%} of the attention"
            )
        entries = [
            f'{mark} = "{self._column_labels[column]}" at {column} '
            f"({float(self._weights[:, column].sum()) / total:.0%})"
            for column, mark in self._marks.items()
        ]
        yield Columns([Text(entry) for entry in entries], padding=(0, 3))


def _colour(level: float) -> str:
    """Colour of *level*, from 0 (dark) to 1 (bright), in the syntax of rich."""
    position = level * (len(_PALETTE) - 1)
    i, (low, high) = min(enumerate(pairwise(_PALETTE)), key=lambda p: abs(position - p[0] - 0.5))
    part = position - i
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def label(text: str, n_cells: int | None = None) -> str:
    """*text* on one line, with control characters escaped; cut or padded to *n_cells*."""
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return plain if n_cells is None else set_cell_size(plain, n_cells)
