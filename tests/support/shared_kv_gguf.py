"""Random-weight Gemma 3n and Gemma 4 models: layers that read an earlier layer's KV cache.

llama.cpp's own generator of tiny models leaves both out. Gemma 4's layers also differ in the
number of heads and in their size. Weights depend on (seed, tensor name) alone.
Never: loads a model or knows anything of kqview.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

from .tiny_gguf import add_bytes_vocab, finish, tensor_source

if TYPE_CHECKING:
    from pathlib import Path

N_VOCAB = 320
WINDOW = 16


class Weights:
    """Adds tensors by shape, slowest dimension first: matrices are (n_out, n_in)."""

    def __init__(self, writer: gguf.GGUFWriter) -> None:
        self._writer = writer
        self._rand = tensor_source(0)

    def norm(self, name: str, n: int, size: float = 1.0) -> None:
        data = size * (1 + self._rand(name, (n,), 0.1))
        self._writer.add_tensor(name, np.ascontiguousarray(data, dtype=np.float32))

    def matrix(self, name: str, *shape: int) -> None:
        self._writer.add_tensor(name, self._rand(name, shape, shape[-1] ** -0.5))


def _writer_of(arch: str, n_embd: int, n_ff: int, n_layer: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(None, arch)
    writer.add_context_length(2048)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(n_ff)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(WINDOW)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(N_VOCAB)
    add_bytes_vocab(writer, N_VOCAB, None)
    return writer


def write_gemma3n(path: Path) -> Path:
    """22 layers (llama.cpp fixes that the cache of 20 is shared by the rest), 2 heads on 1 KV head.

    Every fifth layer sees all tokens, the others a window of 16.
    """
    n_layer, n_head, n_embd, n_ff = 22, 2, 64, 96
    n_altup, n_embd_altup, laurel_rank = 4, 256, 64  # fixed in llama.cpp
    head_size = n_embd // n_head
    writer = _writer_of("gemma3n", n_embd, n_ff, n_layer)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(1)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    add = Weights(writer)
    add.matrix("token_embd.weight", N_VOCAB, n_embd)
    add.norm("output_norm.weight", n_embd)
    add.matrix("altup_proj.weight", n_altup - 1, n_embd, n_embd)
    add.matrix("altup_unembd_proj.weight", n_altup - 1, n_embd, n_embd)
    add.matrix("per_layer_token_embd.weight", N_VOCAB, n_embd_altup * n_layer)
    add.matrix("per_layer_model_proj.weight", n_embd_altup * n_layer, n_embd)
    add.norm("per_layer_proj_norm.weight", n_embd_altup)
    for il in range(n_layer):
        b = f"blk.{il}."
        _add_attention(add, b, n_embd, n_head, 1, head_size)
        _add_feed_forward(add, b, n_embd, n_ff)
        add.matrix(b + "inp_gate.weight", n_embd_altup, n_embd)
        add.matrix(b + "proj.weight", n_embd, n_embd_altup)
        add.norm(b + "post_norm.weight", n_embd)
        add.matrix(b + "altup_correct_coef.weight", n_altup, n_altup)
        add.norm(b + "altup_correct_scale.weight", n_embd)
        add.matrix(b + "altup_predict_coef.weight", n_altup * n_altup, n_altup)
        add.matrix(b + "altup_router.weight", n_altup, n_embd)
        add.norm(b + "altup_router_norm.weight", n_embd)
        add.matrix(b + "laurel_l.weight", laurel_rank, n_embd)
        add.matrix(b + "laurel_r.weight", n_embd, laurel_rank)
        add.norm(b + "laurel_post_norm.weight", n_embd)
    return finish(writer, path)


def write_gemma4(path: Path) -> Path:
    """6 layers, the last 2 without a cache of their own.

    Layers 1, 3 and 5 see all tokens with 2 heads of size 64, the others a window of 16 with 4
    heads of size 32. Layers 4 and 5 read the caches of the last layers of their kind.
    """
    n_layer, n_embd, n_ff, n_shared = 6, 64, 96, 2
    is_window = [il % 2 == 0 for il in range(n_layer)]
    n_heads = [4 if window else 2 for window in is_window]
    writer = _writer_of("gemma4", n_embd, n_ff, n_layer)
    writer.add_head_count(n_heads)
    writer.add_head_count_kv([1] * n_layer)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_uint32("gemma4.attention.key_length_swa", 32)
    writer.add_uint32("gemma4.attention.value_length_swa", 32)
    writer.add_uint32("gemma4.rope.dimension_count", 64)
    writer.add_uint32("gemma4.rope.dimension_count_swa", 32)
    writer.add_float32("gemma4.rope.freq_base_swa", 10000.0)
    writer.add_uint32("gemma4.attention.shared_kv_layers", n_shared)
    writer.add_array("gemma4.attention.sliding_window_pattern", is_window)
    writer.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    add = Weights(writer)
    add.matrix("token_embd.weight", N_VOCAB, n_embd)
    add.norm("output_norm.weight", n_embd)
    add.norm("rope_freqs.weight", 32)
    for il in range(n_layer):
        b = f"blk.{il}."
        head_size = 32 if is_window[il] else 64
        _add_attention(add, b, n_embd, n_heads[il], 1, head_size, has_kv=il < n_layer - n_shared)
        _add_feed_forward(add, b, n_embd, n_ff)
    return finish(writer, path)


def _add_attention(
    add: Weights, b: str, n_embd: int, n_head: int, n_head_kv: int, head_size: int,
    *, has_kv: bool = True,
) -> None:  # fmt: skip
    add.norm(b + "attn_norm.weight", n_embd)
    add.matrix(b + "attn_q.weight", n_head * head_size, n_embd)
    add.norm(b + "attn_q_norm.weight", head_size, 0.5)
    if has_kv:
        add.matrix(b + "attn_k.weight", n_head_kv * head_size, n_embd)
        add.matrix(b + "attn_v.weight", n_head_kv * head_size, n_embd)
        add.norm(b + "attn_k_norm.weight", head_size, 0.5)
    add.matrix(b + "attn_output.weight", n_embd, n_head * head_size)
    # Small: what llama.cpp rounds in sums of V hardly moves the layers above.
    add.norm(b + "post_attention_norm.weight", n_embd, 0.02)


def _add_feed_forward(add: Weights, b: str, n_embd: int, n_ff: int) -> None:
    add.norm(b + "ffn_norm.weight", n_embd)
    add.matrix(b + "ffn_gate.weight", n_ff, n_embd)
    add.matrix(b + "ffn_up.weight", n_ff, n_embd)
    add.matrix(b + "ffn_down.weight", n_embd, n_ff)
    add.norm(b + "post_ffw_norm.weight", n_embd)
