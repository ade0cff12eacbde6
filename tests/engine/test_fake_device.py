"""The tests of tests/device, and engine tests once more, with models on fake devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kqview  # noqa: F401  # brings the module in, where there is one

ROOT = Path(__file__).resolve().parents[2]
# What these say of the CPU holds for devices too.
AGAIN = ("values", "plans", "prompt_rows", "reductions", "hidden", "slots", "view_lifetime",
         "cancel", "generate", "device_values")  # fmt: skip


@pytest.mark.skipif(
    "kqview._fake_device" not in sys.modules,
    reason="not a developer build (-C cmake.define.KQVIEW_DEV=ON)",
)
@pytest.mark.parametrize("path", ["tests/device", *(f"tests/engine/test_{n}.py" for n in AGAIN)])
def test_on_fake_devices(path: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path],
        cwd=ROOT, env={**os.environ, "KQVIEW_TEST_FAKE_DEVICES": "2"},
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
