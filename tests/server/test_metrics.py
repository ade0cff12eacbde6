"""Metrics: every byte that was copied, every token of every engine, and nothing made up."""

from __future__ import annotations

import base64
import json
import re
import shutil
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kqview.demo import MODEL_PATH
from kqview.server import Settings
from tests.server.clients import read_to_close, sse_events, websocket
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.serving import Served


@pytest.fixture
def toy() -> Iterator[Served]:
    with serving_toy(Settings(n_slots=2)) as served:
        yield served


def samples(served: Served) -> dict[str, float]:
    """Values by name, labels as in the text."""
    with served.client() as client:
        reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(reply.text):
        for one in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(one.labels.items()))
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return found


def test_bytes_sent_as_rows_are_the_bytes_copied(toy: Served):
    n_sent = 0
    body = {"prompt": "Tom has", "max_tokens": 20}
    with toy.client() as client, client.stream("POST", "/toy/stream", json=body) as reply:
        for event in sse_events(reply):
            n_sent += len(base64.b64decode(event.get("data", "")))
    with websocket(toy, "/toy/ws") as socket:
        socket.send(json.dumps({**body, "prompt_rows": True}))
        frames, _ = read_to_close(socket)
    n_sent += sum(len(frame) for frame in frames if isinstance(frame, bytes))
    assert n_sent > 0
    # One copy a row, no matter how it travelled.
    assert samples(toy)["kqview_attention_copied_bytes_total"] == n_sent


def test_nothing_is_copied_where_nobody_asked(toy: Served):
    with toy.client() as client:
        client.post("/toy/generate", json={"prompt": "Tom", "attention": False})
        client.post("/toy/generate", json={"prompt": "Tom", "attention": True})
    assert samples(toy)["kqview_attention_copied_bytes_total"] == 0


def test_requests_tokens_and_ends_are_counted(toy: Served):
    with toy.client() as client:
        client.post("/toy/generate", json={"prompt": [1, 2, 3], "max_tokens": 5})
        client.post("/toy/generate", json={"prompt": "Tom", "max_tokens": 0})
        client.get("/nowhere")
        client.get("/nowhere/else")
    found = samples(toy)
    assert found["kqview_generated_tokens_total"] == 5
    assert found["kqview_prompt_tokens_total"] == 3
    assert found["kqview_generations_total{reason=length}"] == 1
    assert found["kqview_generation_seconds_count"] == 1
    assert found["kqview_http_requests_total{path=/toy/generate,status=200}"] == 1
    assert found["kqview_http_requests_total{path=/toy/generate,status=400}"] == 1
    assert found["kqview_http_requests_total{path=other,status=404}"] == 2
    assert found["kqview_running_requests"] == found["kqview_busy_slots"] == 0


def test_paths_and_codes_of_strangers_add_no_series(toy: Served):
    with toy.client() as client:
        before = len(samples(toy))
        for i in range(20):
            client.get(f"/x{i}")
            client.request(f"M{i}", "/health")
    for code in range(3000, 3020):
        with websocket(toy, "/toy/ws") as socket:
            socket.close(code)
    toy.wait_until(lambda: len(samples(toy)) > before)
    assert len(samples(toy)) - before <= 8


def test_counters_sum_over_the_engines_that_served(tmp_path: Path):
    shutil.copy(MODEL_PATH, tmp_path / "b.gguf")
    settings = Settings(demo=True, n_threads=1, models_dir=str(tmp_path))
    with serving_toy(settings) as served, served.client() as client:
        body = {"prompt": "Tom", "max_tokens": 6, "attention": False}
        client.post("/toy/generate", json=body)
        before = samples(served)
        assert client.post("/toy/switch", json={"text": "b.gguf"}).status_code == 200
        client.post("/toy/generate", json=body)
        after = samples(served)
    assert before["kqview_generated_tokens_total"] == 6
    assert after["kqview_generated_tokens_total"] == 12
    grown = {name for name in before if re.search("_total|_count|_sum|_bucket", name)}
    assert all(after[name] >= before[name] for name in grown)
