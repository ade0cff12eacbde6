"""Caches on the host lie in huge pages, where Linux has them.

In a process of its own: another engine's memory may be given out again.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import output_of

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE = 2 << 20

# Prints the size of a cache, and for how many more bytes huge pages are asked with it there.
SCRIPT = """
import re, sys
from kqview import Engine

def advised():
    n_bytes = 0
    with open("/proc/self/smaps") as mappings:
        for line in mappings:
            if size := re.match(r"Size: +(\\d+) kB", line):
                n_mapping = int(size[1]) * 1024
            elif re.match(r"VmFlags:.*\\bhg\\b", line):
                n_bytes += n_mapping
    return n_bytes

before = advised()
engine = Engine(sys.argv[1], n_ctx=2048, n_slots=32, kv_type="f32")
model = engine.model
n_values = model.n_layer * model.n_head_kv * (model.n_embd // model.n_head)
print(engine.n_ctx * len(engine.slots) * n_values * 2 * 4, advised() - before)
"""


@pytest.mark.skipif(not SWITCH.exists(), reason="the system has no transparent huge pages")
def test_cache_lies_in_huge_pages(tiny_llama: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tiny_llama)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    n_bytes, n_advised = map(int, output_of(process).split())
    assert n_bytes > 4 * HUGE_PAGE
    assert n_advised >= n_bytes - 2 * HUGE_PAGE  # both ends may share a page with other memory
