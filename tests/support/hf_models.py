"""Tiny random models of transformers, and their GGUF by llama.cpp's own converter.

The converter is not part of what is built: ``python -m tests.support.hf_models`` extracts it, with
the package gguf that goes with it, from the pinned archive into kqview's cache, once a machine.
"""

# transformers has types that pyright cannot follow, and need not be installed.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

FETCH = Path(__file__).parents[2] / "vendor" / "fetch.py"
N_VOCAB, N_LAYERS, N_HEADS, WINDOW = 320, 3, 4, 8
SIZES: dict[str, Any] = {
    "vocab_size": N_VOCAB, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _fetcher() -> tuple[Any, Any]:
    """vendor/fetch.py, and the pin with other files of the same archive."""
    spec = importlib.util.spec_from_file_location("kqview_fetch", FETCH)
    assert spec is not None
    assert spec.loader is not None
    fetch = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fetch)
    lock = replace(
        fetch.read_lock(fetch.LOCK_FILE), include=("conversion/*", "gguf-py/gguf/*"), exclude=(),
        required=("conversion/__init__.py", "gguf-py/gguf/__init__.py"),
        tree_files=112, tree_bytes=1_791_930, content_hash="converter",
    )  # fmt: skip
    return fetch, lock


def is_here() -> bool:
    """Whether the converter is in the cache."""
    fetch, lock = _fetcher()
    return fetch.is_complete(fetch.cache_root(os.environ) / lock.tree_name, lock)


@cache
def _conversion() -> Any:
    """The converter's package, which has a gguf of its own beside the installed one."""
    fetch, lock = _fetcher()
    tree = fetch.obtain(fetch.cache_root(os.environ), lock)
    others = {name: one for name, one in sys.modules.items() if name.split(".")[0] != "gguf"}
    path = [str(tree), str(tree / "gguf-py"), *sys.path]
    with mock.patch.dict(sys.modules, others, clear=True), mock.patch.object(sys, "path", path):
        import conversion

        conversion.load_all_models()
        return conversion


@dataclass(frozen=True)
class Arch:
    """What differs from `SIZES`, and what modules of a layer are called."""

    config: dict[str, Any] = field(default_factory=dict)
    attention: str = "self_attn"
    projection: str = "self_attn.o_proj"
    """What the outputs of heads go through."""
    mask: str = "attention_mask"
    """The argument of `attention` that is added to its scores."""
    is_encoder: bool = False
    older: dict[str, Any] = field(default_factory=dict)
    """Keys that the converter reads, and this version of transformers does not write."""


MOE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "norm_topk_prob": True,
}  # fmt: skip
# Attention whose keys and values are made of a few latent values.
MLA = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": N_HEADS, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_layer": N_LAYERS, "n_head": N_HEADS, "n_positions": 256}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
HEAD = {"head_dim": 16}
FULL = {"num_key_value_heads": N_HEADS}
LOCAL = {"sliding_window": WINDOW}
GLOBAL = {"sliding_window": None}
SOFT = {"query_pre_attn_scalar": 16}
# By the names that transformers has for them.
ARCHS: dict[str, Arch] = {
    "llama": Arch(),
    "mixtral": Arch({**MOE, **GLOBAL}),
    "qwen2": Arch(),
    "qwen3": Arch({"head_dim": 32}),
    "qwen3_moe": Arch({**HEAD, **MOE}),
    "qwen3_next": Arch({
        **HEAD, **MOE, "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }),
    "gemma": Arch(HEAD),
    "gemma2": Arch({
        **HEAD, **LOCAL, **SOFT, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    }),
    # The sixth layer looks at everything.
    "gemma3_text": Arch({**HEAD, **LOCAL, **SOFT, "num_hidden_layers": 7}),
    "phi": Arch({**FULL, "intermediate_size": 256}, projection="self_attn.dense"),
    "phi3": Arch(GLOBAL),
    "gpt2": Arch(GPT2, "attn", "attn.c_proj", older={"n_ctx": 256}),
    "gpt_bigcode": Arch({**GPT2, "n_inner": 256}, "attn", "attn.c_proj"),
    "gpt_neox": Arch({}, "attention", "attention.dense", older={"rotary_pct": 0.25}),
    "falcon": Arch(
        {"multi_query": True, "num_kv_heads": 1, "ffn_hidden_size": 256}, "self_attention",
        "self_attention.dense",
    ),
    "mpt": Arch(
        {"d_model": 64, "n_heads": N_HEADS, "n_layers": N_LAYERS, "max_seq_len": 256}, "attn",
        "attn.out_proj", "position_bias",
    ),
    "bloom": Arch(
        {"n_layer": N_LAYERS, "n_head": N_HEADS}, "self_attention", "self_attention.dense"
    ),
    "starcoder2": Arch(GLOBAL),
    "stablelm": Arch({"use_parallel_residual": True}),
    "olmo": Arch(),
    "olmo2": Arch(),
    "olmo3": Arch(LOCAL),
    "olmoe": Arch({**MOE, **FULL, "norm_topk_prob": False}),
    "cohere": Arch({"logit_scale": 1.0}),
    "cohere2": Arch({**LOCAL, "logit_scale": 1.0}, older={"rotary_pct": 1.0}),
    "granite": Arch({"residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "granitemoehybrid": Arch({
        **MOE, **MAMBA, "shared_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }, older={"layer_types": ["mamba", "attention", "mamba"]}),
    "deepseek_v2": Arch({**MOE, **MLA, "norm_topk_prob": False}),
    "deepseek_v3": Arch({**MOE, **MLA}, older={"scoring_func": "sigmoid"}),
    "gpt_oss": Arch({
        **MOE, **HEAD, **LOCAL, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    "nemotron": Arch(),
    "glm": Arch({**HEAD, "rms_norm_eps": 1e-5}),
    "glm4": Arch(HEAD),
    "exaone4": Arch({**GLOBAL, "layer_types": ["full_attention"] * N_LAYERS}),
    "smollm3": Arch(),
    "seed_oss": Arch(HEAD),
    "ernie4_5": Arch(HEAD),
    "arcee": Arch(),
    "apertus": Arch(),
    "hunyuan_v1_dense": Arch(HEAD),
    "minimax_m2": Arch({**HEAD, **MOE}, older={"rotary_dim": 16, "scoring_func": "sigmoid"}),
    "lfm2": Arch(
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        projection="self_attn.out_proj",
    ),
    "jamba": Arch({
        **MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_state": 8, "use_mamba_kernels": False,
    }),
    "falcon_h1": Arch({**HEAD, **MAMBA, "mamba_d_ssm": 128}),
    "bert": Arch(FULL, "attention.self", "attention.output.dense", is_encoder=True),
    "modernbert": Arch(
        {**FULL, "local_attention": 2 * WINDOW}, "attn", "attn.Wo", is_encoder=True,
        older={"layer_norm_eps": 1e-5, "global_attn_every_n_layers": 3},
    ),
    "eurobert": Arch({"classifier_pooling": "mean"}, is_encoder=True),
}  # fmt: skip


def make(name: str) -> Any:
    """The model on eager attention: float32 weights, which depend only on *name*, as float64."""
    import torch
    import transformers

    torch.manual_seed(1)
    arch = ARCHS[name]
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **arch.config})
    kind = transformers.AutoModel if arch.is_encoder else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for one in model.parameters():
            noise = torch.randn_like(one)
            one.copy_(one + 0.1 * noise if one.ndim == 1 else noise * one.shape[-1] ** -0.5)
    for one in gelus(model):
        one.forward = _gelu
    return model.double()


def gelus(model: Any) -> list[Any]:
    """Its modules that compute GELU."""
    return [one for one in model.modules() if "gelu" in type(one).__name__.lower()]


def layers(model: Any) -> Any:
    """Its layers, in their order."""
    import torch

    lists = (one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    return max(lists, key=len)


def _gelu(x: Any) -> Any:
    """By tanh, of a value in float16 and returned in it, as llama.cpp's table has it."""
    import torch

    rounded = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half()
    return torch.where(x.abs() < 10, rounded.to(x.dtype), x.clamp(min=0))


def convert(model: Any, folder: Path) -> Path:
    """Write *model* as transformers does, and that as a GGUF without a vocabulary."""
    arch = ARCHS[model.config.model_type]
    conversion = _conversion()
    model.float().save_pretrained(folder)
    model.double()
    vocabulary = {"model": {"vocab": dict.fromkeys(map(str, range(N_VOCAB)))}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary), "utf-8")  # gemma3 counts it
    name = model.config.architectures[0].replace("Mpt", "MPT")
    of = conversion.ModelBase.from_model_architecture(name)
    hparams = {**conversion.ModelBase.load_hparams(folder, False), **arch.older}
    ftype = conversion.base.gguf.LlamaFileType.ALL_F32

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(N_VOCAB)
        if arch.is_encoder:
            self.gguf_writer.add_token_type_count(self.hparams.get("type_vocab_size", 0))

    path = folder.with_suffix(".gguf")
    with mock.patch.multiple(of, set_vocab=set_vocab, no_mtp=True):
        of(folder, ftype, path, hparams=hparams).write()
    return path


if __name__ == "__main__":
    found, pinned = _fetcher()
    print(found.obtain(found.cache_root(os.environ), pinned))
