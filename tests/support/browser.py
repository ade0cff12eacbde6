"""Debian's chromium, driven by playwright, for tests of pages.

``apt-get install chromium``; playwright's own browsers are not needed.
"""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

sync_api = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WITHIN_MS = 30_000
sync_api.expect.set_options(timeout=WITHIN_MS)
PHONE = {"width": 360, "height": 720}
# As root there is no sandbox; the pages are ours. Names under .example are this machine.
_ARGUMENTS = ["--no-sandbox", "--host-resolver-rules=MAP *.example 127.0.0.1"]


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    """A browser without a window."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        yield browser
        browser.close()


@contextlib.contextmanager
def open_tab(browser: Any) -> Iterator[Any]:
    """A tab that fails the test on an error of its scripts; its console is ``tab.logged``."""
    tab = browser.new_page()
    tab.set_default_timeout(WITHIN_MS)
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.logged = []
    tab.on("console", lambda message: tab.logged.append(message.text))
    yield tab
    tab.close()
    assert errors == [], errors


def violations(page: Any) -> list[str]:
    """What axe finds wrong with the page as it is, light and dark; skips the test without axe."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    wrong: list[str] = []
    for scheme, rules in (("light", {}), ("dark", {"runOnly": ["color-contrast"]})):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        found = axe.run(page, options={"resultTypes": ["violations"], **rules})
        assert found.response["passes"], "axe checked nothing"
        wrong += [
            f"{scheme}: {one['id']}: {one['help']}: {node['html']}"
            for one in found.response["violations"]
            for node in one["nodes"]
        ]
    return wrong
