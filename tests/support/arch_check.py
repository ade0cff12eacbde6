"""Compares one model's captured rows with the stock build's, layer by layer.

Owns: what is compared and how the largest error of a layer is measured. The error of a row is
max|a - b| / max|b| over the columns that the row shows, infinite where a column is hidden in one
and not in the other. Never: tolerates anything; limits stand in the tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import Engine
from kqview.errors import UnsupportedModel

from . import stock
from .rows import KINDS, Kind

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from kqview.types import Token

N_PROMPT = 20
N_TOKENS = 6
N_CTX = 256
# exp of a score this far below the row's largest one is 0 in float32.
UNDERFLOW = 80.0


@dataclass
class Report:
    """What one model gave. Errors by "<kind> <flash attention>" and layer."""

    name: str
    mode: str = ""  # "generate" or "attend"
    expected_layers: list[int] = field(default_factory=list[int])
    layers: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    errors: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    n_heads: list[int] = field(default_factory=list[int])
    # Smallest and largest sum of a row of probabilities, in all layers.
    sums: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    # The same of the stock build's rows, with columns that are no tokens.
    stock_sums: tuple[float, float] = (np.inf, -np.inf)
    is_tuple: bool = False
    failure: str = ""

    def largest(self, flash_attn: bool, *, first_layer: bool = False) -> float:
        """Largest error of any kind, of all layers or of the first one."""
        found = [
            error
            for key, by_layer in self.errors.items()
            if key.endswith(" on") == flash_attn
            for layer, error in by_layer.items()
            if not first_layer or layer == min(by_layer)
        ]
        return max(found, default=0.0)


def layers_of(token: Token) -> list[NDArray[np.float32]]:
    """Rows of each captured layer, (n_heads, n_context)."""
    assert token.attention is not None
    return [np.asarray(rows) for rows in token.attention]


def row_error(kind: Kind, got: NDArray[np.float32], layer: stock.Layer) -> float:
    """Largest error of rows (n_heads, ..., n_context) against the stock rows of the same shape."""
    probs = layer.probs.reshape(got.shape).astype(np.float64)
    if kind == "probs":
        return relative(got, probs)
    want = (layer.kq if kind == "logits" else layer.scores).reshape(got.shape).astype(np.float64)
    shown = np.isfinite(got)
    if np.isnan(got).any() or (~shown & (probs > 0)).any():
        return np.inf
    seen = shown if kind == "logits" else shown & (probs > 0)
    if kind == "scores":
        # Shown, and yet the stock probability is 0: only because it is too small for a float32.
        peak = np.where(shown, got, -np.inf).max(axis=-1, keepdims=True)
        if (shown & (probs == 0) & (got > peak - UNDERFLOW)).any():
            return np.inf
    return relative(np.where(seen, got, 0.0), np.where(seen, want, 0.0))


def relative(got: NDArray[Any], want: NDArray[np.float64]) -> float:
    """max|a - b| / max|b| of the worst row; 0 where both are all zero."""
    if not np.isfinite(got).all():
        return np.inf
    distance = np.abs(got - want).max(axis=-1)
    size = np.abs(want).max(axis=-1)
    return float(np.where(distance == 0, 0.0, distance / np.maximum(size, 1e-30)).max())


class ModelCheck:
    """Runs one model through the engine and the stock build."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.report = Report(path.stem)
        self._stock: dict[tuple[Any, ...], stock.Run] = {}

    def run(self) -> Report:
        """Generate with each kind and flash attention off and on; compare every row."""
        for flash_attn in (False, True):
            with Engine(
                self.path,
                n_ctx=N_CTX,
                n_threads=1,
                kv_type="f32",
                flash_attn=flash_attn,
                attention_budget_bytes=2**28,
            ) as engine:
                self._generate(engine, flash_attn)
        return self.report

    def _generate(self, engine: Engine, flash_attn: bool) -> None:
        report = self.report
        prompt = np.random.default_rng(3).integers(0, 128, N_PROMPT).tolist()
        for kind in KINDS:
            key = f"{kind} {'on' if flash_attn else 'off'}"
            layers = engine.model.attention_layers
            try:
                tokens = list(
                    engine.generate(
                        prompt,
                        max_tokens=N_TOKENS,
                        temperature=0.0,
                        ignore_eos=True,
                        capture=kind if layers else None,
                    )
                )
            except UnsupportedModel:
                report.mode = "attend"
                self._attend(engine, prompt, flash_attn)
                return
            report.mode = "generate"
            assert len(tokens) == N_TOKENS
            run = self._stock_rows(prompt, [token.id for token in tokens])
            report.expected_layers = [layer.layer for layer in run.steps[0].layers]
            report.layers[key] = list(layers)
            if layers:
                self._compare(kind, key, tokens, run)

    def _compare(self, kind: Kind, key: str, tokens: list[Token], run: stock.Run) -> None:
        report = self.report
        report.is_tuple = isinstance(tokens[0].attention, tuple)
        errors = dict.fromkeys(report.layers[key], 0.0)
        low, high = np.inf, -np.inf
        for index, (token, step) in enumerate(zip(tokens, run.steps, strict=True)):
            got = dict(zip(report.layers[key], layers_of(token), strict=True))
            report.n_heads = [len(rows) for rows in got.values()]
            for layer in step.layers:
                if layer.layer not in got:
                    continue
                rows = got[layer.layer]
                assert rows.shape[-1] == N_PROMPT + index
                errors[layer.layer] = max(errors[layer.layer], row_error(kind, rows, layer))
                if kind == "probs":
                    sums = rows.sum(axis=-1)
                    low, high = min(low, float(sums.min())), max(high, float(sums.max()))
                    report.stock_sums = (
                        min(report.stock_sums[0], float(layer.sums.min())),
                        max(report.stock_sums[1], float(layer.sums.max())),
                    )
        report.errors[key] = errors
        if kind == "probs":
            report.sums[key] = (low, high)

    def _stock_rows(self, prompt: list[int], ids: list[int], **options: Any) -> stock.Run:
        # The same tokens in most runs: the stock build runs once for all of them.
        key = (*ids[:-1], *options.items())
        if key not in self._stock:
            self._stock[key] = stock.read_rows(
                self.path,
                prompt,
                n_predict=max(len(ids), 1),
                forced_ids=ids,
                kv_type="f32",
                n_ctx=N_CTX,
                **options,
            )
        return self._stock[key]

    def _attend(self, engine: Engine, prompt: list[int], flash_attn: bool) -> None:
        report = self.report
        run = self._stock_rows(prompt, [], rows="all")
        report.expected_layers = [layer.layer for layer in run.steps[0].layers]
        for kind in KINDS:
            key = f"{kind} {'on' if flash_attn else 'off'}"
            layers = engine.model.attention_layers
            report.layers[key] = list(layers)
            blocks = engine.attend(prompt, capture=kind).array()
            report.is_tuple = isinstance(blocks, tuple)
            got = dict(zip(layers, (np.asarray(rows) for rows in blocks), strict=True))
            errors = dict.fromkeys(layers, 0.0)
            low, high = np.inf, -np.inf
            for layer in run.steps[0].layers:
                if layer.layer not in got:
                    continue
                rows = got[layer.layer]
                assert rows.shape == layer.kq.shape
                errors[layer.layer] = row_error(kind, rows, layer)
                if kind == "probs":
                    sums = rows.sum(axis=-1)
                    low, high = min(low, float(sums.min())), max(high, float(sums.max()))
            report.n_heads = [rows.shape[0] for rows in got.values()]
            report.errors[key] = errors
            if kind == "probs":
                report.sums[key] = (low, high)
                report.stock_sums = (low, high)
