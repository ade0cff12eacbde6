"""A float64 numpy BERT: an independent truth for embeddings and for a classifier's logits.

Owns: the mathematics only (learned positions, LayerNorm behind each block, attention to both sides,
GELU, the classifier head with its tanh), read straight from a GGUF. Shares no code with kqview or
llama.cpp. GELU is a table of float16 in llama.cpp's CPU backend: here too its argument and its
value are rounded, which is all that is taken over from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from .tiny_gguf import Reader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

F64 = NDArray[np.float64]


class BertReference:
    """Weights of one model in float64."""

    def __init__(self, path: Path) -> None:
        reader = Reader(path)
        value: dict[str, Any] = {
            key.removeprefix("bert."): entry.contents()
            for key, entry in reader.fields.items()
            if key.startswith("bert.")
        }
        self.n_layer = int(value["block_count"])
        self.n_head = int(value["attention.head_count"])
        self.epsilon = float(value["attention.layer_norm_epsilon"])
        self._weights: dict[str, F64] = {
            tensor.name: np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float64)
            for tensor in reader.tensors
        }

    def rows(self, ids: Sequence[int]) -> F64:
        """The last layer's output of every token, (n_tokens, n_embd)."""
        w = self._weights
        n_tokens = len(ids)
        x = w["token_embd.weight"][np.asarray(ids)] + w["position_embd.weight"][:n_tokens]
        if "token_types.weight" in w:
            x = x + w["token_types.weight"].reshape(-1, x.shape[1])[0]
        x = self._norm(x, "token_embd_norm")
        for il in range(self.n_layer):
            b = f"blk.{il}."
            q, k, v = (self._heads(x, b + name) for name in ("attn_q", "attn_k", "attn_v"))
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = weights / weights.sum(-1, keepdims=True) @ v
            mixed = mixed.transpose(1, 0, 2).reshape(n_tokens, -1)
            x = self._norm(x + self._linear(mixed, b + "attn_output"), b + "attn_output_norm")
            inner = _gelu(self._linear(x, b + "ffn_up"))
            x = self._norm(x + self._linear(inner, b + "ffn_down"), b + "layer_output_norm")
        return x

    def logits(self, ids: Sequence[int]) -> F64:
        """What the classifier head makes of the first token, (n_classes,)."""
        pooled = np.tanh(self._linear(self.rows(ids)[0], "cls"))
        return self._linear(pooled, "cls.output")

    def _linear(self, x: F64, name: str) -> F64:
        return x @ self._weights[name + ".weight"].T + self._weights.get(name + ".bias", 0.0)

    def _heads(self, x: F64, name: str) -> F64:
        """Project (n_tokens, n_embd) to (n_head, n_tokens, head_size)."""
        return self._linear(x, name).reshape(len(x), self.n_head, -1).transpose(1, 0, 2)

    def _norm(self, x: F64, name: str) -> F64:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred * centred).mean(-1, keepdims=True) + self.epsilon)
        return centred / scale * self._weights[name + ".weight"] + self._weights[name + ".bias"]


def _gelu(x: F64) -> F64:
    near = x.astype(np.float16).astype(np.float64)
    inner = np.sqrt(2 / np.pi) * near * (1 + 0.044715 * near * near)
    rounded = (0.5 * near * (1 + np.tanh(inner))).astype(np.float16).astype(np.float64)
    return np.where(x >= 10, x, np.where(x <= -10, 0.0, rounded))
