"""Waiting for what other threads and processes do."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

# Until a test fails, not a measure of anything: machines that do other work are slow.
WITHIN_S = 60.0

hanging = threading.Event()
"""What code that a test lets hang waits for, so that it ends with the test."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until *condition*, which only reads, is true."""
    end_s = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end_s, "the condition did not become true"
        time.sleep(0.005)


async def until(condition: Callable[[], object]) -> None:
    """The same in an event loop, which goes on."""
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - it is of other threads as well
            await asyncio.sleep(0.001)
