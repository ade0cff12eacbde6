"""README.md says what is so: its examples print what stands below them, its links lead on."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
# A block of Python, and the block of text that follows it: its output.
EXAMPLES = re.findall(r"```python\n((?:(?!```).)*)```\n+```text\n(.*?)```", README, re.DOTALL)
# "$ kqview ..." and the lines that follow it up to the next command: its standard output.
COMMANDS = [
    example
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    for example in re.findall(r"^\$ kqview (.*)\n((?:[^$].*\n|\n)*)", block, re.MULTILINE)
]
LINKED = (
    *("README.md", "src/kqview/EXACTNESS.md"),
    *(f"{d}/README.md" for d in ("cpp", "vendor", "bench", "bench/peers")),
)


def test_readme_first_example_has_eight_lines():
    code = [line for line in EXAMPLES[0][0].splitlines() if line.strip()]
    assert len(code) == 8


@pytest.mark.parametrize(("code", "output"), EXAMPLES)
def test_readme_example_prints_what_stands_below_it(code: str, output: str):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert printed.getvalue() == output


@pytest.mark.parametrize(("command", "output"), COMMANDS)
def test_readme_command_prints_what_stands_below_it(command: str, output: str, tmp_path: Path):
    pytest.importorskip("typer")
    done = subprocess.run(
        [sys.executable, "-m", "kqview", *shlex.split(command)],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert printed == [line.rstrip() for line in output.splitlines()]


@pytest.mark.parametrize("page", LINKED)
def test_link_of_page_leads_to_a_file(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [t for t in targets if not ((ROOT / page).parent / t).exists()] == []


def test_readme_names_only_commands_that_exist():
    pytest.importorskip("typer")
    from typer.main import get_command

    from kqview.cli.main import app

    commands = set(getattr(get_command(app), "commands", {}))
    named = set(re.findall(r"(?:^|\$ |bin/|`)kqview ([a-z]+)\b", README, re.MULTILINE))
    assert named
    assert named <= commands
