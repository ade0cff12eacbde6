"""Converts a BERT classifier of Hugging Face to GGUF, with its whole head.

llama.cpp's own converter leaves out ``pooler.dense``, which `BertForSequenceClassification` applies
before the classifier, so logits of its files are not those of transformers. Here the pooler becomes
``cls`` and the classifier ``cls.output``, which llama.cpp's graph of BERT evaluates in that order:
``cls.output @ tanh(cls @ h + b) + b``, h being the last layer's output for ``[CLS]``.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from kqview import json_input
from kqview.durable import WholeFile
from kqview.errors import ModelLoadError, UnsupportedModel
from kqview.extras import needed

WeightType = Literal["f32", "f16"]

_ARCHITECTURE: Final = "BertForSequenceClassification"
_SPECIAL: Final = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_HF_ROLES: Final = {"bos": "cls"}  # where GGUF has another name for a role

# Hugging Face's names without "bert." and the ending -> names of GGUF.
_NAMES: Final = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "pooler.dense": "cls",
    "classifier": "cls.output",
}
_LAYER_NAMES: Final = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_LAYER: Final = re.compile(r"encoder\.layer\.(\d+)\.(.+)")
_ENDINGS: Final = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
_ALWAYS_F32: Final = ("position_embd.weight", "token_types.weight")  # added to floats as they are


def convert_classifier(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    weight_type: WeightType = "f32",
) -> int:
    """Write the classifier in the folder *source* as the GGUF file *target*; return its size.

    The file says that its pooling is "rank", so `Engine` opens it as a classifier. It appears under
    its name when it is complete.

    Args:
        source: Folder with config.json, \\*.safetensors, and tokenizer.json or vocab.txt.
        target: File to write.
        weight_type: Type of the matrices; everything else is float32.

    Raises:
        ModelLoadError: A file is missing or damaged.
        UnsupportedModel: The model is not a BERT classifier, or has a part that llama.cpp lacks.
        OSError: A file cannot be read or written.
        KqviewError: gguf or safetensors is not installed.
    """
    gguf, safetensors = (
        needed(name, "converting needs", 'run pip install "kqview[convert]"')
        for name in ("gguf", "safetensors")
    )
    folder = Path(source)
    config = _checked_config(_read_json(folder / "config.json"))
    tensors = dict(_tensors(safetensors, folder))
    _check_tensors(tensors, config)
    writer = gguf.GGUFWriter(None, "bert")
    _write_facts(writer, gguf, folder, config, weight_type)
    _write_vocabulary(writer, gguf, folder, len(tensors["token_embd.weight"]))
    for name, values in tensors.items():
        is_f16 = weight_type == "f16" and values.ndim == 2 and name not in _ALWAYS_F32
        writer.add_tensor(name, values.astype(np.float16 if is_f16 else np.float32))
    with WholeFile(target) as file:
        # What opening a file by name would set.
        writer.fout, writer.state = [file.stream], gguf.WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        return file.stream.tell()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json_input.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}; pass a model's folder") from None
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return content  # pyright: ignore[reportUnknownVariableType]


# ---- the model


def _checked_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with Hugging Face's defaults, of a model that llama.cpp can evaluate."""
    defaults = {
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
    }
    config = defaults | config
    if config.get("architectures") != [_ARCHITECTURE]:
        raise UnsupportedModel(
            f"architectures in config.json is {config.get('architectures')}; this command converts "
            f"{_ARCHITECTURE}, llama.cpp's convert_hf_to_gguf.py other models"
        )
    wanted: dict[str, Sequence[object]] = {
        "hidden_act": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
    }
    for name, values in wanted.items():
        if config[name] not in values:
            shown = " or ".join(map(repr, values))
            raise UnsupportedModel(
                f"{name} in config.json is {config[name]!r}; llama.cpp has only {shown}"
            )
    numbers = (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
        "max_position_embeddings", "type_vocab_size",
    )  # fmt: skip
    for name in numbers:
        if type(config.get(name)) is not int or config[name] < 1:
            raise ModelLoadError(
                f"{name} in config.json is {config.get(name)!r}; it must be a whole number from 1"
            )
    return config


def _tensors(safetensors: Any, folder: Path) -> Iterator[tuple[str, NDArray[Any]]]:
    """Tensors of all files, under the names of GGUF."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ModelLoadError(f"{folder} has no .safetensors file; save the model in that format")
    for path in paths:
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    if gguf_name := _name_of(name):
                        yield gguf_name, file.get_tensor(name)
        except (safetensors.SafetensorError, TypeError) as error:  # TypeError: a type numpy lacks
            raise ModelLoadError(
                f"{path} cannot be read: {error}; save the model as float32 or float16"
            ) from error


def _name_of(name: str) -> str | None:
    """GGUF's name of a tensor; None for one that the classifier does not use."""
    stem, _, ending = name.removeprefix("bert.").rpartition(".")
    if layer := _LAYER.fullmatch(stem):
        part = _LAYER_NAMES.get(layer[2])
        known = part and f"blk.{layer[1]}.{part}"
    else:
        known = _NAMES.get(stem)
    return f"{known}.{_ENDINGS[ending]}" if known and ending in _ENDINGS else None


def _check_tensors(tensors: Mapping[str, NDArray[Any]], config: Mapping[str, Any]) -> None:
    names = [*_NAMES.values()]
    for i in range(config["num_hidden_layers"]):
        names += [f"blk.{i}.{name}" for name in _LAYER_NAMES.values()]
    without_bias = {"token_embd", "position_embd", "token_types"}
    wanted = {f"{name}.weight" for name in names}
    wanted |= {f"{name}.bias" for name in names if name not in without_bias}
    if missing := sorted(wanted - tensors.keys()):
        raise ModelLoadError(
            f"the .safetensors files lack {', '.join(missing[:3])} and {len(missing)} tensors in "
            f"all; pass a model saved as {_ARCHITECTURE}"
        )
    n_labels, n_named = len(tensors["cls.output.bias"]), len(_labels(config))
    if n_labels != n_named:
        raise ModelLoadError(
            f"id2label in config.json names {n_named} labels, but the classifier has {n_labels}"
        )


def _labels(config: Mapping[str, Any]) -> list[str]:
    """Names of the labels in the order of their numbers; Hugging Face's default is two."""
    named: Any = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    try:
        return [str(named[str(i)]) for i in range(len(named))]
    except (KeyError, TypeError):
        raise ModelLoadError("id2label in config.json must name the labels from 0 on") from None


def _write_facts(
    writer: Any, gguf: Any, folder: Path, config: Mapping[str, Any], weight_type: WeightType
) -> None:
    writer.add_name(folder.resolve().name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_pooling_type(gguf.PoolingType.RANK)
    writer.add_classifier_output_labels(_labels(config))
    types = gguf.LlamaFileType
    writer.add_file_type(types.ALL_F32 if weight_type == "f32" else types.MOSTLY_F16)


# ---- the vocabulary


def _write_vocabulary(writer: Any, gguf: Any, folder: Path, n_vocab: int) -> None:
    path = folder / "tokenizer_config.json"
    settings = _read_json(path) if path.exists() else {}
    tokens, lowers, strips = _vocabulary(folder, settings)
    if len(tokens) > n_vocab:
        raise ModelLoadError(
            f"the vocabulary has {len(tokens)} tokens, but the model has vectors for {n_vocab}"
        )
    names: dict[str, str] = {}  # of the special tokens, by their roles in GGUF
    for role, default in _SPECIAL.items():
        named = settings.get(f"{_HF_ROLES.get(role, role)}_token") or default
        names[role] = cast("str", named["content"] if isinstance(named, dict) else named)
    texts: list[str] = []
    types: list[int] = []
    for i in range(n_vocab):
        token = tokens[i] if i < len(tokens) else f"[PAD{i}]"
        if i >= len(tokens):
            types.append(gguf.TokenType.UNUSED)
        elif token in names.values():
            types.append(gguf.TokenType.CONTROL)
        else:
            # llama.cpp marks the start of a word, WordPiece its continuation.
            token = token[2:] if token.startswith("##") else f"\u2581{token}"
            types.append(gguf.TokenType.NORMAL)
        texts.append(token)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_types(types)
    writer.add_bool("tokenizer.ggml.normalizer.lowercase", lowers)
    writer.add_bool("tokenizer.ggml.normalizer.strip_accents", strips)
    ids = {token: i for i, token in enumerate(tokens)}
    for role, name in names.items():
        if name in ids:
            getattr(writer, f"add_{role}_token_id")(ids[name])
        elif role != "mask":
            raise ModelLoadError(f"the vocabulary has no {name}, the model's {role} token")


def _vocabulary(folder: Path, settings: Mapping[str, Any]) -> tuple[list[str], bool, bool]:
    """(tokens in order, whether text is made lower case, whether accents are removed)."""
    if not (folder / "tokenizer.json").exists():
        lowers = settings.get("do_lower_case", True)
        strips = settings.get("strip_accents")
        try:
            text = (folder / "vocab.txt").read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ModelLoadError(f"{folder} has neither tokenizer.json nor vocab.txt") from None
        return text.removesuffix("\n").split("\n"), lowers, lowers if strips is None else strips
    content = _read_json(folder / "tokenizer.json")
    model: dict[str, Any] = content.get("model") or {}
    normalizer: dict[str, Any] = content.get("normalizer") or {}
    kinds = model.get("type"), normalizer.get("type")
    if kinds != ("WordPiece", "BertNormalizer") or model.get("continuing_subword_prefix") != "##":
        raise UnsupportedModel(
            f"tokenizer.json has a {kinds[0]} model with normalizer {kinds[1]}; llama.cpp has "
            "WordPiece with ## and BertNormalizer for BERT"
        )
    ids: dict[str, int] = dict(model["vocab"])
    added: list[dict[str, Any]] = content.get("added_tokens") or []
    ids |= {one["content"]: one["id"] for one in added}
    if sorted(ids.values()) != list(range(len(ids))):
        raise ModelLoadError("the ids in tokenizer.json have gaps or repeat")
    lowers, strips = normalizer.get("lowercase", True), normalizer.get("strip_accents")
    return sorted(ids, key=ids.__getitem__), lowers, lowers if strips is None else strips
