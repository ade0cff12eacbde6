"""Figures: where matplotlib is imported, and what all pictures share."""

import importlib
from typing import TYPE_CHECKING, Any, Final

from kqview.durable import WholeFile
from kqview.errors import KqviewError

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure

DPI: Final = 150
INK: Final = "#1f2933"  # text
FAINT: Final = "#9aa5b1"  # text of lesser weight, lines


def require_matplotlib(name: str) -> Any:
    """matplotlib.figure, imported for the function or option *name*.

    Raises:
        KqviewError: It is not installed.
    """
    try:
        return importlib.import_module("matplotlib.figure")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "matplotlib":
            raise
        raise KqviewError(
            f'{name}: matplotlib is not installed, pictures need it; run pip install "kqview[viz]"'
        ) from missing


def new_figure(name: str, width: float, height: float) -> "Figure":
    """A figure of *width* x *height* inches for the function *name*.

    It belongs to the caller alone: pyplot, with its list of open figures and its choice of a
    window system, is not involved.

    Raises:
        KqviewError: matplotlib is not installed.
    """
    figure: Figure = require_matplotlib(name).Figure(
        figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white"
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12)  # pyright: ignore
    return figure


def save_figure(figure: "Figure", path: "Path") -> None:
    """Write *figure* to *path*, whose ending says in which format; png without one.

    Raises:
        OSError: *path* cannot be written; what was there before still is.
    """
    with WholeFile(path) as file:
        figure.savefig(file.stream, format=path.suffix[1:] or "png")  # pyright: ignore[reportUnknownMemberType]
