"""A receiver of traces that does what a test wants: fails, hangs, dies, comes back."""

from __future__ import annotations

import http.server
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

LONG_S = 60.0  # for waits that end early


class Receiver(http.server.ThreadingHTTPServer):
    """Keeps what is posted; answers what `answer` says."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.answer: Callable[[str], int] = lambda name: 201
        self.headers: dict[str, str] = {}
        self.posts: list[tuple[str, dict[str, str]]] = []
        self.payloads: list[dict[str, Any]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.changed = threading.Condition()
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.posts]

    def wait(self, is_enough: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(is_enough, LONG_S), self.names

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a poster that has given up."""

    def stop(self) -> None:
        self.may_answer.set()
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver = self.server
        assert isinstance(receiver, Receiver)
        payload: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["content-length"])))
        name = payload["request"]["request_id"]
        with receiver.changed:
            about = {key.lower(): value for key, value in self.headers.items()}
            receiver.payloads.append(payload)
            receiver.posts.append((name, {**about, "path": self.path}))
            receiver.changed.notify_all()
        receiver.may_answer.wait(LONG_S)
        self.send_response(receiver.answer(name))
        for key, value in receiver.headers.items():
            self.send_header(key, value)
        self.send_header("content-length", "3")
        self.end_headers()
        self.wfile.write(b"why")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def receiving(port: int = 0) -> Generator[Receiver]:
    receiver = Receiver(port)
    try:
        yield receiver
    finally:
        receiver.stop()
