"""What does the attention of a decoded token cost alone, against reading its keys and values once?

A program runs it without a model (attend_speed.cpp, built here once): 24 layers of 16
heads, 4 KV heads and head size 64 in one graph, kqview's op, llama.cpp's flash attention and a
plain read of the same bytes in turn, all by ggml's threads. Nothing else of a token is in the way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from functools import cache
from typing import TYPE_CHECKING, Final

from console import attempt, main
from models import ROOT, NotHere
from peers.build import cache_root, source_path
from report import Timing

from kqview.bench.pairs import Pairs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

SMALL_PAGES: Final = "ours, small pages"
# name -> (tokens of context, layers, what, against, target)
CASES: Final[dict[str, tuple[int, int, str, str, float | None]]] = {
    f"alone-{n_context}-{name}": (n_context, n_layers, what, against, target)
    for n_context, n_layers, of_read in ((1024, 24, None), (4096, 24, 2.0), (16384, 6, 1.8))
    for name, what, against, target in (
        ("read", "ours", "read", of_read),
        ("logits", "ours, logits", "ours", None),
        ("probs", "ours, probs", "ours", None),
        ("stock", "ours", "stock", None),
        ("pages", "ours", SMALL_PAGES, None),
    )
}
TEXTS: Final = {
    "ours": "kqview's attention",
    "ours, logits": "kqview's attention, logits of all heads",
    "ours, probs": "kqview's attention, probs of all heads",
    SMALL_PAGES: "kqview's attention, K and V in pages of 4 KiB",
    "read": "reading K and V once",
    "stock": "llama.cpp's flash attention",
}
WEIGHTS = {name: 3.0 for name in CASES}
QUICK_SHARE = 16  # a quick run has this much less context


@cache
def program() -> Path:
    """The program, built where it is not there yet or its source has changed."""
    # A build folder belongs to one tree.
    folder = cache_root() / f"attend-speed-{zlib.crc32(str(ROOT).encode()):08x}"
    print("bench: building attend_speed; a minute or more the first time", file=sys.stderr)
    configure = [
        "cmake", "-S", str(ROOT / "tests" / "native"), "-B", str(folder),
        "-DKQVIEW_SANITIZE=none", f"-DKQVIEW_LLAMA_CPP_DIR={source_path(None)}",
    ]  # fmt: skip
    build = ["cmake", "--build", str(folder), "--target", "attend_speed", "--parallel", "2"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout, done.stderr, file=sys.stderr)
            raise NotHere("the program cannot be built; the lines above say why")
    return folder / "attend_speed"


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases; one run has the rows of a context."""
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, settings, line, name)
    _times.cache_clear()


@cache
def _times(
    settings: Settings, n_context: int, n_layers: int, *, has_small_pages: bool
) -> dict[str, list[float]]:
    """Milliseconds of every round of each way."""
    words = [
        f"context={n_context}", f"layers={n_layers}", f"threads={settings.n_threads}",
        f"rounds={settings.n_pairs}", f"cpu_clock={int(settings.clock == 'cpu')}",
        f"small_pages={int(has_small_pages)}",
    ]  # fmt: skip
    done = subprocess.run([program(), *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _measure(settings: Settings, line: ProgressLine, name: str) -> Timing:
    n_context, n_layers, what, against, target = CASES[name]
    n_context //= QUICK_SHARE if settings.is_quick else 1
    line.start(name, 1)
    # Twice the memory: other rows are measured without it.
    has_small_pages = against == SMALL_PAGES
    times = _times(settings, n_context, n_layers, has_small_pages=has_small_pages)
    line.tick()
    return Timing(
        name=name,
        what=TEXTS[what],
        baseline=TEXTS[against],
        work=f"attention of a decoded token at {n_context:,} tokens; {n_layers} layers of 16 heads",
        pairs=Pairs(times[against], times[what]),
        target=settings.target(target),
        command=f"python bench/alone.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
