"""The README's table of server settings is that of the code: flags, variables and defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("typer")

from kqview.cli.serve_command import flag_of
from kqview.server.settings import PREFIX, Settings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def shown(value: object) -> str:
    """A default as a person types it."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value}"


def table() -> list[str]:
    """Rows of the README's table."""
    return [
        f"| `{flag_of(spec.name)}` | `{PREFIX}{spec.name.upper()}` | {shown(spec.default)} "
        f"| {spec.metadata['help']} |"
        for spec in dataclasses.fields(Settings)
    ]


def test_readme_table_of_settings_is_that_of_the_code():
    missing = [row for row in table() if row not in README]
    assert not missing, "README.md lacks these rows:\n" + "\n".join(missing)
