"""How does the time of a token grow with the context: llama.cpp's two ways, ours, ours with rows?

Four ways at 64 to 16,384 tokens: llama.cpp's flash attention, its attention without flash
attention, kqview's, and kqview's with the logits of all layers and heads. Each engine has a process
of its own; a round asks them in turn. The model has 6 of the 24 layers that other rows have, so
that the longest prompt takes about a minute; it is evaluated once, and a slot that holds it is cut
back for each shorter context. `python bench/plot.py FILE.jsonl --of curve` draws the saved rows.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import cells
from console import attempt, main
from kernel import LONG_SHAPE, OURS, QUICK_SHARE, STOCK
from processes import OwnProcess
from report import Timing
from runs import decode_runs, open_engine

from kqview.bench.pairs import Pairs, rounds, step_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview.bench.records import LeftOut

CONTEXTS: Final = (16384, 8192, 4096, 2048, 1024, 512, 256, 64)  # each is cut out of the one before
# way -> (process, capture, text)
BASELINE: Final = "stock"
WAYS: Final[dict[str, tuple[str, str | None, str]]] = {
    BASELINE: ("flash attention on", None, "llama.cpp, flash attention on"),
    "plain": ("flash attention off", None, "llama.cpp, flash attention off"),
    "ours": ("ours", None, "kqview's attention"),
    "logits": ("ours", "logits", "kqview's attention, logits of all heads"),
}
# name -> (tokens of context, way); the baseline is a part of every row
CASES: Final = {
    f"curve-{n_context}-{way}": (n_context, way)
    for n_context in CONTEXTS
    for way in WAYS
    if way != BASELINE
}
WEIGHTS = {name: 1.0 + n_context * 4e-4 for name, (n_context, _) in CASES.items()}


@contextmanager
def opened(
    settings: Settings, options: dict[str, Any]
) -> Generator[Callable[[int, str | None], float]]:
    """An engine whose slot holds the longest prompt; what it yields returns ms a token."""
    with open_engine(settings, **options) as engine:
        prompt = cells.fill(settings, engine, flash_attn=options["flash_attn"])

        def ms(n_context: int, capture: str | None) -> float:
            runs = decode_runs(settings, engine, prompt[:n_context])
            return step_ms(runs.stamps_s(settings.n_tokens, capture=capture), settings.n_skip)

        yield ms


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the chosen contexts; the rows of one come out of the same rounds."""
    names = settings.chosen(CASES)
    if not names:
        return
    share = QUICK_SHARE if settings.is_quick else 1
    at = replace(settings, n_context=CONTEXTS[0] // share, shape=LONG_SHAPE)
    with ExitStack() as stack:
        processes = {
            way: stack.enter_context(OwnProcess(opened, at, options))
            for way, options in {**STOCK, "ours": OURS}.items()
        }
        for n_context in dict.fromkeys(CASES[name][0] for name in names):
            of_context = [name for name in names if CASES[name][0] == n_context]
            n_rounds = settings.pairs_for(None)
            line.start(of_context[0], n_rounds)

            def run(process: str, capture: str | None, n_context: int) -> Callable[[], float]:
                return lambda: processes[process].ask(n_context, capture)

            ways = {
                way: run(process, capture, max(8, n_context // share))
                for way, (process, capture, _) in WAYS.items()
            }
            for once in ways.values():
                once()  # first use of everything
            times: list[dict[str, float]] = []
            for found in rounds(ways, n_rounds):
                times.append(found)
                line.tick()
            for name in of_context:
                yield attempt(name, _row, settings, name, times)


def _row(settings: Settings, name: str, times: list[dict[str, float]]) -> Timing:
    n_context, way = CASES[name]
    return Timing(
        name=name,
        what=f"{WAYS[way][2]}, {n_context:,} tokens",
        baseline=WAYS[BASELINE][2],
        work=f"a decoded token by context; 6 layers of 16 heads, {settings.n_threads} threads",
        pairs=Pairs([one[BASELINE] for one in times], [one[way] for one in times]),
        target=None,
        command=f"python bench/curve.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
