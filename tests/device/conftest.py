"""Tests that run on the devices of fake_device.cpp, two of them, in a process of their own.

tests/engine/test_fake_device.py starts that process; by hand:

    KQVIEW_TEST_FAKE_DEVICES=2 pytest tests/device
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.conftest import (  # noqa: F401  # pyright: ignore[reportUnusedImport]
    make_engine,
    tiny_llama,
    tiny_qwen2,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

# Developer builds alone have it.
fake_device: Any = sys.modules.get("kqview._fake_device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if "KQVIEW_TEST_FAKE_DEVICES" not in os.environ:
        reason = "in a process of its own: tests/engine/test_fake_device.py starts it"
    elif fake_device is None:
        reason = "not a developer build (-C cmake.define.KQVIEW_DEV=ON)"
    if reason:
        for item in items:
            if "tests/device" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def device() -> Iterator[Any]:
    """The fake device, as it is by default before and after each test."""
    if fake_device is None:
        pytest.skip("not a developer build")
    fake_device.set()
    yield fake_device
    fake_device.set()
