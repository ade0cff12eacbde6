"""Rows: attention of several tokens with the names of its axes, from whatever carries it.

Pictures are drawn from Rows, so that each of them takes tokens, the rows of a prompt, and arrays.
Rows hold views; what they read is not copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kqview.errors import InvalidCapture, RequestError
from kqview.types.capture import RAW_KINDS
from kqview.types.forms import Array, softmax
from kqview.types.token import Attention, Token

KEPT_FORMAT_CHARACTERS: Final = "\u200c\u200d"  # joiners, which scripts and emoji are written with


@dataclass(slots=True, eq=False)
class QueryRow:
    """What one query looked at.

    Attributes:
        layers: ``(n_heads, n_values)`` for each layer.
        n_columns: How many tokens there are before and with the last one that the query sees.
        places: The columns of the values, for each layer; None if there is a value for each column.
        gap: Columns that the context had lost.
    """

    layers: list[Array]
    n_columns: int
    places: list[NDArray[np.integer[Any]]] | None = None
    gap: range = range(0)

    def whole(self, kind: str) -> list[Array]:
        """``(n_heads, n_columns)`` for each layer; where no value is, one that *kind* ignores."""
        if self.places is None and not self.gap:
            return self.layers
        made: list[Array] = []
        for i, layer in enumerate(self.layers):
            empty = 0.0 if kind == "probs" else -np.inf
            whole = np.full((len(layer), self.n_columns), empty, layer.dtype)
            if self.places is None:
                whole[:, : self.gap.start] = layer[:, : self.gap.start]
                whole[:, self.gap.stop :] = layer[:, self.gap.start :]
            else:
                places = self.places[i].astype(np.intp).reshape(layer.shape)
                places += np.where(places < self.gap.start, 0, len(self.gap))
                np.put_along_axis(whole, places, layer, axis=1)
            made.append(whole)
        return made


@dataclass(slots=True, eq=False)
class Rows:
    """Rows of attention in the order of the text.

    Attributes:
        texts: Text of each token of the context, in its order; one more than the longest row has
            columns where that is the token which the row has produced.
        at: For each row, the index into `texts` of the token that it belongs to.
        rows: The rows; all have the same layers and heads.
        n_prompt: How many of the texts are the prompt's; None if the rows are those of a prompt.
        layers: The model's layers, in the order of the values; () if they are not known.
        heads: The heads of each layer, likewise.
        kind: Kind of the values.
        reduce: How the capture has reduced the heads; None if it has not.
        has_spans: Whether the values are sums over spans of columns.
        is_matrix: Whether there are neither layers nor heads to choose from.
    """

    texts: list[str]
    at: list[int]
    rows: list[QueryRow]
    n_prompt: int | None = None
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    kind: str = "probs"
    reduce: str | None = None
    has_spans: bool = False
    is_matrix: bool = False

    @property
    def n_columns(self) -> list[int]:
        """Columns of each row."""
        return [row.n_columns for row in self.rows]

    @property
    def n_heads(self) -> list[int]:
        """Heads of each layer."""
        return [len(layer) for layer in self.rows[0].layers] if self.rows else []

    @property
    def layer_names(self) -> list[int]:
        """A number for each layer of the rows."""
        n = len(self.n_heads)
        return list(self.layers) if len(self.layers) == n else list(range(n))

    def head_names(self, i_layer: int) -> list[int]:
        """A number for each head of the layer at *i_layer*."""
        n = self.n_heads[i_layer]
        return list(self.heads) if len(self.heads) == n else list(range(n))


def rows_of_tokens(tokens: Sequence[Token], n_prompt: int | None = None) -> Rows:
    """The rows of *tokens*, without those that have no attention; their texts, if they know them.

    Args:
        tokens: Tokens of one generation, in its order.
        n_prompt: How many of the texts are the prompt's; None for what the tokens know.

    Raises:
        RequestError: The tokens are of different captures.
    """
    with_rows = [token for token in tokens if token.attention is not None]
    capture = next((t.capture for t in with_rows if t.capture is not None), None)
    rows = [_row_of(token) for token in with_rows]
    if len({tuple(len(layer) for layer in row.layers) for row in rows}) > 1:
        raise RequestError(
            "the tokens have rows of different captures; use tokens of one generation",
            parameter="attention",
        )
    at = [row.n_columns for row in rows]
    is_reduced = capture is not None and capture.reduce is not None
    kept = () if capture is None or is_reduced else tuple(capture.heads or ())
    heads = () if is_reduced or not with_rows else with_rows[0].heads or kept
    context = with_rows[-1]._context if with_rows else None  # pyright: ignore[reportPrivateUsage]
    if n_prompt is None:
        n_prompt = context.n_prompt if context is not None else min(at, default=0)
    return Rows(
        _texts_of(with_rows, at),
        at,
        rows,
        n_prompt,
        with_rows[0].layers if with_rows else (),
        heads,
        "probs" if capture is None else capture.kind,
        None if capture is None else capture.reduce,
        capture is not None and bool(capture.spans),
        bool(with_rows) and getattr(with_rows[0].attention, "ndim", 3) == 1,
    )


def _row_of(token: Token) -> QueryRow:
    """The row of a token."""
    places = token.attention_positions
    layers = layers_of(token.attention)
    n = layers[0].shape[-1]
    if places is not None:
        n = token._n_before - len(token.discarded)  # pyright: ignore[reportPrivateUsage]
        places = layers_of(places)
        n = max(n, 1 + max(int(np.max(place, initial=0)) for place in places))
    return QueryRow(layers, n + len(token.discarded), places, token.discarded)


def layers_of(rows: Any, n_axes: int = 1) -> list[Any]:
    """A row, or one for each query, as its layers, whatever axes a reduction has removed.

    Args:
        rows: As `Token.attention`, or as `PromptBlock.rows`.
        n_axes: Axes behind that of the heads: 1 of a row, 2 of several.
    """
    if isinstance(rows, tuple):
        return [*rows]  # pyright: ignore[reportUnknownVariableType]
    if rows.ndim == n_axes:
        return [rows[None]]
    return [layer[None] for layer in rows] if rows.ndim == n_axes + 1 else list(rows)


def _texts_of(tokens: Sequence[Token], at: Sequence[int]) -> list[str]:
    """The text of each token up to the last of *tokens*; positions where they are not known."""
    if not tokens:
        return []
    last, n = tokens[-1], at[-1]
    context = last._context  # pyright: ignore[reportPrivateUsage]
    if context is not None:
        return context.texts_of((*context.ids[:n], last.id))
    texts = [str(i) for i in range(n + 1)]
    for token, place in zip(tokens, at, strict=True):
        texts[place] = token.text or f"#{token.id}"
    return texts


def rows_of_array(array: Attention, *, kind: str = "probs", causal: bool = True) -> Rows:
    """The rows of the queries of an array, the last ones of the context; its texts are positions.

    Args:
        array: ``(n_query, n_context)``, ``(n_layers, n_heads, n_context)`` for one query, or
            ``(n_layers, n_heads, n_query, n_context)``; or a tuple with an array of the last two
            forms without the first axis for each layer.
        kind: Kind of the values.
        causal: Whether a query sees only itself and the tokens before it.

    Raises:
        RequestError: The shape is another one.
    """
    if isinstance(array, tuple):
        parts = [part[:, None] if part.ndim == 2 else part for part in array]
    elif array.ndim == 2:
        parts = [array[None]]
    elif array.ndim == 3:
        parts = [layer[:, None] for layer in array]
    elif array.ndim == 4:
        parts = list(array)
    else:
        raise RequestError(
            f"attention has shape {array.shape}; pass (n_query, n_context), "
            "(n_layers, n_heads, n_context) or (n_layers, n_heads, n_query, n_context)",
            parameter="attention",
        )
    n_query, n_context = parts[0].shape[-2:]
    if n_query > n_context:
        raise RequestError(
            f"attention has {n_query} queries but only {n_context} tokens; transpose the array",
            parameter="attention",
        )
    at, rows = rows_of_queries(parts, n_context - n_query, causal=causal)
    is_matrix = not isinstance(array, tuple) and array.ndim == 2
    texts = [str(i) for i in range(n_context)]
    return Rows(texts, at, rows, kind=kind, is_matrix=is_matrix)


def rows_of_queries(
    layers: Sequence[Array],
    start: int,
    places: Sequence[NDArray[np.integer[Any]]] | None = None,
    *,
    n_context: int | None = None,
    causal: bool = True,
) -> tuple[list[int], list[QueryRow]]:
    """The rows of consecutive queries of a prompt, and their positions.

    Args:
        layers: ``(n_heads, n_query, n_values)`` for each layer.
        start: Position of the first query.
        places: The columns of the values, likewise; None if there is a value for each column.
        n_context: Columns of each row; None for the last axis of the layers.
        causal: Whether a query sees only itself and the tokens before it.
    """
    n_query = layers[0].shape[1]
    n_all: int = layers[0].shape[-1] if n_context is None else n_context
    at = list(range(start, start + n_query))
    rows: list[QueryRow] = []
    for i, position in enumerate(at):
        n = position + 1 if causal else n_all
        if places is None:
            rows.append(QueryRow([layer[:, i, :n] for layer in layers], n))
        else:
            # What a query does not see has no share, but may fill up the largest ones.
            found = [place[:, i] for place in places]
            rows.append(QueryRow([layer[:, i] for layer in layers], n_all, found))
    return at, rows


def check_shares(rows: Rows) -> None:
    """Refuse rows that are no shares of each token of the context.

    Raises:
        InvalidCapture: They are sums over spans; or products of keys and queries, of which the
            model alone knows the scale.
    """
    if rows.has_spans:
        raise InvalidCapture(
            "spans left the rows without a value per token; capture without spans",
            parameter="attention",
        )
    if rows.kind in RAW_KINDS:
        raise InvalidCapture(
            'values of kind "qk" are not shares of what a token looks at; capture "probs" or '
            '"scores"',
            parameter="attention",
        )


def shares(layers: Sequence[Array], kind: str) -> list[NDArray[np.float32]]:
    """The layers of a whole row as shares of the whole, from 0 to 1.

    Scores go through a softmax, which is what the model does with them unless it has sinks.

    Raises:
        RequestError: A value of kind "probs" is not from 0 to 1.
    """
    exact = [layer.astype(np.float32) for layer in layers]
    if kind == "probs":
        return [_checked(layer) for layer in exact]
    return [softmax(layer).astype(np.float32) for layer in exact]


def _checked(layer: NDArray[np.float32]) -> NDArray[np.float32]:
    least, most = float(layer.min(initial=0.0)), float(layer.max(initial=0.0))
    if not (least >= -_ROUNDED and most <= 1 + _ROUNDED):  # NaN fails too
        raise RequestError(
            f"attention has values from {least:.4g} to {most:.4g}; pass shares from 0 to 1, or "
            'kind="scores" for what goes into a softmax',
            parameter="attention",
        )
    return layer.clip(0.0, 1.0)


def visible(text: str) -> str:
    """A token's text with something to see in it, and nothing that would change what is around."""
    shown = "".join(
        c if c.isprintable() or c in KEPT_FORMAT_CHARACTERS else _SIGNS.get(c) or repr(c)[1:-1]
        for c in text
    )
    return shown or "·"


_ROUNDED: Final = 0.01  # what float16 and sums of shares may be beyond 0 and 1
_SIGNS: Final = {"\n": "↵\n", "\t": "⇥\t"}
