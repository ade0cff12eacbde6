"""kqview convert-classifier: a random BERT of Hugging Face gives the same ids and logits as GGUF.

The reference is transformers' formula (models/bert/modeling_bert.py) in float64, and transformers
itself where it is installed.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.convert import convert_classifier
from kqview.errors import ModelLoadError, UnsupportedModel
from tests.support.rows import near

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.engine.conftest import MakeEngine

safetensors = pytest.importorskip("safetensors.numpy")
pytest.importorskip("gguf")

WORDS = ("the", "cat", "sat", "un", "happy", "naive", "cafe", "!", ",", "great", "film")
PIECES = ("##s", "##ly", "##ha", "##ppy", "##ness", "##n")
TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *PIECES)
CONFIG: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 48,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "vocab_size": 40,  # more vectors than tokens, as in padded models
    "id2label": {"0": "negative", "1": "neutral", "2": "positive"},
}
LABELS = ("negative", "neutral", "positive")
# Text, and the tokens that BERT's tokenizer makes of it.
TEXTS = {
    "The cat sat": ("the", "cat", "sat"),
    "cats, unhappily!": ("cat", "##s", ",", "[UNK]", "!"),
    "NAÏVE café": ("naive", "cafe"),
    "unhappyness": ("un", "##ha", "##ppy", "##ness"),
    "great great film": ("great", "great", "film"),
    "": (),
}


def random_tensors(
    config: dict[str, Any] = CONFIG, spread: float = 0.02, seed: int = 7
) -> dict[str, NDArray[np.float32]]:
    """Weights as transformers makes them: normal with 0.02, norms near one, biases near zero.

    The matrices of the layers have the standard deviation *spread* instead.
    """
    random = np.random.default_rng(seed)
    n_embd, n_ff = config["hidden_size"], config["intermediate_size"]
    tensors: dict[str, NDArray[np.float32]] = {}

    def add(name: str, *shape: int, mean: float = 0.0) -> None:
        tensors[name] = random.normal(mean, 0.02, shape).astype(np.float32)

    def linear(name: str, n_out: int, n_in: int) -> None:
        add(f"{name}.weight", n_out, n_in)
        tensors[f"{name}.weight"] *= np.float32(spread / 0.02)
        add(f"{name}.bias", n_out)

    def norm(name: str) -> None:
        add(f"{name}.weight", n_embd, mean=1.0)
        add(f"{name}.bias", n_embd)

    for name, n_rows in (("word", 40), ("position", 48), ("token_type", 2)):
        add(f"bert.embeddings.{name}_embeddings.weight", n_rows, n_embd)
    norm("bert.embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"bert.encoder.layer.{i}"
        for name in ("query", "key", "value"):
            linear(f"{layer}.attention.self.{name}", n_embd, n_embd)
        linear(f"{layer}.attention.output.dense", n_embd, n_embd)
        norm(f"{layer}.attention.output.LayerNorm")
        linear(f"{layer}.intermediate.dense", n_ff, n_embd)
        linear(f"{layer}.output.dense", n_embd, n_ff)
        norm(f"{layer}.output.LayerNorm")
    linear("bert.pooler.dense", n_embd, n_embd)
    linear("classifier", len(LABELS), n_embd)
    # A head that tells texts apart: with 0.02 all logits would be nearly zero.
    for name in ("bert.pooler.dense.weight", "classifier.weight"):
        tensors[name] *= np.float32(0.4 * (64 / n_embd) ** 0.5 / spread)
    return tensors


TENSORS = random_tensors()


def write_folder(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    tensors: dict[str, NDArray[Any]] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    safetensors.save_file(tensors or TENSORS, folder / "model.safetensors")
    if tokenizer is None:
        (folder / "vocab.txt").write_text("\n".join(TOKENS) + "\n")
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    else:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hf") / "sentiment")


@pytest.fixture(scope="session")
def converted(folder: Path) -> Path:
    path = folder.with_suffix(".gguf")
    assert convert_classifier(folder, path) == path.stat().st_size
    return path


def expected_ids(tokens: Sequence[str]) -> list[int]:
    return [TOKENS.index(token) for token in ("[CLS]", *tokens, "[SEP]")]


def hf_logits(
    ids: Sequence[int], tensors: dict[str, Any] = TENSORS, config: dict[str, Any] = CONFIG
) -> NDArray[np.float64]:
    """Logits of transformers' BertForSequenceClassification."""
    w = {name.removeprefix("bert."): value.astype(np.float64) for name, value in tensors.items()}

    def linear(x: Any, name: str) -> Any:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def gelu(x: Any) -> Any:
        return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    n_head = config["num_attention_heads"]
    x = w["embeddings.word_embeddings.weight"][list(ids)]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{layer}.attention.self.{name}").reshape(len(ids), n_head, -1).swapaxes(0, 1)
            for name in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(ids), -1)
        out = f"{layer}.attention.output"
        x = norm(linear(mixed, f"{out}.dense") + x, f"{out}.LayerNorm")
        inner = gelu(linear(x, f"{layer}.intermediate.dense"))
        x = norm(linear(inner, f"{layer}.output.dense") + x, f"{layer}.output.LayerNorm")
    return linear(np.tanh(linear(x[0], "pooler.dense")), "classifier")


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_logits_are_those_of_hugging_face(
    make_engine: MakeEngine, converted: Path, text: str
) -> None:
    engine = make_engine(converted, flash_attn=False)
    ids = expected_ids(TEXTS[text])
    assert engine.tokenize(text) == ids
    result = engine.classify(text)
    want = hf_logits(ids)
    np.testing.assert_allclose(result.raw, want, atol=near(1e-4, "vectors"), rtol=0)
    assert result.label == LABELS[want.argmax()]
    assert np.ptp(want) > 0.1  # the tolerance means something


def test_file_is_a_classifier_with_the_labels_and_limits_of_the_configuration(
    make_engine: MakeEngine, converted: Path
) -> None:
    engine = make_engine(converted)
    assert engine.pooling == "rank"
    assert engine.n_classes == 3
    model = engine.model
    assert (model.name, model.architecture, model.file_type) == ("sentiment", "bert", "all F32")
    assert model.classifier_labels == LABELS
    assert (model.n_ctx_train, model.n_layer, model.n_head) == (48, 3, 4)
    assert model.special_tokens["mask"] == "[MASK]"


def test_special_tokens_in_a_text_are_words_unless_they_are_parsed(
    make_engine: MakeEngine, converted: Path
) -> None:
    engine = make_engine(converted)
    assert TOKENS.index("[SEP]") in engine.tokenize("cat[SEP]sat", add_special=False)
    assert TOKENS.index("[SEP]") not in engine.tokenize(
        "cat[SEP]sat", parse_special=False, add_special=False
    )


def test_half_precision_halves_the_matrices(
    make_engine: MakeEngine, folder: Path, converted: Path, tmp_path: Path
) -> None:
    path = tmp_path / "half.gguf"
    convert_classifier(folder, path, weight_type="f16")
    assert path.stat().st_size < 0.65 * converted.stat().st_size
    text = "The cat sat"
    found = make_engine(path, flash_attn=False).classify(text).raw
    want = hf_logits(expected_ids(TEXTS[text]))
    np.testing.assert_allclose(found, want, atol=5e-3, rtol=0)


@pytest.mark.full
@pytest.mark.parametrize(("weight_type", "limit"), [("f32", 0.005), ("f16", 0.01)])
@pytest.mark.parametrize("spread", [0.02, 0.05, 0.1])
def test_logits_of_larger_models_are_as_near_as_the_guide_says(
    make_engine: MakeEngine, tmp_path: Path, spread: float, weight_type: Any, limit: float
) -> None:
    size = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
    config = {**CONFIG, **size}
    tensors = random_tensors(config, spread)
    folder = write_folder(tmp_path / "model", config=config, tensors=tensors)
    convert_classifier(folder, tmp_path / "out.gguf", weight_type=weight_type)
    engine = make_engine(tmp_path / "out.gguf")
    random = np.random.default_rng(1)
    errors: list[float] = []
    for n_tokens in (1, 5, 20, 40):
        ids = [2, *random.integers(5, 22, n_tokens).tolist(), 3]
        want = hf_logits(ids, tensors, config)
        assert np.abs(want).max() > 0.5
        errors.append(float(np.abs(engine.classify(ids).raw - want).max() / np.abs(want).max()))
    assert max(errors) <= near(limit)


def test_tokenizer_json_and_old_names_of_norms_are_read(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in TENSORS.items()
    }
    renamed["bert.embeddings.position_ids"] = np.arange(48, dtype=np.int64)[None]
    tokenizer = {
        "model": {
            "type": "WordPiece", "continuing_subword_prefix": "##",
            "vocab": {token: i for i, token in enumerate(TOKENS)},
        },
        "normalizer": {"type": "BertNormalizer", "lowercase": False, "strip_accents": None},
    }  # fmt: skip
    folder = write_folder(tmp_path / "cased", tensors=renamed, tokenizer=tokenizer)
    convert_classifier(folder, tmp_path / "cased.gguf")
    engine = make_engine(tmp_path / "cased.gguf", flash_attn=False)
    assert engine.tokenize("The cat café") == expected_ids(("[UNK]", "cat", "[UNK]"))
    _, offsets = engine.tokenize("The cat café", offsets=True)
    assert offsets == [(0, 0), (0, 3), (4, 7), (8, 12), (12, 12)]
    ids = expected_ids(("cat", "sat"))
    np.testing.assert_allclose(engine.classify(ids).raw, hf_logits(ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"architectures": ["RobertaForSequenceClassification"]}, UnsupportedModel, "Roberta"),
        ({"hidden_act": "relu"}, UnsupportedModel, "'relu'"),
        ({"position_embedding_type": "relative_key"}, UnsupportedModel, "'relative_key'"),
        ({"hidden_size": "64"}, ModelLoadError, "hidden_size"),
        ({"num_hidden_layers": 4}, ModelLoadError, r"blk\.3"),
        ({"id2label": {"0": "only"}}, ModelLoadError, "1 labels"),
        ({"id2label": {"a": "b"}}, ModelLoadError, "id2label"),
    ],
)
def test_model_that_cannot_be_converted_is_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    folder = write_folder(tmp_path / "model", config={**CONFIG, **changes})
    with pytest.raises(error, match=words):
        convert_classifier(folder, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "vocab.txt"])
def test_folder_without_a_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / name).unlink()
    with pytest.raises(ModelLoadError, match=name.removeprefix("model")):
        convert_classifier(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / name).write_bytes(b"{damaged")
    with pytest.raises(ModelLoadError, match=name):
        convert_classifier(folder, tmp_path / "out.gguf")


def test_command_writes_the_file_and_reports_errors_in_one_line(
    folder: Path, converted: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kqview", "convert-classifier"]

    def run(*arguments: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True)

    done = run(folder, tmp_path / "out.gguf")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.gguf").read_bytes() == converted.read_bytes()
    (tmp_path / "empty").mkdir()
    done = run(tmp_path / "empty", tmp_path / "other.gguf")
    assert done.returncode == 3
    assert done.stderr == f"error: {tmp_path / 'empty'} has no config.json; pass a model's folder\n"


def test_failed_conversion_leaves_an_old_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        convert_classifier(folder, tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.needs("transformers")
def test_random_model_of_transformers_gives_its_logits(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(**{**CONFIG, "vocab_size": len(TOKENS)})
    model = transformers.BertForSequenceClassification(config).eval()
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    convert_classifier(folder, tmp_path / "out.gguf")
    engine = make_engine(tmp_path / "out.gguf", flash_attn=False)
    for text in TEXTS:
        batch = tokenizer(text, return_tensors="pt")
        assert engine.tokenize(text) == batch["input_ids"][0].tolist()
        with torch.no_grad():
            want = model(**batch).logits[0].numpy()
        np.testing.assert_allclose(engine.classify(text).raw, want, atol=1e-4, rtol=0)
