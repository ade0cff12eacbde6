"""Caches on the host lie in huge pages, where Linux has them, and take memory as they are used.

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

# Prints the size of a cache, for how many more bytes huge pages are asked with it there, and how
# much more memory the process holds: behind opening, and behind an answer.
SCRIPT = """
import re, sys
from pathlib import Path
from kqview import Engine

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

def advised():
    n_bytes = 0
    with open("/proc/self/smaps") as mappings:
        for line in mappings:
            if size := re.match(r"Size: +(\\d+) kB", line):
                n_mapping = int(size[1]) * 1024
            elif re.match(r"VmFlags:.*\\bhg\\b", line):
                n_bytes += n_mapping
    return n_bytes

Engine(sys.argv[1], n_ctx=256).close()
before, held = advised(), anonymous()
engine = Engine(sys.argv[1], n_ctx=2048, n_slots=32, kv_type="f32")
model = engine.model
n_values = model.n_layer * model.n_head_kv * (model.n_embd // model.n_head)
print(engine.n_ctx * len(engine.slots) * n_values * 2 * 4, advised() - before)
print(anonymous() - held)
engine.generate([1, 2, 3], max_tokens=8, ignore_eos=True).read()
print(anonymous() - held)
"""


def measured(model: Path) -> list[int]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(model)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return [int(word) for word in output_of(process).split()]


@pytest.mark.skipif(not SWITCH.exists(), reason="the system has no transparent huge pages")
def test_cache_lies_in_huge_pages(tiny_llama: Path) -> None:
    n_bytes, n_advised, *_ = measured(tiny_llama)
    assert n_bytes > 4 * HUGE_PAGE
    assert n_advised >= n_bytes - 2 * HUGE_PAGE  # both ends may share a page with other memory


@pytest.mark.skipif(sys.platform != "linux", reason="other systems write zeros to a cache")
def test_cells_take_memory_once_they_are_used(tiny_llama: Path) -> None:
    n_bytes, _, n_opened, n_answered = measured(tiny_llama)
    assert n_opened < n_bytes // 4
    assert n_answered < n_bytes // 2  # at least a huge page for the keys and values of each layer
