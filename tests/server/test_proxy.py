"""The reverse-proxy page: its configurations run as they stand, in front of a real server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import ssl
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.server.clients import read_to_close, sse_events
from tests.support.needs import program
from tests.support.processes import free_port
from tests.support.serve_process import Parent

if TYPE_CHECKING:
    from collections.abc import Iterator

trustme = pytest.importorskip("trustme")

PAGE = (Path(__file__).parents[2] / "src/kqview/server/PROXY.md").read_text(encoding="utf-8")
NAME, KEY = "llm.example.org", "SECRET"
CLIENT = "127.0.0.7"  # another address of this machine than the proxy's
STREAM = "/api/extra/generate/stream"
TEXT = "Mirelda found a silver key near the old bridge."

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="wants all of 127.0.0.0/8"),
]


def block(language: str) -> str:
    """The one block of that language on the page."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return found


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """*text* with each first part, which has to be there, replaced."""
    for old, new in pairs:
        assert old in text, f"PROXY.md has no {old!r}"
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def running(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **options) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


class Server(Parent):
    """``kqview serve`` as the page starts it."""

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def line_of(self, request_id: str) -> dict[str, Any]:
        """A request's line of the access log."""
        line: dict[str, Any] = json.loads(self.wait_for(f'"request_id":"{request_id}"'))
        return line


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    command = replaced(
        block("sh"), ("--model model.gguf", "--demo --port 0 --slots 2 --ctx 8192 --threads 1")
    )
    program_name, *arguments = shlex.split(command)
    assert program_name == "kqview"
    one = Server([sys.executable, "-m", "kqview", *arguments])
    yield one
    one.close()


@dataclass(frozen=True)
class Proxied:
    """The server as clients see it: behind a proxy, by its name."""

    server: Server
    port: int
    trusting: ssl.SSLContext

    def client(self, address: str = CLIENT) -> httpx.Client:
        transport = httpx.HTTPTransport(verify=self.trusting, local_address=address)
        return httpx.Client(
            transport=transport,
            base_url=f"https://127.0.0.1:{self.port}",
            headers={"host": f"{NAME}:{self.port}", "x-api-key": KEY},
            timeout=60,
        )

    def ask(self, client: httpx.Client, method: str, path: str, **options: Any) -> httpx.Response:
        names = {"sni_hostname": NAME}
        return client.request(method, path, extensions=names, **options)


def nginx(folder: Path, server: Server, port: int, files: dict[str, Path]) -> list[str]:
    found = program("nginx")
    site = replaced(
        block("nginx"),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("127.0.0.1:5001", server.address),
        ("/etc/ssl/llm.example.org.pem", str(files["cert"])),
        ("/etc/ssl/llm.example.org.key", str(files["key"])),
    )
    temporary = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = " ".join(f"{name}_temp_path {folder}/{name};" for name in temporary)
    user = "user root;" if os.geteuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/log; worker_processes 1; {user}\n"
        f"events {{}}\nhttp {{ access_log off; {paths}\n{site}\n}}\n"
    )
    return [found, "-p", str(folder), "-e", str(folder / "log"), "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, server: Server, port: int, files: dict[str, Path]) -> list[str]:
    found = program("caddy")
    own = f"bind 127.0.0.1\n\ttls {files['cert']} {files['key']}\n"
    site = replaced(
        block("caddy"),
        (f"{NAME} {{\n", f"{NAME}:{port} {{\n\t{own}"),
        ("127.0.0.1:5001", server.address),
    )
    (folder / "Caddyfile").write_text(
        f"{{\n\tadmin off\n\tauto_https disable_redirects\n}}\n{site}"
    )
    return [found, "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(one, id=one.__name__, marks=pytest.mark.needs(one.__name__))
        for one in (nginx, caddy)
    ],
)
def proxied(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    authority = trustme.CA()
    certificate = authority.issue_cert(NAME)
    files = {name: folder / name for name in ("cert", "key", "ca")}
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    certificate.private_key_pem.write_to_path(files["key"])
    authority.cert_pem.write_to_path(files["ca"])
    trusting = ssl.create_default_context(cafile=str(files["ca"]))
    port = free_port()
    command = request.param(folder, server, port, files)
    environ = {**os.environ, "HOME": str(folder)}
    environ |= {name: str(folder) for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME")}
    log = (folder / "output").open("w")
    with log, running(command, stdout=log, stderr=log, env=environ, cwd=folder) as process:
        one = Proxied(server, port, trusting)
        end_s = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 5).close()
                break
            assert process.poll() is None, (folder / "output").read_text()
            assert time.monotonic() < end_s
            time.sleep(0.02)
        yield one


def test_post_is_answered_and_its_client_is_the_real_one(proxied: Proxied):
    forged = {
        "x-request-id": f"post-{proxied.port}", "x-forwarded-for": "203.0.113.66, 198.51.100.1",
        "forwarded": "for=203.0.113.67", "origin": f"https://{NAME}:{proxied.port}",
    }  # fmt: skip
    body = {"prompt": TEXT, "max_length": 3}
    with proxied.client() as client:
        reply = proxied.ask(client, "POST", "/api/v1/generate", json=body, headers=forged)
    assert reply.status_code == 200, reply.text
    assert reply.json()["results"][0]["text"]
    assert proxied.server.line_of(f"post-{proxied.port}")["client"] == CLIENT


def test_each_client_is_logged_by_its_own_address(proxied: Proxied):
    for address in ("127.0.0.21", "127.0.0.22"):
        name = f"{address}-{proxied.port}"
        with proxied.client(address) as client:
            proxied.ask(client, "GET", "/health", headers={"x-request-id": name})
        assert proxied.server.line_of(name)["client"] == address


def test_large_body_goes_through(proxied: Proxied):
    body = json.dumps({"text": "hello"}).encode() + b" " * 20 * 2**20
    with proxied.client() as client:
        reply = proxied.ask(client, "POST", "/api/v1/tokenize", content=body)
        assert reply.status_code == 200
        too_large = proxied.ask(client, "POST", "/api/v1/tokenize", content=body + b" " * 2**24)
        assert too_large.status_code == 413


def test_stream_is_not_gathered_on_its_way(proxied: Proxied):
    """The client reads one event and no more: what is unread has to hold the generation up."""
    name = f"stream-{proxied.port}"
    body = {
        "prompt": TEXT, "max_length": 1000, "ban_eos_token": True, "output_attentions": True,
        "request_id": name,
    }  # fmt: skip
    with proxied.client() as client, proxied.client() as other:

        def text() -> str:
            path = "/api/extra/generate/check"
            reply = proxied.ask(other, "POST", path, json={"request_id": name})
            return reply.json()["results"][0]["text"]

        sending = client.build_request(
            "POST", STREAM, json=body, extensions={"sni_hostname": NAME, "timeout": {"read": 60}}
        )
        reply = client.send(sending, stream=True)
        assert reply.headers["content-type"].startswith("text/event-stream")
        events = sse_events(reply)
        assert next(events)["type"] == "token"
        before = ""
        while (now := text()) != before:
            before = now
            time.sleep(0.5)
        assert now, "the whole generation was gathered between the server and its client"
        path = "/api/extra/abort"
        ended = proxied.ask(other, "POST", path, json={"request_id": name})
        assert ended.json()["success"] == "true"
        *_, last = events
        assert (last["type"], last["finish_reason"]) == ("done", "stop")


def test_websocket_generates(proxied: Proxied):
    name = f"socket-{proxied.port}"
    sock = socket.create_connection(("127.0.0.1", proxied.port), 30, (CLIENT, 0))
    headers = {"x-api-key": KEY, "x-request-id": name, "x-forwarded-for": "203.0.113.66"}
    with connect(
        f"wss://{NAME}:{proxied.port}{STREAM}/ws", sock=sock, ssl=proxied.trusting, max_size=None,
        additional_headers=headers, compression=None,
    ) as ws:  # fmt: skip
        ws.send(json.dumps({"prompt": TEXT, "max_length": 20, "ban_eos_token": True}))
        frames, code = read_to_close(ws)
    assert (len(frames), code) == (41, 1000)
    assert proxied.server.line_of(name)["client"] == CLIENT


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://page.example"},
        {"origin": f"http://{NAME}"},  # not by HTTPS
        {"x-forwarded-host": "rebound.example", "host": "rebound.example"},
    ],
)
def test_page_of_another_name_is_refused_behind_it_too(proxied: Proxied, headers: Any):
    with proxied.client() as client:
        body = {"prompt": TEXT, "max_length": 1}
        reply = proxied.ask(client, "POST", "/api/v1/generate", json=body, headers=headers)
    # Caddy has nothing under another name, and says so with an empty reply.
    assert reply.status_code == 403 or (reply.status_code == 200 and not reply.content)
