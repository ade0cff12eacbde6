"""Which client a request comes from: proxies that the settings name count, and nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from kqview.server.web.peers import _FORWARDED, Peers, client_name
from tests.server.clients import raw_connection, read_until, request_bytes, websocket
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from tests.server.conftest import AccessLines

PROXY, INNER, CLIENT, OTHER = "10.0.0.1", "10.0.0.2", "203.0.113.7", "198.51.100.9"


def resolved(*headers: tuple[str, str], peer: str | None = PROXY, kind: str = "http") -> Any:
    scope: Any = {
        "type": kind,
        "scheme": "ws" if kind == "websocket" else "http",
        "client": peer and (peer, 4711),
        "headers": [(name.encode(), value.encode()) for name, value in headers],
        "state": {},
    }
    Peers((f"{PROXY}/32", "10.0.0.2", "2001:db8:1::/48")).resolve(scope)
    return scope


def xff(value: str) -> tuple[str, str]:
    return "x-forwarded-for", value


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ([xff(CLIENT)], CLIENT),
        ([xff(f"{CLIENT}:50000")], CLIENT),
        # Left of the client stands what the client wrote itself.
        ([xff(f"{OTHER}, {CLIENT}")], CLIENT),
        ([xff(f"{OTHER}, {PROXY}, {CLIENT}")], CLIENT),
        ([xff(OTHER), xff(CLIENT)], CLIENT),
        ([xff(f"{OTHER}, {CLIENT}, {INNER}")], CLIENT),
        ([xff(f"{INNER}, {PROXY}")], INNER),
        ([xff("2001:db8::7")], "2001:db8::7"),
        ([xff("[2001:db8::7]:443")], "2001:db8::7"),
        ([xff(f"{CLIENT}, 2001:db8:1::5")], CLIENT),
        ([xff(f"::ffff:{CLIENT}")], CLIENT),
        # What is no address leads no further.
        ([xff(f"{CLIENT}, unknown, {INNER}")], INNER),
        ([xff("unknown")], PROXY),
        ([xff("")], PROXY),
        ([xff("<script>, 1.2.3")], PROXY),
        ([], PROXY),
        ([("forwarded", f"for={CLIENT};proto=https")], CLIENT),
        ([("forwarded", f'for={OTHER}, For="{CLIENT}:1234";by=x')], CLIENT),
        ([("forwarded", 'for="[2001:db8::7]:4711"')], "2001:db8::7"),
        ([("forwarded", f"for={CLIENT}, for={INNER}")], CLIENT),
        ([("forwarded", f"for=_hidden, for={INNER}")], INNER),
        ([("forwarded", 'for="a,b;\\", for=1'), xff(CLIENT)], CLIENT),
        # A proxy that writes the one hands on the other as the client sent it.
        ([("forwarded", f"for={OTHER}"), xff(CLIENT)], CLIENT),
    ],
)
def test_client_is_the_rightmost_that_is_no_proxy(headers: Any, client: str):
    assert resolved(*headers)["client"][0] == client


@pytest.mark.parametrize("peer", [CLIENT, "127.0.0.1", "::1", "10.0.0.3", "testclient", None])
def test_who_is_no_named_proxy_is_not_believed(peer: str | None):
    headers = [xff(OTHER), ("x-forwarded-proto", "https"), ("x-forwarded-host", "a.example")]
    scope = resolved(*headers, ("forwarded", f"for={OTHER};proto=https;host=a"), peer=peer)
    assert scope["client"] == (peer and (peer, 4711))
    assert (scope["scheme"], scope["state"]) == ("http", {})


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_scheme_and_host_are_those_of_the_proxys_client(kind: str):
    secure = "wss" if kind == "websocket" else "https"
    for headers in (
        [xff(CLIENT), ("x-forwarded-proto", "https"), ("x-forwarded-host", "a.example:8443")],
        [xff(CLIENT), ("x-forwarded-proto", "http, HTTPS"), ("x-forwarded-host", "a.example:8443")],
        [("forwarded", f'for={CLIENT};proto=https;host="a.example:8443", for={INNER};proto=http')],
    ):
        scope = resolved(*headers, kind=kind)
        assert scope["scheme"] == secure
        assert scope["state"]["forwarded_host"] == "a.example:8443"
    assert resolved(xff(CLIENT), ("x-forwarded-proto", "gopher"), kind=kind)["scheme"] != secure


def test_clients_have_one_name_each():
    assert client_name("192.0.2.1") == client_name("::ffff:192.0.2.1") == "192.0.2.1"
    assert client_name("192.0.2.2") != client_name("192.0.2.1")
    assert client_name("::ffff:192.0.2.1") != client_name("::ffff:192.0.2.2")
    assert client_name("2001:db8::1") == client_name("2001:db8::ffff:2") == "2001:db8::/64"
    assert client_name("fe80::1%eth0") == "fe80::/64"
    assert client_name("testclient") == "testclient"


# ---- over sockets


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded"])
def test_headers_of_this_machine_forge_neither_the_log_nor_the_rate(lines: AccessLines, name: str):
    with serving_toy(Settings(rate_limit=3.0)) as served, served.client() as client:
        statuses = [
            client.post(
                "/toy/tokenize",
                json={"text": "x"},
                headers={
                    name: f"{'for=' if name == 'forwarded' else ''}203.0.113.{i}",
                    "x-request-id": f"r{i}",
                },
            ).status_code
            for i in range(4)
        ]
        assert statuses == [200, 200, 200, 429]
        served.wait_until(lambda: len(lines.raw) == 4)
    assert set(lines.clients().values()) == {"127.0.0.1"}


def test_named_proxy_shows_each_client_to_log_rate_and_limits(lines: AccessLines):
    settings = Settings(rate_limit=1.0, trusted_proxies=("127.0.0.0/8",))
    with serving_toy(settings) as served, served.client() as client:

        def ask(address: str, name: str) -> int:
            headers = {"x-forwarded-for": f"{OTHER}, {address}", "x-request-id": name}
            body = {"text": "x"}
            return client.post("/toy/tokenize", json=body, headers=headers).status_code

        assert [ask(CLIENT, "a"), ask(CLIENT, "b"), ask("203.0.113.8", "c")] == [200, 429, 200]
        headers = {"x-forwarded-for": "203.0.113.9", "x-request-id": "d"}
        with websocket(served, "/toy/ws", additional_headers=headers):
            pass
        served.wait_until(lambda: len(lines.raw) == 4)
    assert lines.clients() == {"a": CLIENT, "b": CLIENT, "c": "203.0.113.8", "d": "203.0.113.9"}


def test_requests_at_a_time_of_one_client_behind_a_proxy_are_bounded():
    settings = Settings(
        n_ctx=8192, trusted_proxies=("127.0.0.1",), max_connections_per_client=2, max_queued=8
    )
    with serving_toy(settings) as served:
        body = b'{"prompt":"Tom has","max_tokens":8000}'
        mine = {"x_forwarded_for": CLIENT}
        socks = [raw_connection(served, receive_bytes=4096) for _ in range(2)]
        for sock in socks:
            sock.sendall(request_bytes("POST", "/toy/stream", body, **mine))
        served.wait_until(lambda: len(served.service.runs) == 2)
        with raw_connection(served) as third:
            third.sendall(request_bytes("GET", "/health", **mine))
            refused = read_until(third, b"\r\n\r\n")
            third.sendall(request_bytes("GET", "/health", x_forwarded_for=OTHER))
            other = read_until(third, b'"ok"')
        assert refused.startswith(b"HTTP/1.1 429 ")
        assert b"retry-after: 1" in refused
        assert b"HTTP/1.1 200 " in other
        for sock in socks:
            sock.close()
        served.wait_idle()


def test_header_without_pairs_is_read_in_time_proportional_to_its_length():
    # 60 kB took a minute where each character began a name of its own.
    assert _FORWARDED.findall("a" * 60_000) == []
