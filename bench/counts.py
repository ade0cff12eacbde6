"""What does capture add to a decoded token that noise cannot touch?

Nodes added to the graph, bytes that the kernel writes into the views' memory, dot products of a
query with a key, and, where `perf stat` counts them, instructions of the whole process. One thread,
so that waiting threads add no instructions. Instructions are the difference of a long and a short
run, which excludes the prompt and the building of graphs; perf attaches to this process for each.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from console import attempt, main
from report import Count
from runs import decode_runs, open_engine

from kqview import Capture
from kqview.bench.sweep import chosen_heads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut
    from kqview.bench.sweep import DecodeRuns

TEN_HEADS = Capture(layers=(0,), heads=(0,))  # stands for heads that depend on the model
CASES: dict[str, tuple[str, bool, Capture | None]] = {
    "counts-flash-off": ("none; flash attention on", True, None),
    "counts-flash-logits": ("logits, all heads; flash attention on", True, Capture("logits")),
    "counts-flash-10-heads": ("logits of 10 chosen heads; flash attention on", True, TEN_HEADS),
    "counts-plain-off": ("none; flash attention off", False, None),
    "counts-plain-logits": ("logits, all heads; flash attention off", False, Capture("logits")),
}
WEIGHTS = dict.fromkeys(CASES, 4.0)
EVENT = "instructions:u"
ATTACH_S = 0.5  # perf says nowhere that it is attached


def measure(settings: Settings, line: ProgressLine) -> Iterator[Count | LeftOut]:
    """Count for the chosen cases, one engine for each setting of flash attention."""
    for flash_attn in (True, False):
        names = [name for name in settings.chosen(CASES) if CASES[name][1] == flash_attn]
        if not names:
            continue
        with open_engine(replace(settings, n_threads=1), flash_attn=flash_attn) as engine:
            runs = decode_runs(settings, engine)
            for name in names:
                line.start(name, 1)
                yield attempt(name, _count, settings, engine, runs, name)
                line.tick()


def _count(settings: Settings, engine: Engine, runs: DecodeRuns, name: str) -> Count:
    what, flash_attn, capture = CASES[name]
    if capture is TEN_HEADS:
        capture = chosen_heads(engine.model)
    model = engine.model
    n_layers = len((capture and capture.layers) or model.attention_layers)
    n_heads = len((capture and capture.heads) or range(model.n_head))
    before = engine.stats()
    runs.stamps_s(1, capture=capture)
    after = engine.stats()
    return Count(
        name=name,
        what=what,
        nodes_added=after.graph_nodes_added,
        bytes_written=after.attention_bytes - before.attention_bytes,
        # With flash attention off the products are there already and are copied.
        dot_products=n_layers * n_heads * settings.n_context if capture and flash_attn else 0,
        instructions=_instructions_per_token(
            lambda n: runs.stamps_s(n, capture=capture), settings.n_skip, settings.n_tokens
        ),
        command=f"python bench/counts.py --row {name}{' --quick' if settings.is_quick else ''}",
    )


def _instructions_per_token(run: Callable[[int], object], n_short: int, n_long: int) -> int | None:
    """Instructions of a token between the *n_short*-th and the *n_long*-th one."""
    short = _counted(lambda: run(n_short))
    long = _counted(lambda: run(n_long)) if short is not None else None
    return None if short is None or long is None else (long - short) // (n_long - n_short)


def _counted(work: Callable[[], object]) -> int | None:
    """Instructions that this process ran during *work*, None where perf cannot count them."""
    perf = shutil.which("perf")
    if perf is None:
        return None
    command = [perf, "stat", "-e", EVENT, "-x", ",", "-p", str(os.getpid())]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as counter:
        time.sleep(ATTACH_S)
        work()
        counter.send_signal(signal.SIGINT)
        _, text = counter.communicate()
    return parse_perf(text)


def parse_perf(text: str) -> int | None:
    """The count in the output of ``perf stat -x,``; None where there is none."""
    for row in text.splitlines():
        value, *rest = row.split(",")
        if EVENT in rest and value.isdigit():
            return int(value)
    return None


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
