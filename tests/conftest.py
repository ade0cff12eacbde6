"""For every test: which ones run, what a run says of the others, signals, a browser."""

from __future__ import annotations

import os
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any

# Before numpy is imported: products of float64 references are small, and a second thread of BLAS
# spends more processor time on waiting than on them.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from tests.support.needs import FILES, FIXTURES, is_met

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

# A machine that does other work takes a second over an example now and then; that is no failure.
settings.register_profile(
    "kqview", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# The same examples each time: a change, and an install, are judged by their own faults.
settings.register_profile("ci", settings.get_profile("kqview"), derandomize=True)
settings.load_profile("ci")

# Behind a shell's "&", and in many CI systems, SIGINT is ignored, and so it would be in every
# program that a test starts. A handler here is no handler there, but the default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_n_left_out: Counter[str] = Counter()  # tests by what they need and is not here
_n_full = 0


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Leave out what this machine cannot run and, unless asked for by file or ``-m``, `full`."""
    global _n_full
    for item in items:
        for name in set(getattr(item, "fixturenames", ())) & FIXTURES.keys():
            item.add_marker(pytest.mark.needs(FIXTURES[name]))
        if need := FILES.get(f"{item.path.parent.name}/{item.path.name}"):
            item.add_marker(pytest.mark.needs(need))
    yield  # ``-m`` and ``-k`` choose
    wants_full = config.option.markexpr or any(".py" in argument for argument in config.args)
    left_out: list[pytest.Item] = []
    for item in items:
        needs = [need for mark in item.iter_markers("needs") for need in mark.args]
        missing = [need for need in needs if not is_met(need)]
        if not wants_full and item.get_closest_marker("full"):
            _n_full += 1
        elif missing:
            _n_left_out[missing[0]] += 1
        else:
            continue
        left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which tests were not run."""
    more = [f"{_n_full} more: pytest -m full"] if _n_full else []
    if n_missing := _n_left_out.total():
        counts = ", ".join(f"{need} {n}" for need, n in _n_left_out.most_common())
        more.append(f"{n_missing} need what is not here ({counts}): bash .ci/full")
    if more:
        terminalreporter.write_line(f"not run: {'; '.join(more)}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium."""
    from tests.support.browser import open_browser  # skips without playwright

    with open_browser() as one:
        yield one


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab; see `open_tab`."""
    from tests.support.browser import open_tab

    with open_tab(browser) as tab:
        yield tab
