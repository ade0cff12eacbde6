"""Names that the server answers to, and pages that may call it: other people's may do neither."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kqview.server import Settings
from kqview.server.errors import Forbidden
from kqview.server.security import Gate
from tests.server.clients import raw_connection, read_to_close, read_until, request_bytes, websocket
from tests.server.toy_dialect import serving_toy

BODY = {"prompt": "Tom has", "max_tokens": 1, "attention": False}


def scope(*headers: tuple[str, str], method: str = "POST", **more: Any) -> Any:
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
    assert lets_in(Settings(), scope(("host", host))) == is_ours


def test_names_that_are_listed_are_answered_to():
    settings = Settings(allowed_hosts=("Box.", "*.example.org"))
    for host, is_ours in (
        ("box:5001", True), ("BOX", True), ("a.example.org", True), ("a.b.example.org:1", True),
        ("example.org", False), ("badexample.org", False), ("box.evil.example", False),
    ):  # fmt: skip
        assert lets_in(settings, scope(("host", host))) == is_ours, host
    assert lets_in(Settings(allowed_hosts=("*",)), scope(("host", "anything.example")))


def test_name_that_it_listens_on_is_its_own():
    assert lets_in(Settings(host="box.lan"), scope(("host", "box.lan:5001")))
    # In place: a test client or a program that calls the app itself.
    assert lets_in(Settings(), scope(("host", "testserver"), server=("testserver", 80)))
    assert lets_in(Settings(host="0.0.0.0", api_keys=()), scope(("host", "10.1.2.3:5001")))


def test_every_host_that_is_said_has_to_be_ours():
    ours, theirs = ("host", "127.0.0.1"), ("host", "rebound.example")
    assert lets_in(Settings(), scope())  # HTTP/1.0 has none; no browser leaves it out
    assert not lets_in(Settings(), scope(ours, theirs))
    assert not lets_in(Settings(), scope(theirs, ours))
    # A proxy's word can only narrow it: a page may send that header too.
    forwarded = {"state": {"forwarded_host": "localhost"}}
    assert not lets_in(Settings(), scope(theirs, **forwarded))
    assert not lets_in(Settings(), scope(ours, state={"forwarded_host": "rebound.example"}))


@pytest.mark.parametrize(
    "host", ["a b", "http://a", "a/b", "a:80", "", "*.", "a..b", "*a.org", "ä.example"]
)
def test_setting_that_is_no_host_is_refused(host: str):
    from kqview.errors import RequestError

    with pytest.raises(RequestError, match="allowed_hosts"):
        Settings(allowed_hosts=(host,))


# ---- pages


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
    assert lets_in(Settings(), scope(("host", "127.0.0.1:5001"), ("origin", origin)))


@pytest.mark.parametrize("origin", FOREIGN)
def test_pages_of_others_may_not(origin: str):
    asked = scope(("host", "127.0.0.1:5001"), ("origin", origin))
    assert not lets_in(Settings(), asked)
    assert lets_in(Settings(cors_origins=("*",)), asked)
    assert not lets_in(Settings(cors_origins=()), asked)


def test_listed_pages_stand_beside_those_of_this_machine_or_alone():
    page, local = ("origin", "https://page.example"), ("origin", "http://localhost:8080")
    both = Settings(cors_origins=("loopback", "https://page.example"))
    alone = Settings(cors_origins=("https://page.example",))
    host = ("host", "127.0.0.1:5001")
    assert lets_in(both, scope(host, page))
    assert lets_in(both, scope(host, local))
    assert lets_in(alone, scope(host, page))
    assert not lets_in(alone, scope(host, local))


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
    asked = scope(("host", host), ("origin", origin), scheme=scheme)
    assert lets_in(settings, asked) == is_own


def test_any_host_makes_no_page_its_own():
    asked = scope(("host", "rebound.example:5001"), ("origin", "http://rebound.example:5001"))
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
    asked = scope(*headers, ("host", "localhost:5001"), method=method)
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
    body = json.dumps(BODY).encode()
    before = served.service.n_runs
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
    assert served.service.n_runs == before + 1


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
        socket.send(json.dumps(BODY))
        assert '"token"' in socket.recv(timeout=5)
