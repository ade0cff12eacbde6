"""The document's own examples, with a model that has the vocabulary of the document's."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine
from kqview.server import Settings
from tests.support.kobold import golden
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

PATH = "/api/extra/generate/stream"
FRANCE = [785, 6722, 315, 9625, 374]


@pytest.fixture(scope="module")
def client(qwen_model: Path) -> Iterator[httpx.Client]:
    with (
        Engine(qwen_model, n_threads=1, n_ctx=512) as engine,
        serving(Settings(), engine) as served,
        served.client() as client,
    ):
        yield client


def test_tokenize_example_replies_as_documented(client: httpx.Client):
    body = {"text": "Hello, how are you?", "add_special_tokens": False}
    assert client.post("/api/v1/tokenize", json=body).json() == golden("tokenize")["reply"]


def test_detokenize_example_replies_as_documented(client: httpx.Client):
    body = {"token_ids": [9707, 11, 1246, 525, 498, 30]}
    assert client.post("/api/v1/detokenize", json=body).json() == {"text": "Hello, how are you?"}


def test_model_has_the_documented_fields_and_vocabulary(client: httpx.Client):
    reply = client.get("/api/v1/model").json()
    documented = golden("model")["reply"]
    assert list(reply) == list(documented)
    assert [type(value) for value in reply.values()] == [type(v) for v in documented.values()]
    same = ("vocab_size", "bos_token_id", "rope_freq_scale")
    assert [reply[name] for name in same] == [documented[name] for name in same]


def test_prompt_and_input_ids_examples_give_identical_output(client: httpx.Client):
    wanted = {"text": "The capital of France is", "add_special_tokens": False}
    assert client.post("/api/v1/tokenize", json=wanted).json()["token_ids"] == FRANCE
    sampling = {"max_length": 3, "temperature": 0.7, "sampler_seed": 12345}
    headers = {"accept": "text/event-stream"}
    a = client.post(PATH, json={"prompt": wanted["text"], **sampling}, headers=headers)
    b = client.post(PATH, json={"input_ids": FRANCE, **sampling}, headers=headers)
    assert a.text == b.text
    assert a.text.endswith('event: message\ndata: {"token":"","finish_reason":"length"}\n\n')


def test_complete_working_example_decodes_its_attention(client: httpx.Client):
    body = {
        "prompt": "The capital of France is", "max_length": 20, "temperature": 0.7,
        "output_attentions": True, "request_id": "test-123",
    }  # fmt: skip
    shapes: list[Any] = []
    with client.stream("POST", PATH, json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            data = json.loads(line[6:])
            if data["type"] == "token":
                attn = np.frombuffer(base64.b64decode(data["attention"]["data"]), dtype=np.float32)
                shapes.append(attn.reshape(data["attention"]["shape"]).shape)
            elif data["type"] == "done":
                break
    assert shapes == [(3, 2, 5 + i) for i in range(data["total_tokens"])]
    assert data["request_id"] == "test-123"


def test_workflow_generates_from_pruned_ids(client: httpx.Client):
    pruned = FRANCE[:2] + FRANCE[3:]
    body = {"input_ids": pruned, "max_length": 10, "output_attentions": True}
    with client.stream("POST", PATH, json=body) as response:
        first = next(line for line in response.iter_lines() if line.startswith("data: "))
    assert json.loads(first[6:])["attention"]["context_length"] == len(pruned)
