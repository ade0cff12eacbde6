"""``kqview serve`` keeps the memory of rows that it freed: the next row costs no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from kqview.cli import serving

pytestmark = pytest.mark.full

# Rows are copied in worker threads; a page is 4 KiB, so fresh memory for one row faults 2048 times.
SCRIPT = """
import resource, threading
from kqview.cli.serving import keep_freed_memory
if {keeps}:
    keep_freed_memory()

def work():
    for i in range(20):
        if i == 10:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        # As a row on its way: its bytes, its text, the text's bytes, the frame.
        forms = [b"x" * (8 << 20) for _ in range(4)]
        del forms
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def faults(*, keeps: bool) -> int:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(keeps=keeps)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator is meant")
def test_rows_that_were_freed_leave_their_memory_to_the_next_ones():
    assert faults(keeps=True) < 1000 < 10_000 < faults(keeps=False)


def test_without_glibc_nothing_happens(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str | None) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(serving.ctypes, "CDLL", refuse)
    serving.keep_freed_memory()
