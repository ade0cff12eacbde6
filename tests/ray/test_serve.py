"""The server in replicas of Ray Serve: sessions stay on a replica, an update loses no request."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kqview.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

text_string_to_metric_families = pytest.importorskip(
    "prometheus_client.parser"
).text_string_to_metric_families
ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
URL = "http://127.0.0.1:8123"


def deploy(**more: Any) -> None:
    from kqview.ray.serve import app

    serve.run(app({"demo": True, "replicas": 2, "cpus": 0, **more}), name="kqview")


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    deploy(n_slots=1)
    yield
    serve.shutdown()
    ray.shutdown()


def ask(client: httpx.Client, session: str | None = None) -> httpx.Response:
    body = {"prompt": "Anna is a", "max_tokens": 4, "temperature": 0}
    headers = {"serve_multiplexed_model_id": session} if session else {}
    return client.post(f"{URL}/v1/completions", json=body, headers=headers, timeout=300)


def test_replicas_answer_and_are_updated_without_losing_a_request(running: None):
    updated = threading.Event()
    answers: list[int] = []

    def load() -> None:
        with httpx.Client() as client:
            while not updated.is_set():
                answers.append(ask(client, "a session").status_code)

    threads = [threading.Thread(target=load) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        deploy(n_slots=2)  # other settings: each replica is replaced
    finally:
        updated.set()
        for thread in threads:
            thread.join()
    assert len(answers) > 4
    assert set(answers) == {200}


def test_session_stays_on_one_replica(running: None):
    prompt = {"prompt": "Mirelda found a silver key near the old bridge.", "max_tokens": 1}
    with httpx.Client(timeout=300) as client:
        usages = [
            client.post(
                f"{URL}/v1/completions", json=prompt,
                headers={"serve_multiplexed_model_id": "another session"},
            ).json()["usage"]
            for _ in range(9)
        ]  # fmt: skip
    # Each replica evaluates the prompt once, so only one has seen it.
    cached = [one["prompt_tokens_details"]["cached_tokens"] for one in usages]
    assert cached[0] == 0
    assert min(cached[1:]) > 0


def test_metrics_of_all_replicas_are_on_one_page(running: None):
    with httpx.Client() as client:
        assert ask(client).status_code == 200
        reply = client.get(f"{URL}/metrics", timeout=60)
    assert reply.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(reply.text))
    found = {one.name: one.samples for one in families}
    assert len(found) == len(families)
    by_replica = {one.labels["replica"]: one.value for one in found["kqview_generated_tokens"]}
    assert len(by_replica) == 2
    assert sum(by_replica.values()) >= 4
    statuses = {one.labels.get("status") for one in found["kqview_http_requests"]}
    assert "200" in statuses


def test_health_of_all_replicas_is_in_one_answer(running: None):
    reply = httpx.get(f"{URL}/health", timeout=60)
    body = reply.json()
    assert (reply.status_code, body["status"], body["n_silent"]) == (200, "ok", 0)
    assert [one["status"] for one in body["replicas"].values()] == ["ok", "ok"]


def test_unknown_settings_are_refused():
    from kqview.ray.serve import app

    with pytest.raises(RequestError, match="sloths"):
        app({"demo": True, "sloths": 2})
