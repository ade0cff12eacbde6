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
from typing import TYPE_CHECKING, Final, NamedTuple

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
F16: Final = "ours, F16"
AVX2: Final = "x86-64-v3"


class Case(NamedTuple):
    """What is compared with what, over a cache of a type, by code for a processor."""

    n_context: int
    n_layers: int
    what: str
    against: str
    target: float | None = None
    kv_type: str = "f16"
    compiled_for: str = "native"


CASES: Final[dict[str, Case]] = {
    f"alone-{n_context}-{name}": Case(n_context, n_layers, *case)
    for n_context, n_layers, of_read, of_f16 in (
        (1024, 24, None, None), (4096, 24, 1.6, None), (16384, 6, 1.6, 0.6),
    )
    for name, *case in (
        ("read", "ours", "read", of_read),
        ("logits", "ours, logits", "ours"),
        ("probs", "ours, probs", "ours"),
        ("stock", "ours", "stock"),
        ("pages", "ours", SMALL_PAGES),
        ("avx2", "ours", "read", of_read, "f16", AVX2),
        *((kv_type, "ours", F16, of_f16, kv_type) for kv_type in ("q8_0", "q4_0")),
    )
}  # fmt: skip
TEXTS: Final = {
    "ours": "kqview's attention",
    "ours, logits": "kqview's attention, logits of all heads",
    "ours, probs": "kqview's attention, probs of all heads",
    SMALL_PAGES: "kqview's attention, K and V in pages of 4 KiB",
    F16: "kqview's attention, K and V in F16",
    "read": "reading K and V once",
    "stock": "llama.cpp's flash attention",
}
WEIGHTS = {name: 3.0 for name in CASES}
QUICK_SHARE = 16  # a quick run has this much less context


@cache
def program(compiled_for: str) -> Path:
    """The program, built where it is not there yet or its source has changed."""
    # A build folder belongs to one tree.
    folder = cache_root() / f"attend-speed-{zlib.crc32(str(ROOT).encode()):08x}"
    print("bench: building attend_speed; a minute or more the first time", file=sys.stderr)
    configure = [
        "cmake", "-S", str(ROOT / "tests" / "native"), "-B", str(folder),
        "-DKQVIEW_SANITIZE=none", f"-DKQVIEW_LLAMA_CPP_DIR={source_path(None)}",
    ]  # fmt: skip
    target = f"attend_speed_{compiled_for}"
    build = ["cmake", "--build", str(folder), "--target", target, "--parallel", "2"]
    for command in (configure, build):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout, done.stderr, file=sys.stderr)
            raise NotHere("the program cannot be built; the lines above say why")
    return folder / target


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases; one run has the rows of a context."""
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, settings, line, name)
    _times.cache_clear()


@cache
def _times(
    settings: Settings, compiled_for: str, n_context: int, n_layers: int, *others: str
) -> dict[str, list[float]]:
    """Milliseconds of every round of each way."""
    words = [
        f"context={n_context}", f"layers={n_layers}", f"threads={settings.n_threads}",
        f"rounds={settings.n_pairs}", f"cpu_clock={int(settings.clock == 'cpu')}",
        *others,
    ]  # fmt: skip
    done = subprocess.run(
        [program(compiled_for), *words], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def _measure(settings: Settings, line: ProgressLine, name: str) -> Timing:
    case = CASES[name]
    n_context = case.n_context // (QUICK_SHARE if settings.is_quick else 1)
    line.start(name, 1)
    # Twice the memory: the other rows are measured without them.
    others = {SMALL_PAGES: ["small_pages=1"], F16: ["f16=1", "stock=0"]}.get(case.against, [])
    others.append(f"type={case.kv_type}")
    times = _times(settings, case.compiled_for, n_context, case.n_layers, *others)
    line.tick()
    return Timing(
        name=name,
        what=TEXTS[case.what]
        + (f", K and V in {case.kv_type}" if case.against == F16 else "")
        + (f", compiled for {case.compiled_for}" if case.compiled_for == AVX2 else ""),
        baseline=TEXTS[case.against],
        work=f"attention of a decoded token at {n_context:,} tokens; "
        f"{case.n_layers} layers of 16 heads",
        pairs=Pairs(times[case.against], times[case.what]),
        target=settings.target(case.target),
        command=f"python bench/alone.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
