"""Float64 numpy transformers: an independent truth for captured attention, embeddings and logits.

Own: the mathematics only, read straight from a GGUF. Share no code with kqview or llama.cpp, so a
fault cannot hide in both sides. Weights are dequantised exactly; llama.cpp also rounds activations
when weights are not F32, so tight comparisons need F32 weights.

`Reference`: Llama and Qwen2 (RMSNorm, RoPE, grouped-query attention, SwiGLU), the whole sequence in
one pass. RoPE angles are exact by default. llama.cpp multiplies them up in float32, which alone
moves rows of a 3-layer model by 1e-5 at position 200, 2e-5 at 800 and 9e-5 at 1800 (largest
relative error of probs); ``angle_type="f32"`` does the same here, and the difference is 3e-6 at
1800 again.

`CachedReference`: the same with a cache, keys before RoPE and values; a token's position is its
place in the cache. What was computed stays as it was computed, discarded tokens included, which no
forward pass over the remaining ids would give.

`BertReference`: learned positions, LayerNorm behind each block, attention to both sides, GELU, the
classifier head with its tanh. GELU is a table of float16 in llama.cpp's CPU backend: its argument
and its value are rounded here too, unless another GELU is passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from .tiny_gguf import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kqview.types import Token

    from .rows import Kind

F64 = NDArray[np.float64]
CacheType = Literal["f32", "f16"]


@dataclass(frozen=True)
class Result:
    """One forward pass; all arrays float64 and owned.

    ``logits``: (n_tokens, n_vocab).
    ``kq``: (n_layer, n_head, n_query, n_key), product of q and k before scale and mask;
    columns right of the diagonal hold values too, which a causal engine has not computed then.
    ``scores``: as kq, scaled, columns right of the diagonal -inf.
    ``probs``: softmax of scores, rows sum to 1.
    ``hidden``: (n_layer, n_tokens, n_embd), the residual stream behind each layer.
    ``final``: (n_tokens, n_embd), the last of them normalised: what the output layer reads.
    """

    logits: F64
    kq: F64
    scores: F64
    probs: F64
    hidden: F64
    final: F64


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Largest over rows (the last axis) of max|got - want| / max|want|."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"relative_error: shapes {got.shape} and {want.shape}; they must be equal")
    return float((np.abs(got - want).max(-1) / np.abs(want).max(-1)).max())


class Reference:
    """Weights of one model in float64. Immutable after `load`; `forward` may run in any thread."""

    def __init__(self, arch: str, fields: dict[str, Any], weights: dict[str, F64]) -> None:
        def value(key: str, default: Any = None) -> Any:
            found = fields.get(f"{arch}.{key}", default)
            if found is None:
                raise ValueError(
                    f"reference.load: no key {arch}.{key}; the file is not a whole {arch} model"
                )
            return found

        self.arch = arch
        self.n_layer = int(value("block_count"))
        self.n_head = int(value("attention.head_count"))
        self.n_head_kv = int(value("attention.head_count_kv", self.n_head))
        self.n_embd = int(value("embedding_length"))
        self.head_size = int(value("attention.key_length", self.n_embd // self.n_head))
        self.rms_eps = float(value("attention.layer_norm_rms_epsilon"))
        self.rope_base = float(value("rope.freq_base", 10000.0))
        self.weights = weights

    @classmethod
    @cache
    def load(cls, path: Path) -> Reference:
        """Read every weight of a Llama or Qwen2 GGUF, once.

        Raises:
            ValueError: The architecture is another one, or rope scaling is asked for.
        """
        reader = Reader(path)
        fields = {
            key: entry.contents()
            for key, entry in reader.fields.items()
            if not key.startswith("tokenizer.")
        }
        arch = fields["general.architecture"]
        if arch not in ("llama", "qwen2"):
            raise ValueError(
                f"reference.load: architecture {arch!r}; only llama and qwen2 are written here"
            )
        if fields.get(f"{arch}.rope.scaling.type", "none") != "none":
            raise ValueError("reference.load: rope scaling is set; use a model without it")
        weights = {
            tensor.name: np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float64)
            for tensor in reader.tensors
        }
        return cls(arch, fields, weights)

    def forward(
        self,
        ids: Sequence[int],
        *,
        kv_type: CacheType = "f32",
        operand_type: CacheType = "f32",
        angle_type: Literal["f64", "f32"] = "f64",
        flash_attn: bool = False,
        exact_from: int | None = None,
        bias: F64 | None = None,
        head_factors: F64 | None = None,
        behind_layer: Callable[[int, F64], F64] | None = None,
        behind_part: Callable[[str, int, F64], F64] | None = None,
        patched_heads: Mapping[tuple[int, int], F64] | None = None,
        heads_out: list[F64] | None = None,
    ) -> Result:
        """Run the whole sequence at once.

        Args:
            ids: Token ids, positions 0 onwards.
            kv_type: Type in which K and V are kept; "f16" rounds both.
            operand_type: "f16" also rounds q and the probabilities where they meet K and V, as
                llama.cpp's CPU product does with an F16 cache and flash attention off. The
                returned probs are not rounded.
            angle_type: "f32" multiplies RoPE angles up in float32, as llama.cpp's CPU kernel does.
            flash_attn: Mix V as llama.cpp's CPU flash attention does for fewer than 64 queries: q,
                K, V and the running sum rounded to F16. Reaches kq only through the layers below.
            exact_from: The first query whose V is mixed exactly all the same, as kqview's own
                attention does while it decodes; None for none.
            bias: Added to the scores, of a shape that broadcasts to ``(n_layer, n_head, n_query,
                n_key)``; -inf hides a key. Not in flash_attn's own mixing.
            head_factors: ``(n_layer, n_head)``, factors of what heads give out.
            behind_layer: Called with a layer and its output, ``(n_tokens, n_embd)``; returns
                what goes on in its place.
            behind_part: As behind_layer, with what "attention_out" or "mlp_out" adds to the stream.
            patched_heads: By (layer, head), ``(n_tokens, head_size)`` in place of its output.
            heads_out: Filled with what the heads of each layer give out,
                ``(n_head, n_tokens, head_size)``.

        Returns:
            Logits and attention of every token, layer and head.
        """
        tokens = np.asarray(ids, np.int64)
        if tokens.ndim != 1 or tokens.size == 0:
            raise ValueError(
                f"reference.forward: ids have shape {tokens.shape}; pass a flat list of 1 or more"
            )
        n_tokens, w = tokens.size, self.weights
        future = np.triu(np.ones((n_tokens, n_tokens), bool), 1)
        cos, sin = self._angles(n_tokens, angle_type)
        x = w["token_embd.weight"][tokens]
        shape = (self.n_layer, self.n_head, n_tokens, n_tokens)
        kq, scores, probs = np.empty(shape), np.empty(shape), np.empty(shape)
        hidden = np.empty((self.n_layer, n_tokens, self.n_embd))
        for il in range(self.n_layer):
            b = f"blk.{il}."
            h = self._norm(x, b + "attn_norm")
            q = self._rotate(self._heads(h, b + "attn_q", self.n_head), cos, sin)
            k = self._rotate(self._heads(h, b + "attn_k", self.n_head_kv), cos, sin)
            v = self._heads(h, b + "attn_v", self.n_head_kv)
            # Query head i reads KV head i // (n_head / n_head_kv).
            k, v = (np.repeat(_round(t, kv_type), self.n_head // self.n_head_kv, 0) for t in (k, v))
            kq[il] = _round(q, operand_type) @ k.transpose(0, 2, 1)
            scores[il] = np.where(future, -np.inf, kq[il] / np.sqrt(self.head_size))
            if bias is not None:
                scores[il] += np.broadcast_to(bias, shape)[il]
            probs[il] = _softmax(scores[il])
            if flash_attn:
                entered = _round(q, "f16") @ _round(k, "f16").transpose(0, 2, 1)
                mixed = _flash_mix(entered / np.sqrt(self.head_size), _round(v, "f16"))
                if exact_from is not None:
                    mixed[:, exact_from:] = probs[il][:, exact_from:] @ v
            else:
                mixed = _round(probs[il], operand_type) @ v
            if head_factors is not None:
                mixed = mixed * head_factors[il][:, None, None]
            for (layer, head), values in (patched_heads or {}).items():
                if layer == il:
                    mixed[head] = values
            if heads_out is not None:
                heads_out.append(mixed)
            mixed = mixed.transpose(1, 0, 2).reshape(n_tokens, -1)
            part = behind_part or (lambda _at, _il, x: x)
            x = x + part("attention_out", il, mixed @ w[b + "attn_output.weight"].T)
            h = self._norm(x, b + "ffn_norm")
            gate = h @ w[b + "ffn_gate.weight"].T
            inner = gate / (1 + np.exp(-gate)) * (h @ w[b + "ffn_up.weight"].T)
            x = x + part("mlp_out", il, inner @ w[b + "ffn_down.weight"].T)
            hidden[il] = x = x if behind_layer is None else behind_layer(il, x)
        output = w.get("output.weight", w["token_embd.weight"])
        final = self._norm(x, "output_norm")
        return Result(final @ output.T, kq, scores, probs, hidden, final)

    def head_outputs(self, ids: Sequence[int]) -> list[F64]:
        """What the heads of each layer give out, ``(n_head, n_tokens, head_size)``."""
        found: list[F64] = []
        self.forward(ids, angle_type="f32", heads_out=found)
        return found

    def _norm(self, x: F64, name: str) -> F64:
        mean_square = np.mean(x * x, -1, keepdims=True)
        return x / np.sqrt(mean_square + self.rms_eps) * self.weights[name + ".weight"]

    def _heads(self, h: F64, name: str, n_head: int) -> F64:
        """Project (n_tokens, n_embd) to (n_head, n_tokens, head_size)."""
        out = h @ self.weights[name + ".weight"].T + self.weights.get(name + ".bias", 0.0)
        return out.reshape(len(h), n_head, self.head_size).transpose(1, 0, 2)

    def _angles(self, n_tokens: int, angle_type: str) -> tuple[F64, F64]:
        """Cosine and sine of position * base^(-2 pair / size), each (n_tokens, head_size / 2)."""
        of = np.float64 if angle_type == "f64" else np.float32
        ratio = of(self.rope_base) ** of(-2.0 / self.head_size)
        angle = np.empty((n_tokens, self.head_size // 2), of)
        angle[:, 0] = np.arange(n_tokens)
        for pair in range(1, angle.shape[1]):
            angle[:, pair] = angle[:, pair - 1] * ratio
        angle = angle / self.weights.get("rope_freqs.weight", np.ones(1)).astype(of)
        return np.cos(angle).astype(np.float64), np.sin(angle).astype(np.float64)

    def _rotate(self, t: F64, cos: F64, sin: F64) -> F64:
        """Rotate (n_head, n_tokens, head_size): neighbours for llama, the two halves for qwen2."""
        out = np.empty_like(t)
        half = self.head_size // 2
        if self.arch == "llama":
            first, second = slice(0, None, 2), slice(1, None, 2)
        else:
            first, second = slice(0, half), slice(half, None)
        a, b = t[..., first], t[..., second]
        out[..., first] = a * cos - b * sin
        out[..., second] = a * sin + b * cos
        return out


def _round(t: F64, to: CacheType) -> F64:
    return t.astype(np.float16).astype(np.float64) if to == "f16" else t


def _softmax(scores: F64) -> F64:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _flash_mix(scores: F64, v: F64) -> F64:
    """Mix V (n_head, n_key, head_size) key by key, with a running maximum and an F16 sum."""
    n_head, n_tokens, _ = scores.shape
    largest = np.full((n_head, n_tokens), -np.inf)
    total = np.zeros((n_head, n_tokens))
    mixed = np.zeros((n_head, n_tokens, v.shape[-1]))
    for key in range(n_tokens):
        seen = np.s_[:, key:]  # the queries that see this key
        score, before = scores[:, key:, key], largest[seen].copy()
        largest[seen] = np.maximum(score, before)
        rescale, weight = np.exp(before - largest[seen]), np.exp(score - largest[seen])
        total[seen] = total[seen] * rescale + weight
        kept = _round(mixed[seen] * rescale[..., None], "f16")
        mixed[seen] = _round(kept + v[:, key, None] * weight[..., None], "f16")
    return mixed / total[..., None]


# ---- with a cache that can be cut and shifted


class CachedReference:
    """One sequence of a Llama or Qwen2 model; an F32 cache and no flash attention."""

    def __init__(self, path: Path) -> None:
        self._model = Reference.load(path)
        self._keys: list[list[F64]] = [[] for _ in range(self._model.n_layer)]
        self._values: list[list[F64]] = [[] for _ in range(self._model.n_layer)]

    @property
    def n_tokens(self) -> int:
        """Tokens in the cache."""
        return len(self._keys[0])

    def discard(self, n_keep: int, n_discard: int) -> None:
        """Drop tokens behind the first *n_keep* and close the gap."""
        for cached in (*self._keys, *self._values):
            del cached[n_keep : n_keep + n_discard]

    def decode(self, token: int) -> Result:
        """Append one token; its rows are (n_layer, n_head, 1, n_tokens)."""
        m = self._model
        w = m.weights
        x = w["token_embd.weight"][np.asarray([token])]
        n = self.n_tokens + 1
        cos, sin = m._angles(n, "f32")
        shape = (m.n_layer, m.n_head, 1, n)
        kq, scores, probs = np.empty(shape), np.empty(shape), np.empty(shape)
        hidden = np.empty((m.n_layer, 1, m.n_embd))
        for il in range(m.n_layer):
            b = f"blk.{il}."
            h = m._norm(x, b + "attn_norm")
            q = m._rotate(m._heads(h, b + "attn_q", m.n_head), cos[-1:], sin[-1:])
            self._keys[il].append(m._heads(h, b + "attn_k", m.n_head_kv)[:, 0])
            self._values[il].append(m._heads(h, b + "attn_v", m.n_head_kv)[:, 0])
            k = m._rotate(np.stack(self._keys[il], 1), cos, sin)
            n_group = m.n_head // m.n_head_kv
            k, v = np.repeat(k, n_group, 0), np.repeat(np.stack(self._values[il], 1), n_group, 0)
            kq[il] = q @ k.transpose(0, 2, 1)
            scores[il] = kq[il] / np.sqrt(m.head_size)
            probs[il] = _softmax(scores[il])
            mixed = (probs[il] @ v).transpose(1, 0, 2).reshape(1, -1)
            x = x + mixed @ w[b + "attn_output.weight"].T
            h = m._norm(x, b + "ffn_norm")
            gate = h @ w[b + "ffn_gate.weight"].T
            up = h @ w[b + "ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[b + "ffn_down.weight"].T
            hidden[il] = x
        output = w.get("output.weight", w["token_embd.weight"])
        final = m._norm(x, "output_norm")
        return Result(final @ output.T, kq, scores, probs, hidden, final)

    def decode_all(self, tokens: Sequence[int]) -> list[Result]:
        """Append tokens one by one."""
        return [self.decode(token) for token in tokens]

    def truncate(self, n_keep: int) -> None:
        """Keep the first *n_keep* tokens."""
        self.discard(n_keep, self.n_tokens - n_keep)

    def errors(self, last_id: int, tokens: Sequence[Token], kind: Kind) -> F64:
        """Append *last_id* and all but the last of *tokens*; each layer's largest error.

        Infinite where a row has not as many columns as tokens are cached.
        """
        errors: list[list[float]] = []
        for fed, token in zip([last_id, *(t.id for t in tokens[:-1])], tokens, strict=True):
            errors.append(row_errors(self.decode(fed), token, kind))
        return np.max(errors, 0)


def row_errors(result: Result, token: Token, kind: Kind) -> list[float]:
    """Error of a token's row in each layer against the one query of *result*."""
    want = {"logits": result.kq, "scores": result.scores, "probs": result.probs}[kind][:, :, 0]
    rows = np.asarray(token.attention)
    if rows.shape != want.shape:
        return [np.inf] * len(want)
    return [relative_error(row, layer) for row, layer in zip(rows, want, strict=True)]


# ---- BERT


class BertReference:
    """Weights of one model in float64."""

    def __init__(self, path: Path, gelu: Callable[[F64], F64] | None = None) -> None:
        self._gelu = gelu or _gelu
        reader = Reader(path)
        value: dict[str, Any] = {
            key.removeprefix("bert."): entry.contents()
            for key, entry in reader.fields.items()
            if key.startswith("bert.")
        }
        self.n_layer = int(value["block_count"])
        self.n_head = int(value["attention.head_count"])
        self.epsilon = float(value["attention.layer_norm_epsilon"])
        self.weights: dict[str, F64] = {
            tensor.name: np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float64)
            for tensor in reader.tensors
        }

    def rows(self, ids: Sequence[int]) -> F64:
        """The last layer's output of every token, (n_tokens, n_embd)."""
        return self.forward(ids)[0]

    def forward(
        self, ids: Sequence[int], bias: F64 | float = 0.0, head_factors: F64 | None = None
    ) -> tuple[F64, F64]:
        """`rows`, and the probabilities of all layers, (n_layer, n_head, n_tokens, n_tokens).

        *bias* and *head_factors*: as of `Reference.forward`, for layers alike.
        """
        w = self.weights
        probs: list[F64] = []
        n_tokens = len(ids)
        x = w["token_embd.weight"][np.asarray(ids)] + w["position_embd.weight"][:n_tokens]
        if "token_types.weight" in w:
            x = x + w["token_types.weight"].reshape(-1, x.shape[1])[0]
        x = self._norm(x, "token_embd_norm")
        for il in range(self.n_layer):
            b = f"blk.{il}."
            q, k, v = (self._heads(x, b + name) for name in ("attn_q", "attn_k", "attn_v"))
            probs.append(_softmax(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]) + bias))
            heads = probs[-1] @ v
            if head_factors is not None:
                heads = heads * head_factors[:, None, None]
            mixed = heads.transpose(1, 0, 2).reshape(n_tokens, -1)
            x = self._norm(x + self._linear(mixed, b + "attn_output"), b + "attn_output_norm")
            inner = self._gelu(self._linear(x, b + "ffn_up"))
            x = self._norm(x + self._linear(inner, b + "ffn_down"), b + "layer_output_norm")
        return x, np.stack(probs)

    def logits(self, ids: Sequence[int]) -> F64:
        """What the classifier head makes of the first token, (n_classes,)."""
        pooled = np.tanh(self._linear(self.rows(ids)[0], "cls"))
        return self._linear(pooled, "cls.output")

    def _linear(self, x: F64, name: str) -> F64:
        return x @ self.weights[name + ".weight"].T + self.weights.get(name + ".bias", 0.0)

    def _heads(self, x: F64, name: str) -> F64:
        """Project (n_tokens, n_embd) to (n_head, n_tokens, head_size)."""
        return self._linear(x, name).reshape(len(x), self.n_head, -1).transpose(1, 0, 2)

    def _norm(self, x: F64, name: str) -> F64:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred * centred).mean(-1, keepdims=True) + self.epsilon)
        return centred / scale * self.weights[name + ".weight"] + self.weights[name + ".bias"]


def gelu_tanh(x: F64) -> F64:
    """The approximation by tanh."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))


def _gelu(x: F64) -> F64:
    rounded = _round(gelu_tanh(_round(x, "f16")), "f16")
    return np.where(x >= 10, x, np.where(x <= -10, 0.0, rounded))
