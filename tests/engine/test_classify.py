"""`Engine.classify`: labels of texts, and scores of (query, document) pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest

from kqview import Classification
from kqview.errors import InvalidToken, PromptTooLong, RequestError, UnsupportedModel
from tests.support import encoder_gguf, tiny_gguf
from tests.support.bert_reference import BertReference
from tests.support.rows import random_ids
from tests.support.tiny_gguf import Reader

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

TABLE = 1e-3  # as in test_embed.py
LABELS = ("joy", "anger", "surprise")
RANK = gguf.PoolingType.RANK


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "classifier.gguf"
    return encoder_gguf.write_bert(path, pooling=RANK, n_classes=3, labels=LABELS)


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "reranker.gguf"
    return encoder_gguf.write_bert(path, pooling=RANK, n_classes=1)


def softmax(values: Any) -> Any:
    weights = np.exp(values - np.max(values))
    return weights / weights.sum()


@pytest.mark.parametrize("n_tokens", [1, 40, 300])
def test_scores_are_the_softmax_of_the_reference(
    make_engine: MakeEngine, classifier: Path, n_tokens: int
) -> None:
    engine = make_engine(classifier, flash_attn=False)
    assert engine.pooling == "rank"
    assert engine.model.classifier_labels == LABELS
    ids = random_ids(n_tokens)
    want = BertReference(classifier).logits(ids)
    found = engine.classify(ids)
    assert isinstance(found, Classification)
    np.testing.assert_allclose(found.raw, want, atol=TABLE * np.abs(want).max())
    assert tuple(found.scores) == LABELS
    np.testing.assert_allclose(list(found.scores.values()), softmax(want), atol=1e-3)
    assert math.isclose(sum(found.scores.values()), 1, abs_tol=1e-9)
    assert found.label == LABELS[want.argmax()]
    assert found.score == found.scores[found.label] == max(found.scores.values())


def test_one_value_scores_as_its_sigmoid(make_engine: MakeEngine, reranker: Path) -> None:
    engine = make_engine(reranker, flash_attn=False)
    ids = random_ids(20)
    (want,) = BertReference(reranker).logits(ids)
    found = engine.classify(ids)
    assert found.label == "LABEL_0"
    assert math.isclose(found.raw[0], want, abs_tol=TABLE)
    assert math.isclose(found.score, 1 / (1 + math.exp(-found.raw[0])), rel_tol=1e-9)


def test_several_texts_equal_single_ones(make_engine: MakeEngine, classifier: Path) -> None:
    engine = make_engine(classifier, n_slots=2)
    texts = [random_ids(n, seed=n) for n in (3, 50, 9)]
    found = engine.classify(texts)
    assert found == [engine.classify(text) for text in texts]
    assert len({one.raw for one in found}) == 3
    named = engine.classify(["good", "bad"])
    assert named == [engine.classify("good"), engine.classify("bad")]
    assert named[0] == engine.classify(engine.tokenize("good", add_special=True))


def test_pair_is_one_prompt_with_the_ids_that_the_vocabulary_asks_for(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    model = encoder_gguf.write_bert(
        tmp_path / "pairs.gguf", pooling=RANK, n_classes=1, adds=("bos", "eos", "sep")
    )
    engine = make_engine(model)
    bos, eos = engine.model.bos_token_id, engine.model.eos_token_id
    query, document = engine.tokenize("who?"), engine.tokenize("me <|im_end|>", parse_special=False)
    ids = [bos, *query, eos, encoder_gguf.SEP, *document, eos]
    found = engine.classify([("who?", "me <|im_end|>"), ("who?", "you")])
    assert found[0] == engine.classify(ids)
    assert found[1] != found[0]


def test_pair_goes_through_the_template_of_the_file(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    template = "<|im_start|>q: {query} d: {document} of {query}<|im_end|>"
    model = encoder_gguf.write_bert(
        tmp_path / "template.gguf", pooling=RANK, n_classes=1, rerank_template=template
    )
    engine = make_engine(model)
    text = "<|im_start|>q: {document}? d: {query} of {document}?<|im_end|>"
    assert engine.classify([("{document}?", "{query}")]) == [engine.classify(engine.tokenize(text))]


def test_classifier_opened_to_embed_embeds_and_refuses_to_classify(
    make_engine: MakeEngine, classifier: Path
) -> None:
    engine = make_engine(classifier, pooling="cls", flash_attn=False)
    ids = random_ids(20)
    want = BertReference(classifier).rows(ids)[0]
    vector = engine.embed(ids, normalize=False)
    np.testing.assert_allclose(vector, want, atol=TABLE * np.abs(want).max())
    with pytest.raises(UnsupportedModel, match="pooling='rank'"):
        engine.classify(ids)


def test_classifier_refuses_to_embed_and_says_how(
    make_engine: MakeEngine, classifier: Path
) -> None:
    with pytest.raises(UnsupportedModel, match="pooling='cls'"):
        make_engine(classifier).embed("text")


def test_model_without_head_refuses(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    # A file that names the pooling of a classifier and has none.
    headless = encoder_gguf.write_bert(tmp_path / "headless.gguf", pooling=RANK)
    for model in (tiny_llama, headless):
        engine = make_engine(model)
        with pytest.raises(UnsupportedModel, match="no classifier head"):
            engine.classify("text")
        with pytest.raises(UnsupportedModel, match="pooling='mean'"):
            engine.embed("text")


@pytest.mark.parametrize(
    ("texts", "error", "what"),
    [
        ([], RequestError, "classify: there is no text"),
        ("", RequestError, "no tokens"),
        (["a", ""], RequestError, "text 1: the prompt has no tokens"),
        ([("a", "b", "c")], InvalidToken, "'a'"),
        ([("a", 1)], InvalidToken, "'a'"),
        (["ok", ("a", "\ud800")], RequestError, "text 1: character 0"),
        ([1, 320], InvalidToken, "320"),
        ([("a" * 40, "b" * 40)], PromptTooLong, "text 0: .*80 tokens.*64; raise n_ubatch"),
        (None, RequestError, "got NoneType"),
    ],
)
def test_bad_texts_are_refused_before_anything_runs(
    make_engine: MakeEngine, classifier: Path, texts: Any, error: type[Exception], what: str
) -> None:
    engine = make_engine(classifier, n_ubatch=64)
    with pytest.raises(error, match=what):
        engine.classify(texts)
    assert engine.stats().n_requests == 0


@pytest.mark.peers
def test_reranker_that_is_a_decoder_gives_probabilities(
    make_engine: MakeEngine, architectures: dict[str, Path], tmp_path: Path
) -> None:
    # As Qwen3's rerankers: two rows of the output layer as head, and llama.cpp adds the softmax.
    source = architectures["qwen3-dense"]
    model, head = add_head(source, tmp_path / "reranker.gguf", ("yes", "no"))
    ids = [i % 100 for i in random_ids(20)]
    last = make_engine(source, pooling="last", flash_attn=False).embed(ids, normalize=False)
    want = softmax(head @ last.astype(np.float64))
    engine = make_engine(model, flash_attn=False, n_slots=2)
    assert engine.pooling == "rank"
    assert len(engine.generate(ids, max_tokens=3, ignore_eos=True, capture="probs").read()) >= 0
    for found in engine.classify([ids, ids]):
        np.testing.assert_allclose(found.raw, want, atol=1e-4)
        assert list(found.scores.items()) == list(zip(("yes", "no"), found.raw, strict=True))


def add_head(source: Path, path: Path, labels: tuple[str, ...]) -> tuple[Path, Any]:
    """Write a copy of a model with a classifier head; return it and the head's weights."""
    reader = Reader(source)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(None, arch)
    own = (f"{arch}.pooling_type", f"{arch}.classifier.")
    for key, entry in reader.fields.items():
        value = entry.contents()
        if value != [] and not key.startswith(("GGUF.", "general.architecture", *own)):
            sub_type = entry.types[-1] if entry.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, value, entry.types[0], sub_type)
    writer.add_pooling_type(RANK)
    writer.add_classifier_output_labels(labels)
    for tensor in reader.tensors:
        if not tensor.name.startswith("cls"):
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    n_embd = int(reader.fields[f"{arch}.embedding_length"].contents())
    head = np.random.default_rng(1).standard_normal((len(labels), n_embd)).astype(np.float32) * 0.1
    writer.add_tensor("cls.output.weight", head)
    return tiny_gguf.finish(writer, path), head
