"""The server in replicas of Ray Serve: sessions stay on a replica, an update loses no request."""

from __future__ import annotations

import json
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
    ray.init(num_cpus=2, log_to_driver=False)
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


@pytest.mark.parametrize(
    ("said", "n_silent", "status", "word"),
    [
        (["ok", "ok"], 0, 200, "ok"),
        (["ok", "stalled"], 0, 200, "degraded"),
        (["ok"], 1, 200, "degraded"),
        (["stalled", "closing"], 0, 503, "stalled"),
        ([], 2, 503, "silent"),
    ],
)
def test_health_is_that_of_the_best_replica(said: list[str], n_silent: int, status: int, word: str):
    from kqview.ray.serve import joined_health

    pages = [(f"r{i}", f'{{"status": "{one}"}}') for i, one in enumerate(said)]
    found, body = joined_health(pages, n_silent)
    assert found == status
    assert json.loads(body) == {
        "status": word, "n_silent": n_silent,
        "replicas": {f"r{i}": {"status": one} for i, one in enumerate(said)},
    }  # fmt: skip


def test_pages_are_joined_by_their_families():
    from kqview.ray.serve import joined

    page = """# HELP a_total So many.
# TYPE a_total counter
a_total 1.0
# HELP b_seconds Of "{x}".
# TYPE b_seconds histogram
b_seconds_bucket{le="1.0",of="} \\" {"} 2.0
b_seconds_count 2.0
"""
    both = joined([("two", page.replace("1.0", "3.0")), ("one", page)])
    assert both.splitlines() == [
        "# HELP a_total So many.", "# TYPE a_total counter", 'a_total{replica="one"} 1.0',
        'a_total{replica="two"} 3.0', '# HELP b_seconds Of "{x}".',
        "# TYPE b_seconds histogram",
        'b_seconds_bucket{replica="one",le="1.0",of="} \\" {"} 2.0',
        'b_seconds_count{replica="one"} 2.0',
        'b_seconds_bucket{replica="two",le="3.0",of="} \\" {"} 2.0',
        'b_seconds_count{replica="two"} 2.0',
    ]  # fmt: skip


def test_unknown_settings_are_refused():
    from kqview.ray.serve import app

    with pytest.raises(RequestError, match="sloths"):
        app({"demo": True, "sloths": 2})
