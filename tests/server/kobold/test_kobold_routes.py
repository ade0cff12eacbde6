"""Every route of the kobold dialect that answers at once, over real sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.support.serving import Serve, Served

TEXT = "Mirelda found a silver key near the old bridge."


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[httpx.Client]:
    with demo.client() as client:
        yield client


# ---- text and ids


def test_tokenize_replies_as_the_engine_does(demo: Served, client: httpx.Client):
    reply = client.post("/api/v1/tokenize", json={"text": TEXT, "add_special_tokens": False})
    assert reply.status_code == 200
    body = reply.json()
    ids = demo.engine.tokenize(TEXT, add_special=False)
    assert list(body) == ["tokens", "token_ids", "token_count"]
    assert body["token_ids"] == [token["token_id"] for token in body["tokens"]] == ids
    assert body["token_count"] == len(ids)
    assert "".join(token["text"] for token in body["tokens"]) == TEXT


@pytest.mark.parametrize("name", ["add_special_tokens", "add_special"])
def test_tokenize_adds_special_tokens_when_asked(demo: Served, client: httpx.Client, name: str):
    body = client.post("/api/v1/tokenize", json={"content": TEXT, name: True}).json()
    assert body["token_ids"] == demo.engine.tokenize(TEXT)
    assert body["token_ids"] != demo.engine.tokenize(TEXT, add_special=False)


def test_tokenize_reads_special_tokens_and_gives_back_their_text(client: httpx.Client):
    text = "<|im_start|>user\nHello<|im_end|>\n"
    body = client.post("/api/v1/tokenize", json={"text": text}).json()
    texts = [token["text"] for token in body["tokens"]]
    assert {"<|im_start|>", "<|im_end|>"} < {*texts}
    assert "".join(texts) == text


def test_tokenize_without_pieces_leaves_texts_out(client: httpx.Client):
    body = client.post("/api/v1/tokenize", json={"text": TEXT, "with_pieces": False}).json()
    assert all(list(token) == ["token_id"] for token in body["tokens"])
    assert len(body["tokens"]) == body["token_count"]


def test_tokenize_keeps_each_id_of_a_character_of_several(demo: Served, client: httpx.Client):
    text = "é 😀!"
    body = client.post("/api/v1/tokenize", json={"text": text}).json()
    texts = [token["text"] for token in body["tokens"]]
    assert body["token_ids"] == demo.engine.tokenize(text, add_special=False)
    assert "".join(texts) == text
    assert "" in texts


@pytest.mark.parametrize("name", ["token_ids", "tokens"])
def test_detokenize_gives_the_text_back(demo: Served, client: httpx.Client, name: str):
    ids = demo.engine.tokenize(TEXT, add_special=False)
    reply = client.post("/api/v1/detokenize", json={name: ids})
    assert reply.json() == {"text": TEXT}


def test_detokenize_of_an_unknown_id_is_refused(demo: Served, client: httpx.Client):
    n_vocab = demo.engine.model.n_vocab
    reply = client.post("/api/v1/detokenize", json={"token_ids": [n_vocab]})
    assert reply.status_code == 400
    assert reply.json()["error_code"] == "INVALID_TOKEN"
    assert "token_ids" in reply.text


@pytest.mark.parametrize("path", ["/api/extra/tokencount", "/api/extra/tokenize"])
def test_token_count_has_ids(demo: Served, client: httpx.Client, path: str):
    ids = demo.engine.tokenize(TEXT)
    assert client.post(path, json={"prompt": TEXT}).json() == {"value": len(ids), "ids": ids}
    ids = demo.engine.tokenize(TEXT, add_special=False)
    plain = client.post(path, json={"prompt": TEXT, "special": False})
    assert plain.json() == {"value": len(ids), "ids": ids}


def test_token_count_of_no_text_fails_with_minus_one(client: httpx.Client):
    reply = client.post("/api/extra/tokencount", json={"prompt": 7})
    assert reply.status_code == 400
    assert reply.json()["value"] == -1


def test_extra_detokenize_says_whether_it_worked(demo: Served, client: httpx.Client):
    ids = demo.engine.tokenize(TEXT, add_special=False)
    reply = client.post("/api/extra/detokenize", json={"ids": ids})
    assert reply.json() == {"result": TEXT, "success": True}
    reply = client.post("/api/extra/detokenize", json={"ids": [-1]})
    assert reply.status_code == 400
    assert reply.json()["success"] is False


# ---- what runs


def test_model_has_the_fields_of_the_document(demo: Served, client: httpx.Client):
    body = client.get("/api/v1/model").json()
    info = demo.engine.model
    assert body == {
        "result": f"koboldcpp/{info.name}",
        "model_name": f"koboldcpp/{info.name}",
        "vocab_size": info.n_vocab,
        "num_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "embedding_size": 128,
        "max_context_length": 512,
        "max_trained_context": 512,
        "bos_token_id": info.bos_token_id,
        "eos_token_id": info.eos_token_id,
        "eot_token_id": info.eot_token_id,
        "rope_freq_base": 10000.0,
        "rope_freq_scale": 1.0,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/v1/info/version", {"result": "1.2.5"}),
        ("/api/v1/config/max_context_length", {"value": 512}),
        ("/api/extra/true_max_context_length", {"value": 512}),
        ("/api/v1/config/max_length", {"value": 512}),
        ("/api/v1/config/soft_prompt", {"value": ""}),
        ("/api/v1/config/soft_prompts_list", {"values": []}),
        ("/api/extra/preloadstory", {}),
        ("/ping", {"status": "ok"}),
    ],
)
def test_route_answers_what_clients_expect(client: httpx.Client, path: str, body: Any):
    reply = client.get(path)
    assert reply.status_code == 200
    assert reply.json() == body


def test_version_is_that_of_koboldcpp(client: httpx.Client):
    body = client.get("/api/extra/version").json()
    assert body["result"] == "KoboldCpp"
    assert body["version"] == "1.101"
    assert body["protected"] is body["txt2img"] is body["vision"] is body["transcribe"] is False


def test_service_info_names_the_api(client: httpx.Client):
    body = client.get("/.well-known/serviceinfo").json()
    assert body["software"]["name"] == "kqview"
    assert body["api"]["koboldai"]["rel_url"] == "/api"


def test_api_leads_to_the_docs(client: httpx.Client):
    reply = client.get("/api")
    assert reply.is_redirect
    assert client.get("/api", follow_redirects=True).status_code == 200


@pytest.mark.parametrize(
    "name", ["model", "info/version", "config/max_context_length", "config/max_length",
             "config/soft_prompt", "config/soft_prompts_list"],
)  # fmt: skip
def test_route_of_v1_is_at_latest_too(client: httpx.Client, name: str):
    latest, v1 = client.get(f"/api/latest/{name}"), client.get(f"/api/v1/{name}")
    assert latest.status_code == 200
    assert latest.json() == v1.json()


def test_max_context_of_the_settings_is_told(serve: Serve):
    served = serve(Settings(max_context=100, max_tokens=20))
    with served.client() as client:
        assert client.get("/api/v1/model").json()["max_context_length"] == 100
        assert client.get("/api/v1/config/max_length").json() == {"value": 20}


# ---- keys
