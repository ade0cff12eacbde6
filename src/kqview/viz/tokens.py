"""The text of tokens, coloured by attention: in a notebook, and as a file of its own."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kqview.coloured.html import CELL_BYTES, coloured_html, document
from kqview.durable import write_whole
from kqview.errors import RequestError, shown
from kqview.types import Token
from kqview.types.capture import Kind
from kqview.viz.source import AttentionSource, WeightArray, rows_of

FILE_BYTES: Final = 16 << 20
SUFFIXES: Final = (".html", ".htm")
_TITLE: Final = "What each token looked at"


class ColouredText:
    """Tokens coloured by attention; a notebook shows them. Made by `coloured`.

    Attributes:
        html: What is shown, to be put into a page.
    """

    def __init__(self, html: str) -> None:
        self.html = html

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return f"ColouredText({len(self.html):,} characters of HTML; a notebook shows it)"


def coloured(
    attention: AttentionSource | tuple[WeightArray, ...],
    tokens: Sequence[str | Token] | None = None,
    *,
    kind: Kind | None = None,
    causal: bool = True,
    title: str | None = None,
    max_bytes: int = CELL_BYTES,
) -> ColouredText:
    """Show the text coloured by attention, in a notebook.

    Point at a token, or move to it with the arrow keys, to see what it looked at; choose a layer
    and a head. The result is HTML that loads nothing. Where a page does not run its script, such as
    a notebook that is not trusted, it is a still picture of the mean of all rows and heads.

    Args:
        attention: What to show, as for `heatmap`: tokens, an array of shares from 0 to 1, or what
            has them. Of a Generation the tokens that are left are taken.
        tokens: Texts or Token objects of the context, as for `heatmap`.
        kind: Kind of the values, "probs" or "scores", which go through a softmax; None for that of
            the tokens, "probs" for an array.
        causal: Whether a query of an array sees only itself and the tokens before it.
        title: Heading; None for what it is.
        max_bytes: Bytes that the attention may take. If all heads need more, the largest shares of
            each row are kept, else means of heads or of layers; the page says so. Texts and styles,
            at most about 1 MiB, come on top.

    Raises:
        RequestError: There are no rows, the shape is not supported, values are not from 0 to 1, or
            *tokens* has another length than the context.
        InvalidCapture: The rows have no shares of each token: kind "qk", or ``spans``.
        KqviewError: What taking the rest of a generation raises.
    """
    if max_bytes < 1 << 10:
        raise RequestError(
            f"max_bytes is {max_bytes}; a picture needs 1024 at least", parameter="max_bytes"
        )
    rows, notes = rows_of(attention, tokens, kind, causal=causal)
    title = _TITLE if title is None else title
    return ColouredText(coloured_html(rows, title=title, notes=notes, max_bytes=max_bytes))


def to_html(
    path: str | os.PathLike[str],
    attention: AttentionSource | tuple[WeightArray, ...],
    tokens: Sequence[str | Token] | None = None,
    *,
    kind: Kind | None = None,
    causal: bool = True,
    title: str | None = None,
    max_bytes: int = FILE_BYTES,
) -> Path:
    """Write what `coloured` shows as one file that a browser opens, light or dark.

    The file loads nothing and needs no network. It appears complete or not at all.

    Args:
        path: A file ending in ".html" or ".htm", which is replaced.
        attention: As for `coloured`.
        tokens: As for `coloured`.
        kind: As for `coloured`.
        causal: As for `coloured`.
        title: Heading, and title of the page.
        max_bytes: As for `coloured`.

    Returns:
        The file.

    Raises:
        RequestError: *path* ends differently. Also as for `coloured`.
        InvalidCapture: As for `coloured`.
        OSError: The file cannot be written; an old file stays.
    """
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise RequestError(
            f"path is {shown(os.fspath(path))}; a page needs a name that ends in .html",
            parameter="path",
        )
    page = coloured(attention, tokens, kind=kind, causal=causal, title="", max_bytes=max_bytes)
    write_whole(target, document(page.html, title or _TITLE).encode())
    return target
