"""The soak test for a minute, in a process of its own, whose memory nothing else moves."""

from __future__ import annotations

import faulthandler
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MINUTES = 1.0


@pytest.mark.full
def test_everything_at_once_for_a_minute_leaves_nothing_behind() -> None:
    # It watches over itself, and pytest's limit for one test is a minute.
    faulthandler.cancel_dump_traceback_later()
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--minutes", str(MINUTES)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MINUTES * 60 + 120,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
