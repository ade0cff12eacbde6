"""The server page's table of settings names every setting of the code with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kqview.server.settings import PREFIX, Settings, flag_of

PAGE = Path(__file__).parents[2] / "src/kqview/server/README.md"
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
        (flag_of(spec.name), f"{PREFIX}{spec.name.upper()}", shown(spec.default))
        for spec in dataclasses.fields(Settings)
    }
