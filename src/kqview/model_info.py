"""Turns what llama.cpp says about a loaded model into ModelInfo."""

import re

from kqview import _core
from kqview.types import ModelInfo

_ROLE = re.compile(r"tokenizer\.ggml\.(\w+)_token_id")


def model_info(model: _core.Model, engine: _core.Engine) -> ModelInfo:
    """Facts about *model*, with the attention layers that *engine* found in its graph."""
    raw = model.info()
    metadata = model.metadata()
    architecture = metadata.get("general.architecture", "")
    layers = engine.attention_layers
    return ModelInfo(
        name=metadata.get("general.name", ""),
        architecture=architecture,
        n_vocab=raw["n_vocab"],
        n_layer=raw["n_layer"],
        n_head=max((layer[1] for layer in layers), default=raw["n_head"]),
        n_head_kv=max((layer[2] for layer in layers), default=raw["n_head_kv"]),
        n_embd=raw["n_embd"],
        n_ctx_train=raw["n_ctx_train"],
        attention_layers=tuple(layer[0] for layer in layers),
        attention_scale=layers[0][3] if layers else 0.0,
        bos_token_id=_id_or_none(raw["bos_token_id"]),
        eos_token_id=_id_or_none(raw["eos_token_id"]),
        eot_token_id=_id_or_none(raw["eot_token_id"]),
        pad_token_id=_id_or_none(raw["pad_token_id"]),
        special_tokens=_special_tokens(model, metadata) if raw["has_vocab"] else {},
        # llama.cpp's default where a file does not say
        rope_freq_base=float(metadata.get(f"{architecture}.rope.freq_base", 10000.0)),
        rope_freq_scale=raw["rope_freq_scale"],
        chat_template=raw["chat_template"],
        n_params=raw["n_params"],
        size_bytes=raw["size_bytes"],
        file_type=raw["file_type"],
        classifier_labels=tuple(raw["classifier_labels"]),
        metadata=metadata,
    )


def _id_or_none(token_id: int) -> int | None:
    return None if token_id < 0 else token_id


def _special_tokens(model: _core.Model, metadata: dict[str, str]) -> dict[str, str]:
    """Text of each special token by the role that the file's metadata gives it."""
    found: dict[str, str] = {}
    n_vocab = model.info()["n_vocab"]
    for key, value in metadata.items():
        role = _ROLE.fullmatch(key)
        if role and value.isdigit() and int(value) < n_vocab:
            found[role[1]] = model.token_bytes(int(value)).decode("utf-8", "replace")
    return found
