"""Does the wheel of a release cost anything against a build for this processor?

The wheel that the environment variable KQVIEW_WHEEL names, unpacked into a temporary folder,
against the installed kqview, which must be a build for this machine (``pip install .``). Each side
has processes of its own, which are asked in turn. Loading is what the first ``system_info()`` of a
process takes, import included.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import zipfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from console import attempt, main
from models import NotHere, model_path
from report import Timing

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut

# name -> (what, of which work)
CASES: Final = {
    "wheel-prompt": ("no capture", "a prompt of {} tokens"),
    "wheel-prompt-logits": ("logits of all rows, attend, all heads", "a prompt of {} tokens"),
    "wheel-decode": ("no capture", "a decoded token at {} tokens of context"),
    "wheel-decode-logits": ("logits, all heads", "a decoded token at {} tokens of context"),
}
WEIGHTS = {**dict.fromkeys(CASES, 200.0), "wheel-load": 30.0}
TARGET = 1.04
LOAD_MS_MAX = 50  # more than a build for this machine
SIDE = Path(__file__).with_name("wheel_side.py")


class _Side:
    """A process with one kqview; a context manager.

    Attributes:
        variant: Which CPU variant it uses.
        load_ms: Milliseconds until it could say so.
    """

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, SIDE, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.variant: str
        self.load_ms: float
        self.variant, self.load_ms = self._answer()

    def ask(self, question: object) -> float:
        """What it answers: settings, which open an engine, or a case, for its milliseconds."""
        assert self._process.stdin is not None
        pickle.dump(question, self._process.stdin)
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except EOFError:
            raise RuntimeError("a process of the benchmark ended; its error is above") from None

    def __enter__(self) -> _Side:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def unpacked() -> Generator[str]:
    """The folder of the unpacked wheel."""
    if not (wheel := os.environ.get("KQVIEW_WHEEL")):
        raise NotHere("KQVIEW_WHEEL names no wheel; python vendor/wheels.py makes one")
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        yield folder


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(WEIGHTS):
        yield attempt(name, _measure, settings, line, name)


def _measure(settings: Settings, line: ProgressLine, name: str) -> Timing:
    with ExitStack() as stack:
        folder = stack.enter_context(unpacked())
        sides = [stack.enter_context(_Side(folder)), stack.enter_context(_Side(""))]
        wheel, native = sides
        if native.variant != "native":
            raise NotHere(f"the installed kqview uses {native.variant}; pip install . builds one")
        command = f"python bench/wheel.py --row {name} {settings.flags}"
        if name == "wheel-load":
            pairs = line.pairs(name, lambda: _load_ms(""), lambda: _load_ms(folder), 20)
            more_ms = median(pairs.candidate_ms) - median(pairs.baseline_ms)
            what = f"wheel, {wheel.variant}: {more_ms:+.1f} ms, at most +{LOAD_MS_MAX}"
            return Timing(
                name=name, what=what, baseline="build for this machine", work="loading kqview",
                pairs=pairs, target=None, command=command,
            )  # fmt: skip
        model_path(settings)  # written by one of them
        for side in sides:
            side.ask(settings)
            side.ask(name)
        n_pairs = settings.n_pairs
        pairs = line.pairs(name, lambda: native.ask(name), lambda: wheel.ask(name), n_pairs)
    what, work = CASES[name]
    return Timing(
        name=name,
        what=f"wheel, {wheel.variant}; {what}",
        baseline="build for this machine",
        work=work.format(settings.n_context),
        pairs=pairs,
        target=settings.target(TARGET),
        command=command,
    )


def _load_ms(folder: str) -> float:
    with _Side(folder) as side:
        return side.load_ms


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
