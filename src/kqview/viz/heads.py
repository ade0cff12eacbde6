"""Heads: the rule that picks one worth looking at, and values of any kind as probabilities."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.floating[Any]]

N_LATEST: Final = 4
"""Columns at a row's end that select_head leaves out: the query itself and three before it."""


def select_head(
    rows: Sequence[Row | Sequence[Row]], *, layer: int | None = None, head: int | None = None
) -> tuple[int, int]:
    """Choose the head that looks most sharply at something neither first nor recent.

    A head's score is the mean over the rows of its largest weight, leaving out the first column
    (where idle heads park their mass) and the last ``N_LATEST`` (where heads look that only follow
    the order of the text). Rows with no other column do not count; the first of equals wins.

    Args:
        rows: Attention of each token, shape ``(n_layers, n_heads, n_context)`` or a sequence of
            ``(n_heads, n_context)``, probabilities.
        layer: Choose only among the heads of this index of the first axis.
        head: Choose only among the heads with this index.

    Returns:
        Indices into the first two axes, 0 or what was asked for where no row counts.

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


def probabilities(values: Row, kind: str, scale: float) -> Row:
    """Turn values of any kind of capture into probabilities over the last axis.

    "probs" come back as they are, without a copy. "logits" are scaled first; a model that caps or
    biases its scores attends a little differently than they say.

    Args:
        values: Shape ``(..., n_context)``.
        kind: Kind of the capture.
        scale: The model's ``attention_scale``.
    """
    if kind == "probs":
        return values
    scores = values.astype(np.float64) * (scale if kind == "logits" else 1.0)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
