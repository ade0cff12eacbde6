"""The field ``edits`` of the APIs: a request has the text and the scores that `Engine` gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import ControlVector, Edit, Engine
from kqview.server import Settings
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

PROMPT = "Look in, look out, look in"
DIRECTIONS = np.random.default_rng(0).normal(size=(2, 64)).astype(np.float32) * 20
EDITS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "heads": (
        lambda: Edit.scale_heads({(0, 1): 0.0, (1, 2): 3.0}),
        [{"type": "scale_heads", "factors": [[0, 1, 0.0], [1, 2, 3.0]]}],
    ),
    "bias": (
        lambda: Edit.attention_bias([(0, 4)], 3.0),
        [{"type": "attention_bias", "spans": [[0, 4]], "log_factor": 3.0}],
    ),
    "block": (
        lambda: Edit.block((8, None), (0, 6)),
        [{"type": "block", "queries": [8, None], "keys": [0, 6]}],
    ),
    "vector": (
        lambda: Edit.add(DIRECTIONS, [1, 2], 0.5),
        [{"type": "control_vector", "name": "v.gguf", "scale": 0.5}],
    ),
    "add": (
        lambda: Edit.add(DIRECTIONS[0], [1]),
        [{"type": "add", "vector": DIRECTIONS[0].tolist(), "layers": [1]}],
    ),
}


@pytest.fixture(scope="module")
def client(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("vectors")
    ControlVector((1, 2), DIRECTIONS, "llama").save(folder / "v.gguf")
    (folder / "broken.gguf").write_bytes(b"GGUF")
    settings = Settings(
        model=str(byte_model),
        n_ctx=128,
        edits="all",
        control_vectors_dir=str(folder),
        chat_template="{% for one in messages %}{{ one.content }}{% endfor %}",
    )
    with serving(settings) as served, served.client() as one:
        yield one


def send(client: httpx.Client, edits: Any, path: str = "/completion") -> httpx.Response:
    body = {"prompt": PROMPT, "n_predict": 12, "max_tokens": 12, "temperature": 0, "edits": edits}
    return client.post(path, json=body)


@pytest.mark.parametrize("name", EDITS)
def test_a_request_has_the_text_of_the_edited_model(
    client: httpx.Client, byte_model: Path, name: str
) -> None:
    make, field = EDITS[name]
    with Engine(byte_model, n_ctx=128) as engine:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
        want = engine.generate(PROMPT, edits=make(), **options).read()
        plain = engine.generate(PROMPT, **options).read()
    assert want != plain
    assert send(client, field).json()["content"] == want
    reply = send(client, field, "/v1/completions").json()
    assert reply["choices"][0]["text"] == want
    assert send(client, None).json()["content"] == plain
    message = {"role": "user", "content": PROMPT}
    body = {"messages": [message], "max_tokens": 12, "temperature": 0, "edits": field}
    reply = client.post("/v1/messages", json=body).json()
    assert reply["content"][0]["text"] == want
    reply = client.post("/v1/chat/completions", json=body).json()
    assert reply["choices"][0]["message"]["content"] == want


def test_logprobs_of_a_prompt_are_those_of_the_edited_model(
    client: httpx.Client, byte_model: Path
) -> None:
    make, field = EDITS["heads"]
    body = {
        "prompt": PROMPT, "max_tokens": 1, "echo": True, "logprobs": 1, "edits": field,
    }  # fmt: skip
    found = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    with Engine(byte_model, n_ctx=128) as engine:
        want = engine.score(PROMPT, edits=make()).logprobs
        plain = engine.score(PROMPT).logprobs
    n = len(want)
    np.testing.assert_allclose(found["token_logprobs"][1:n], want[1:], atol=1e-3)
    assert np.abs(np.asarray(plain[1:]) - want[1:]).max() > 1e-2


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ([{"type": "hook", "fn": "x"}], "edits[0].type"),
        ([{}], "edits[0].type"),
        ([{"type": "block", "queries": [0, None]}], "keys"),
        ([{"type": "block", "queries": [0, None], "keys": [0, 1], "other": 1}], "other"),
        ([{"type": "scale_heads", "factors": {"0": 1}}], "[layer, head, factor]"),
        ([{"type": "scale_heads", "factors": [[9, 0, 1.0]]}], "layer 9"),
        ([{"type": "scale_heads", "factors": [[1, 0, 1.0], [1, 0, 2.0]]}], "twice"),
        ([{"type": "scale_heads", "factors": [[[1], 0, 1.0]]}], "[layer, head, factor]"),
        ([{"type": "add", "vector": [1.0], "layers": [0]}], "1 values"),
        ([{"type": "control_vector", "name": "../v.gguf"}], "control vectors are broken.gguf"),
        ([{"type": "control_vector", "name": "broken.gguf"}], "broken.gguf cannot be read"),
        ([{"type": "attention_bias", "spans": [[0, 4]], "log_factor": 1e9}], "log_factor"),
    ],
)
def test_edits_that_are_none_are_refused(client: httpx.Client, edits: Any, says: str) -> None:
    reply = send(client, edits)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert "/tmp" not in reply.text


def test_a_server_allows_no_edits_unless_told(byte_model: Path) -> None:
    with serving(Settings(model=str(byte_model), n_ctx=128)) as served, served.client() as client:
        reply = send(client, EDITS["heads"][1])
        assert reply.status_code == 400
        assert "--edits" in reply.json()["error"]["message"]


def test_edits_may_need_an_admin_key(byte_model: Path) -> None:
    settings = Settings(
        model=str(byte_model), n_ctx=128, edits="admin", api_keys=("user",), admin_keys=("root",)
    )
    with serving(settings) as served, served.client() as client:
        for key, status in (("user", 403), ("root", 200)):
            client.headers["Authorization"] = f"Bearer {key}"
            reply = send(client, EDITS["heads"][1])
            assert reply.status_code == status
            # A key without the right learns nothing from edits that are none.
            assert send(client, [{"type": "none"}]).status_code == (403 if status == 403 else 400)
            assert send(client, None).status_code == 200
