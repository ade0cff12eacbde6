"""The server page names every setting with its default, and those that need a restart."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kqview.server.settings import PREFIX, Settings
from kqview.server.settings_table import rows_of

PAGE = Path(__file__).parents[2] / "src/kqview/server/CONFIGURATION.md"
ROW = re.compile(r"^\| `(--[\w-]+)` \| `(KQVIEW_\w+)` \| (.*?) ?\| .+ \|$", re.M)


def shown(value: object) -> str:
    """A default as a person types it."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value}"


def test_table_has_every_setting_with_its_flag_variable_and_default() -> None:
    written = set(ROW.findall(PAGE.read_text(encoding="utf-8")))
    assert written == {
        (row.flag, f"{PREFIX}{row.name.upper()}", shown(row.default))
        for row in rows_of(Settings).values()
    }


def test_page_names_the_settings_that_need_a_restart() -> None:
    [text] = re.findall(r"These need a restart.+?; of", PAGE.read_text(encoding="utf-8"), re.S)
    assert re.findall(r"`(\w+)`", text) == [
        spec.name for spec in dataclasses.fields(Settings) if spec.metadata["restart"]
    ]
