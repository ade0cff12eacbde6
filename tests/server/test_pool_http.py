"""Several models over HTTP and WebSockets: every API selects, lists, and an administrator loads."""

from __future__ import annotations

import contextlib
import json
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from websockets.sync.client import connect

from tests.support.pool import NAMES, WITHIN_S, config_of, n_vocab, write_models
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path

    import httpx

    from tests.support.serving import Served

ADMIN = {"authorization": "Bearer boss"}
MOD = """
from kqview.mods import Mod

class Shout(Mod):
    def on_prefilled(self, event, actions, tokenizer):
        return actions.force_output(tokenizer.encode("ABC", False))
"""
CHAT = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """A server of all models, of which two fit."""
    config = config_of(
        folder, admin_keys=("boss",), models_dir=str(folder), model_wait_s=WITHIN_S, n_slots=2
    )
    with serving(config) as started:
        yield started


def n_tokens(served: Served) -> dict[str, int]:
    """Tokens that each model has generated."""
    return {
        one.id: sum(stats.n_tokens for stats in one.stats()) for one in list(served.service.pool)
    }


def post(path: str, **body: Any) -> Callable[[Served, str], Any]:
    def ask(served: Served, name: str) -> Any:
        with served.client() as client:
            reply = client.post(path, json={**body, "model": name})
        assert reply.status_code == 200, reply.text
        is_json = reply.headers["content-type"].startswith("application/json")
        return reply.json() if is_json else reply.text

    return ask


def over_socket(path: str, **body: Any) -> Callable[[Served, str], Any]:
    def ask(served: Served, name: str) -> Any:
        with connect(f"{served.ws_url}{path}") as socket:
            socket.send(json.dumps({**body, "model": name}))
            message: dict[str, Any] = {}
            while message.get("type") not in ("done", "error"):
                message = json.loads(socket.recv(timeout=WITHIN_S))
            assert message["type"] == "done", message
        return message

    return ask


REQUESTS = {
    "openai-chat": post("/v1/chat/completions", messages=CHAT, max_tokens=3),
    "openai-chat-stream": post("/v1/chat/completions", messages=CHAT, max_tokens=3, stream=True),
    "openai-completions": post("/v1/completions", prompt="abc", max_tokens=3),
    "openai-responses": post("/v1/responses", input="abc", max_output_tokens=3),
    "anthropic": post("/v1/messages", messages=CHAT, max_tokens=3),
    "anthropic-stream": post("/v1/messages", messages=CHAT, max_tokens=3, stream=True),
    "llama-server": post("/completion", prompt="abc", n_predict=3),
    "llama-server-stream": post("/completion", prompt="abc", n_predict=3, stream=True),
    "dream": post("/api/v1/generate", prompt="abc", max_new_tokens=3),
    "dream-socket": over_socket(
        "/api/v1/generate/stream", type="generate", prompt="abc", max_new_tokens=3
    ),
    "kobold": post("/api/extra/generate/stream", prompt="abc", max_length=3),
    "mia4": post("/generate", prompt="abc", overrides={"max_output_tokens": 3}),
}


@pytest.mark.parametrize("api", REQUESTS)
def test_request_of_every_api_selects_its_model(served: Served, api: str):
    for name in ("cleo", "bob"):
        before = n_tokens(served)
        REQUESTS[api](served, name)
        served.wait_until(lambda: not served.runs)
        after = n_tokens(served)
        assert [one for one in NAMES if after[one] > before[one]] == [name]


NAMING = ("openai-chat", "openai-completions", "openai-responses", "anthropic", "llama-server")


@pytest.mark.parametrize("api", NAMING)
def test_reply_names_the_model_that_answered(served: Served, api: str):
    assert REQUESTS[api](served, "dan")["model"] == "dan"


def test_facts_are_of_the_model_in_the_query(served: Served):
    with served.client() as client:
        for name in ("bob", "cleo"):
            info = client.get("/api/v1/model/info", params={"model": name}).json()
            assert (info["model_name"], info["vocab_size"]) == (name, n_vocab(name))
            assert client.get("/props", params={"model": name}).json()["model_alias"] == name
            assert client.get("/slots", params={"model": name}).status_code == 200
        default = client.get("/api/v1/model/info").json()
        assert default["vocab_size"] == n_vocab("ada")


def test_unknown_model_is_404_with_those_there_are(served: Served):
    with served.client() as client:
        reply = client.post("/v1/completions", json={"prompt": "a", "model": "eve"})
        assert reply.status_code == 404
        assert "'ada', 'bob', 'cleo', 'dan'" in reply.json()["error"]["message"]
        assert client.get("/v1/models/eve").status_code == 404


def test_list_has_all_models_with_facts_of_those_that_are_loaded(served: Served):
    with served.client() as client:
        load(client, "bob")
        unload(client, "cleo")
        models = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        assert list(models) == list(NAMES)
        assert models["bob"]["status"] == {"value": "loaded"}
        assert models["bob"]["meta"]["n_vocab"] == n_vocab("bob")
        assert models["cleo"]["status"] == {"value": "unloaded"}
        assert models["cleo"]["meta"] is None
        assert client.get("/v1/models/bob").json()["id"] == "bob"
        names = client.get("/api/v1/models").json()
        assert names["models"][:4] == list(NAMES)
        assert "ada.gguf" in names["models"]


# ---- an administrator


def act(client: httpx.Client, name: str, action: str, **headers: str) -> httpx.Response:
    return client.post(f"/models/{name}/{action}", headers=headers or ADMIN)


def load(client: httpx.Client, name: str) -> dict[str, Any]:
    return act(client, name, "load").json()


def unload(client: httpx.Client, name: str) -> dict[str, Any]:
    return act(client, name, "unload").json()


def test_administrator_loads_unloads_and_pins(served: Served):
    with served.client() as client:
        state = load(client, "ada")
        assert (state["state"], state["progress"], state["pinned"]) == ("loaded", 1.0, False)
        assert state["estimated_bytes"] >= state["measured_bytes"] > 0
        assert act(client, "ada", "pin").json()["pinned"]
        for name in ("bob", "cleo", "dan"):
            load(client, name)
        assert served.service.pool.find("ada").loaded is not None
        assert not act(client, "ada", "unpin").json()["pinned"]
        assert unload(client, "ada")["state"] == "unloaded"
        assert act(client, "eve", "load").status_code == 404
        assert act(client, "ada", "load", authorization="Bearer stranger").status_code == 401
    with served.client() as client:
        assert client.post("/models/ada/load").status_code == 401


def test_only_model_is_loaded_and_unloaded_by_its_name(folder: Path):
    with serving(config_of(folder, "bob", admin_keys=("boss",))) as alone, alone.client() as client:
        assert unload(client, "bob")["state"] == "unloaded"
        assert client.get("/health").status_code == 200
        reply = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()
        assert reply["model"] == "bob"
        assert "kqview_generated_tokens_total 1.0" in client.get("/metrics").text


def test_metrics_tell_models_apart(served: Served):
    with served.client() as client:
        REQUESTS["openai-completions"](served, "dan")
        metrics = client.get("/metrics").text
    n = n_tokens(served)["dan"]
    assert f'kqview_generated_tokens_total{{model="dan"}} {n:.1f}' in metrics
    assert 'kqview_model_loaded{model="dan"} 1.0' in metrics
    assert "kqview_models_budget_bytes" in metrics


# ---- requests that run


@contextlib.contextmanager
def streaming(served: Served, name: str) -> Generator[httpx.Response]:
    """A stream that cannot end, because its client reads no more of it than it asks for."""
    body = {"prompt": "abc", "n_predict": 400, "ignore_eos": True, "stream": True, "model": name}
    body["n_probs"] = 300  # together more than any buffer on the way takes
    with served.client() as client, client.stream("POST", "/completion", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        yield stream


def test_stream_keeps_its_model_while_another_wants_the_memory(folder: Path):
    replies: list[Any] = []
    with serving(config_of(folder, n_fit=1, model_wait_s=WITHIN_S)) as served:
        pool = served.service.pool
        asking = threading.Thread(
            target=lambda: replies.append(REQUESTS["openai-completions"](served, "bob"))
        )
        with streaming(served, "ada") as stream:
            asking.start()
            served.wait_until(lambda: pool.find("bob").estimated_bytes)
            assert pool.find("ada").loaded is not None
            last = [*stream.iter_lines()][-2]
            assert json.loads(last.removeprefix("data: "))["stop_type"] == "limit"
        asking.join(WITHIN_S)
        assert [reply["model"] for reply in replies] == ["bob"]
        assert pool.find("ada").loaded is None


def test_request_without_room_is_503_with_what_is_in_use(folder: Path):
    config = config_of(folder, n_fit=1, model_wait_s=0.01)
    with serving(config) as served, streaming(served, "ada"), served.client() as client:
        reply = client.post("/v1/completions", json={"prompt": "abc", "model": "bob"})
        assert reply.status_code == 503
        assert "ada (1 requests)" in reply.json()["error"]["message"]
        assert int(reply.headers["retry-after"]) >= 1


def test_idle_socket_keeps_no_model(folder: Path):
    config = config_of(folder, n_fit=1, model_wait_s=WITHIN_S)
    message = {"type": "generate", "prompt": "abc", "max_new_tokens": 2}
    with serving(config) as served, connect(f"{served.ws_url}/api/v1/generate/stream") as socket:
        for name in ("ada", "bob", "ada"):
            socket.send(json.dumps({**message, "model": name}))
            while json.loads(socket.recv(timeout=WITHIN_S))["type"] != "done":
                pass
            REQUESTS["openai-completions"](served, "cleo")  # there is room for one
            assert served.service.pool.find(name).loaded is None


def test_kept_attention_outlives_its_model(folder: Path):
    config = config_of(folder, n_fit=1, model_wait_s=WITHIN_S)
    with serving(config) as served, served.client() as client:
        body = {"prompt": "abc", "max_tokens": 2, "attention": {"delivery": "id"}, "model": "ada"}
        reply = client.post("/v1/completions", json={**body, "ignore_eos": True}).json()
        REQUESTS["openai-completions"](served, "bob")
        assert served.service.pool.find("ada").loaded is None
        row = client.get(f"/v1/attention/{reply['id']}/1")
        assert row.status_code == 200
        shape = [int(n) for n in row.headers["x-attention-shape"].split(",")]
        assert shape[:2] == [3, 4]


def test_model_that_fails_is_503_and_others_answer(folder: Path):
    with serving(config_of(folder, "ada", "broken")) as served, served.client() as client:
        for _ in range(2):
            reply = client.post("/v1/completions", json={"prompt": "a", "model": "broken"})
            assert reply.status_code == 503
            assert "cannot be loaded" in reply.json()["error"]["message"]
            assert int(reply.headers["retry-after"]) >= 1
        REQUESTS["openai-completions"](served, "ada")
        models = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
        assert models["broken"]["status"] == {"value": "unloaded", "failed": True}
        assert client.get("/health").json()["status"] == "ok"


def test_logprobs_of_a_run_are_not_those_of_another_model(folder: Path):
    with serving(config_of(folder)) as served, served.client() as client:
        body = {"prompt": "abc", "max_length": 2, "logprobs": True, "model": "bob"}
        assert client.post("/api/extra/generate/stream", json=body).status_code == 200
        found = {
            name: client.post("/api/extra/last_logprobs?model=" + name, json={}).json()
            for name in ("ada", "bob")
        }
        assert found["ada"]["logprobs"] is None
        assert len(found["bob"]["logprobs"]["content"]) == 2


def test_mod_in_the_name_of_a_model_steers_that_model(folder: Path, tmp_path: Path):
    (tmp_path / "shout.py").write_text(MOD)
    config = config_of(folder, mods_dir=str(tmp_path), model_wait_s=WITHIN_S)
    models = {"org/bob/shout": config.models["bob"], **config.models}
    config = msgspec.structs.replace(config, models=models)
    with serving(config) as served, served.client() as client:
        for name in ("bob", "cleo"):
            body = {"prompt": "abc", "max_tokens": 5, "model": f"{name}/shout"}
            reply = client.post("/v1/completions", json=body).json()
            assert (reply["model"], reply["choices"][0]["text"]) == (name, "ABC")
        body = {"prompt": "abc", "max_tokens": 5, "model": "org/bob/shout"}  # has none
        reply = client.post("/v1/completions", json=body).json()
        assert reply["choices"][0]["text"] != "ABC"
