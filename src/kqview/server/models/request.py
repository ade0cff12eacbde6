"""A request for text in neutral terms, which every dialect makes of its own bodies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kqview.engine import Engine
from kqview.errors import InvalidCapture
from kqview.mods.events import Dialogue
from kqview.mods.steering import Forcing
from kqview.types import Capture, ModelInfo, Sampling
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


@dataclass(frozen=True, slots=True)
class ModWanted:
    """A mod that a request names, and its options by name."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A dialect's request for text in neutral terms.

    Attributes:
        prompt: Text, tokenized as ``engine.generate`` does, or ids.
        truncates: Whether a text that is too long loses its front; see `texts.truncated`.
        memory: Beginning of the text that stays then.
        more_prompts: Further prompts, whose samples follow those of the first.
        max_tokens: Most tokens to generate.
        sampling: How they are chosen, with the dialect's defaults.
        request_id: Name for events, logs and `Service.find`; unique among its owner's runs.
        shares_name: Whether others of its owner may have that name; the run then gets another one,
            and `Run.label` is what its client calls it.
        attention: What attention to send, None for none.
        n_samples: Texts to generate from each prompt, which is evaluated once.
        key: A second name, for several runs of one owner (KoboldAI's ``genkey``).
        max_context: Longest prompt that the client allows, besides the server's own limit.
        keeps_logprobs: Whether `Run.logprobs` of the first sample are kept.
        names: Parameter of the core -> the client's own name for it, for error messages.
        slot: The slot of the first sample, None for any.
        context_shift: Whether a full slot drops old tokens and goes on.
        n_keep: Tokens at the start that it keeps, -1 for the prompt.
        n_discard: Tokens after them that it drops, None for half.
        n_reuse_min: Least tokens in a row to reuse by moving them, 0 for none.
        cache_prompt: False evaluates the whole prompt; further samples share that evaluation.
        lora: Scale of each LoRA adapter by its id, None for the engine's.
        mods: Mods that steer it, in their order.
        banned_phrases: Texts that it must not generate.
        dialogue: The chat that its prompt was made of, for its mods; None without either.
        forcing: Makes the ``forcing`` of `Engine.generate` for each text; None for none.
    """

    prompt: str | Sequence[int]
    truncates: bool = False
    memory: str = ""
    more_prompts: Sequence[str | Sequence[int]] = ()
    max_tokens: int
    sampling: Sampling
    request_id: str
    shares_name: bool = False
    attention: AttentionWanted | None = None
    n_samples: int = 1
    key: str = ""
    max_context: int | None = None
    keeps_logprobs: bool = False
    names: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    slot: int | None = None
    context_shift: bool = False
    n_keep: int = 0
    n_discard: int | None = None
    n_reuse_min: int = 0
    cache_prompt: bool = True
    lora: Mapping[int | str, float] | None = None
    mods: Sequence[ModWanted] = ()
    banned_phrases: Sequence[str] = ()
    dialogue: Dialogue | None = None
    forcing: Callable[[Engine], Forcing] | None = None

    @property
    def n_generations(self) -> int:
        """How many texts it makes."""
        return self.n_samples * (1 + len(self.more_prompts))
