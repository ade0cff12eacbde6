"""POST /classify: bodies, errors, and what texts cannot do."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import gguf
import msgspec
import numpy as np
import pytest

from kqview import Engine
from kqview.server import Settings
from kqview.server.api.llama_server.pooled import predictions_of
from kqview.types import Classification
from tests.support import tiny_gguf
from tests.support.reference import BertReference
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.support.serving import Serve, Served

LABELS = ("NEGATIVE", "NEUTRAL", "POSITIVE")
TEXT = "I love this product, it works great!"


def write(path: Path, **options: Any) -> Path:
    return tiny_gguf.write_bert(path, pooling=gguf.PoolingType.RANK, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "classifier.gguf"
    return write(path, n_classes=3, labels=LABELS, adds=("bos", "eos"))


@pytest.fixture(scope="module")
def classifier(model: Path) -> Iterator[Served]:
    with (
        Engine(model, n_threads=1, n_batch=256, n_ubatch=256) as engine,
        serving(Settings(), engine) as served,
    ):
        yield served


@pytest.fixture(scope="module")
def client(classifier: Served) -> Iterator[httpx.Client]:
    with classifier.client() as client:
        yield client


def ids_of(served: Served, text: str) -> list[int]:
    return served.engine.tokenize(text, add_special=True, parse_special=False)


def refused(client: httpx.Client, body: Any, status: int, kind: str) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = client.post("/classify", content=content)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (status, status, kind)
    return error


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_reply_has_the_fields_of_the_seed_and_the_values_of_the_model(
    classifier: Served, client: httpx.Client, model: Path, path: str
):
    reply = client.post(path, json={"inputs": TEXT})
    assert reply.status_code == 200
    body = reply.json()
    ids = ids_of(classifier, TEXT)
    predictions = body.pop("predictions")
    assert body == {
        "model": classifier.service.pool.default.name,
        "object": "list",
        "usage": {"prompt_tokens": len(ids), "total_tokens": len(ids)},
    }
    want = BertReference(model).logits(ids)
    best_first = np.argsort(-want)
    assert [one["label"] for one in predictions] == [LABELS[i] for i in best_first]
    assert all(one.keys() == {"label", "score"} for one in predictions)
    found = [one["score"] for one in predictions]
    np.testing.assert_allclose(found, want[best_first], atol=1e-3 * np.abs(want).max())


def test_list_is_answered_by_a_list_of_lists_whatever_its_length(client: httpx.Client):
    def predictions(inputs: Any) -> Any:
        return client.post("/classify", json={"inputs": inputs}).json()["predictions"]

    one, other = predictions(TEXT), predictions("")
    assert predictions([TEXT]) == [one]
    assert predictions([TEXT, "", TEXT]) == [one, other, one]


def test_reply_names_the_model_of_the_request(client: httpx.Client):
    body = {"inputs": TEXT, "model": "sentiment", "raw_scores": True, "truncate": True}
    assert client.post("/classify", json=body).json()["model"] == "sentiment"


def test_empty_text_is_its_special_tokens(classifier: Served, client: httpx.Client):
    reply = client.post("/classify", json={"inputs": ""})
    assert reply.json()["usage"]["prompt_tokens"] == len(ids_of(classifier, "")) == 2


def test_text_cannot_contain_special_tokens(classifier: Served, client: httpx.Client):
    text = "<|im_start|>good<|im_end|>"
    reply = client.post("/classify", json={"inputs": text}).json()
    engine = classifier.engine
    assert reply["usage"]["prompt_tokens"] == len(ids_of(classifier, text))
    injected = engine.tokenize(text, add_special=True, parse_special=True)
    assert reply["usage"]["prompt_tokens"] > len(injected)


def test_many_texts_come_in_their_order(classifier: Served, client: httpx.Client):
    texts = [f"{i} apples" for i in range(150)]
    reply = client.post("/classify", json={"inputs": texts}).json()
    found = [
        {one["label"]: one["score"] for one in predictions} for predictions in reply["predictions"]
    ]
    wanted = classifier.engine.classify([ids_of(classifier, text) for text in texts])
    for scores, one in zip(found, wanted, strict=True):
        assert scores == pytest.approx(dict(zip(LABELS, one.raw, strict=True)))


@pytest.mark.parametrize(
    "body", [{}, {"inputs": 5}, {"inputs": ["a", 5]}, {"inputs": None}, {"inputs": [[]]}, b"{", b""]
)
def test_body_without_texts_is_400(client: httpx.Client, body: Any):
    refused(client, body, 400, "invalid_request_error")
    error = refused(client, {"inputs": []}, 400, "invalid_request_error")
    assert (error["param"], "inputs is empty" in error["message"]) == ("inputs", True)


def test_text_that_one_step_cannot_hold_is_400_and_named(client: httpx.Client):
    kind = "exceed_context_size_error"
    error = refused(client, {"inputs": ["a", "a" * 300]}, 400, kind)
    assert "inputs[1] has 302 tokens" in error["message"]
    assert (error["param"], error["n_prompt_tokens"], error["n_ctx"]) == ("inputs", 302, 256)
    error = refused(client, {"inputs": "a" * 600}, 400, kind)
    assert "inputs has 602 tokens" in error["message"]
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (602, 512)


def test_text_without_any_token_is_400(serve: Serve, tmp_path: Path):
    with Engine(write(tmp_path / "bare.gguf", n_classes=2, labels=LABELS[:2])) as engine:
        with serve(engine=engine).client() as client:
            error = refused(client, {"inputs": ["a", ""]}, 400, "invalid_request_error")
            assert "inputs[1] has no tokens" in error["message"]


def test_labels_that_the_file_does_not_tell_apart_are_numbered(serve: Serve, tmp_path: Path):
    path = write(tmp_path / "numbered.gguf", n_classes=4, labels=("joy", "", "fear", "joy"))
    with Engine(path, n_threads=1) as engine, serve(engine=engine).client() as client:
        reply = client.post("/classify", json={"inputs": TEXT}).json()
        labels = sorted(one["label"] for one in reply["predictions"])
        assert labels == ["LABEL_0", "LABEL_1", "LABEL_3", "fear"]


@pytest.mark.parametrize("kind", ["generator", "reranker", "pools otherwise"])
def test_model_that_is_no_classifier_is_501_before_its_body_counts(
    serve: Serve, tmp_path: Path, model: Path, kind: str
):
    if kind == "generator":
        engine = Engine.demo(n_threads=1, n_ctx=256)
    elif kind == "reranker":
        engine = Engine(write(tmp_path / "reranker.gguf", n_classes=1))
    else:
        engine = Engine(model, pooling="cls")
    with engine, serve(engine=engine).client() as client:
        for inputs in (TEXT, []):
            refused(client, {"inputs": inputs}, 501, "not_supported_error")


def test_predictions_fall_and_nan_comes_last():
    raw = (1.0, float("nan"), 3.0, 1.0)
    names = ("a", "b", "c", "d")
    result = Classification("c", 1.0, dict.fromkeys(names, 0.25), raw)
    found = predictions_of(result)
    assert [one.label for one in found] == ["c", "a", "d", "b"]
    assert msgspec.json.encode(found[-1]) == b'{"label":"b","score":null}'


def test_client_that_leaves_ends_its_texts(classifier: Served):
    engine = classifier.engine
    before = engine.stats()
    body = json.dumps({"inputs": ["a" * 200] * 5_000}).encode()
    head = f"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    port = int(classifier.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head.encode() + body)
        classifier.wait_until(lambda: engine.stats().n_finished > before.n_finished)
    classifier.wait_until(lambda: engine.stats().n_cancelled > before.n_cancelled)
    classifier.wait_idle()
    assert engine.stats().since(before).n_requests < 5_000
