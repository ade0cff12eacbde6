"""Every route of the kobold dialect that answers at once, over real sockets."""

from __future__ import annotations

import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kqview.server import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    ids = demo.engine.tokenize(TEXT)
    assert list(body) == ["tokens", "token_ids", "token_count"]
    assert body["token_ids"] == [token["token_id"] for token in body["tokens"]] == ids
    assert body["token_count"] == len(ids)
    assert "".join(token["text"] for token in body["tokens"]) == TEXT


@pytest.mark.parametrize("name", ["add_special_tokens", "add_special"])
def test_tokenize_adds_special_tokens_when_asked(demo: Served, client: httpx.Client, name: str):
    body = client.post("/api/v1/tokenize", json={"content": TEXT, name: True}).json()
    assert body["token_ids"] == demo.engine.tokenize(TEXT, add_special=True)
    assert body["token_ids"] != demo.engine.tokenize(TEXT)


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
    assert body["token_ids"] == demo.engine.tokenize(text)
    assert "".join(texts) == text
    assert "" in texts


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/json", "application/x-www-form-urlencoded", None]
)
def test_tokenize_takes_any_content_type(client: httpx.Client, content_type: str | None):
    headers = {} if content_type is None else {"content-type": content_type}
    body = b'{"text":"Hello","add_special_tokens":false}'
    reply = client.post("/api/v1/tokenize", content=body, headers=headers)
    assert reply.status_code == 200
    assert reply.json()["tokens"]


@pytest.mark.parametrize("body", [b"{}", b'{"text":1}', b"not json", b"[]", b'{"text":"\xff"}'])
def test_tokenize_says_what_was_wrong(client: httpx.Client, body: bytes):
    reply = client.post("/api/v1/tokenize", content=body, headers={"origin": "http://page.example"})
    assert reply.status_code == 400
    assert reply.json()["error"]
    assert reply.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize("name", ["token_ids", "tokens"])
def test_detokenize_gives_the_text_back(demo: Served, client: httpx.Client, name: str):
    ids = demo.engine.tokenize(TEXT)
    reply = client.post("/api/v1/detokenize", json={name: ids})
    assert reply.json() == {"text": TEXT}


def test_detokenize_of_an_unknown_id_is_refused(demo: Served, client: httpx.Client):
    n_vocab = demo.engine.model.n_vocab
    reply = client.post("/api/v1/detokenize", json={"token_ids": [n_vocab]})
    assert reply.status_code == 400
    assert reply.json()["error_code"] == "INVALID_TOKEN"


@pytest.mark.parametrize("path", ["/api/extra/tokencount", "/api/extra/tokenize"])
def test_token_count_has_ids(demo: Served, client: httpx.Client, path: str):
    ids = demo.engine.tokenize(TEXT, add_special=True)
    assert client.post(path, json={"prompt": TEXT}).json() == {"value": len(ids), "ids": ids}
    ids = demo.engine.tokenize(TEXT)
    plain = client.post(path, json={"prompt": TEXT, "special": False})
    assert plain.json() == {"value": len(ids), "ids": ids}


def test_token_count_of_no_text_fails_with_minus_one(client: httpx.Client):
    reply = client.post("/api/extra/tokencount", json={"prompt": 7})
    assert reply.status_code == 400
    assert reply.json()["value"] == -1


def test_extra_detokenize_says_whether_it_worked(demo: Served, client: httpx.Client):
    ids = demo.engine.tokenize(TEXT)
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


def test_props_have_the_template(demo: Served, client: httpx.Client):
    body = client.get("/props").json()
    assert body["chat_template"] == demo.engine.model.chat_template
    assert body["total_slots"] == 2
    assert body["default_generation_settings"] == {"n_ctx": 512}


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


def test_slash_at_the_end_is_tolerated_without_a_redirect(client: httpx.Client):
    assert client.get("/api/v1/model/").status_code == 200
    reply = client.post("/api/v1/tokenize/", json={"text": "Hello"})
    assert reply.status_code == 200
    assert client.get("/nothing/").status_code == 404


def test_max_context_of_the_settings_is_told(serve: Serve):
    served = serve(Settings(max_context=100, max_tokens=20))
    with served.client() as client:
        assert client.get("/api/v1/model").json()["max_context_length"] == 100
        assert client.get("/api/v1/config/max_length").json() == {"value": 20}


# ---- the last generation


def test_perf_is_of_the_last_generation(serve: Serve):
    served = serve()
    with served.client() as client:
        before = client.get("/api/extra/perf").json()
        assert (before["total_gens"], before["stop_reason"], before["idle"]) == (0, -1, 1)
        body = {"prompt": TEXT, "max_length": 5, "sampler_seed": 42, "ban_eos_token": True}
        client.post("/api/extra/generate/stream", json=body)
        after = client.get("/api/extra/perf").json()
    n_prompt = len(served.engine.tokenize(TEXT, add_special=True))
    assert (after["last_input_count"], after["last_token_count"]) == (n_prompt, 5)
    assert (after["total_gens"], after["stop_reason"], after["last_seed"]) == (1, 0, 42)
    assert after["last_process"] > 0
    assert after["last_eval_speed"] > 0
    assert after["uptime"] >= after["idletime"] >= 0


def test_perf_knows_a_generation_that_a_stop_sequence_ended(serve: Serve):
    served = serve()
    with served.client() as client:
        client.post(
            "/api/extra/generate/stream",
            json={"prompt": TEXT, "max_length": 100, "temperature": 0, "stop_sequence": ["e"]},
        )
        perf = client.get("/api/extra/perf").json()
    assert perf["stop_reason"] == 2
    assert perf["last_process"] > 0


def test_last_logprobs_are_of_the_last_generation(serve: Serve):
    with serve().client() as client:
        assert client.get("/api/extra/last_logprobs").json() == {"logprobs": None}
        body = {"prompt": TEXT, "max_length": 4, "logprobs": 3, "temperature": 0, "genkey": "K1"}
        text = "".join(plain_texts(client, body))
        assert client.get("/api/extra/last_logprobs").json() == {"logprobs": None}
        reply = client.post("/api/extra/last_logprobs", json={"genkey": "K1"}).json()
        assert client.get("/api/extra/last_logprobs?genkey=K1").json() == reply
    logprobs = reply["logprobs"]
    assert "".join(logprobs["tokens"]) == text
    assert len(logprobs["content"]) == len(logprobs["token_logprobs"]) == 4
    for one in logprobs["content"]:  # greedy: the best of the three is the one that was taken
        assert len(one["top_logprobs"]) == 3
        assert one["top_logprobs"][0]["token"] == one["token"]
        assert one["logprob"] == pytest.approx(one["top_logprobs"][0]["logprob"])


def plain_texts(client: httpx.Client, body: dict[str, Any]) -> list[str]:
    reply = client.post("/api/extra/generate/stream", json=body)
    reply.raise_for_status()
    data = [line[6:] for line in reply.text.split("\n") if line.startswith("data: ")]
    return [httpx.Response(200, content=one).json()["token"] for one in data]


# ---- a generation that runs


@pytest.fixture
def held(serve: Serve) -> Iterator[Any]:
    """Starts generations that wait for their client, who does not read on; with the server."""
    served = serve(Settings(n_slots=3))
    stack: list[Any] = []

    def hold(**body: Any) -> Any:
        # Rows fill the socket's buffers long before the slot is full.
        client = served.client()
        body = {"prompt": TEXT, "max_length": 450, "ban_eos_token": True, **body}
        sending = client.build_request(
            "POST", "/api/extra/generate/stream", json={"output_attentions": True, **body}
        )
        reply = client.send(sending, stream=True)
        chunks = reply.iter_raw()
        next(chunks)
        stack.append((client, reply))
        return chunks

    yield served, hold
    for client, reply in stack:
        reply.close()
        client.close()


def test_abort_ends_the_generation_of_its_key(held: Any):
    served, hold = held
    first, second = hold(genkey="K1"), hold(genkey="K2")
    with served.client() as client:
        abort = "/api/extra/abort"
        wrong = client.post(abort, json={"genkey": "K3"}).json()
        assert wrong == {"success": "false", "done": "false"}
        keyless = client.post(abort).json()
        assert keyless == {"success": "false", "done": "true"}
        assert len(served.service.runs) == 2
        right = client.post(abort, json={"genkey": "K1"}).json()
        assert right == {"success": "true", "done": "true"}
    body = b"".join(first)
    assert b'"finish_reason":"stop"' in body[-200:]
    served.wait_until(lambda: [r.request.key for r in served.service.runs.values()] == ["K2"])
    del second


def test_abort_without_a_key_ends_the_only_generation_without_one(held: Any):
    served, hold = held
    chunks = hold()
    with served.client() as client:
        reply = client.post("/api/extra/abort", content=b"").json()
        assert reply == {"success": "true", "done": "true"}
    b"".join(chunks)
    served.wait_idle()


def test_abort_without_a_key_spares_several(held: Any):
    served, hold = held
    both = hold(), hold(request_id="named")
    with served.client() as client:
        reply = client.post("/api/extra/abort", json={}).json()
        assert reply == {"success": "false", "done": "false"}
        assert len(served.service.runs) == 2
        reply = client.post("/api/extra/abort", json={"request_id": "named"}).json()
        assert reply == {"success": "true", "done": "true"}
    assert b'"type":"done"' in b"".join(both[1])
    served.wait_until(lambda: "named" not in served.service.runs)
    assert len(served.service.runs) == 1


def test_check_shows_the_text_so_far(held: Any):
    served, hold = held
    chunks = hold(genkey="K1")
    with served.client() as client:
        path = "/api/extra/generate/check"
        served.wait_until(lambda: client.post(path, json={"genkey": "K1"}).json()["results"][0])
        text = client.post(path, json={"genkey": "K1"}).json()["results"][0]["text"]
        assert text
        assert client.get(f"{path}?genkey=K1").json()["results"][0]["text"].startswith(text)
        assert client.get(path).json() == {"results": [{"text": ""}]}
    del chunks


def test_tokenize_answers_at_once_while_a_generation_runs(serve: Serve):
    # One thread computes, and the machine may have two for everything: the bound is generous.
    served = serve()
    is_over = threading.Event()
    n_bytes: list[int] = []

    def generate() -> None:
        with served.client() as client:
            while not is_over.is_set():
                body = {"prompt": TEXT, "max_length": 400, "ban_eos_token": True}
                body |= {"output_attentions": True, "attention_values": "probs"}
                n_bytes.append(len(client.post("/api/extra/generate/stream", json=body).content))

    thread = threading.Thread(target=generate)
    thread.start()
    took_s: list[float] = []
    try:
        with served.client() as client:
            served.wait_until(lambda: served.service.n_runs)
            for _ in range(30):
                start_s = time.perf_counter()
                client.post("/api/v1/tokenize", json={"text": TEXT}).raise_for_status()
                took_s.append(time.perf_counter() - start_s)
                time.sleep(0.01)
            assert served.service.runs or n_bytes
    finally:
        is_over.set()
        thread.join()
    assert statistics.median(took_s) < 0.25


# ---- keys


def test_routes_need_a_key_where_there_is_one(serve: Serve):
    served = serve(Settings(api_keys=("secret",)))
    with served.client() as client:
        for path in ("/api/v1/model", "/api/extra/perf", "/props"):
            reply = client.get(path)
            assert reply.status_code == 401
            assert reply.json()["detail"]["type"] == "unauthorized"
        assert client.post("/api/v1/tokenize", json={"text": "x"}).status_code == 401
        assert client.get("/api/extra/version").json()["protected"] is True
        headers = {"authorization": "Bearer secret"}
        assert client.get("/api/v1/model", headers=headers).status_code == 200


def test_full_queue_is_told_before_the_first_byte(serve: Serve):
    served = serve(Settings(max_queued=0))
    with served.client() as holder, served.client() as client:
        body = {"prompt": TEXT, "max_length": 450, "ban_eos_token": True, "request_id": "a"}
        body |= {"output_attentions": True}
        with holder.stream("POST", "/api/extra/generate/stream", json=body) as reply:
            chunks = reply.iter_raw()  # dropping it would close the connection
            next(chunks)
            refused = client.post("/api/extra/generate/stream", json=body | {"request_id": "b"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["detail"]["type"] == "service_unavailable"
