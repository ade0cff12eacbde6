"""Seconds of each way in; `python -m tests.attack` is the attack itself."""

from __future__ import annotations

import faulthandler

import pytest

from tests.attack.__main__ import SHARES, run_one

AT_ONCE = {"blobs", "bodies", "calls", "frames"}
SECONDS = 2.0


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in AT_ONCE else pytest.mark.full) for name in SHARES],
)
def test_seconds_of_the_attack_find_nothing_wrong(name: str) -> None:
    faulthandler.cancel_dump_traceback_later()  # it has a limit of its own
    assert run_one(name, SECONDS, seed=1)
