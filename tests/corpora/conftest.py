"""One engine with two slots for the tests of corpora, which need pyarrow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kqview import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("pyarrow")
pytest.importorskip("safetensors")


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The demo model."""
    with Engine.demo(n_slots=2, n_ctx=256, n_threads=1) as one:
        yield one
