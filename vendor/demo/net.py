"""The demo model as a torch module: a llama (RMSNorm, interleaved RoPE, GQA, SwiGLU).

It computes what llama.cpp's "llama" graph computes, so its weights go into a GGUF file without
permutation. `induction_score` measures how much each head is an induction head: how often its
largest weight falls on the token after the earlier mention of the current token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from bpe import SPECIAL_TOKENS
from corpus import made_up_name
from torch import Tensor, nn

if TYPE_CHECKING:
    from random import Random

    from bpe import BytePairVocabulary


@dataclass(frozen=True)
class NetConfig:
    """Sizes of the network, in the names that GGUF uses."""

    n_vocab: int = 768
    n_ctx_train: int = 512
    n_embd: int = 128
    n_layer: int = 4
    n_head: int = 8
    n_head_kv: int = 4
    n_embd_head: int = 32
    n_ff: int = 384
    rope_freq_base: float = 10000.0
    norm_eps: float = 1e-5


def rope_table(config: NetConfig, n_tokens: int) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the rotary angles, each of shape (n_tokens, n_embd_head / 2)."""
    half = torch.arange(0, config.n_embd_head, 2, dtype=torch.float64) / config.n_embd_head
    angles = torch.arange(n_tokens, dtype=torch.float64)[:, None] * config.rope_freq_base**-half
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last axis of *x*, shape (n_batch, n_head, n_tokens,
    n_embd_head)."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Layer(nn.Module):
    """Attention, then the feed-forward network, each on the normalised stream."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        c = self.config = config
        self.attn_norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        self.attn_q = nn.Linear(c.n_embd, c.n_head * c.n_embd_head, bias=False)
        self.attn_k = nn.Linear(c.n_embd, c.n_head_kv * c.n_embd_head, bias=False)
        self.attn_v = nn.Linear(c.n_embd, c.n_head_kv * c.n_embd_head, bias=False)
        self.attn_output = nn.Linear(c.n_head * c.n_embd_head, c.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(c.n_embd, c.norm_eps)
        self.ffn_gate = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_up = nn.Linear(c.n_embd, c.n_ff, bias=False)
        self.ffn_down = nn.Linear(c.n_ff, c.n_embd, bias=False)

    def _heads(self, x: Tensor, n_head: int) -> Tensor:
        return x.unflatten(-1, (n_head, self.config.n_embd_head)).transpose(1, 2)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, attention: list[Tensor] | None = None
    ) -> Tensor:
        """Return the stream after this layer; append the weights to *attention* if it is given.

        Args:
            x: Stream, shape (n_batch, n_tokens, n_embd).
            cos: Table of shape (n_tokens, n_embd_head / 2).
            sin: Table of shape (n_tokens, n_embd_head / 2).
            attention: Receives a tensor of shape (n_batch, n_head, n_tokens, n_tokens).
        """
        c = self.config
        y = self.attn_norm(x)
        q = rotate(self._heads(self.attn_q(y), c.n_head), cos, sin)
        k = rotate(self._heads(self.attn_k(y), c.n_head_kv), cos, sin)
        v = self._heads(self.attn_v(y), c.n_head_kv)
        k, v = (t.repeat_interleave(c.n_head // c.n_head_kv, dim=1) for t in (k, v))
        if attention is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            n = x.shape[1]
            scores = (q @ k.transpose(-1, -2)) / math.sqrt(c.n_embd_head)
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
            attention.append(scores.softmax(-1))
            y = attention[-1] @ v
        x = x + self.attn_output(y.transpose(1, 2).flatten(-2))
        y = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(y)) * self.ffn_up(y))


class Net(nn.Module):
    """The whole model, from token ids to logits."""

    def __init__(self, config: NetConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.n_vocab, config.n_embd)
        self.blk = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.output_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.output = nn.Linear(config.n_embd, config.n_vocab, bias=False)
        self._initialize()

    @torch.no_grad()
    def _initialize(self) -> None:
        """Set the first weights: random, with half the heads of two layers biased to look back
        and copy.

        Left to chance, a model this small needs far more text than minutes allow before it finds
        that looking back pays. So layer 0 begins with heads that lean to the previous token, and
        layer 1 with heads that lean to places whose previous token is the current one; training
        does the rest. (The idea is known as mimetic initialisation.) Two random rotations keep
        apart, in one stream, what a token is, what came before it, and what comes next.
        """
        c, n = self.config, self.config.n_embd_head
        for parameter in self.blk.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 / math.sqrt(parameter.shape[1]))
        for layer in self.blk:
            nn.init.zeros_(layer.attn_output.weight)
            nn.init.zeros_(layer.ffn_down.weight)
        embedding = nn.init.normal_(self.token_embd.weight)
        embedding[:, 0] = 0.0
        embedding *= math.sqrt(c.n_embd - 1) / embedding.norm(dim=1, keepdim=True)
        embedding[:, 0] = 1.0  # a constant, the same after the norm, to hang pure positions on
        before, after, basis = (
            nn.init.orthogonal_(torch.empty(c.n_embd, c.n_embd)) for _ in range(3)
        )
        self.output.weight.copy_(0.1 * embedding @ after.T)

        angle = c.rope_freq_base ** -(torch.arange(0, n, 2) / n)
        ahead = torch.stack((angle.cos(), -angle.sin()), -1).flatten()  # meets a key one place back
        here = torch.stack((torch.ones(n // 2), torch.zeros(n // 2)), -1).flatten()
        slow = (
            torch.arange(n) >= n * 3 // 8
        )  # pairs that turn too slowly to blur a match by content
        per_group = c.n_head // c.n_head_kv
        for head in range(c.n_head // 2):
            group = head // per_group
            q, kv = slice(head * n, (head + 1) * n), slice(group * n, (group + 1) * n)
            read, copied = basis[kv], basis[c.n_embd // 2 :][kv]
            layer = self.blk[0]
            layer.attn_q.weight[q] *= 0.1
            layer.attn_k.weight[kv] *= 0.1 if head % per_group == 0 else 1.0
            layer.attn_q.weight[q, 0], layer.attn_k.weight[kv, 0] = (
                6 * ~slow * ahead,
                6 * ~slow * here,
            )
            layer.attn_v.weight[kv] = read
            layer.attn_output.weight[:, q] = before @ read.T / per_group
            layer = self.blk[1]
            layer.attn_q.weight[q][slow] = 1.5 * read[slow]
            layer.attn_k.weight[kv][slow] = 1.5 * (read @ before.T)[slow]
            layer.attn_v.weight[kv] = copied
            layer.attn_output.weight[:, q] = after @ copied.T / per_group

    def forward(self, ids: Tensor, attention: list[Tensor] | None = None) -> Tensor:
        """Return logits of shape (n_batch, n_tokens, n_vocab) for ids of shape (n_batch,
        n_tokens)."""
        cos, sin = rope_table(self.config, ids.shape[1])
        x = self.token_embd(ids)
        for layer in self.blk:
            x = layer(x, cos, sin, attention)
        return self.output(self.output_norm(x))


@dataclass(frozen=True)
class InductionScore:
    """The best head's rate, the rate of a head that looks anywhere, and which head it is."""

    rate: float
    chance: float
    layer: int
    head: int

    def __str__(self) -> str:
        return f"{self.rate:.3f} (layer {self.layer}, head {self.head}; chance {self.chance:.3f})"


def random_probe(rng: Random, n_vocab: int, length: int = 24) -> list[int]:
    """Return distinct random ids followed by a part of the same ids again."""
    ids = rng.sample(range(len(SPECIAL_TOKENS), n_vocab), length)
    return ids + ids[: rng.randint(2, length - 1)]


def name_probe(rng: Random, vocabulary: BytePairVocabulary) -> list[int]:
    """Return a sentence with an unseen name that stops inside the name's second mention."""
    name, other = made_up_name(rng, unseen=True), made_up_name(rng, unseen=True)
    told = (
        f"<|endoftext|>One day, {name} found a silver key near the old bridge. "
        f"Then {other} came to the bridge too. {other} took the key and thanked"
    )
    mention = vocabulary.encode(f" {name}")
    return vocabulary.encode(told) + mention[: rng.randint(1, len(mention) - 1)]


def induction_score(net: Net, probes: list[list[int]]) -> InductionScore:
    """Return the score of the head that most often looks right after the earlier mention.

    Args:
        net: The model.
        probes: Token ids; those whose last id did not occur exactly once before are left out.
    """
    hits = torch.zeros(net.config.n_layer, net.config.n_head)
    chance = n_used = 0.0
    for ids in probes:
        if ids.count(ids[-1]) != 2:
            continue
        attention: list[torch.Tensor] = []
        with torch.no_grad():
            net(torch.tensor([ids]), attention)
        rows = torch.stack([layer[0, :, -1] for layer in attention])
        hits += rows.argmax(-1) == ids.index(ids[-1]) + 1
        chance += 1 / len(ids)
        n_used += 1
    rates = hits / n_used
    best = int(rates.argmax())
    return InductionScore(
        float(rates.max()), chance / n_used, best // net.config.n_head, best % net.config.n_head
    )
