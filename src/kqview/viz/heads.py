"""Choosing a head worth looking at, and converting captured values to probabilities."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kqview.coloured.rows import softmax
from kqview.types.capture import RAW_KINDS

Weights = NDArray[np.floating[Any]]

N_LATEST: Final = 4
"""Columns at the end of a row that `select_head` ignores: the query and the three before it."""


def select_head(
    rows: Sequence[Weights | Sequence[Weights]],
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


def probabilities(values: Weights, kind: str, scale: float) -> Weights:
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
