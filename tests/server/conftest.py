"""Fixtures of the server tests: servers, and models that they serve."""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.demo import MODEL_PATH
from kqview.server import Settings
from tests.support import stock, tiny_gguf
from tests.support.engines import open_engine
from tests.support.serving import Serve, Served, serving
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from kqview.server.config import Config


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(
            settings: Settings | Config | None = None, engine: Engine | None = None
        ) -> Served:
            return stack.enter_context(serving(settings, engine))

        yield start


@pytest.fixture
def steady_demo(serve: Serve) -> Iterator[Served]:
    """How many tokens it guesses depends neither on what steps cost nor on who reads them."""
    options: dict[str, Any] = {"n_ctx": 1024, "run_ahead": 40, "learns_costs": False}
    with open_engine(MODEL_PATH, n_threads=1, **options) as engine:
        yield serve(engine=engine)


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 3 layers and 4 heads with random weights whose ids below 256 are the bytes."""
    return tiny_gguf.write_preset(tmp_path_factory.mktemp("model") / "llama.gguf", "tiny_llama")


@pytest.fixture(scope="session")
def qwen_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen2 of 3 layers and 2 heads with random weights and the vocabulary of the real ones."""
    return tiny_gguf.write_preset(
        tmp_path_factory.mktemp("model") / "qwen2.gguf",
        "tiny_qwen2_real_vocab",
        llama_cpp_dir=stock.source(),
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The demo model with two slots and one thread."""
    with Engine.demo(n_threads=1, n_slots=2) as one:
        yield one


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    """One server of the demo model for the tests of a module that leave it as they found it."""
    with serving(Settings(n_slots=2)) as served:
        yield served


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[httpx.Client]:
    """A client of the server of the demo model."""
    with demo.client() as one:
        yield one


class AccessLines(logging.Handler):
    """Collects the access log, from the server's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.raw: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.raw.append(record.getMessage())

    def of(self, request_id: str) -> dict[str, Any]:
        """The one line of a request."""
        wait_until(lambda: request_id in self.clients())
        (line,) = (one for one in map(json.loads, self.raw) if one["request_id"] == request_id)
        return line

    def clients(self) -> dict[str, str]:
        """The client of each request."""
        return {one["request_id"]: one["client"] for one in map(json.loads, list(self.raw))}


@pytest.fixture
def lines() -> Iterator[AccessLines]:
    """What is logged of requests."""
    logger, handler = logging.getLogger("kqview.access"), AccessLines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)
