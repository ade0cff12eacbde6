"""The README's figures of speed are those that benchmarks have saved."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
ROW = re.compile(
    r"^\| .+ \| (?P<ratio>[0-9.]+) \| `(?P<file>\w+\.py) --row (?P<row>[\w-]+)` \|$", re.M
)


def test_ratios_are_those_of_the_newest_saved_rows() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.split("## What it costs\n")[1].split("\n## ")[0]
    found = list(ROW.finditer(section))
    assert len(found) == sum(line.startswith("| ") for line in section.splitlines()) - 1
    saved = sorted((ROOT / "bench" / "results").glob("*.jsonl"))
    lines = [line for file in saved for line in file.read_text(encoding="utf-8").splitlines()]
    newest = {row["row"]: row for row in map(json.loads, lines)}
    for one in found:
        row = newest[one["row"]]
        assert "AMD EPYC" in row["cpu"]  # as the section says
        pairs = row["pairs"]
        ratio = median(
            ours / theirs
            for ours, theirs in zip(pairs["candidate_ms"], pairs["baseline_ms"], strict=True)
        )
        assert one["ratio"] == f"{ratio:.3f}", f"{one['row']}: {ratio:.3f} was measured"
