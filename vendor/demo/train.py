"""Trains the bundled demo model from scratch and writes its GGUF file.

    pip install torch gguf
    python vendor/demo/train.py --out model.gguf

Holds the mix of documents, the schedule, the export and the report. Every source of randomness is
seeded.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from random import Random

try:
    import gguf
    import numpy as np
    import torch
    import torch.nn.functional as F
    from bpe import SPECIAL_TOKENS, BytePairVocabulary
    from corpus import CHAT_TEMPLATE, chat_document, story_document, vocabulary_text
    from net import Net, NetConfig, induction_score, name_probe, random_probe
except ModuleNotFoundError as error:
    if error.name not in {"torch", "gguf", "numpy"}:
        raise
    sys.exit(f"{error.name} is not installed; run pip install torch gguf")

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


def write_gguf(path: Path, net: Net, vocabulary: BytePairVocabulary) -> None:
    """Write *net* and *vocabulary* to *path*.

    The first special token begins a text and ends it (bos, eos and padding), the last one ends a
    chat message. The tensors' torch names are the GGUF names already.
    """
    c = net.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("kqview demo")
    # The bundled file says this; another text would make another file.
    writer.add_description("Tiny story model whose names come back; trained by kqview.demo.train")
    writer.add_license("MIT")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(c.n_vocab)
    writer.add_context_length(c.n_ctx_train)
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(c.n_ff)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head_kv)
    writer.add_key_length(c.n_embd_head)
    writer.add_value_length(c.n_embd_head)
    writer.add_rope_dimension_count(c.n_embd_head)
    writer.add_rope_freq_base(c.rope_freq_base)
    writer.add_layer_norm_rms_eps(c.norm_eps)

    begin, _, end_of_message = range(len(SPECIAL_TOKENS))
    kinds = [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    kinds += [gguf.TokenType.NORMAL] * (c.n_vocab - len(SPECIAL_TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{a} {b}" for a, b in vocabulary.merges])
    writer.add_bos_token_id(begin)
    writer.add_eos_token_id(begin)
    writer.add_pad_token_id(begin)
    writer.add_eot_token_id(end_of_message)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    for name, tensor in net.state_dict().items():
        dtype = np.float32 if tensor.dim() == 1 else np.float16
        writer.add_tensor(name, tensor.numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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

    net = Net(NetConfig())
    vocabulary = BytePairVocabulary.train(vocabulary_text(options.seed), net.config.n_vocab)
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
    unfinished = options.out.with_suffix(".part")
    write_gguf(unfinished, net, vocabulary)
    unfinished.replace(options.out)
    print(f"wrote {options.out}, {options.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
