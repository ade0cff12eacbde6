"""For every test: a browser; property tests are judged by what they find, not by their time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

# A machine that does other work takes a second over an example now and then; that is no failure.
settings.register_profile(
    "kqview", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# The same examples each time: a change is judged by its own faults.
settings.register_profile("ci", settings.get_profile("kqview"), derandomize=True)
settings.load_profile("kqview")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for modules marked with `tests.support.browser.needs_browser`."""
    from tests.support.browser import open_browser  # skips without playwright

    with open_browser() as one:
        yield one


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A tab; see `open_tab`."""
    from tests.support.browser import open_tab

    with open_tab(browser) as tab:
        yield tab
