"""How fast do saved slots of 100 MB go through the server, compared with a bare socket?

The slot holds a prompt that fills 100 MB of F16 cache. A pair is one save-state, or restore-state,
as application/octet-stream and one transfer of as many bytes, in the same direction, between two
processes that do nothing else. What the server does besides: it copies the slot, or checks and
reads the blob, computes a SHA-256 of it to know it again, and writes an arriving body to a file.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from console import attempt, main
from models import model_path
from report import Timing
from runs import open_engine
from serve_client import Wire
from started import Started, free_port, is_healthy
from state import BLOB_BYTES, QUICK_BLOB_BYTES, tokens_of

from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

CASES = {"state-http-save": "save-state", "state-http-restore": "restore-state"}
WEIGHTS = dict.fromkeys(CASES, 40.0)
_BINARY = "application/octet-stream"
_ROOM = 2**22


class Server(Started):
    """``kqview serve`` of the model."""

    def __init__(self, settings: Settings, n_tokens: int) -> None:
        self.port = free_port()
        options = {
            "--model": model_path(settings), "--port": self.port, "--ctx": n_tokens + 256,
            "--threads": settings.n_threads, "--ngl": settings.n_gpu_layers,
            "--max-body-bytes": 2**30,
        }  # fmt: skip
        words = [str(word) for option in options.items() for word in option]
        command = [sys.executable, "-m", "kqview", "serve", "--no-supervise", *words]
        super().__init__(command)

    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_healthy(self.port)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
        """One request; status and body of the reply."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", body or None, headers, method=method
        )
        with urllib.request.urlopen(request, timeout=600) as reply:
            return reply.status, reply.read()


class Bare(Started):
    """This script as a server that only sends, or receives, as many bytes as it is told."""

    def __init__(self) -> None:
        self.port = free_port()
        here = Path(__file__).resolve()
        environ = {**os.environ, "PYTHONPATH": str(here.parent)}
        super().__init__([sys.executable, str(here), "bare", str(self.port)], environ)

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            self.send(0)
        except OSError:
            return False
        return True

    def send(self, n_bytes: int) -> None:
        """Let it send *n_bytes* to here."""
        with Wire(self.port) as wire:
            wire.send(b"s" + n_bytes.to_bytes(8, "little"))
            wire.skip(n_bytes + 1)

    def receive(self, data: bytes) -> None:
        """Send it *data*."""
        with Wire(self.port) as wire:
            wire.send(b"r" + len(data).to_bytes(8, "little"))
            wire.send(data)
            wire.skip(1)


def serve_bare(port: int) -> None:
    """What `Bare` starts."""
    room = memoryview(bytearray(_ROOM))
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                head = connection.recv(9, socket.MSG_WAITALL)
                n_left = int.from_bytes(head[1:], "little")
                while n_left:
                    part = room[: min(n_left, _ROOM)]
                    n_left -= (
                        connection.send(part) if head[:1] == b"s" else connection.recv_into(part)
                    )
                connection.sendall(b".")


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases with one server."""
    names = settings.chosen(CASES)
    if not names:
        return
    n_tokens = tokens_of(settings, QUICK_BLOB_BYTES if settings.is_quick else BLOB_BYTES)
    with open_engine(replace(settings, n_context=64), flash_attn=True) as engine:
        ids = prompt_ids(n_tokens, engine.model.n_vocab)
    with Server(settings, n_tokens) as server, Bare() as bare:
        body = json.dumps({"prompt": ids, "n_predict": 1, "ignore_eos": True}).encode()
        server.ask("POST", "/completion", body)
        for name in names:
            yield attempt(name, _measure, settings, line, server, bare, name)


def _measure(
    settings: Settings, line: ProgressLine, server: Server, bare: Bare, name: str
) -> Timing:
    is_save = CASES[name] == "save-state"
    _, blob = server.ask("POST", "/slots/0?action=save-state", accept=_BINARY)

    def ours() -> None:
        with Wire(server.port) as wire:
            head = (
                f"POST /slots/0?action={CASES[name]} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                f"Content-Length: {0 if is_save else len(blob)}\r\n"
                f"Accept: {_BINARY}\r\nContent-Type: {_BINARY}\r\n\r\n"
            )
            wire.send(head.encode())
            if not is_save:
                wire.send(blob)
            status, *headers = wire.line_block().decode().lower().split("\r\n")
            if " 200 " not in status:
                raise RuntimeError(status)
            sizes = dict(header.split(": ", 1) for header in headers)
            wire.skip(int(sizes["content-length"]))

    def alone() -> None:
        if is_save:
            bare.send(len(blob))
        else:
            bare.receive(blob)

    ours()
    pairs = line.pairs(
        name, lambda: _ms(settings, alone), lambda: _ms(settings, ours), settings.pairs_for(None)
    )
    return Timing(
        name=name,
        what=f"{CASES[name]} as {_BINARY}",
        baseline=f"a bare socket that {'sends' if is_save else 'receives'} as many bytes",
        work=f"a slot of {len(blob) / 1e6:.0f} MB",
        pairs=pairs,
        target=None,
        command=f"python bench/state_http.py --row {name} {settings.flags}",
    )


def _ms(settings: Settings, call: Callable[[], object]) -> float:
    start_s = settings.now_s()
    call()
    return (settings.now_s() - start_s) * 1e3


if __name__ == "__main__":
    if sys.argv[1:2] == ["bare"]:
        serve_bare(int(sys.argv[2]))
    main(__doc__, WEIGHTS, measure)
