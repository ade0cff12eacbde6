# pyright: basic, reportMissingImports=false
"""Trains the bundled demo model from nothing and writes its GGUF file.

    python -m kqview.demo.train --out model.gguf

Owns the mix of documents, the schedule and the report. Every source of randomness is seeded.
Needs torch and gguf, which kqview itself does not: `pip install torch gguf`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from random import Random
from types import ModuleType

if not __package__:  # run by path: stand in for the package, which may not be built yet
    package = ModuleType("kqview")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["kqview"] = package

try:
    import torch
    import torch.nn.functional as F

    from kqview.demo.bpe import SPECIAL_TOKENS, BytePairVocabulary
    from kqview.demo.chat import chat_document, story_document
    from kqview.demo.export import write_gguf
    from kqview.demo.induction import induction_score, name_probe, random_probe
    from kqview.demo.net import Net, NetConfig
    from kqview.durable import WholeFile
except ModuleNotFoundError as error:
    if error.name not in {"torch", "gguf"}:
        raise
    sys.exit(
        f"demo.train: {error.name} is not installed, training needs it; pip install torch gguf"
    )

SEED = 20
SHORT_ROW, LONG_ROW = 128, 512  # tokens a row: the long ones come last, they cost more
TOKENS_PER_STEP = 2048
SHARE_RANDOM, SHARE_CHAT = 0.2, 0.2  # of the rows; the rest are stories
PEAK_RATE, WARMUP_STEPS = 2e-3, 50


def random_row(rng: Random, n_vocab: int, n_tokens: int) -> list[int]:
    """Return random ids in which runs come back: only a head that looks back can predict them."""
    ordinary = range(len(SPECIAL_TOKENS), n_vocab)
    ids = rng.choices(ordinary, k=rng.randint(6, 80))
    while len(ids) < n_tokens:
        if rng.random() < 0.15:
            ids += rng.choices(ordinary, k=rng.randint(1, 8))
        start = rng.randrange(max(1, len(ids) - 4))
        ids += ids[start : start + rng.randint(3, 80)]
    return ids[:n_tokens]


def text_row(
    rng: Random, vocabulary: BytePairVocabulary, n_tokens: int, *, chat: bool
) -> list[int]:
    """Return documents one after the other, each begun by the first special token, cut to
    *n_tokens*."""
    ids: list[int] = []
    while len(ids) < n_tokens + 1:
        document = chat_document(rng) if chat else story_document(rng)
        ids += vocabulary.encode(SPECIAL_TOKENS[0] + document)
    start = (
        1 if rng.random() < 0.1 else 0
    )  # now and then without the first token, as raw ids may come
    return ids[start : start + n_tokens]


def batch(rng: Random, vocabulary: BytePairVocabulary, n_tokens: int) -> torch.Tensor:
    """Return ids of shape (TOKENS_PER_STEP / n_tokens, n_tokens + 1), int64."""
    rows: list[list[int]] = []
    for _ in range(TOKENS_PER_STEP // n_tokens):
        kind = rng.random()
        if kind < SHARE_RANDOM:
            rows.append(random_row(rng, len(vocabulary.tokens), n_tokens + 1))
        else:
            rows.append(
                text_row(rng, vocabulary, n_tokens + 1, chat=kind < SHARE_RANDOM + SHARE_CHAT)
            )
    return torch.tensor(rows)


@torch.no_grad()
def mean_loss(net: Net, rows: list[list[int]]) -> float:
    """Return the mean loss on *rows* of equal length, in nats a token."""
    ids = torch.tensor(rows)
    return float(F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()))


def train(net: Net, vocabulary: BytePairVocabulary, n_steps: int, seed: int) -> float:
    """Train *net* in place and return the mean loss of the last 50 steps, in nats a token."""
    matrices = [p for p in net.parameters() if p.dim() == 2]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=True,
    )
    rng, started, losses = Random(seed), time.monotonic(), []
    for step in range(n_steps):
        row = LONG_ROW if step >= 0.7 * n_steps else SHORT_ROW
        ids = batch(rng, vocabulary, row)
        decay = 0.5 * (1 + math.cos(math.pi * step / n_steps))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min((step + 1) / WARMUP_STEPS, 0.02 + 0.98 * decay)
        loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            probes = [random_probe(Random(i), len(vocabulary.tokens)) for i in range(50)]
            print(
                f"step {step + 1}/{n_steps}  {time.monotonic() - started:.0f} s  "
                f"loss {sum(losses[-50:]) / 50:.3f}  induction {induction_score(net, probes)}",
                flush=True,
            )
    return sum(losses[-50:]) / len(losses[-50:])


def main() -> None:
    """Parse the command line, train, round the weights to the file's precision, report, write."""
    parser = argparse.ArgumentParser(description="Train the kqview demo model.")
    parser.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    parser.add_argument(
        "--steps", type=int, default=2000, help=f"optimizer steps of {TOKENS_PER_STEP} tokens"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=SEED, help="seed of text, weights and probes")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    started = time.monotonic()

    rng = Random(options.seed)
    corpus = "\n".join(
        chat_document(rng) if i % 5 == 0 else story_document(rng) for i in range(1500)
    )
    for token in SPECIAL_TOKENS:
        corpus = corpus.replace(token, "\n")
    net = Net(NetConfig())
    vocabulary = BytePairVocabulary.train(corpus, net.config.n_vocab)
    print(
        f"{len(vocabulary.tokens)} tokens, {sum(p.numel() for p in net.parameters())} weights",
        flush=True,
    )
    loss = train(net, vocabulary, options.steps, options.seed + 1)
    print(f"trained in {time.monotonic() - started:.0f} s, loss {loss:.3f}")

    net.load_state_dict(
        {k: v.half().float() if v.dim() == 2 else v for k, v in net.state_dict().items()}
    )
    rng = Random(options.seed + 2)
    told = [text_row(rng, vocabulary, SHORT_ROW * 2 + 1, chat=False) for _ in range(64)]
    print(f"loss on unseen stories: {mean_loss(net, told):.3f}")
    randoms = [random_probe(rng, len(vocabulary.tokens)) for _ in range(300)]
    names = [name_probe(rng, vocabulary) for _ in range(300)]
    print(f"induction on random tokens: {induction_score(net, randoms)}")
    print(f"induction on unseen names:  {induction_score(net, names)}")
    with WholeFile(options.out) as file:
        write_gguf(Path(file.temporary), net, vocabulary)
    print(f"wrote {options.out}, {options.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
