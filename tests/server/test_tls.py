"""TLS of the server's own: HTTPS and WSS with a certificate, and files that cannot be used."""

from __future__ import annotations

import contextlib
import json
import signal
import ssl
import sys
from typing import TYPE_CHECKING

import httpx
import pytest

from kqview.errors import RequestError
from kqview.server import Settings
from kqview.server.web.tls import tls_context
from tests.server.clients import (
    is_closed_by_server,
    n_files,
    raw_connection,
    read_to_close,
    reset,
    sse_events,
    websocket,
)
from tests.server.toy_dialect import serving_toy
from tests.support.serve_process import started

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

pytestmark = pytest.mark.full

trustme = pytest.importorskip("trustme")

BODY = {"prompt": "Tom has", "max_tokens": 3}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Paths: a certificate, its key, both in one file, another's key, an encrypted one, the CA."""
    from cryptography.hazmat.primitives import serialization as form

    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    mine, other = (authority.issue_cert("localhost", "127.0.0.1") for _ in range(2))
    authority.cert_pem.write_to_path(folder / "ca")
    mine.cert_chain_pems[0].write_to_path(folder / "cert")
    mine.private_key_pem.write_to_path(folder / "key")
    other.private_key_pem.write_to_path(folder / "other")
    mine.private_key_and_cert_chain_pem.write_to_path(folder / "both")
    key = form.load_pem_private_key(mine.private_key_pem.bytes(), None)
    secret = form.BestAvailableEncryption(b"secret")
    (folder / "encrypted").write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, secret)
    )
    (folder / "text").write_text("no certificate")
    broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    (folder / "broken").write_bytes(broken)
    return {path.name: str(path) for path in folder.iterdir()} | {"folder": str(folder)}


@pytest.fixture(scope="module")
def trusting(files: dict[str, str]) -> ssl.SSLContext:
    """A client that trusts the certificate and nothing else."""
    return ssl.create_default_context(cafile=files["ca"])


@pytest.fixture(scope="module")
def served(files: dict[str, str]) -> Iterator[Served]:
    settings = Settings(n_ctx=2048, ssl_certfile=files["cert"], ssl_keyfile=files["key"])
    with serving_toy(settings) as one:
        yield one


def test_post_and_stream_go_over_https(served: Served, trusting: ssl.SSLContext):
    assert served.url.startswith("https://")
    with served.client(verify=trusting) as client:
        assert len(client.post("/toy/generate", json=BODY).json()["ids"]) == 3
        with client.stream("POST", "/toy/stream", json=BODY) as reply:
            assert [event["type"] for event in sse_events(reply)] == ["token"] * 3 + ["done"]
        own = {"origin": served.url}
        assert client.post("/toy/generate", json=BODY, headers=own).status_code == 200


def test_websocket_goes_over_wss(served: Served, trusting: ssl.SSLContext):
    with websocket(served, "/toy/ws", ssl=trusting) as socket:
        socket.send(json.dumps({**BODY, "max_tokens": 200}))
        frames, code = read_to_close(socket)
    assert (len(frames), code) == (401, 1000)


def test_plain_http_is_not_answered(served: Served, trusting: ssl.SSLContext):
    with pytest.raises(httpx.TransportError):
        httpx.get(served.url.replace("https", "http") + "/health", timeout=60)
    with served.client(verify=trusting) as client:
        assert client.get("/health").status_code == 200


def test_one_file_may_hold_both(files: dict[str, str]):
    assert tls_context(Settings(ssl_certfile=files["both"])) is not None
    assert tls_context(Settings()) is None


@pytest.mark.parametrize(
    ("certificate", "key", "named"),
    [
        ("nowhere", "key", "ssl_certfile .*nowhere"),
        ("cert", "nowhere", "ssl_keyfile .*nowhere"),
        ("folder", "key", "ssl_certfile"),
        ("text", "key", "ssl_certfile .*certificate"),
        ("cert", "text", "ssl_keyfile .*private key"),
        ("cert", "cert", "ssl_keyfile .*private key"),
        ("key", "cert", "ssl_certfile .*certificate"),
        ("cert", None, "ssl_certfile .*private key"),
        (None, "key", "ssl_keyfile .*ssl_certfile"),
        ("cert", "other", "does not belong"),
        ("cert", "encrypted", "passphrase"),
        ("broken", "key", "ssl_certfile"),
        ("a\0b", "key", "ssl_certfile"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    files: dict[str, str], certificate: str | None, key: str | None, named: str
):
    given = [name and files.get(name, name) for name in (certificate, key)]
    with pytest.raises(RequestError, match=named):
        tls_context(Settings(ssl_certfile=given[0], ssl_keyfile=given[1]))


# ---- kqview serve


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "kqview", "serve", "--demo", "--port", "0", *options]


def test_serve_says_https_and_serves_it(files: dict[str, str], trusting: ssl.SSLContext):
    options = ("--ssl-certfile", files["cert"], "--ssl-keyfile", files["key"], "--threads", "1")
    with started(command(*options)) as parent:
        assert parent.url.startswith("https://127.0.0.1:")
        reply = httpx.get(parent.url + "/health", verify=trusting, timeout=60)
        assert reply.status_code == 200
        parent.process.send_signal(signal.SIGTERM)
        assert parent.process.wait(60) == 0


# ---- before the handshake


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def small(request: pytest.FixtureRequest, files: dict[str, str]) -> Iterator[Served]:
    """A server with room for few, on either event loop."""
    import uvicorn

    if request.param == "uvloop":
        pytest.importorskip("uvloop")
    settings = Settings(
        ssl_certfile=files["cert"], ssl_keyfile=files["key"], max_connections=6,
        max_connections_per_client=4, idle_timeout_s=3,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "asyncio":
            patch.setattr(uvicorn.Config, "get_loop_factory", lambda self: None)
        with serving_toy(settings) as one:
            yield one


def answers(served: Served, trusting: ssl.SSLContext, source: str = "127.0.0.1") -> bool:
    transport = httpx.HTTPTransport(verify=trusting, local_address=source)
    with httpx.Client(transport=transport, timeout=60) as client:
        try:
            return client.get(served.url + "/health").status_code == 200
        except httpx.TransportError:
            return False


def test_connections_that_never_shake_hands_count_and_end(small: Served, trusting: ssl.SSLContext):
    small.wait_until(lambda: answers(small, trusting))
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(raw_connection(small)) for _ in range(4)]
        socks[0].sendall(b"\x16\x03\x01")  # the beginning of one
        small.wait_until(lambda: not answers(small, trusting))
        assert answers(small, trusting, "127.0.0.9")  # another client
        # All of the server's: then nobody is let in, but not for long.
        assert all(is_closed_by_server(sock) for sock in socks)
        small.wait_until(lambda: answers(small, trusting))


def test_hundreds_of_connections_of_every_kind_leave_nothing(
    small: Served, trusting: ssl.SSLContext
):
    small.wait_until(lambda: answers(small, trusting))
    before = n_files()
    for i in range(150):
        with raw_connection(small) as sock:
            if i % 3 == 0:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            elif i % 3 == 1:
                reset(sock)
            elif i % 9 == 2:
                with contextlib.suppress(OSError):
                    trusting.wrap_socket(sock, server_hostname="localhost").close()
    small.wait_until(lambda: answers(small, trusting))
    small.wait_until(lambda: n_files() <= before)
