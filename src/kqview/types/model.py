"""ModelInfo: what a loaded model says about itself; Classification: what its classifier says."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of one loaded model; it stays valid after the engine is closed.

    Attributes:
        name: Name from the file's metadata, "" where it has none.
        architecture: GGUF architecture, such as "qwen2".
        n_vocab: Size of the vocabulary; token ids are below it.
        n_layer: Layers of the model, with attention or without.
        n_head: Query heads of a layer, the largest where layers differ.
        n_head_kv: Key and value heads of a layer, the largest where layers differ.
        n_embd: Width of the residual stream.
        n_ctx_train: Context in tokens that the model was trained for.
        attention_layers: Layers that have attention to capture, ascending.
        attention_scale: Factor between "logits" and the input of the softmax.
        bos_token_id: Id that starts a text, None where the model has none.
        eos_token_id: Id that ends a text, None where the model has none.
        eot_token_id: Id that ends a turn of a chat, None where the model has none.
        pad_token_id: Id for padding, None where the model has none.
        special_tokens: Text of each special token by its role, such as "bos".
        rope_freq_base: Base of the rotary position embedding.
        rope_freq_scale: Scale of the rotary position embedding.
        chat_template: Jinja source from the file, None where it has none.
        n_params: Number of weights.
        size_bytes: Size of all tensors.
        file_type: Quantisation of the file in words, such as "Q8_0".
        classifier_labels: Labels of a classifier head, () for other models.
        metadata: Every key of the file's metadata as text.
    """

    name: str
    architecture: str
    n_vocab: int
    n_layer: int
    n_head: int
    n_head_kv: int
    n_embd: int
    n_ctx_train: int
    attention_layers: tuple[int, ...]
    attention_scale: float
    bos_token_id: int | None
    eos_token_id: int | None
    eot_token_id: int | None
    pad_token_id: int | None
    special_tokens: Mapping[str, str]
    rope_freq_base: float
    rope_freq_scale: float
    chat_template: str | None
    n_params: int
    size_bytes: int
    file_type: str
    classifier_labels: tuple[str, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Classification:
    """The result of `Engine.classify` for one text.

    Attributes:
        label: The label with the highest score.
        score: Its score, 0..1.
        scores: Score of each label, in the order of ``ModelInfo.classifier_labels`` ("LABEL_0" and
            so on where the file names none). Several add up to 1 (softmax); the score of a single
            one, such as a reranker's, is the sigmoid of its value.
        raw: The output of the head in that order: logits, except for Qwen3 rerankers, to whose
            graph llama.cpp adds a softmax.
    """

    label: str
    score: float
    scores: Mapping[str, float]
    raw: tuple[float, ...]
