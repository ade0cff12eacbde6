"""Random-weight encoders: BERT, which is nothing else, and T5, which has a decoder as well.

llama.cpp's own generator of tiny models leaves both out. Weights depend on the tensor's name alone.
Never: loads a model or knows anything of kqview.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf

from .shared_kv_gguf import Weights
from .tiny_gguf import add_bytes_vocab, finish

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

N_VOCAB = 320
SEP = 262
N_LAYER, N_HEAD, N_EMBD, N_FF = 3, 4, 64, 96


def _writer_of(arch: str, n_positions: int = 512) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(None, arch)
    writer.add_context_length(n_positions)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_vocab_size(N_VOCAB)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_bytes_vocab(writer, N_VOCAB, None)
    return writer


def write_bert(
    path: Path,
    *,
    pooling: gguf.PoolingType | None = None,
    n_classes: int = 0,
    labels: Sequence[str] = (),
    n_positions: int = 512,
    adds: Sequence[str] = (),
    rerank_template: str | None = None,
) -> Path:
    """3 layers of 4 heads; learned positions, attention to both sides.

    Args:
        path: File to write.
        pooling: What the file says of it; None says nothing.
        n_classes: Values of a classifier head; 0 leaves it out.
        labels: Names of the classes; llama.cpp takes one class where there are none.
        n_positions: Positions that have a vector.
        adds: Which of "bos", "eos" and "sep" the vocabulary puts around a text.
        rerank_template: The file's text for a query and a document.
    """
    writer = _writer_of("bert", n_positions)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    if labels:
        writer.add_classifier_output_labels(labels)
    writer.add_sep_token_id(SEP)
    for name in adds:
        writer.add_bool(f"tokenizer.ggml.add_{name}_token", True)
    if rerank_template is not None:
        writer.add_string("tokenizer.chat_template.rerank", rerank_template)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_token_type_count(1)
    add = Weights(writer)
    add.matrix("token_embd.weight", N_VOCAB, N_EMBD)
    add.matrix("position_embd.weight", n_positions, N_EMBD)
    if n_classes:
        add.matrix("cls.weight", N_EMBD, N_EMBD)
        add.norm("cls.bias", N_EMBD, 0.1)
        add.matrix("cls.output.weight", n_classes, N_EMBD)
        add.norm("cls.output.bias", n_classes, 0.1)
    add.norm("token_embd_norm.weight", N_EMBD)
    add.norm("token_embd_norm.bias", N_EMBD, 0.1)
    for il in range(N_LAYER):
        b = f"blk.{il}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add.matrix(f"{b}{name}.weight", N_EMBD, N_EMBD)
            add.norm(f"{b}{name}.bias", N_EMBD, 0.1)
        for name in ("attn_output_norm", "layer_output_norm"):
            add.norm(f"{b}{name}.weight", N_EMBD)
            add.norm(f"{b}{name}.bias", N_EMBD, 0.1)
        add.matrix(b + "ffn_up.weight", N_FF, N_EMBD)
        add.matrix(b + "ffn_down.weight", N_EMBD, N_FF)
    return finish(writer, path)


def write_t5(path: Path) -> Path:
    """3 encoder and 3 decoder layers of 4 heads; relative positions are a bias of the scores."""
    writer = _writer_of("t5")
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_key_length(N_EMBD // N_HEAD)
    writer.add_value_length(N_EMBD // N_HEAD)
    writer.add_relative_attn_buckets_count(8)
    writer.add_decoder_start_token_id(0)
    add = Weights(writer)
    add.matrix("token_embd.weight", N_VOCAB, N_EMBD)
    add.matrix("output.weight", N_VOCAB, N_EMBD)
    for part, blocks in (("enc", ("attn",)), ("dec", ("attn", "cross_attn"))):
        add.norm(f"{part}.output_norm.weight", N_EMBD)
        for il in range(N_LAYER):
            b = f"{part}.blk.{il}."
            for block in blocks:
                add.norm(f"{b}{block}_norm.weight", N_EMBD)
                for name in ("q", "k", "v", "o"):
                    add.matrix(f"{b}{block}_{name}.weight", N_EMBD, N_EMBD)
            if il == 0:
                add.matrix(b + "attn_rel_b.weight", 8, N_HEAD)
            add.norm(b + "ffn_norm.weight", N_EMBD)
            add.matrix(b + "ffn_gate.weight", N_FF, N_EMBD)
            add.matrix(b + "ffn_up.weight", N_FF, N_EMBD)
            add.matrix(b + "ffn_down.weight", N_EMBD, N_FF)
    return finish(writer, path)
