"""Embeddings and reranking in the API of llama.cpp's server."""

from __future__ import annotations

import json
import math
import threading
from typing import TYPE_CHECKING, Any

import gguf
import httpx
import numpy as np
import pytest

from kqview import Engine, guards
from kqview.heads import Head, HeadFile, ModelKey
from kqview.server import Settings
from kqview.server.api.llama_server.pooled import RerankBody, normalized, ranked
from tests.support import tiny_gguf
from tests.support.serving import serving
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.serving import Served

TEXTS = ["Anna is a painter.", "Ben", "The river was wide and deep."]
QUERY = "Who paints?"


@pytest.fixture(scope="module")
def embedder() -> Iterator[Served]:
    with (
        Engine.demo(n_threads=1, pooling="mean", n_slots=2) as engine,
        serving(Settings(), engine) as served,
    ):
        yield served


@pytest.fixture
def client(embedder: Served) -> Iterator[httpx.Client]:
    with embedder.client() as client:
        yield client


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tiny_gguf.write_bert(
        tmp_path_factory.mktemp("model") / "reranker.gguf",
        pooling=gguf.PoolingType.RANK, n_classes=1, adds=("bos", "eos", "sep"),
    )  # fmt: skip
    with Engine(path, n_threads=1) as engine, serving(Settings(), engine) as served:
        yield served


def vectors_of(reply: httpx.Response) -> np.ndarray[Any, Any]:
    body = reply.json()
    assert reply.status_code == 200, body
    assert [one["index"] for one in body] == list(range(len(body)))
    assert all(len(one["embedding"]) == 1 for one in body)
    return np.array([one["embedding"][0] for one in body])


# ---- embeddings


@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
@pytest.mark.parametrize("name", ["input", "content"])
def test_texts_become_vectors(embedder: Served, client: httpx.Client, path: str, name: str):
    found = vectors_of(client.post(path, json={name: TEXTS}))
    np.testing.assert_allclose(found, embedder.engine.embed(TEXTS), atol=1e-5)
    one = vectors_of(client.post(path, json={name: TEXTS[0]}))
    np.testing.assert_allclose(one, found[:1], atol=1e-5)


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings"])
def test_many_short_texts_are_tokenized_in_another_thread(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str
):
    threads: set[str] = set()
    tokenize = Engine.tokenize

    def note(engine: Engine, *args: Any, **options: Any) -> list[int]:
        threads.add(threading.current_thread().name)
        return tokenize(engine, *args, **options)

    monkeypatch.setattr(Engine, "tokenize", note)
    texts = ["a"] * 1000
    reply = client.post(path, json={"input": texts})
    assert reply.status_code == 200
    assert threads
    assert all(name.startswith("kqview-") for name in threads)


def test_ids_and_mixtures_are_texts_too(embedder: Served, client: httpx.Client):
    ids = embedder.engine.tokenize(TEXTS[0])
    expected = embedder.engine.embed(TEXTS[0])[None]
    content = {"content": [{"type": "text", "text": part} for part in (TEXTS[0][:3], TEXTS[0][3:])]}
    for form in (ids, [ids], [{"prompt_string": TEXTS[0]}], [[ids[0], TEXTS[0]]], content):
        found = vectors_of(client.post("/embedding", json={"input": form}))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        [openai] = client.post("/v1/embeddings", json={"input": form}).json()["data"]
        np.testing.assert_allclose(openai["embedding"], expected[0], atol=1e-5)


def test_vectors_are_normalized_as_asked(client: httpx.Client):
    def of(kind: int) -> np.ndarray[Any, Any]:
        return vectors_of(client.post("/embedding", json={"input": TEXTS, "embd_normalize": kind}))

    raw = of(-1)
    assert not np.allclose(np.linalg.norm(raw, axis=-1), 1)
    for kind in (1, 2, 3):
        norm = (np.abs(raw) ** kind).sum(axis=-1, keepdims=True) ** (1 / kind)
        np.testing.assert_allclose(of(kind), raw / norm, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.abs(of(0)).max(axis=-1), 32760, rtol=1e-5)


def test_vector_of_zeros_stays():
    zeros = np.zeros((2, 4), np.float32)
    for kind in (-1, 0, 1, 2, 3):
        assert not normalized(zeros, kind).any()


def test_without_pooling_each_token_has_a_vector():
    with (
        Engine.demo(n_threads=1, pooling="none") as engine,
        serving(Settings(), engine) as served,
        served.client() as client,
    ):
        reply = client.post("/embedding", json={"input": TEXTS[:2]}).json()
        expected = engine.embed(TEXTS[:2], normalize=False)
    for one, vectors in zip(reply, expected, strict=True):
        np.testing.assert_allclose(one["embedding"], vectors, atol=1e-5)


def test_server_opens_its_model_with_the_pooling_of_its_settings():
    settings = Settings(demo=True, pooling="last", n_threads=1)
    with serving(settings) as served, served.client() as client:
        assert served.engine.pooling == "last"
        assert len(vectors_of(client.post("/embedding", json={"input": "a"}))) == 1
        # It generates all the same.
        reply = client.post("/completion", json={"prompt": "Anna", "n_predict": 2})
        assert reply.json()["tokens_predicted"] == 2


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": ["a", []]}, "no tokens"),
    ({"content": [True]}, "content"),
    ({"input": [10**6]}, str(10**6)),
    ({"input": "a", "embd_normalize": -2}, "embd_normalize"),
    ({"input": {"content": "a"}}, "content"),
    ({"input": {"content": [{"type": "image_url"}]}}, "image_url"),
    ({"input": "a " * 5000}, "5002"),
]


@pytest.mark.parametrize(("body", "fact"), REFUSED)
def test_text_that_cannot_be_embedded_is_refused(
    client: httpx.Client, body: dict[str, Any], fact: str
):
    reply = client.post("/embedding", json=body)
    assert reply.status_code == 400, reply.text
    assert fact in reply.json()["error"]["message"]


def test_model_that_is_not_served_for_it_is_not_supported(demo: Served, ranker: Served):
    for served in (demo, ranker):
        with served.client() as client:
            reply = client.post("/embedding", json={"input": "a"})
        assert reply.status_code == 501
        assert "--pooling" in reply.json()["error"]["message"]


# ---- reranking


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
def test_documents_are_ranked_in_jinas_form(ranker: Served, path: str):
    with ranker.client() as client:
        reply = client.post(path, json={"query": QUERY, "documents": TEXTS, "model": "m"}).json()
    scores = [one.raw[0] for one in ranker.engine.classify([(QUERY, text) for text in TEXTS])]
    n_tokens = sum(len(ranker.engine.pair_ids(QUERY, text)) for text in TEXTS)
    results = reply.pop("results")
    assert reply == {
        "model": "m",
        "object": "list",
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }
    assert [one["index"] for one in results] == sorted(range(3), key=lambda i: -scores[i])
    for one in results:
        expected: float = scores[int(one["index"])]
        assert one["relevance_score"] == pytest.approx(expected, abs=1e-4)


def test_documents_are_ranked_in_teis_form(ranker: Served):
    body = {"query": QUERY, "texts": TEXTS}
    with ranker.client() as client:
        plain = client.post("/rerank", json=body).json()
        texts = client.post("/rerank", json={**body, "return_text": True, "top_n": 2}).json()
        few = client.post("/rerank", json={"query": QUERY, "documents": TEXTS, "top_n": 1}).json()
    assert {"index", "score"} == plain[0].keys()
    assert [one["score"] for one in plain] == sorted((o["score"] for o in plain), reverse=True)
    assert [one["text"] for one in texts] == [TEXTS[one["index"]] for one in plain[:2]]
    assert len(few["results"]) == 1


def test_score_that_is_no_number_comes_last():
    body = RerankBody(query="a", documents=["a", "b", "c"])
    reply = ranked(body, [1, math.nan, 2], n_tokens=3, model="m")
    assert [result.index for result in reply.results] == [2, 0, 1]


RANK_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"documents": TEXTS}, "query"),
    ({"query": 5, "documents": TEXTS}, "query"),
    ({"query": QUERY}, "documents"),
    ({"query": QUERY, "documents": []}, "documents"),
    ({"query": QUERY, "documents": "text"}, "documents"),
    ({"query": QUERY, "documents": [1]}, "documents"),
    ({"query": QUERY, "documents": TEXTS, "top_n": -1}, "top_n"),
    ({"query": QUERY, "documents": ["a " * 3000]}, "documents"),
]


@pytest.mark.parametrize(("body", "fact"), RANK_REFUSED)
def test_documents_that_cannot_be_ranked_are_refused(
    ranker: Served, body: dict[str, Any], fact: str
):
    with ranker.client() as client:
        reply = client.post("/rerank", content=json.dumps(body))
    assert reply.status_code == 400, reply.text
    assert fact in reply.json()["error"]["message"]


def test_model_that_is_no_reranker_is_not_supported(demo: Served):
    with demo.client() as client:
        reply = client.post("/rerank", json={"query": QUERY, "documents": TEXTS})
    assert reply.status_code == 501
    assert reply.json()["error"]["type"] == "not_supported_error"


# ---- reranking by attention


def test_a_model_that_generates_ranks_by_attention_if_asked(demo: Served):
    body = {"query": QUERY, "documents": TEXTS, "method": "attention"}
    with demo.client() as client:
        reply = client.post("/v1/rerank", json=body).json()
    scores = guards.rerank(demo.engine, QUERY, TEXTS)
    found = {one["index"]: one["relevance_score"] for one in reply["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(scores, abs=1e-4)
    assert [one["index"] for one in reply["results"]] == sorted(range(3), key=lambda i: -scores[i])
    assert reply["usage"]["prompt_tokens"] > 0


def test_a_head_file_may_come_with_the_request(demo: Served, tmp_path: Path):
    model = ModelKey.of(demo.engine.model, demo.engine.fingerprint())
    file = HeadFile(task="rerank", model=model, heads=(Head(1, 1, 1.0),))
    file.save(tmp_path / "heads.json")
    sent = json.loads((tmp_path / "heads.json").read_text())
    body = {"query": QUERY, "texts": TEXTS, "method": "attention", "heads": sent}
    with demo.client() as client:
        reply = client.post("/rerank", json=body).json()
    found = {one["index"]: one["score"] for one in reply}
    want = guards.rerank(demo.engine, QUERY, TEXTS, file)
    assert [found[i] for i in range(3)] == pytest.approx(want, abs=1e-4)


def test_scores_by_attention_are_averaged_over_orders(demo: Served):
    want = {n: guards.rerank(demo.engine, QUERY, TEXTS, permutations=n) for n in (1, 3)}
    assert want[1] != pytest.approx(want[3], abs=1e-3)
    body = {"query": QUERY, "documents": TEXTS, "method": "attention", "permutations": 3}
    with demo.client() as client:
        reply = client.post("/rerank", json=body).json()
    found = {one["index"]: one["relevance_score"] for one in reply["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(want[3], abs=1e-4)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"permutations": 0}, "permutations"),
        ({"permutations": 65}, "permutations"),
        ({"permutations": 1.5}, "permutations"),
        ({"heads": {}}, "heads: it is no head file"),
        ({"heads": {"token_alignment_heads": [{"layer": 0, "head": 0}]}}, "'align'"),
        (
            {"heads": {"params": {"important_heads": [[90, 0]]}}},
            "the head file is of another model",
        ),
        ({"documents": ["a", " "]}, "documents[1]"),
        ({"query": " "}, "query"),
        ({"method": "magic"}, "method"),
    ],
)
def test_ranking_by_attention_that_cannot_be_is_refused(
    demo: Served, change: dict[str, Any], fact: str
):
    body = {"query": QUERY, "documents": TEXTS, "method": "attention", **change}
    with demo.client() as client:
        reply = client.post("/rerank", json=body)
    assert reply.status_code == 400, reply.text
    assert fact in reply.json()["error"]["message"]


def test_ranking_by_attention_ends_with_its_client(demo: Served):
    documents = [f"{text} " * 40 for text in TEXTS] * 200  # many prompts
    body = {"query": QUERY, "documents": documents, "method": "attention"}
    n_requests = demo.engine.stats().n_requests
    with demo.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/rerank", json=body, timeout=1)
        # The first prompt may begin after that; between two prompts all slots are idle.
        wait_until(lambda: demo.engine.stats().n_requests > n_requests)
        wait_until(lambda: demo.service.budget.used_bytes == 0)
        wait_until(lambda: not demo.service._ending)
        n_tokens = demo.engine.stats().n_tokens
    assert demo.engine.stats().n_requests < n_requests + len(documents)
    assert not demo.engine.generations
    assert demo.engine.stats().n_tokens == n_tokens
