"""Fixtures of the receiver's tests: a receiver of an empty database, and the sample payload."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.receiving import Receiving, receiving, sqlite_url

if TYPE_CHECKING:
    from collections.abc import Iterator

from kqview.ingest import IngestSettings

SAMPLE = Path(__file__).parent / "sample_payload.json"


@pytest.fixture
def sample() -> dict[str, Any]:
    """The example of the format's description."""
    return json.loads(SAMPLE.read_text(encoding="utf-8"))


@pytest.fixture
def received(tmp_path: Path) -> Iterator[Receiving]:
    """A receiver with an empty SQLite database and without keys."""
    with receiving(IngestSettings(database=sqlite_url(tmp_path / "traces.db"))) as one:
        yield one
