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
    from pathlib import Path

N_VOCAB = 320
N_LAYER, N_HEAD, N_EMBD, N_FF = 3, 4, 64, 96


def _writer_of(arch: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(None, arch)
    writer.add_context_length(512)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_vocab_size(N_VOCAB)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    add_bytes_vocab(writer, N_VOCAB, None)
    return writer


def write_bert(path: Path) -> Path:
    """3 layers of 4 heads; learned positions, attention to both sides."""
    writer = _writer_of("bert")
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_token_type_count(1)
    add = Weights(writer)
    add.matrix("token_embd.weight", N_VOCAB, N_EMBD)
    add.matrix("position_embd.weight", 512, N_EMBD)
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
