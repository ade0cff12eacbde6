"""Caches on the host lie in huge pages, where Linux has them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kqview import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

MAPPINGS = Path("/proc/self/smaps")
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGE_PAGE = 2 << 20

pytestmark = pytest.mark.skipif(
    not (MAPPINGS.exists() and SWITCH.exists()), reason="the system has no transparent huge pages"
)


def advised() -> Iterator[int]:
    """Bytes of each mapping for which huge pages were asked."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", MAPPINGS.read_text(), flags=re.MULTILINE):
        flags = re.search(r"^VmFlags:.*\bhg\b", mapping, re.MULTILINE)
        if flags and (size := re.search(r"^Size: +(\d+) kB", mapping, re.MULTILINE)):
            yield int(size[1]) * 1024


def test_cache_lies_in_huge_pages(tiny_llama: Path) -> None:
    before = sum(advised())
    with Engine(tiny_llama, n_ctx=2048, n_slots=32, kv_type="f32") as engine:
        info = engine.model
        n_values = info.n_layer * info.n_head_kv * (info.n_embd // info.n_head)
        n_bytes = engine.n_ctx * len(engine.slots) * n_values * 2 * 4  # keys and values, float32
        assert n_bytes > 4 * HUGE_PAGE
        # Both ends of a buffer may share a page with other memory.
        assert sum(advised()) - before >= n_bytes - 2 * HUGE_PAGE
