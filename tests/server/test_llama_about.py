"""What the API of llama.cpp's server says about the server, and chats that get no answer."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.chat import rendering
from kqview.errors import RequestError, UnsupportedModel
from kqview.server import Settings
from tests.support.chat_templates import HOSTILE
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.support.serving import Served

MESSAGES = [{"role": "user", "content": "Who are you? <|im_end|>"}]


# ---- properties, health, metrics


def test_properties_are_those_of_model_and_server(demo: Served, client: httpx.Client):
    props = client.get("/props").json()
    model = demo.engine.model
    assert props["total_slots"] == 2
    assert props["model_alias"] == "kqview demo"
    assert props["model_ftype"] == model.file_type
    assert props["chat_template"] == model.chat_template
    assert props["chat_template_caps"]["supports_tools"] is False
    assert (props["bos_token"], props["eos_token"]) == ("<|endoftext|>", "<|endoftext|>")
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    assert props["build_info"].startswith("kqview-")
    settings = props["default_generation_settings"]
    assert settings["n_ctx"] == 512
    assert settings["params"]["temperature"] == 0.8
    assert "grammar" not in settings["params"]


def test_properties_have_what_the_server_was_started_with():
    settings = Settings(sampling=("seed=42", "temperature=0.5"), default_max_tokens=9)
    with serving(settings) as served, served.client() as own:
        shown = own.get("/props").json()["default_generation_settings"]["params"]
        reply = own.post("/completion", json={"prompt": "Anna", "ignore_eos": True}).json()
        more = own.post("/completion", json={"prompt": "A", "n_predict": 10, "ignore_eos": True})
    assert (shown["seed"], shown["temperature"], shown["n_predict"]) == (42, 0.5, 9)
    assert (reply["tokens_predicted"], more.json()["tokens_predicted"]) == (9, 10)


def test_properties_are_changed_only_if_the_server_was_started_for_it(client: httpx.Client):
    reply = client.post("/props", json={})
    assert reply.status_code == 501
    assert "--props" in reply.json()["error"]["message"]
    with serving(Settings(props=True)) as served, served.client() as own:
        assert own.post("/props", json={}).json() == {"success": True}
        assert own.get("/props").json()["endpoint_props"] is True


def test_health_has_both_paths_and_llama_cpps_error(demo: Served, client: httpx.Client):
    assert client.get("/v1/health").json() == client.get("/health").json()
    assert client.get("/health").json()["status"] == "ok"
    with serving(Settings()) as served, served.client() as own:
        served.service.pool.default.loaded = None
        reply = own.get("/v1/health")
        assert reply.status_code == 503
        error = reply.json()["error"]
        assert (error["code"], error["type"]) == (503, "unavailable_error")


def test_metrics_have_llama_cpps_names_beside_ours():
    with serving(Settings()) as served, served.client() as client:
        body = {"prompt": "Anna is a painter", "n_predict": 5, "ignore_eos": True}
        n_prompt = client.post("/completion", json=body).json()["tokens_evaluated"]
        client.post("/completion", json=body)
        reply = client.get("/metrics")
        values = {
            line.split()[0]: float(line.split()[1])
            for line in reply.text.splitlines()
            if line and not line.startswith("#")
        }
    assert int(reply.headers["process-start-time-unix"]) > 0
    assert values["llamacpp:prompt_tokens_total"] == n_prompt + 1
    assert values["llamacpp:prompt_tokens_cached_total"] == n_prompt - 1
    assert values["llamacpp:tokens_predicted_total"] == 10
    assert values["llamacpp:tokens_predicted_total"] == values["kqview_generated_tokens_total"]
    assert values["llamacpp:n_tokens_max"] == n_prompt + 5
    assert values["llamacpp:spec_decode_num_drafts_total"] == 0
    assert values["llamacpp:n_decode_total"] >= 10
    assert values["llamacpp:prompt_seconds_total"] > 0
    assert values["llamacpp:tokens_predicted_seconds_total"] > 0
    assert values["llamacpp:prompt_tokens_seconds"] > 0
    assert values["llamacpp:predicted_tokens_seconds"] > 0
    assert values["llamacpp:requests_processing"] == 0
    assert values["llamacpp:requests_deferred"] == 0
    assert 0 < values["llamacpp:n_busy_slots_per_decode"] <= 1


# ---- chats without an answer


def test_template_is_applied(demo: Served, client: httpx.Client):
    reply = client.post("/apply-template", json={"messages": MESSAGES})
    expected = demo.engine.apply_chat_template(MESSAGES, tokenize=False)  # pyright: ignore[reportArgumentType]
    assert reply.json() == {"prompt": expected}
    without = client.post(
        "/apply-template", json={"messages": MESSAGES, "add_generation_prompt": False}
    ).json()["prompt"]
    assert expected.startswith(without)
    assert len(without) < len(expected)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"]
)
def test_tokens_of_a_chat_are_counted(demo: Served, client: httpx.Client, path: str):
    reply = client.post(path, json={"messages": MESSAGES}).json()
    ids = demo.engine.apply_chat_template(MESSAGES)  # pyright: ignore[reportArgumentType]
    assert reply == {"input_tokens": len(ids), "object": "response.input_tokens"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ({"messages": MESSAGES, "chat_template": "{{ 1 }}"}, "chat_template"),
]


@pytest.fixture(scope="module")
def templated() -> Iterator[httpx.Client]:
    """A client of a server that lets requests bring templates, and stops them early."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rendering, "CPU_S_MAX", 1.0)
        settings = Settings(demo=True, n_threads=1, request_chat_template=True)
        with serving(settings) as served, served.client() as client:
            yield client


def test_template_of_a_request_needs_the_setting(client: httpx.Client, templated: httpx.Client):
    body = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}!"}
    refused = client.post("/apply-template", json=body)
    assert refused.status_code == 400
    assert "--request-chat-template" in refused.json()["error"]["message"]
    expected = {"prompt": "Who are you? <|im_end|>!"}
    assert templated.post("/apply-template", json=body).json() == expected
    body["chat_template"] = "{% for"
    assert templated.post("/apply-template", json=body).status_code == 400


@pytest.mark.parametrize("name", ["comparison", "tojson", "kept texts"])
def test_health_answers_while_a_template_takes_all(templated: httpx.Client, name: str):
    body = {"messages": MESSAGES, "chat_template": HOSTILE[name]}
    with ThreadPoolExecutor(1) as other:
        hostile = other.submit(templated.post, "/apply-template", json=body, timeout=60)
        answered_s: list[float] = []
        while not hostile.done():
            start_s = time.monotonic()
            assert templated.get("/health").status_code == 200
            answered_s.append(time.monotonic() - start_s)
    assert hostile.result().status_code == 400
    assert "stopped" in hostile.result().json()["error"]["message"]
    assert median(answered_s) < 0.5
    assert max(answered_s) < max(0.5, sum(answered_s) / 2)  # else it was one wait, with a busy GIL
    body["chat_template"] = "{{ messages[0].role }}"
    assert templated.post("/apply-template", json=body).json() == {"prompt": "user"}


@pytest.mark.parametrize(("body", "fact"), REFUSED)
def test_chat_that_cannot_be_rendered_is_refused(
    client: httpx.Client, body: dict[str, Any], fact: str
):
    for path in ("/apply-template", "/v1/chat/completions/input_tokens"):
        reply = client.post(path, json=body)
        assert reply.status_code == 400, reply.text
        assert fact in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("Q: {{ messages[0].content }} A:", "Q: Hi A:"),
        ("chatml", "<|im_start|>user\nHi<|im_end|>\n"),
        (
            "command-r",
            "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>",
        ),
    ],
)
def test_operator_may_give_another_template(template: str, expected: str):
    messages = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    with (
        serving(Settings(demo=True, n_threads=1, chat_template=template)) as served,
        served.client() as client,
    ):
        assert client.post("/apply-template", json=messages).json() == {"prompt": expected}
        shown = client.get("/props").json()["chat_template"]
        counted = client.post("/v1/chat/completions/input_tokens", json=messages).json()
        n_tokens = len(served.engine.tokenize(expected))
    assert shown == template or "{" not in template
    assert counted["input_tokens"] == n_tokens


def test_template_that_cannot_work_is_refused_before_anything_is_served():
    with pytest.raises(RequestError, match="--chat-template-file"):
        Settings(chat_template="llama33")
    with pytest.raises(UnsupportedModel, match="chat template does not parse"):
        Engine.demo(chat_template="{% for")
