"""A tiny Llama of a GGUF as a model of transformers, in float64."""

# transformers has types that pyright cannot follow, and need not be installed.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support.reference import Reference

if TYPE_CHECKING:
    from pathlib import Path

# Name in a GGUF -> name in transformers, of a layer.
_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_llama(path: Path) -> Any:
    """The LlamaForCausalLM with the weights of *path*, whose RoPE has base 10000."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    of = Reference.load(path)
    weights = of.weights
    assert of.rope_base == 10000.0
    n_vocab, n_embd = weights["token_embd.weight"].shape
    config = LlamaConfig(
        vocab_size=n_vocab,
        hidden_size=n_embd,
        intermediate_size=len(weights["blk.0.ffn_gate.weight"]),
        num_hidden_layers=of.n_layer,
        num_attention_heads=of.n_head,
        num_key_value_heads=of.n_head_kv,
        head_dim=of.head_size,
        rms_norm_eps=of.rms_eps,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    state = {
        "model.embed_tokens": weights["token_embd.weight"],
        "model.norm": weights["output_norm.weight"],
        "lm_head": weights.get("output.weight", weights["token_embd.weight"]),
    }
    for layer in range(of.n_layer):
        for ours, theirs in _NAMES.items():
            one = weights[f"blk.{layer}.{ours}.weight"]
            if ours in ("attn_q", "attn_k"):
                one = _halves(one, of.n_head if ours == "attn_q" else of.n_head_kv)
            state[f"model.layers.{layer}.{theirs}"] = one
    model = LlamaForCausalLM(config).double().eval()
    tensors = {f"{name}.weight": torch.from_numpy(one.copy()) for name, one in state.items()}
    model.load_state_dict(tensors)
    return model


def _halves(weight: Any, n_head: int) -> Any:
    """Rows of each head as transformers rotates them: the two halves, not neighbours, are pairs."""
    pairs = weight.reshape(n_head, -1, 2, weight.shape[-1])
    return np.swapaxes(pairs, 1, 2).reshape(weight.shape)
