"""The server in replicas of Ray Serve: sessions stay on a replica, an update loses no request."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kqview.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_unknown_settings_are_refused():
    from kqview.ray.serve import app

    with pytest.raises(RequestError, match="sloths"):
        app({"demo": True, "sloths": 2})
