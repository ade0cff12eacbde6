"""Fixtures of the receiver's tests: databases, a receiver of an empty one, the sample payload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview.ingest import IngestSettings
from tests.support import postgres
from tests.support.receiving import Receiving, receiving, sqlite_url

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLE = Path(__file__).parent / "sample_payload.json"


@pytest.fixture
def sample() -> dict[str, Any]:
    """The example of the format's description."""
    return json.loads(SAMPLE.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.Postgres]:
    """A PostgreSQL server."""
    with postgres.running() as one:
        yield one


@pytest.fixture(
    params=["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgresql"))]
)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, of each kind in turn."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "traces.db")
    return request.getfixturevalue("server").new_database()


@pytest.fixture
def received(tmp_path: Path) -> Iterator[Receiving]:
    """A receiver with an empty SQLite database and without keys."""
    with receiving(IngestSettings(database=sqlite_url(tmp_path / "traces.db"))) as one:
        yield one


@pytest.fixture
def stored(database: str) -> Iterator[Receiving]:
    """A receiver with an empty database of each kind, and without keys."""
    with receiving(IngestSettings(database=database)) as one:
        yield one
