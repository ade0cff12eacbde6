"""Receivers of traces on free ports of this machine for tests, closed again."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("sqlalchemy")
pytest.importorskip("uvicorn")

from kqview.cli.ingesting import ReceiverServer
from kqview.ingest import IngestSettings, create_app
from tests.support.serving import in_thread

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from kqview.ingest.receiver import Receiver
    from kqview.ingest.store import Store


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
        with in_thread(ReceiverServer(app), listener):
            yield Receiving(f"http://127.0.0.1:{listener.getsockname()[1]}", app.receiver)
