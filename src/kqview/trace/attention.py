"""The attention of one forward pass as a trace stores it: the columns with the most."""

import math
from typing import Any, Final, cast

import numpy as np

from kqview.types import Capture
from kqview.types.capture import RAW_KINDS
from kqview.types.forms import softmax
from kqview.types.token import Attention, Positions

TOP_COLUMNS: Final = 32
"""Number of columns that `top_columns` keeps by default."""
_DIGITS: Final = 5


def top_columns(
    rows: Attention,
    capture: Capture,
    *,
    positions: Positions | None = None,
    scale: float = 1.0,
    n_columns: int | None = None,
    k: int = TOP_COLUMNS,
) -> dict[str, Any] | None:
    """Summarize what a token attended to, averaged over layers and heads.

    Args:
        rows: ``attention`` of the event.
        capture: What was captured.
        positions: ``attention_positions`` of the event, with ``Capture(top_k=...)``.
        scale: `ModelInfo.attention_scale`, for rows of kind "qk".
        n_columns: Number of tokens before this one; needed with *positions*.
        k: Maximum number of columns to keep.

    Returns:
        ``positions``, indices into prompt and output before the token, the most attended first;
        ``weights``, their mean probabilities; ``rest``, the probability of all others; and
        ``n_columns``. None if there are no rows.
    """
    parts = rows if isinstance(rows, tuple) else (rows,)
    where = positions if isinstance(positions, tuple) else (positions,) * len(parts)
    n: int = n_columns if n_columns is not None else parts[0].shape[-1] if parts else 0
    total = np.zeros(n, np.float64)
    n_rows = 0
    for part, at in zip(parts, where, strict=True):
        flat = part.reshape(-1, part.shape[-1]).astype(np.float32)
        if capture.kind != "probs":
            flat = softmax(flat * np.float32(scale) if capture.kind in RAW_KINDS else flat)
        n_rows += len(flat)
        if at is None:
            total += flat.sum(axis=0)
        else:
            np.add.at(total, at.reshape(-1), flat.reshape(-1))
    if n_rows == 0 or n == 0:
        return None
    mean = total / n_rows
    k = min(k, n)
    best = np.argpartition(-mean, k - 1)[:k]
    best = best[np.argsort(-mean[best], kind="stable")]
    weights = [round(float(one), _DIGITS) for one in mean[best]]
    return {
        "positions": cast("list[int]", best.tolist()),
        "weights": weights,
        "rest": round(max(0.0, 1.0 - math.fsum(weights)), _DIGITS),
        "n_columns": n,
    }
