"""The README's figures of speed are those of the table that benchmarks wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| .+ \| (?P<ratio>[0-9.]+) \| `(?P<file>\w+\.py) --row (?P<row>[\w-]+)` \|$", re.M
)


def test_ratios_are_those_of_the_table() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## What it costs\n")[1].split("\n## ")[0]
    table = (ROOT / "bench" / "README.md").read_text(encoding="utf-8").splitlines()
    found = list(ROW.finditer(section))
    assert len(found) == sum(line.startswith("| ") for line in section.splitlines()) - 1
    for one in found:
        command = f"`python bench/{one['file']} --row {one['row']} "
        [measured] = [line.split(" | ") for line in table if command in line]
        assert one["ratio"] == measured[4], f"{one['row']}: {measured[4]} was measured"
