"""ModelInfo: facts about a loaded model; Classification: the result of its classifier."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape


def table(title: str, rows: Mapping[str, object]) -> str:
    """A caption and a row for each name and value; everything in it is escaped."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{escape(name)}</th>"
        f"<td style='text-align:left'>{escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table><caption>{escape(title)}</caption>{lines}</table>"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about one loaded model; remains valid after the engine is closed.

    Attributes:
        name: Name from the file's metadata; "" if it has none.
        architecture: GGUF architecture, such as "qwen2".
        n_vocab: Size of the vocabulary; every token id is below it.
        n_layer: Number of layers, with or without attention.
        n_head: Query heads per layer; the largest number if layers differ.
        n_head_kv: Key and value heads per layer; the largest number if layers differ.
        n_embd: Width of the residual stream.
        n_ctx_train: Number of context tokens that the model was trained with.
        attention_layers: Layers whose attention can be captured, in ascending order.
        attention_scale: Factor between "qk" and the input of the softmax.
        bos_token_id: Id that starts a text; None if the model has none.
        eos_token_id: Id that ends a text; None if the model has none.
        eot_token_id: Id that ends a turn of a chat; None if the model has none.
        pad_token_id: Id for padding; None if the model has none.
        special_tokens: Text of each special token by its role, such as "bos".
        rope_freq_base: Base frequency of the rotary position embedding.
        rope_freq_scale: Frequency scale of the rotary position embedding.
        chat_template: Jinja source from the file; None if it has none.
        n_params: Number of weights.
        size_bytes: Size of all tensors.
        file_type: Name of the file's quantisation, such as "Q8_0".
        classifier_labels: Labels of the classifier head; () for other models.
        metadata: All metadata of the file, with values as text.
        fim_token_ids: Ids for filling a gap in a text: "prefix", "suffix" and "middle" announce
            what precedes the gap, what follows it and what fills it, "repository" and "file" a
            name. Empty if the model cannot do that.
        has_attention_sinks: Whether layers have attention sinks, to which part of each softmax
            goes: rows of "probs" then add up to less than 1.
        begin_ids: Ids with which every text, chat, gap to fill and pair to rank begins: that of
            BOS, if the model wants it. A chat whose template writes it itself gets no second one.
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
    special_tokens: Mapping[str, str] = field(repr=False)
    rope_freq_base: float
    rope_freq_scale: float
    chat_template: str | None = field(repr=False)
    n_params: int
    size_bytes: int
    file_type: str
    classifier_labels: tuple[str, ...]
    metadata: Mapping[str, str] = field(repr=False)
    fim_token_ids: Mapping[str, int] = field(default_factory=dict[str, int])
    has_attention_sinks: bool = False
    begin_ids: tuple[int, ...] = ()

    def _repr_html_(self) -> str:
        """The facts that fit on a screen, for a notebook."""
        return table(self.name or self.architecture, self.summary())

    def summary(self) -> dict[str, object]:
        """The main facts by name, in words."""
        return {
            "architecture": self.architecture,
            "weights": f"{self.n_params:,}, {self.file_type}, {self.size_bytes / 2**20:,.1f} MiB",
            "layers": f"{self.n_layer}, {len(self.attention_layers)} with attention",
            "heads": f"{self.n_head}, {self.n_head_kv} of keys and values",
            "width": self.n_embd,
            "vocabulary": self.n_vocab,
            "trained context": self.n_ctx_train,
        }


@dataclass(frozen=True, slots=True)
class Classification:
    """The result of `Engine.classify` for one text.

    Attributes:
        label: The label with the highest score.
        score: Its score, from 0 to 1.
        scores: The score of each label, in the order of ``ModelInfo.classifier_labels`` ("LABEL_0"
            and so on where the file has no name, or one for several). Several scores add up to 1
            (softmax); a single score, such as a reranker's, is the sigmoid of its value.
        raw: The output of the head in the same order: logits, except for Qwen3 rerankers, to whose
            graph llama.cpp adds a softmax.
    """

    label: str
    score: float
    scores: Mapping[str, float]
    raw: tuple[float, ...]
