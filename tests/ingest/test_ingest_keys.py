"""Who may post, read and delete, and what is stored of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview.errors import RequestError
from kqview.ingest import IngestSettings
from kqview.ingest.settings import web_settings
from tests.support.receiving import Receiving, receiving, sqlite_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.full

OPERATOR, POSTER, ANN, BOB = "operator-key", "post-key", "ann-key", "bob-key"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    """A receiver with keys that has a trace of Ann, and one of nobody."""
    settings = IngestSettings(
        database=sqlite_url(tmp_path_factory.mktemp("keys") / "traces.db"),
        web=web_settings(admin_keys=(OPERATOR,), api_keys=(POSTER,)),
    )
    with receiving(settings) as received, received.client(headers={"x-api-key": POSTER}) as client:
        for body in (
            {"request_id": "ann", "user_api_key": ANN, "model": "of ann"},
            {"request_id": "nobody", "model": "of nobody"},
        ):
            assert client.post("/ingest", json={"request": body}).status_code == 201
        yield received


def ask(guarded: Receiving, method: str, path: str, key: str | None) -> Any:
    body = {"request": {"request_id": "nobody", "model": "of nobody"}}
    with guarded.client(headers={} if key is None else {"x-api-key": key}) as client:
        return client.request(method, path, json=body if method == "POST" else None)


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("GET", "/v1/traces/ann", None, 401),
        ("GET", "/v1/traces/ann", BOB, 403),
        ("GET", "/v1/traces/ann", ANN, 200),
        ("GET", "/v1/traces/ann", OPERATOR, 200),
        ("GET", "/v1/traces/ann", POSTER, 403),
        ("GET", "/v1/traces/nobody", ANN, 403),
        ("GET", "/v1/traces/nobody", OPERATOR, 200),
        ("GET", "/v1/traces/none", ANN, 404),
        ("GET", "/v1/traces", None, 401),
        ("GET", "/v1/values", None, 401),
        ("GET", "/v1/stream", None, 401),
        ("GET", "/metrics", ANN, 401),
        ("GET", "/metrics", POSTER, 403),
        ("GET", "/metrics", OPERATOR, 200),
        ("GET", "/health", None, 200),
        ("GET", "/openapi.json", None, 200),
        ("POST", "/ingest", None, 401),
        ("POST", "/ingest", ANN, 401),
        ("POST", "/ingest", POSTER, 201),
        ("POST", "/ingest", OPERATOR, 201),
        ("DELETE", "/v1/traces/none", None, 401),
        ("DELETE", "/v1/traces/none", ANN, 401),
        ("DELETE", "/v1/traces/none", POSTER, 403),
        ("DELETE", "/v1/traces/none", OPERATOR, 404),
    ],
)
def test_key_decides_what_is_read_posted_and_deleted(
    guarded: Receiving, method: str, path: str, key: str | None, status: int
) -> None:
    assert ask(guarded, method, path, key).status_code == status


@pytest.mark.parametrize(
    ("key", "ids", "models"),
    [
        (ANN, ["ann"], ["of ann"]),
        (BOB, [], []),
        (OPERATOR, ["nobody", "ann"], ["of ann", "of nobody"]),
    ],
)
def test_lists_have_what_the_key_may_see(
    guarded: Receiving, key: str, ids: list[str], models: list[str]
) -> None:
    found = ask(guarded, "GET", "/v1/traces", key).json()["traces"]
    assert [one["request_id"] for one in found] == ids
    assert ask(guarded, "GET", "/v1/values", key).json()["models"] == models


def test_key_is_shown_to_its_owner_and_to_nobody_else(guarded: Receiving) -> None:
    own = ask(guarded, "GET", "/v1/traces/ann", ANN).json()["request"]["user_api_key"]
    others = ask(guarded, "GET", "/v1/traces/ann", OPERATOR).json()["request"]["user_api_key"]
    assert own == ANN
    assert others.startswith("sha256:")
    assert ANN not in others


def test_bearer_token_is_a_key_too(guarded: Receiving) -> None:
    with guarded.client(headers={"authorization": f"Bearer {ANN}"}) as client:
        assert client.get("/v1/traces/ann").status_code == 200


def test_key_is_stored_as_its_digest(tmp_path: Path) -> None:
    with receiving(IngestSettings(database=sqlite_url(tmp_path / "traces.db"))) as received:
        with received.client() as client:
            body = {"request": {"request_id": "a", "user_api_key": "a-secret-of-mine"}}
            assert client.post("/ingest", json=body).status_code == 201
            # A trace that was read is posted again with the digest, and has the same owner.
            read = client.get("/v1/traces/a").json()
            assert client.post("/ingest", json=read).status_code == 201
            mine = client.get("/v1/traces/a", headers={"x-api-key": "a-secret-of-mine"}).json()
    assert mine["request"]["user_api_key"] == "a-secret-of-mine"
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"user_key_sha256" in stored
    assert b"a-secret-of-mine" not in stored


def test_key_outside_ascii_finds_its_traces(tmp_path: Path) -> None:
    settings = IngestSettings(
        database=sqlite_url(tmp_path / "traces.db"), web=web_settings(admin_keys=(OPERATOR,))
    )
    with receiving(settings) as received, received.client() as client:
        client.post("/ingest", json={"request": {"request_id": "a", "user_api_key": "käse"}})
        read = client.get("/v1/traces/a", headers={"x-api-key": "käse".encode()})
    assert read.json()["request"]["user_api_key"] == "käse"


def test_address_that_others_reach_needs_both_kinds_of_keys() -> None:
    web = web_settings(host="0.0.0.0", admin_keys=(OPERATOR,))
    with pytest.raises(RequestError, match="set --post-key for posting"):
        IngestSettings(database="sqlite:///x", web=web).check_bind()


@pytest.mark.parametrize(
    "given",
    [
        {"host": "127.0.0.1"},
        {"host": "0.0.0.0", "public": True},
        {"host": "0.0.0.0", "admin_keys": (OPERATOR,), "api_keys": (POSTER,)},
    ],
)
def test_address_that_nobody_else_reaches_or_that_has_keys_is_fine(given: dict[str, Any]) -> None:
    IngestSettings(database="sqlite:///x", web=web_settings(**given)).check_bind()


def test_settings_show_neither_keys_nor_the_database() -> None:
    settings = IngestSettings(
        database="postgresql://me:password@host/x", web=web_settings(admin_keys=(OPERATOR,))
    )
    assert OPERATOR not in repr(settings)
    assert "password" not in repr(settings)
