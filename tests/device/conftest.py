"""Tests that open engines on two fake devices: fake_device.cpp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.conftest import (
    FAKE_DEVICE,
    architectures,
    fake_devices,
    make_engine,
    tiny_llama,
    tiny_qwen2,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["architectures", "make_engine", "tiny_llama", "tiny_qwen2"]


@pytest.fixture(scope="module", autouse=True)
def fake_devices_registered() -> Iterator[None]:
    with fake_devices():
        yield


@pytest.fixture(autouse=True)
def device(fake_devices_registered: None) -> Iterator[Any]:
    """The fake device, with its default settings before and after each test."""
    FAKE_DEVICE.set()
    yield FAKE_DEVICE
    FAKE_DEVICE.set()
    # What CUDA has recorded, and RPC sent, of a graph stays true while llama.cpp reuses it.
    assert FAKE_DEVICE.counts()["n_moved_graphs"] == 0
    assert FAKE_DEVICE.counts()["n_freed_in_use"] == 0
