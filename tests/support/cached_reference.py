"""The float64 transformer of reference.py with a cache that can be cut and shifted.

Owns: keys before RoPE and values of every token that is cached; a token's position is its place in
the cache, as after a context shift. What was computed stays as it was computed, discarded tokens
included, which no forward pass over the remaining ids would give.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .reference import Reference, Result, _softmax, relative_error

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kqview.types import Token

    from .reference import F64
    from .rows import Kind


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
        w = m._weights
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
