"""Who may call: keys, rate, hosts, origins of pages."""

from __future__ import annotations

import hmac
import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kqview.server import Settings
from kqview.server.app import DIALECTS
from kqview.server.errors import Forbidden, RateLimited, Unauthorized, answer_of
from kqview.server.web import access
from kqview.server.web.access import Gate
from kqview.server.web.endpoint import error_reply
from tests.server.clients import (
    WAITS_S,
    check_browser_headers,
    raw_connection,
    read_to_close,
    read_until,
    request_bytes,
    websocket,
)
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from kqview.server.web.endpoint import Operation

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

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    gate.check(scope(bearer(KEY)), access="user")
    # All keys, although the first one matched, and none of them by its length.
    assert compared == [(32, 32)] * 3


def test_name_of_a_caller_does_not_show_the_key(gate: Gate):
    assert KEY not in gate.check(scope(bearer(KEY)), access="user").name


def test_bucket_refills_and_says_when(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(access.time, "monotonic", lambda: now[0])
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
    monkeypatch.setattr(access, "_MOST_CLIENTS", 10)
    gate = Gate(Settings(rate_limit=1.0))
    for i in range(50):
        gate.check(scope(client=f"10.0.1.{i}"), access="user")
    rate = gate._rate.value
    assert rate is not None
    assert len(rate._buckets) == 10


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


GUARDED = [
    one
    for dialect in DIALECTS
    for one in dialect.OPERATIONS
    if one.access != "open" and one.method != "WS"
]


@pytest.mark.parametrize("one", GUARDED, ids=lambda one: f"{one.method} {one.path}")
def test_no_operation_answers_without_a_key(closed: Any, one: Operation):
    with closed.client() as client:
        reply = client.request(one.method, re.sub("{.*?}", "1", one.path))
    refused = error_reply(answer_of(Unauthorized("")), one.error_body)
    assert reply.status_code == refused.status == 401
    assert reply.json().keys() == msgspec.json.decode(refused.body).keys()


@pytest.mark.parametrize(
    "path", [one.path for dialect in DIALECTS for one in dialect.OPERATIONS if one.method == "WS"]
)
def test_no_websocket_answers_without_a_key(closed: Any, path: str):
    with websocket(closed, path) as socket:
        (event,), code = read_to_close(socket)
    assert "UNAUTHORIZED" in str(event)
    assert code == 1008


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
        assert '"token"' in socket.recv(timeout=WAITS_S)
        assert '"done"' in socket.recv(timeout=WAITS_S)


# ---- hosts and origins


SHORT_BODY = {"prompt": "Tom has", "max_tokens": 1, "attention": False}


def called_as(*headers: tuple[str, str], method: str = "POST", **more: Any) -> Any:
    raw = [(name.encode(), value.encode()) for name, value in headers]
    return {
        "type": "http", "method": method, "scheme": "http", "headers": raw, "query_string": b"",
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 5001), "state": {}, **more,
    }  # fmt: skip


def lets_in(settings: Settings, asked: Any) -> bool:
    try:
        Gate(settings).check(asked, access="user")
    except Forbidden:
        return False
    return True


# ---- names of the server


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:5001", True),
        ("localhost:5001", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("app.localhost:5001", True),
        ("[::1]:5001", True),
        ("192.168.0.7:5001", True),
        ("[2001:db8::1]", True),
        ("rebound.example", False),
        ("rebound.example:5001", False),
        ("localhost.rebound.example", False),
        ("127.0.0.1.rebound.example", False),
        ("notlocalhost", False),
        ("127.0.0.1@rebound.example", False),
        ("127.1", False),
        ("[::1", True),
        ("::1", False),
        ("", False),
        ("box", False),
    ],
)
def test_server_answers_to_addresses_and_localhost(host: str, is_ours: bool):
    assert lets_in(Settings(), called_as(("host", host))) == is_ours


def test_names_that_are_listed_are_answered_to():
    settings = Settings(allowed_hosts=("Box.", "*.example.org"))
    for host, is_ours in (
        ("box:5001", True), ("BOX", True), ("a.example.org", True), ("a.b.example.org:1", True),
        ("example.org", False), ("badexample.org", False), ("box.evil.example", False),
    ):  # fmt: skip
        assert lets_in(settings, called_as(("host", host))) == is_ours, host
    assert lets_in(Settings(allowed_hosts=("*",)), called_as(("host", "anything.example")))


def test_name_that_it_listens_on_is_its_own():
    assert lets_in(Settings(host="box.lan"), called_as(("host", "box.lan:5001")))
    # In place: a test client or a program that calls the app itself.
    assert lets_in(Settings(), called_as(("host", "testserver"), server=("testserver", 80)))
    assert lets_in(Settings(host="0.0.0.0", api_keys=()), called_as(("host", "10.1.2.3:5001")))


def test_every_host_that_is_said_has_to_be_ours():
    ours, theirs = ("host", "127.0.0.1"), ("host", "rebound.example")
    assert lets_in(Settings(), called_as())  # HTTP/1.0 has none; no browser leaves it out
    assert not lets_in(Settings(), called_as(ours, theirs))
    assert not lets_in(Settings(), called_as(theirs, ours))
    # A proxy's word can only narrow it: a page may send that header too.
    forwarded = {"state": {"forwarded_host": "localhost"}}
    assert not lets_in(Settings(), called_as(theirs, **forwarded))
    assert not lets_in(Settings(), called_as(ours, state={"forwarded_host": "rebound.example"}))


@pytest.mark.parametrize(
    "host", ["a b", "http://a", "a/b", "a:80", "", "*.", "a..b", "*a.org", "ä.example"]
)
def test_setting_that_is_no_host_is_refused(host: str):
    from kqview.errors import RequestError

    with pytest.raises(RequestError, match="allowed_hosts"):
        Settings(allowed_hosts=(host,))


# ---- origins of pages


LOOPBACK = [
    "http://localhost:8080", "http://localhost", "https://localhost:8443", "http://127.0.0.1:3000",
    "http://127.8.8.8", "http://[::1]:8080", "http://app.localhost:1234",
]  # fmt: skip
FOREIGN = [
    "https://page.example", "http://page.example:5001", "null", "http://192.168.0.9:8080",
    "http://localhost.evil.example", "http://127.0.0.1.evil.example", "http://127.0.0.1@evil.example",
    "http://evil.example/localhost", "https://xlocalhost", "file://", "", "loopback", "*",
    "chrome-extension://abcdef", "http://localhost:80:80", "http://localhost:8080\\.evil.example",
]  # fmt: skip


@pytest.mark.parametrize("origin", LOOPBACK)
def test_pages_of_this_machine_may_call(origin: str):
    assert lets_in(Settings(), called_as(("host", "127.0.0.1:5001"), ("origin", origin)))


@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_of_others_may_not(origin: str):
    asked = called_as(("host", "127.0.0.1:5001"), ("origin", origin))
    assert not lets_in(Settings(), asked)
    assert lets_in(Settings(cors_origins=("*",)), asked)
    assert not lets_in(Settings(cors_origins=()), asked)


def test_listed_pages_stand_beside_those_of_this_machine_or_alone():
    page, local = ("origin", "https://page.example"), ("origin", "http://localhost:8080")
    both = Settings(cors_origins=("loopback", "https://page.example"))
    alone = Settings(cors_origins=("https://page.example",))
    host = ("host", "127.0.0.1:5001")
    assert lets_in(both, called_as(host, page))
    assert lets_in(both, called_as(host, local))
    assert lets_in(alone, called_as(host, page))
    assert not lets_in(alone, called_as(host, local))


@pytest.mark.parametrize(
    ("origin", "host", "scheme", "is_own"),
    [
        ("http://10.1.2.3:5001", "10.1.2.3:5001", "http", True),
        ("http://box.lan", "box.lan", "http", True),
        ("https://box.lan", "box.lan:443", "https", True),
        ("http://box.lan:80", "box.lan", "http", False),  # browsers leave it out
        # A proxy that nobody trusts says nothing of its scheme.
        ("https://box.lan", "box.lan", "http", True),
        ("http://box.lan", "box.lan", "https", False),
        ("http://box.lan:8080", "box.lan", "http", False),
        ("ftp://box.lan", "box.lan", "http", False),
    ],
)
def test_page_of_the_server_itself_may_call(origin: str, host: str, scheme: str, is_own: bool):
    settings = Settings(allowed_hosts=("box.lan",), cors_origins=())
    asked = called_as(("host", host), ("origin", origin), scheme=scheme)
    assert lets_in(settings, asked) == is_own


def test_any_host_makes_no_page_its_own():
    asked = called_as(("host", "rebound.example:5001"), ("origin", "http://rebound.example:5001"))
    assert not lets_in(Settings(allowed_hosts=("*",)), asked)


@pytest.mark.parametrize(
    ("method", "mode", "site", "is_let_in"),
    [
        ("GET", "navigate", "cross-site", True),  # a link
        ("POST", "navigate", "cross-site", False),  # a form
        ("GET", "no-cors", "cross-site", False),  # an image, a script
        ("POST", "no-cors", "cross-site", False),
        ("GET", "no-cors", "same-origin", True),
        ("POST", "cors", "same-origin", True),
        ("GET", "navigate", "none", True),  # typed by hand
    ],
)
def test_what_other_sites_send_without_an_origin_is_refused(
    method: str, mode: str, site: str, is_let_in: bool
):
    headers = (("sec-fetch-site", site), ("sec-fetch-mode", mode))
    asked = called_as(*headers, ("host", "localhost:5001"), method=method)
    assert lets_in(Settings(), asked) == is_let_in
    assert lets_in(Settings(cors_origins=("*",)), asked)


# ---- over sockets


@pytest.fixture(scope="module")
def served():
    with serving_toy(Settings(n_ctx=1024)) as one:
        yield one


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "text/plain", "origin": "https://page.example"},
        {"content_type": "text/plain", "origin": "null"},
        {"content_type": "text/plain", "sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},
        {"host": "rebound.example"},
    ],
)
def test_simple_post_of_a_foreign_page_does_not_run(served: Any, headers: dict[str, str]):
    body = json.dumps(SHORT_BODY).encode()
    before = served.service._n_runs_of.total()
    with raw_connection(served) as sock:
        raw = request_bytes("POST", "/toy/generate", body, **headers)
        if "host" in headers:
            raw = raw.replace(b"host: 127.0.0.1\r\n", b"")
        sock.sendall(raw)
        reply = read_until(sock, b'"code"')
    assert reply.startswith(b"HTTP/1.1 403 ")
    assert b"access-control-allow-origin" not in reply
    with served.client() as client:  # the same body runs where the page may send it
        page = {"content-type": "text/plain", "origin": "http://localhost:8080"}
        assert client.post("/toy/generate", content=body, headers=page).status_code == 200
    assert served.service._n_runs_of.total() == before + 1


@pytest.mark.parametrize(
    "options",
    [
        {"origin": "https://page.example"},
        {"origin": "null"},
        {
            "additional_headers": {"x-forwarded-host": "localhost"},
            "origin": "http://rebound.example",
        },
    ],
)
def test_websocket_of_a_foreign_page_is_refused(served: Any, options: dict[str, Any]):
    with websocket(served, "/toy/ws", **options) as socket:
        (event,), code = read_to_close(socket)
    assert "may not call" in str(event)
    assert code == 1008


def test_websocket_to_a_foreign_name_is_refused(served: Any):
    from tests.server.clients import upgrade_bytes

    raw = upgrade_bytes("/toy/ws").replace(b"host: 127.0.0.1", b"host: rebound.example:5001")
    with raw_connection(served) as sock:
        sock.sendall(raw)
        assert b"rebound.example" in read_until(sock, b"--allowed-hosts")


def test_websocket_of_a_page_on_this_machine_generates(served: Any):
    with websocket(served, "/toy/ws", origin="http://localhost:8080") as socket:
        socket.send(json.dumps(SHORT_BODY))
        assert '"token"' in socket.recv(timeout=WAITS_S)


# ---- CORS headers


LOCAL_PAGE = "http://localhost:8080"
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


@pytest.fixture(scope="module", params=[None, (LOCAL_PAGE,)], ids=["by-default", "listed"])
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
        reply = client.request(method, path, json=body, headers={"origin": LOCAL_PAGE})
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]


@pytest.mark.parametrize(("method", "path", "body", "status"), REPLIES)
def test_every_reply_may_be_read_by_an_allowed_page_alone(
    listed: Any, method: str, path: str, body: Any, status: int
):
    with listed.client() as client:
        reply = client.request(method, path, json=body, headers={"origin": LOCAL_PAGE})
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == LOCAL_PAGE
        assert "Origin" in reply.headers["vary"]
        other = client.request(method, path, json=body, headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        assert other.status_code in (400, 403, 404, 405, 204)


PAGE_PATHS = ["/", "/chat", "/docs", "/static/chat/page.js", "/static/style.css", "/openapi.json"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [*REPLIES, *(("GET", path, None, 200) for path in PAGE_PATHS)],
)
def test_no_reply_may_be_framed_or_taken_for_another_type(
    open_to_all: Any, method: str, path: str, body: Any, status: int
):
    with open_to_all.client() as client:
        reply = client.request(method, path, json=body)
    assert reply.status_code == status
    check_browser_headers(reply)


@pytest.mark.parametrize("path", ["/toy/generate", "/toy/stream", "/health", "/nowhere"])
def test_preflight_is_answered_once_a_day_for_any_header(open_to_all: Any, path: str):
    headers = {
        "origin": LOCAL_PAGE,
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
        assert (reply.status_code, reply.content) == (200, b"")
        assert "access-control-allow-origin" not in reply.headers
        mine = client.options("/toy/generate", headers={**headers, "origin": LOCAL_PAGE})
    assert mine.headers["access-control-allow-origin"] == LOCAL_PAGE


def test_options_and_wrong_methods_name_every_method_of_a_path(open_to_all: Any):
    with open_to_all.client() as client:
        assert client.options("/toy/generate").headers["allow"] == "OPTIONS, POST"
        refused = client.delete("/toy/generate")
    assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")
    assert refused.json()["error_code"] == "INVALID_REQUEST"
