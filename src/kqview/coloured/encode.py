"""Encoded: rows of attention in as many bytes as a page may have, and what that left out.

A colour needs no more than 8 bits: a share is stored as the square root of itself, which keeps
small shares apart. If all heads do not fit, the largest shares of each row are kept; if those are
fewer than `LEAST_KEPT`, or if finding them would take seconds, heads give way to the means of
layers, layers to one mean, and at last the first rows are left out. `Encoded.omissions` says so in
words.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kqview.coloured.rows import Rows, check_shares, shares

N_TEXTS_MAX: Final = 8192  # tokens that a browser lays out without a pause
LEAST_KEPT: Final = 8
_POSITION_BYTES: Final = 2
# Values of heads that are searched for the largest ones, for each byte of the result: seconds for
# 2 MiB.
_VALUES_PER_BYTE: Final = 128

Shares = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows as a page has them.

    A plane is the mean of all heads, the mean of a layer, or a head; in this order, layer by layer.

    Attributes:
        first_text: Index of the first token that is kept.
        first_row: Index of the first row that is kept.
        layers: Number and heads' numbers of each layer; without heads if their planes are left out.
            Empty if there is only the mean of all.
        n_kept: Shares kept of each row of each plane; 0 for all.
        values: In base64, a byte for each share: 255 times its square root. Row by row, each with
            its planes.
        positions: In base64, the column of each share as two bytes; empty if all are kept.
        mean: The mean of all heads and rows.
        omissions: What was left out, a sentence each.
    """

    first_text: int
    first_row: int
    layers: list[tuple[int, list[int]]]
    n_kept: int
    values: str
    positions: str
    mean: Shares
    omissions: list[str]


def encode(rows: Rows, max_bytes: int) -> Encoded:
    """Encode *rows* in at most *max_bytes* of base64.

    Raises:
        InvalidCapture: The values are no shares of each token.
    """
    check_shares(rows)
    first_text = max(0, len(rows.texts) - N_TEXTS_MAX)
    first_row = sum(at < first_text for at in rows.at)
    omissions: list[str] = []
    if first_text:
        omissions.append(f"The first {first_text:,} tokens are left out.")
    plan = _plan(rows, first_text, first_row, max_bytes * 3 // 4)
    if plan.first_row > first_row:
        n_left, n_rows = plan.first_row - first_row, len(rows.at)
        omissions.append(f"The first {n_left:,} of {n_rows:,} rows are left out.")
    if plan.detail == "layers":
        omissions.append("Single heads are left out; a layer shows the mean of its heads.")
    elif plan.detail == "all":
        omissions.append("Layers and heads are left out; what is shown is the mean of all heads.")
    if plan.n_kept:
        omissions.append(
            f"Of each row, the {plan.n_kept} largest shares are kept; the others count as 0."
        )
    total = np.zeros(max((n - first_text for n in rows.n_columns), default=0), np.float32)
    values: list[bytes] = []
    positions: list[bytes] = []
    for row in rows.rows[plan.first_row :]:
        layers = shares(row.whole(rows.kind), rows.kind)
        planes = np.concatenate(list(_planes(layers, plan.detail)))[:, first_text:]
        total[: planes.shape[1]] += planes[0]
        if plan.n_kept:
            places, planes = _largest(planes, plan.n_kept)
            positions.append(places.astype("<u2").tobytes())
        values.append(np.rint(np.sqrt(planes) * 255).astype(np.uint8).tobytes())
    n_rows = len(rows.rows) - plan.first_row
    return Encoded(
        first_text,
        plan.first_row,
        _names(rows, plan.detail),
        plan.n_kept,
        base64.b64encode(b"".join(values)).decode(),
        base64.b64encode(b"".join(positions)).decode(),
        (total / max(n_rows, 1)).astype(np.float32),
        omissions,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    detail: str  # "heads", "layers" or "all"
    n_kept: int
    first_row: int


def _plan(rows: Rows, first_text: int, first_row: int, n_bytes: int) -> _Plan:
    widths = [n - first_text for n in rows.n_columns[first_row:]]
    for detail in ("heads", "layers", "all"):
        names = _names(rows, detail)
        n_planes = 1 + len(names) + sum(len(heads) for _, heads in names)
        n_values = n_planes * sum(widths)
        if detail == "heads" and n_values > n_bytes * _VALUES_PER_BYTE:
            continue
        if n_values <= n_bytes:
            return _Plan(detail, 0, first_row)
        n_kept = n_bytes // (n_planes * len(widths) * (1 + _POSITION_BYTES))
        if n_kept >= LEAST_KEPT:
            return _Plan(detail, n_kept, first_row)
    n_rows = n_bytes // (LEAST_KEPT * (1 + _POSITION_BYTES))
    return _Plan("all", LEAST_KEPT, len(rows.at) - n_rows)


def _names(rows: Rows, detail: str) -> list[tuple[int, list[int]]]:
    if detail == "all":
        return []
    names = rows.layer_names
    if detail == "layers":
        return [(layer, []) for layer in names]
    heads = [rows.head_names(i) for i in range(len(names))]
    # The only head of a layer is its mean.
    return [(layer, one if len(one) > 1 else []) for layer, one in zip(names, heads, strict=True)]


def _planes(layers: Sequence[Shares], detail: str) -> Iterator[Shares]:
    """The planes of a row in their order, each ``(n, n_columns)``."""
    n_heads = sum(len(layer) for layer in layers)
    yield np.sum([layer.sum(axis=0) for layer in layers], axis=0, keepdims=True) / np.float32(
        n_heads
    )
    if detail == "all":
        return
    for layer in layers:
        yield layer.mean(axis=0, keepdims=True)
        if detail == "heads" and len(layer) > 1:
            yield layer


def _largest(planes: Shares, n_kept: int) -> tuple[NDArray[Any], Shares]:
    """The positions of the *n_kept* largest shares of each plane, and these."""
    n = planes.shape[1]
    if n < n_kept:
        planes = np.pad(planes, ((0, 0), (0, n_kept - n)))
        return np.broadcast_to(np.arange(n_kept) % max(n, 1), planes.shape), planes
    places = np.argpartition(planes, n - n_kept, axis=1)[:, n - n_kept :]
    return places, np.take_along_axis(planes, places, axis=1)
