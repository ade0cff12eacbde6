"""What all replicas of Ray Serve say, in one answer; needs no Ray."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from kqview.ray import serve
from kqview.ray.serve import joined, joined_health
from kqview.server.settings import Settings


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
    pages = [(f"r{i}", f'{{"status": "{one}"}}') for i, one in enumerate(said)]
    found, body = joined_health(pages, n_silent)
    assert found == status
    assert json.loads(body) == {
        "status": word, "n_silent": n_silent,
        "replicas": {f"r{i}": {"status": one} for i, one in enumerate(said)},
    }  # fmt: skip


def test_pages_are_joined_by_their_families():
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


def test_refusals_are_those_of_the_replica_that_was_asked(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    replica = SimpleNamespace(replica_tag="r0", deployment="kqview", app_name="kqview")

    async def results(**_: Any) -> list[Any]:
        return [await serve._Replica().answer("/health", []), RuntimeError("refused")]

    def broadcast(_method: str, path: str, _headers: Any) -> Any:
        asked.append(path)
        return SimpleNamespace(results_async=results)

    ray = SimpleNamespace(
        multiplexed=lambda **_: lambda remember: remember,
        get_multiplexed_model_id=lambda: "",
        get_replica_context=lambda: replica,
        get_deployment_handle=lambda *_: SimpleNamespace(broadcast=broadcast),
    )
    monkeypatch.setattr(serve, "needed", lambda *_: ray)
    monkeypatch.setattr(serve, "_apps", [])
    app = serve._build(Settings(demo=True), 4)

    def status_of(path: str, host: bytes) -> int:
        head, _ = asyncio.run(serve._answer(app, path, [(b"host", host)]))
        return head["status"]

    assert [status_of(path, b"evil.example") for path in ("/health", "/metrics")] == [403, 403]
    assert asked == []
    assert status_of("/health", b"localhost") == 200
    assert asked == ["/health"]
