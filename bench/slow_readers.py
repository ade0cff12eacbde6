"""How much do clients that read slowly slow down another one, at one slot?

``kqview serve --demo --slots 1``. One client stops reading a stream of rows, another one reads an
event every 10 ms and asks again at the end; a third sends one request after the other. Timed is the
third one's request, from the call to the end of its reply, against its requests while it is alone.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from console import attempt, main
from report import Timing
from started import Started, free_port, is_healthy

from kqview.bench.pairs import Pairs, alternate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview.bench.records import LeftOut

NAME = "slow-readers-one-slot"
WEIGHTS = {NAME: 60.0}
TARGET = 1.2
N_TOKENS, N_REQUESTS = 96, 8
EVENT_S = 0.010
N_FIRST_EVENTS = 10  # of the slow reader, before the clock starts
RECEIVE_BYTES = 1 << 16
PROMPT = "Mirelda the baker had a silver key. One day, "
ROWS = {"prompt": "Anna is a", "max_length": 1500, "ban_eos_token": True, "output_attentions": True}
HEAD = "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {n}\r\n\r\n"


class Server(Started):
    """``kqview serve --demo`` with one slot."""

    def __init__(self, n_threads: int) -> None:
        self.port = free_port()
        super().__init__(
            [
                sys.executable, "-m", "kqview", "serve", "--demo", "--port", str(self.port),
                "--threads", str(n_threads), "--slots", "1", "--ctx", "2048",
                "--no-access-log", "--no-supervise",
            ]
        )  # fmt: skip

    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_healthy(self.port)


class SlowReaders:
    """A client that stops reading and one that reads an event every 10 ms, while it is entered."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._ends = threading.Event()
        self._reads = threading.Event()
        self._reader = threading.Thread(target=self._read)

    def __enter__(self) -> Self:
        self._stalled = self._ask()
        self._stalled.recv(1)
        self._reader.start()
        if not self._reads.wait(60):
            raise RuntimeError("the slow reader got no events")
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._reader.join()
        self._stalled.close()

    def _ask(self) -> socket.socket:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        sock.settimeout(60)
        sock.connect(("127.0.0.1", self._port))
        body = json.dumps(ROWS).encode()
        head = HEAD.format(path="/api/extra/generate/stream", n=len(body))
        sock.sendall(head.encode() + body)
        return sock

    def _read(self) -> None:
        n_events = 0
        while not self._ends.is_set():
            with contextlib.closing(self._ask()) as sock:
                events = sock.makefile("rb")
                while not self._ends.is_set() and (line := events.readline()):
                    if line.startswith(b"data:"):
                        n_events += 1
                        time.sleep(EVENT_S)
                    if n_events == N_FIRST_EVENTS:
                        self._reads.set()


def request_ms(port: int, settings: Settings) -> float:
    """Milliseconds of a request of the third client, the mean of several."""
    body = json.dumps(
        {"prompt": PROMPT, "max_length": N_TOKENS, "ban_eos_token": True, "temperature": 0}
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask() -> None:
        connection.request("POST", "/api/v1/generate", body)
        reply: Any = json.loads(connection.getresponse().read())
        if "results" not in reply:
            raise RuntimeError(f"the server answered {reply}")

    with contextlib.closing(connection):
        ask()  # those of the run before have left
        start_s = settings.now_s()
        for _ in range(N_REQUESTS):
            ask()
        return (settings.now_s() - start_s) * 1e3 / N_REQUESTS


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the row, if it is chosen."""
    for name in settings.chosen(WEIGHTS):
        yield attempt(name, _measure, settings, line)


def _measure(settings: Settings, line: ProgressLine) -> Timing:
    n_threads = max(1, settings.n_threads - 1)
    n_pairs = settings.pairs_for(TARGET)
    pairs = Pairs()
    line.start(NAME, n_pairs)
    with Server(n_threads) as server:

        def alone() -> float:
            return request_ms(server.port, settings)

        def beside() -> float:
            with SlowReaders(server.port):
                return request_ms(server.port, settings)

        beside()  # first use of everything
        for alone_ms, beside_ms in alternate(alone, beside, n_pairs):
            pairs.add(alone_ms, beside_ms)
            line.tick()
    return Timing(
        name=NAME,
        what="beside one client that stopped reading and one that reads an event every 10 ms",
        baseline="alone",
        work=f"a request of {N_TOKENS} tokens of the demo model, one slot; {n_threads} threads",
        pairs=pairs,
        target=settings.target(TARGET),
        command=f"python bench/slow_readers.py --row {NAME} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
