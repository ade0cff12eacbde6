"""Who is let in: keys, admin keys, pages of other origins, and how often one may ask."""

from __future__ import annotations

import hmac
from typing import Any

import pytest

from kqview.server import Settings, security
from kqview.server.errors import Forbidden, RateLimited, Unauthorized
from kqview.server.security import Gate
from tests.server.clients import read_to_close, websocket
from tests.server.toy_dialect import serving_toy

KEY, OTHER_KEY, ADMIN_KEY = "user-key", "second-key", "admin-key"
PAGE = "https://page.example"
BODY = {"text": "hello"}


def scope(*headers: tuple[str, str], kind: str = "http", query: str = "", client: str = "10.0.0.1"):
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return {"type": kind, "headers": raw, "query_string": query.encode(), "client": (client, 1)}


def bearer(key: str) -> tuple[str, str]:
    return "authorization", f"Bearer {key}"


@pytest.fixture
def gate() -> Gate:
    return Gate(Settings(api_keys=(KEY, OTHER_KEY), admin_keys=(ADMIN_KEY,)))


@pytest.mark.parametrize(
    "header",
    [
        bearer(KEY),
        bearer(OTHER_KEY),
        bearer(ADMIN_KEY),
        ("x-api-key", KEY),
        ("authorization", f"bearer  {KEY}"),
    ],
)
def test_known_key_is_let_in(gate: Gate, header: tuple[str, str]):
    assert gate.check(scope(header), access="user").name.startswith("key-")


@pytest.mark.parametrize(
    "header",
    [
        ("accept", "*/*"),
        bearer("wrong"),
        bearer(""),
        bearer(KEY[:-1]),
        bearer(KEY + "x"),
        ("authorization", f"Basic {KEY}"),
        ("authorization", KEY),
        ("x-api-key", ""),
        ("x-api-key", KEY.upper()),
        ("x-api-key", "ключ"),
    ],
)
def test_request_without_a_known_key_is_unauthorized(gate: Gate, header: tuple[str, str]):
    with pytest.raises(Unauthorized):
        gate.check(scope(header), access="user")
    with pytest.raises(Unauthorized):
        gate.check(scope(header), access="admin")
    assert gate.check(scope(header), access="open").name == "10.0.0.1"


def test_admin_needs_an_admin_key(gate: Gate):
    assert gate.check(scope(bearer(ADMIN_KEY)), access="admin").is_admin
    with pytest.raises(Forbidden):
        gate.check(scope(bearer(KEY)), access="admin")
    with pytest.raises(Forbidden, match="--admin-key"):
        Gate(Settings(api_keys=(KEY,))).check(scope(bearer(KEY)), access="admin")
    with pytest.raises(Unauthorized):
        Gate(Settings(admin_keys=(ADMIN_KEY,))).check(scope(), access="admin")


def test_query_key_counts_for_websockets_and_only_when_switched_on(gate: Gate):
    asked = scope(kind="websocket", query=f"api_key={KEY}")
    with pytest.raises(Unauthorized):
        gate.check(asked, access="user")
    lenient = Gate(Settings(api_keys=(KEY,), query_key=True))
    assert lenient.check(asked, access="user").name.startswith("key-")
    with pytest.raises(Unauthorized):
        lenient.check(scope(query=f"api_key={KEY}"), access="user")


def test_every_key_is_compared_in_constant_time(gate: Gate, monkeypatch: pytest.MonkeyPatch):
    compared: list[tuple[int, int]] = []
    compare_digest = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare_digest(a, b)

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    gate.check(scope(bearer(KEY)), access="user")
    # All keys, although the first one matched, and none of them by its length.
    assert compared == [(32, 32)] * 3


def test_name_of_a_caller_does_not_show_the_key(gate: Gate):
    assert KEY not in gate.check(scope(bearer(KEY)), access="user").name


def test_bucket_refills_and_says_when(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(security.time, "monotonic", lambda: now[0])
    gate = Gate(Settings(rate_limit=2.0))
    for _ in range(2):
        gate.check(scope(), access="user")
    with pytest.raises(RateLimited) as caught:
        gate.check(scope(), access="user")
    assert caught.value.retry_after_s == 30
    gate.check(scope(client="10.0.0.2"), access="user")
    gate.check(scope(), access="open")
    now[0] = 30.5
    gate.check(scope(), access="user")


def test_clients_of_one_network_of_ipv6_share_a_bucket():
    gate = Gate(Settings(rate_limit=1.0))
    gate.check(scope(client="2001:db8::1"), access="user")
    with pytest.raises(RateLimited):
        gate.check(scope(client="2001:db8::ffff:2"), access="user")
    gate.check(scope(client="2001:db8:0:1::1"), access="user")


def test_guessing_keys_is_rate_limited():
    gate = Gate(Settings(rate_limit=3.0, api_keys=(KEY,)))
    for i in range(3):
        with pytest.raises(Unauthorized):
            gate.check(scope(bearer(f"guess-{i}")), access="user")
    with pytest.raises(RateLimited):
        gate.check(scope(bearer("guess-4")), access="user")
    gate.check(scope(bearer(KEY)), access="user")


def test_buckets_of_many_clients_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(security, "_MOST_CLIENTS", 10)
    gate = Gate(Settings(rate_limit=1.0))
    for i in range(50):
        gate.check(scope(client=f"10.0.1.{i}"), access="user")
    assert gate._rate is not None
    assert len(gate._rate._buckets) == 10


@pytest.mark.parametrize(
    ("origin", "host", "is_let_in"),
    [
        (PAGE, "127.0.0.1:5001", True),
        ("https://other.example", "127.0.0.1:5001", False),
        ("http://127.0.0.1:5001", "127.0.0.1:5001", True),
        ("http://[::1]:5001", "[::1]:5001", True),
        ("http://localhost:5001", "localhost:5001", True),
        ("http://127.0.0.1:1", "127.0.0.1:5001", False),
        # A name that its owner points at this machine is nobody's own page.
        ("http://rebound.example:5001", "rebound.example:5001", False),
        ("null", "127.0.0.1", False),
        ("null", "", False),
        ("http://[", "[", False),
        ("", "", False),
    ],
)
def test_page_of_another_origin_is_let_in_only_where_it_is_listed(
    origin: str, host: str, is_let_in: bool
):
    gate = Gate(Settings(cors_origins=(PAGE,)))
    asked = scope(("origin", origin), ("host", host))
    if is_let_in:
        gate.check(asked, access="user")
        return
    with pytest.raises(Forbidden):
        gate.check(asked, access="user")


# ---- over sockets


@pytest.fixture(scope="module")
def closed():
    """A server with keys and a list of origins."""
    settings = Settings(
        api_keys=(KEY,), admin_keys=(ADMIN_KEY,), query_key=True, cors_origins=(PAGE,)
    )
    with serving_toy(settings) as served:
        yield served


def test_http_statuses_of_keys(closed: Any):
    with closed.client() as client:
        assert client.get("/health").status_code == 200
        refused = client.post("/toy/tokenize", json=BODY)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["code"] == "UNAUTHORIZED"
        assert client.get("/metrics").status_code == 401
        allowed = {"authorization": f"Bearer {KEY}"}
        assert client.post("/toy/tokenize", json=BODY, headers=allowed).status_code == 200
        assert client.post("/toy/tokenize?api_key=" + KEY, json=BODY).status_code == 401
        assert client.get("/toy/admin", headers=allowed).status_code == 403
        assert client.get("/toy/admin").status_code == 401
        assert client.get("/toy/admin", headers={"x-api-key": ADMIN_KEY}).status_code == 200


def test_http_of_a_page_that_is_not_listed_is_refused_before_its_body_is_read(closed: Any):
    headers = {"origin": "https://other.example", "x-api-key": KEY}
    with closed.client() as client:
        reply = client.post("/toy/tokenize", content=b"no json", headers=headers)
    assert reply.status_code == 403
    assert "other.example" in reply.json()["wrong"]
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    ("options", "path", "code"),
    [
        ({}, "/toy/ws", 1008),
        ({"additional_headers": {"x-api-key": "wrong"}}, "/toy/ws", 1008),
        (
            {"additional_headers": {"x-api-key": KEY}, "origin": "https://other.example"},
            "/toy/ws",
            1008,
        ),
        ({}, "/toy/ws?api_key=wrong", 1008),
    ],
)
def test_websocket_of_a_stranger_is_told_why_and_closed(
    closed: Any, options: dict[str, Any], path: str, code: int
):
    with websocket(closed, path, **options) as socket:
        (event,), closed_with = read_to_close(socket)
    assert '"type":"error"' in str(event)
    assert '"UNAUTHORIZED"' in str(event)
    assert closed_with == code


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"additional_headers": {"x-api-key": KEY}, "origin": PAGE}, "/toy/ws"),
        ({"additional_headers": {"authorization": f"Bearer {KEY}"}}, "/toy/ws"),
        ({}, f"/toy/ws?api_key={KEY}"),
    ],
)
def test_websocket_with_a_key_generates(closed: Any, options: dict[str, Any], path: str):
    with websocket(closed, path, **options) as socket:
        socket.send('{"prompt":"Tom has","max_tokens":1,"attention":false}')
        assert '"token"' in socket.recv(timeout=5)
        assert '"done"' in socket.recv(timeout=5)
