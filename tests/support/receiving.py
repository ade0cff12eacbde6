"""Receivers of traces on free ports of this machine for tests, closed again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("uvicorn")

from kqview.cli.ingesting import ReceiverServer
from kqview.ingest import IngestSettings, create_app

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from kqview.ingest.receiver import Receiver
    from kqview.ingest.store import Store

# Until a test fails, not a measure of anything.
STARTS_WITHIN_S = 60.0
ENDS_WITHIN_S = 60.0


@dataclass(frozen=True)
class Receiving:
    """A receiver that runs; ``url`` has no slash at its end."""

    url: str
    receiver: Receiver

    @property
    def store(self) -> Store:
        """Its store, whose methods any thread may call."""
        return self.receiver.store

    def client(self, **options: Any) -> httpx.Client:
        """A client for its paths; close it, or use it as a context manager."""
        # Without certificates, which take longer to load than most replies to come.
        return httpx.Client(base_url=self.url, timeout=60, verify=False, **options)


def sqlite_url(path: Path) -> str:
    """The URL of a database in the file *path*."""
    return f"sqlite:///{path}"


@contextlib.contextmanager
def receiving(settings: IngestSettings) -> Generator[Receiving]:
    """A receiver with *settings*, on a port of its own whatever they say."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(settings)
        server = ReceiverServer(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            end_s = time.monotonic() + STARTS_WITHIN_S
            while not server.started:
                assert thread.is_alive(), "the receiver did not start"
                assert time.monotonic() < end_s, "the receiver did not start in time"
                time.sleep(0.005)
            yield Receiving(f"http://127.0.0.1:{listener.getsockname()[1]}", app.receiver)
        finally:
            server.should_exit = True
            thread.join(ENDS_WITHIN_S)
            assert not thread.is_alive(), "the receiver did not end"
