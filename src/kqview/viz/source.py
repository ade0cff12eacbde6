"""What a picture is drawn from: the rows of anything that carries attention, and one head of them.

Loads no drawing library.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kqview.coloured.rows import Rows, rows_of_array, rows_of_tokens
from kqview.errors import RequestError, shown
from kqview.generation.stream import (
    Generation,
    PromptAttention,
    rows_of_generation,
    rows_of_prompt,
)
from kqview.types import Finished, Token
from kqview.types.capture import RAW_KINDS, Kind
from kqview.types.forms import softmax
from kqview.types.token import Attention

WeightArray = NDArray[np.floating[Any]]


class HasArray(Protocol):
    """Anything with an array of attention, such as `PromptAttention`.

    If it has ``column_texts``, these are the labels.
    """

    def array(self) -> Attention:
        """``(n_layers, n_heads, n_query, n_context)``, or a tuple of layers."""
        ...


class HasTokens(Protocol):
    """Anything that makes tokens, such as `kqview.Saved`."""

    def tokens(self) -> Sequence[Token]:
        """The tokens of a generation, in its order."""
        ...


AttentionSource = (
    Generation | PromptAttention | Finished | HasTokens | HasArray | Sequence[Token] | WeightArray
)


def rows_of(
    attention: "AttentionSource | tuple[WeightArray, ...]",
    tokens: Sequence[str | Token] | None = None,
    kind: Kind | None = None,
    *,
    causal: bool = True,
) -> tuple[Rows, list[str]]:
    """The rows of *attention*, and what is to be said about those that are missing.

    Takes what is left of a Generation; of a PromptAttention if no rows of it are held.

    Args:
        attention: What carries the attention; see `kqview.viz.heatmap`.
        tokens: Texts or Token objects of the context; see there.
        kind: Kind of the values; None for what is known of them, "probs" for an array.
        causal: Whether a query of an array sees only itself and the tokens before it.

    Raises:
        RequestError: There are no rows, the shape is not supported, or *tokens* has another length
            than the context.
        KqviewError: What taking the rest of a generation raises.
    """
    texts = None if tokens is None else [_text_of(token) for token in tokens]
    notes: list[str] = []
    if isinstance(attention, Generation):
        rows, notes = rows_of_generation(attention)
    elif isinstance(attention, PromptAttention):
        rows = rows_of_prompt(attention)
    elif isinstance(attention, Finished):
        rows = rows_of_tokens(attention.tokens)
    elif isinstance(attention, np.ndarray) or (
        isinstance(attention, tuple) and attention and isinstance(attention[0], np.ndarray)
    ):
        rows = rows_of_array(cast("Attention", attention), kind=kind or "probs", causal=causal)
    elif isinstance(attention, Sequence):
        rows = rows_of_tokens(_tokens_in(attention))
    elif hasattr(attention, "array"):
        source = cast("HasArray", attention)
        texts = texts if texts is not None else getattr(source, "column_texts", None)
        rows = rows_of_array(source.array(), kind=kind or "probs", causal=causal)
    elif callable(getattr(attention, "tokens", None)):
        rows = rows_of_tokens(cast("HasTokens", attention).tokens())
    else:
        raise RequestError(
            f"attention is {shown(attention)}; pass tokens, a generation, the result of attend, or "
            "an array",
            parameter="attention",
        )
    if not rows.rows or not max(rows.n_columns):
        raise RequestError(
            "attention has no rows; generate with capture='probs', and keep the tokens",
            parameter="attention",
        )
    rows.kind = kind or rows.kind
    if texts is not None and not rows.has_spans:
        n, n_known = len(texts), len(rows.texts)
        is_all = isinstance(attention, Generation | PromptAttention)
        # Of tokens, those of the prompt are enough, as the others know theirs.
        least = n_known if is_all or rows.n_prompt is None else min(rows.at)
        if not least <= n <= n_known:
            there = f"the rows have {max(rows.n_columns)} columns"
            if is_all:
                there = f"but there are {n_known} tokens"
            raise RequestError(
                f"tokens has {n} texts, {there}; pass a text for each, or leave tokens out",
                parameter="tokens",
            )
        rows.texts = [*texts, *rows.texts[n:]]
    return rows, notes


def _text_of(token: str | Token) -> str:
    return token if isinstance(token, str) else (token.text or f"#{token.id}")


def _tokens_in(attention: Sequence[Any]) -> list[Token]:
    for one in attention:
        if not isinstance(one, Token):
            raise RequestError(
                f"attention has {shown(one)} in it; pass a list of tokens, or an array",
                parameter="attention",
            )
    return list(attention)


# ---- one head

N_LATEST: Final = 4
"""Columns at the end of a row that `select_head` ignores: the query and the three before it."""


def select_head(
    rows: Sequence[WeightArray | Sequence[WeightArray]],
    *,
    layer: int | None = None,
    head: int | None = None,
) -> tuple[int, int]:
    """Choose the sharpest head: the one that attends most to one token, neither first nor recent.

    The score of a head is the mean over the rows of its largest weight, without the first column
    (where idle heads put their mass) and the last ``N_LATEST`` (where heads look that only follow
    the order of the text). Rows without other columns are skipped; ties go to the first head.

    Args:
        rows: Attention of each token, shape ``(n_layers, n_heads, n_context)`` or a sequence of
            ``(n_heads, n_context)``, probabilities.
        layer: Consider only this index of the first axis.
        head: Consider only this index of the second axis.

    Returns:
        Indices into the first two axes. If all rows are skipped, those asked for or 0.

    Raises:
        IndexError: *layer* or *head* is out of range.
    """
    totals: list[NDArray[np.float64]] = []
    for row in rows:
        if row[0].shape[-1] <= 1 + N_LATEST:
            continue
        peaks = [heads[:, 1:-N_LATEST].max(axis=1).astype(np.float64) for heads in row]
        if totals:
            peaks = [total + peak for total, peak in zip(totals, peaks, strict=True)]
        totals = peaks
    if not totals:
        return layer or 0, head or 0
    layers = range(len(totals)) if layer is None else (layer,)
    candidates = [
        (float(totals[i][j]), i, j)
        for i in layers
        for j in (range(len(totals[i])) if head is None else (head,))
    ]
    _, i_layer, i_head = max(candidates, key=lambda candidate: candidate[0])
    return i_layer, i_head


def probabilities(values: WeightArray, kind: str, scale: float) -> WeightArray:
    """Convert values of any kind of capture to probabilities over the last axis.

    "probs" are returned as they are, without a copy. "qk" is scaled first; the result is
    approximate for models that cap or bias their scores.

    Args:
        values: Shape ``(..., n_context)``.
        kind: Kind of the capture.
        scale: The model's ``attention_scale``.
    """
    if kind == "probs":
        return values
    return softmax(values.astype(np.float64) * (scale if kind in RAW_KINDS else 1.0))
