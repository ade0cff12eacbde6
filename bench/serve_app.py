"""The servers that `server.py` measures, each a process of its own, chosen by its arguments.

``bare PORT``: a socket that only sends the rows, the upper limit for any server.
``uvicorn PORT replay|live`` and ``granian PORT replay|live``: kqview's own app. "replay" hands out
rows from memory instead of an engine's; everything else is the path of a real request: renderer,
copy, encoding, ASGI, socket. "live" generates with the demo model.
"""

from __future__ import annotations

import os
import socket
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from kqview import Engine, Token, Usage
from kqview.cli.serving import keep_freed_memory
from kqview.server import create_app
from kqview.server.models.run import Run

if TYPE_CHECKING:
    from kqview.server.app import App
    from kqview.server.models.run import GenerateRequest
    from kqview.server.web.access import Caller
    from kqview.server.web.budget import Reservation

# 28 layers x 28 heads, as Qwen2.5-7B has, at 2,200 tokens: 6.9 MB a row set.
SHAPE = (28, 28, 2200)
ROW_BYTES = 28 * 28 * 2200 * 4
N_SETS = 4  # more than a processor's caches hold
TOKEN_ID = 65


def row_sets() -> list[np.ndarray[Any, Any]]:
    """Different rows of random values; what base64 makes of them does not depend on the values."""
    random = np.random.default_rng(0)
    return [random.random(SHAPE, np.float32) for _ in range(N_SETS)]


class Replay:
    """Takes the place of a Generation; its rows already exist."""

    stop_match = trace = tool_calls = slot = None
    finish_reason = "length"
    n_removed = 0

    def __init__(self, sets: list[np.ndarray[Any, Any]], n_tokens: int) -> None:
        self._sets = sets
        self._n_left = n_tokens
        self._n_tokens = n_tokens
        handle = SimpleNamespace(count_copied=lambda _: None)
        self._source = SimpleNamespace(handle=handle)  # of a Generation
        self.text = ""
        self.usage = Usage(prompt_tokens=SHAPE[2], completion_tokens=n_tokens)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        if self._n_left == 0:
            raise StopAsyncIteration
        self._n_left -= 1
        i = self._n_tokens - self._n_left - 1
        return Token(TOKEN_ID, "A", i, -1.0, attention=self._sets[i % N_SETS])

    def cancel(self) -> None:
        """End it."""
        self._n_left = 0

    async def aclose(self) -> None:
        """As `cancel`."""
        self._n_left = 0


def replaying(engine: Engine) -> App:
    """The app; requests are answered with rows from memory, ``max_tokens`` of them."""
    app = create_app(engine)
    service = app.service
    sets = row_sets()

    async def start(
        request: GenerateRequest, caller: Caller, hold: Reservation, **_: object
    ) -> Run:
        one: Any = Replay(sets, request.max_tokens)
        return Run(request, [one], hold, on_close=lambda run: None)

    service.start = start
    return app


def live(engine: Engine) -> App:
    """The app as it is."""
    return create_app(engine)


def made_app() -> App:
    """The app that the environment asks for; granian's workers import this module and call it."""
    keep_freed_memory()
    engine = Engine.demo(n_threads=int(os.environ["SERVE_APP_THREADS"]))
    return {"replay": replaying, "live": live}[os.environ["SERVE_APP_KIND"]](engine)


def serve_bare(port: int) -> None:
    """Send rows to one connection after another: as many as its 4 bytes say."""
    sets = [memoryview(rows).cast("B") for rows in row_sets()]
    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection:
                n_tokens = int.from_bytes(connection.recv(4), "little")
                for i in range(n_tokens):
                    connection.sendall(sets[i % N_SETS])


def serve_uvicorn(port: int) -> None:
    """As ``kqview serve`` does."""
    import uvicorn

    from kqview.cli.serving import configured

    app = made_app()
    config = configured(app, app.service.settings)
    config.port = port
    uvicorn.Server(config).run()


def serve_granian(port: int) -> None:
    """granian with one worker, which is what one engine allows."""
    from granian.constants import Interfaces, Loops
    from granian.server import Server

    Server(
        "serve_app:made_app", factory=True, address="127.0.0.1", port=port, workers=1,
        interface=Interfaces.ASGI, loop=Loops.uvloop, websockets=True, log_enabled=False,
    ).serve()  # fmt: skip


if __name__ == "__main__":
    name, port_text, *kind = sys.argv[1:]
    if kind:
        os.environ["SERVE_APP_KIND"] = kind[0]
    {"bare": serve_bare, "uvicorn": serve_uvicorn, "granian": serve_granian}[name](int(port_text))
