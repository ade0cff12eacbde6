"""For every test: which ones run and where, what a run says of the others, signals, a browser."""

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

from kqview.machine import default_threads
from tests.support.needs import FILES, FIXTURES, is_met

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

N_WORKERS = 4  # most processes of a run; tests use a core each, and some hundreds of MB

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

_n_left_out: Counter[str] = Counter()  # tests: `full`, or by what they need and is not here


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Spread a run over the cores, unless files are named or the command line says how (``-n``)."""
    option = config.option
    if (
        config.pluginmanager.has_plugin("xdist")
        and not hasattr(config, "workerinput")
        and option.numprocesses is None
        and not (option.usepdb or option.collectonly or option.capture == "no")
        and not _names_files(config)
        and (n_workers := min(N_WORKERS, default_threads())) > 1
    ):
        option.numprocesses, option.dist = n_workers, "worksteal"


def _names_files(config: pytest.Config) -> bool:
    return any(".py" in argument for argument in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None]:
    """Leave out what this machine cannot run and, unless asked for by file or ``-m``, `full`."""
    for item in items:
        for name in set(getattr(item, "fixturenames", ())) & FIXTURES.keys():
            item.add_marker(pytest.mark.needs(FIXTURES[name]))
        if need := FILES.get(f"{item.path.parent.name}/{item.path.name}"):
            item.add_marker(pytest.mark.needs(need))
    yield  # ``-m`` and ``-k`` choose
    wants_full = config.option.markexpr or _names_files(config)
    left_out: list[pytest.Item] = []
    for item in items:
        needs = [need for mark in item.iter_markers("needs") for need in mark.args]
        missing = [need for need in needs if not is_met(need)]
        if not wants_full and item.get_closest_marker("full"):
            _n_left_out["full"] += 1
        elif missing:
            _n_left_out[missing[0]] += 1
        else:
            continue
        left_out.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that runs some of the tests tells the one that sums up what it has left out."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left out"] = dict(_n_left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the counts of a process; each has collected all tests."""
    _n_left_out.update(Counter(getattr(node, "workeroutput", {}).get("left out", {})) - _n_left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which tests were not run."""
    n_full = _n_left_out.pop("full", 0)
    more = [f"{n_full} more: pytest -m full"] if n_full else []
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
