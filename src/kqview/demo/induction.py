# pyright: basic, reportMissingImports=false
"""Measures, in torch, how much each head of the demo model is an induction head.

Owns the two probes (random token sequences, unseen names in a story sentence) and the score: how
often a head's largest weight falls on the token after the earlier mention of the current token.
Needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kqview.demo.bpe import SPECIAL_TOKENS
from kqview.demo.words import made_up_name

if TYPE_CHECKING:
    from random import Random

    from kqview.demo.bpe import BytePairVocabulary
    from kqview.demo.net import Net


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
