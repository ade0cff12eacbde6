"""Pages of other origins: allowed ones may read every reply, whatever went wrong; others none."""

from __future__ import annotations

from typing import Any

import pytest

from kqview.server import Settings
from tests.server.toy_dialect import serving_toy

PAGE = "http://localhost:8080"
REPLIES = [
    ("GET", "/health", None, 200),
    ("GET", "/", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/nowhere", None, 404),
    ("PUT", "/health", None, 405),
    ("OPTIONS", "/toy/generate", None, 204),
    ("POST", "/toy/tokenize", {"text": "hello"}, 200),
    ("POST", "/toy/tokenize", {"text": 5}, 400),
    ("POST", "/toy/generate", {"prompt": [99999]}, 400),
    ("POST", "/toy/generate", {"prompt": [1] * 600}, 400),
    ("POST", "/toy/fail", {"how": "bug"}, 500),
    ("POST", "/toy/fail", {"how": "os"}, 500),
    ("POST", "/toy/fail", {"how": "memory"}, 500),
    ("POST", "/toy/stream", {"prompt": "Tom has", "max_tokens": 1}, 200),
    ("GET", "/toy/admin", None, 403),
]


@pytest.fixture(scope="module")
def open_to_all():
    with serving_toy(Settings(n_slots=2, cors_origins=("*",))) as served:
        yield served


@pytest.fixture(scope="module", params=[None, (PAGE,)], ids=["by-default", "listed"])
def listed(request: pytest.FixtureRequest):
    """A server that pages of this machine may call as it comes, and one that names a page."""
    given = {} if request.param is None else {"cors_origins": request.param}
    with serving_toy(Settings(n_slots=2, **given)) as served:
        yield served


@pytest.mark.parametrize(("method", "path", "body", "status"), REPLIES)
def test_every_reply_may_be_read_by_any_page(
    open_to_all: Any, method: str, path: str, body: Any, status: int
):
    with open_to_all.client() as client:
        reply = client.request(method, path, json=body, headers={"origin": PAGE})
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize(("method", "path", "body", "status"), REPLIES)
def test_every_reply_may_be_read_by_an_allowed_page_alone(
    listed: Any, method: str, path: str, body: Any, status: int
):
    with listed.client() as client:
        reply = client.request(method, path, json=body, headers={"origin": PAGE})
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == PAGE
        assert "Origin" in reply.headers["vary"]
        other = client.request(method, path, json=body, headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert other.status_code in (400, 403, 404, 405, 204)


@pytest.mark.parametrize("path", ["/toy/generate", "/toy/stream", "/health", "/nowhere"])
def test_preflight_is_answered_once_a_day_for_any_header(open_to_all: Any, path: str):
    headers = {
        "origin": PAGE,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type, authorization, x-api-key",
        "access-control-request-private-network": "true",
    }
    with open_to_all.client() as client:
        reply = client.options(path, headers=headers)
    assert reply.is_success
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "POST" in reply.headers["access-control-allow-methods"]
    allowed = reply.headers["access-control-allow-headers"].lower()
    assert all(name in allowed for name in ("content-type", "authorization", "x-api-key"))
    assert int(reply.headers["access-control-max-age"]) == 86400
    assert reply.headers["access-control-allow-private-network"] == "true"


def test_preflight_of_a_page_that_is_not_listed_is_refused(listed: Any):
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    with listed.client() as client:
        reply = client.options("/toy/generate", headers=headers)
        assert reply.status_code == 400
        assert "access-control-allow-origin" not in reply.headers
        mine = client.options("/toy/generate", headers={**headers, "origin": PAGE})
    assert mine.headers["access-control-allow-origin"] == PAGE


def test_options_and_wrong_methods_name_every_method_of_a_path(open_to_all: Any):
    with open_to_all.client() as client:
        assert client.options("/toy/generate").headers["allow"] == "OPTIONS, POST"
        refused = client.delete("/toy/generate")
    assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")
    assert refused.json()["error_code"] == "INVALID_REQUEST"
