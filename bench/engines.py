"""What do an engine's threads cost where other engines or processes want the CPUs as well?

Greedy, no capture. Each way has a process of its own, which opens its engines once; the two are
asked in turn. Rows:

- engines-idle: beside two engines that do nothing, against alone.
- engines-two: two engines of one process at the same time, against two processes with one each.
- engines-one-cpu: two threads on one CPU, against one thread there.
- engines-busy: beside one busy loop for each CPU, against the same without; a share of the CPUs is
  what the loops take.
- engines-busy-demo: the demo model with its default threads, likewise.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from console import attempt, main
from processes import OwnProcess
from report import Timing
from runs import decode_runs, open_engine

from kqview import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview.bench.records import LeftOut

N_DEMO_CONTEXT = 64


@dataclass(frozen=True)
class Way:
    """One side of a row: the engines of each of its processes, and what is around them."""

    what: str
    n_processes: int = 1
    n_engines: int = 1  # in each process
    n_working: int = 1  # of them, all at the same time
    n_threads: int | None = None  # None: as set
    on_one_cpu: bool = False
    is_busy: bool = False  # a busy loop for each CPU runs meanwhile
    is_demo: bool = False


# name -> (candidate, baseline, target)
CASES: Final[dict[str, tuple[Way, Way, float | None]]] = {
    "engines-idle": (Way("beside two idle engines", n_engines=3), Way("alone"), 1.03),
    "engines-two": (
        Way("two engines of one process", n_engines=2, n_working=2),
        Way("two processes", n_processes=2),
        1.05,
    ),
    "engines-one-cpu": (
        Way("2 threads on one CPU", n_threads=2, on_one_cpu=True),
        Way("1 thread on one CPU", n_threads=1, on_one_cpu=True),
        None,
    ),
    "engines-busy": (Way("beside a busy loop for each CPU", is_busy=True), Way("alone"), None),
    "engines-busy-demo": (
        Way("demo model, beside a busy loop for each CPU", is_busy=True, is_demo=True),
        Way("demo model, alone", is_demo=True),
        None,
    ),
}
WEIGHTS = {"engines-idle": 60.0, "engines-two": 90.0, "engines-one-cpu": 120.0,
           "engines-busy": 90.0, "engines-busy-demo": 10.0}  # fmt: skip


@contextmanager
def processes(settings: Settings, way: Way) -> Generator[Callable[[], float]]:
    """The processes of one way; what it yields returns the mean milliseconds a token of one run."""
    with ExitStack() as stack:
        opened = [
            stack.enter_context(OwnProcess(_engines, settings, way)) for _ in range(way.n_processes)
        ]

        def ms() -> float:
            with _busy_loops() if way.is_busy else ExitStack():
                for process in opened:
                    process.send()
                return sum(process.answer() for process in opened) / len(opened)

        yield ms


@contextmanager
def _engines(settings: Settings, way: Way) -> Generator[Callable[[], float]]:
    """The engines of one process, their prompts evaluated."""
    if way.on_one_cpu:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with ExitStack() as stack:
        engines = [stack.enter_context(_open(settings, way)) for _ in range(way.n_engines)]
        prompt = [*range(5, 5 + N_DEMO_CONTEXT)] if way.is_demo else None
        runs = [decode_runs(settings, one, prompt) for one in engines]
        # What is idle has worked before: its threads have been started.
        for one in runs:
            one.stamps_s(2, capture=None)
        yield lambda: _together(settings, runs[: way.n_working])


def _open(settings: Settings, way: Way) -> Engine:
    if way.is_demo:
        return Engine.demo(n_ctx=N_DEMO_CONTEXT + 128, run_ahead=0)
    options: dict[str, Any] = {} if way.n_threads is None else {"n_threads": way.n_threads}
    return open_engine(settings, flash_attn=True, run_ahead=0, **options)


def _together(settings: Settings, runs: list[Any]) -> float:
    found: list[float] = []

    def run(one: Any) -> None:
        # The mean: on a busy machine some steps take much longer than others.
        stamps = one.stamps_s(settings.n_tokens, capture=None)[settings.n_skip :]
        found.append((stamps[-1] - stamps[0]) * 1000.0 / (len(stamps) - 1))

    threads = [threading.Thread(target=run, args=(one,)) for one in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(found) < len(runs):
        raise RuntimeError("a run failed; its error is on stderr")
    return sum(found) / len(found)


@contextmanager
def _busy_loops() -> Generator[None]:
    """One process for each CPU that computes until the end of the block."""
    with ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            stack.enter_context(OwnProcess(_busy_loop))
        yield


@contextmanager
def _busy_loop() -> Generator[Callable[[], float]]:
    def spin() -> None:
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()
    yield lambda: 0.0


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, settings, line, name)


def _measure(settings: Settings, line: ProgressLine, name: str) -> Timing:
    candidate, baseline, target = CASES[name]
    with processes(settings, candidate) as ours, processes(settings, baseline) as theirs:
        pairs = line.pairs(name, theirs, ours, settings.pairs_for(target))
    threads = f"{settings.n_threads} threads"
    return Timing(
        name=name,
        what=candidate.what,
        baseline=baseline.what,
        work="a decoded token" + ("" if candidate.is_demo else f"; {settings.shape}, {threads}"),
        pairs=pairs,
        target=settings.target(target),
        command=f"python bench/engines.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
