"""What does opening an engine take by its context and slots, in time and in memory?

Each run opens the random model in a process of its own, whose first engine was the demo's, and
times that. Memory is what the process holds beyond the weights, which are a mapped file: behind
opening, and behind a first answer of 8 tokens. Each context is compared with 2,048 tokens in one
slot.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

from console import attempt, main
from models import model_path
from report import Timing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

LEAST = (2048, 1)
CASES = {
    f"opening-{n_ctx}x{n_slots}": (n_ctx, n_slots)
    for n_ctx, n_slots in ((2048, 16), (8192, 1), (8192, 16), (32768, 1), (32768, 16))
}
WEIGHTS = dict.fromkeys(CASES, 60.0)
TARGET = 1.5

SCRIPT = """
import json, re, sys, time
from pathlib import Path
from kqview import Engine

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

path, n_ctx, n_slots, n_threads, clock = sys.argv[1:]
now_s = time.process_time if clock == "cpu" else time.perf_counter
Engine.demo(n_ctx=256).close()
before, start = anonymous(), now_s()
engine = Engine(path, n_ctx=int(n_ctx), n_slots=int(n_slots), n_threads=int(n_threads))
ms = (now_s() - start) * 1000
opened = anonymous() - before
engine.generate([1, 2, 3], max_tokens=8, temperature=0, ignore_eos=True).read()
print(json.dumps([ms, opened, anonymous() - before]))
"""


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen contexts."""
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, settings, line, name)


class _Openings:
    """Openings with one context; the memory that each took."""

    def __init__(self, settings: Settings, n_ctx: int, n_slots: int) -> None:
        path = str(model_path(settings))
        of = [path, str(n_ctx), str(n_slots), str(settings.n_threads), settings.clock]
        self._command = [sys.executable, "-c", SCRIPT, *of]
        self._name = f"{n_ctx:,} tokens" + (f" x {n_slots} slots" if n_slots > 1 else "")
        self._memory: list[list[int]] = []

    def ms(self) -> float:
        """Open an engine."""
        done = subprocess.run(self._command, stdout=subprocess.PIPE, check=True, text=True)
        ms, *memory = json.loads(done.stdout)
        self._memory.append(memory)
        return ms

    def __str__(self) -> str:
        opened, answered = (statistics.median(n) / 2**20 for n in zip(*self._memory, strict=True))
        return f"{self._name}: {opened:.0f} MiB, {answered:.0f} MiB behind an answer"


def _measure(settings: Settings, line: ProgressLine, name: str) -> Timing:
    ours, least = _Openings(settings, *CASES[name]), _Openings(settings, *LEAST)
    pairs = line.pairs(name, least.ms, ours.ms, settings.n_pairs)
    return Timing(
        name=name,
        what=str(ours),
        baseline=str(least),
        work=f"opening; {settings.shape}",
        pairs=pairs,
        target=settings.target(TARGET),
        command=f"python bench/opening.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
