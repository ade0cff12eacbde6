"""Attention as a request asks for it, in neutral terms, and the capture that gives it.

What the engine can reduce is reduced there; `kqview.server.api.wire.rows` does the rest.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from kqview.errors import InvalidCapture
from kqview.types import Capture, ModelInfo
from kqview.types.capture import DType, Kind, Reduce, Span

Format = Literal["per_layer", "aggregated", "sparse", "viz"]
Aggregation = Literal["mean", "max", "last_layer", "weighted_layers"]

DEFAULT_TOP_K: Final = 50


@dataclass(frozen=True, slots=True)
class AttentionWanted:
    """Attention as a request asks for it.

    Attributes:
        kind: As in Capture.
        format: "per_layer": all rows, ``(n_layers, n_heads, n_context)``, or with *reduce_heads*
            ``(n_layers, n_context)``. "aggregated": one value per position, ``(n_context,)``.
            "sparse": the *top_k* positions with the largest mean over layers and heads, each with
            its mean over heads in every layer. "viz": per layer the mean and the maximum of all
            heads and positions, and the entropy of the mean row.
        reduce_heads: Of "per_layer": the mean or the maximum of each layer's heads, None for all.
        aggregation: Of "aggregated": "mean" and "max" over layers and heads; "last_layer", the mean
            over the heads of the last layer with attention; "weighted_layers", the mean over
            heads of each layer, averaged with *layer_weights*.
        top_k: Of "sparse".
        dtype: Of the values, "float32" or "float16".
        layers: Layers to keep, None for all that have attention.
        heads: Heads to keep, None for all.
        spans: Of "per_layer" and "aggregated": sums over these ranges of columns, as in Capture,
            instead of a value per column; None for whole rows.
        layer_weights: Of "weighted_layers", one for each layer kept; None weighs layer i of n with
            ``(i + 1)``, so that late layers count more. Weights are divided by their sum.
        prompt: Also send the rows of the prompt's tokens.
    """

    kind: Kind = "probs"
    format: Format = "per_layer"
    reduce_heads: Literal["mean_heads", "max_heads"] | None = None
    aggregation: Aggregation = "mean"
    top_k: int = DEFAULT_TOP_K
    dtype: DType = "float32"
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None
    layer_weights: tuple[float, ...] | None = None
    prompt: bool = False

    def capture(self, model: ModelInfo) -> Capture:
        """The smallest engine capture that gives `shaped` what it needs.

        Raises:
            InvalidCapture: Layers, heads or weights do not fit *model*, *top_k* is below 1, or the
                format cannot show rows of a prompt.
        """
        if self.top_k < 1:
            raise InvalidCapture(f"top_k is {self.top_k}, the least is 1", parameter="top_k")
        if self.prompt and self.format in ("sparse", "viz"):
            raise InvalidCapture(
                f"rows of the prompt cannot be sent as {self.format}; "
                "ask for per_layer or aggregated"
            )
        if self.spans is not None and self.format in ("sparse", "viz"):
            raise InvalidCapture(
                f"spans cannot be sent as {self.format}; ask for per_layer or aggregated",
                parameter="spans",
            )
        layers = self.layers
        if self.format == "aggregated" and self.aggregation == "last_layer":
            layers = (layers or model.attention_layers)[-1:]
        if self.format == "aggregated" and self.aggregation == "weighted_layers":
            self.weights(len(layers if layers is not None else model.attention_layers))
        return Capture(
            self.kind,
            layers=layers,
            heads=self.heads,
            reduce=self._reduce(),
            spans=self.spans,
            # What is computed further here is computed from float32 and rounded once.
            dtype=self.dtype if self.format == "per_layer" else "float32",
            prompt=self.prompt,
            on_full="wait",
        )

    def _reduce(self) -> Reduce | None:
        if self.format == "sparse":
            return "mean_heads"
        if self.format == "aggregated":
            if self.aggregation in ("mean", "last_layer"):
                return "mean"
            return "max" if self.aggregation == "max" else "mean_heads"
        return self.reduce_heads if self.format == "per_layer" else None

    def weights(self, n_layers: int) -> NDArray[np.float32]:
        """The weights of *n_layers* layers, with sum 1; raises InvalidCapture."""
        given = self.layer_weights
        weights = np.arange(1, n_layers + 1) if given is None else np.asarray(given, np.float64)
        if len(weights) != n_layers or not np.isfinite(weights).all() or not weights.sum() > 0:
            raise InvalidCapture(
                f"layer_weights has {len(weights)} weights for {n_layers} layers; "
                "send one finite weight for each layer, with a sum above 0",
                parameter="layer_weights",
            )
        return np.asarray(weights / weights.sum(), np.float32)
