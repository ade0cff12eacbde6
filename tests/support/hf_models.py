"""Tiny random models of transformers, and their GGUF by llama.cpp's own converter.

The converter is not part of what is built: ``python -m tests.support.hf_models`` extracts it, with
the package gguf that goes with it, from the pinned archive into kqview's cache, once a machine.
"""

# transformers has types that pyright cannot follow, and need not be installed.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib.util
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
    """What differs from `SIZES`, and what its modules are called inside of a layer."""

    config: dict[str, Any] = field(default_factory=dict)
    attention: str = "self_attn"
    projection: str = "self_attn.o_proj"
    has_gelu: bool = False
    """llama.cpp looks it up in a table of float16."""
    is_encoder: bool = False
    older: dict[str, Any] = field(default_factory=dict)
    """Keys that the converter reads, and this version of transformers does not write."""


# By the names that transformers has for them.
ARCHS: dict[str, Arch] = {
    "llama": Arch(),
    "qwen2": Arch(),
    "qwen3": Arch({"head_dim": 32}),
    "gemma2": Arch(
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}, has_gelu=True
    ),
    "gpt_neox": Arch(
        {"hidden_act": "gelu_new"}, "attention", "attention.dense", has_gelu=True,
        older={"rotary_pct": 0.25},
    ),
    "bloom": Arch(
        {"n_layer": N_LAYERS, "n_head": N_HEADS}, "self_attention", "self_attention.dense",
        has_gelu=True,
    ),
    "olmo2": Arch(),
    "granite": Arch({"residual_multiplier": 0.5, "attention_multiplier": 0.3}),
}  # fmt: skip


def make(name: str) -> Any:
    """The model in float32 on eager attention; the weights depend only on *name*."""
    import torch
    import transformers

    torch.manual_seed(1)
    arch = ARCHS[name]
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **arch.config})
    kind = transformers.AutoModel if arch.is_encoder else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for one in model.parameters():
            noise = torch.randn_like(one)
            one.copy_(one + 0.1 * noise if one.ndim == 1 else noise * one.shape[-1] ** -0.5)
    for one in model.modules():
        if "gelu" in type(one).__name__.lower():
            one.register_forward_pre_hook(_round)
            one.register_forward_hook(_round)
    return model


def layers(model: Any) -> Any:
    """Its layers, in their order."""
    import torch

    lists = (one for one in model.modules() if isinstance(one, torch.nn.ModuleList))
    return max(lists, key=len)


def _round(_module: Any, values: Any, *output: Any) -> Any:
    """What GELU is given, or returns, in float16 as in llama.cpp's table."""
    (x,) = output or values
    return x.half().float()


def convert(model: Any, folder: Path) -> Path:
    """Write *model* as transformers does, and that as a GGUF without a vocabulary."""
    older = ARCHS[model.config.model_type].older
    conversion = _conversion()
    model.save_pretrained(folder)
    (name,) = model.config.architectures
    of = conversion.ModelBase.from_model_architecture(name)
    hparams = {**conversion.ModelBase.load_hparams(folder, False), **older}
    ftype = conversion.base.gguf.LlamaFileType.ALL_F32

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(N_VOCAB)

    path = folder.with_suffix(".gguf")
    with mock.patch.object(of, "set_vocab", set_vocab):
        of(folder, ftype, path, hparams=hparams).write()
    return path


if __name__ == "__main__":
    found, pinned = _fetcher()
    print(found.obtain(found.cache_root(os.environ), pinned))
