"""The table of what is promised: every test that it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "kqview" / "server" / "README.md"
# | promise | [`test`](path) ... |
ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<tests>[^|]*\]\([^|]+) \|$", re.MULTILINE)
LINK = re.compile(r"\[`([^`]+)`\]\(([^)]+)\)")


def rows() -> list[tuple[str, str, Path]]:
    """(promise, name of the test, its file) of each link in the tables."""
    return [
        (row["promise"], name, (PAGE.parent / path).resolve())
        for row in ROW.finditer(PAGE.read_text(encoding="utf-8"))
        for name, path in LINK.findall(row["tests"])
    ]


def names_in(path: Path) -> set[str]:
    """Names of the tests of a file, native ones by their title."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".cpp":
        return set(re.findall(r'TEST_CASE\("([^"]+)"', text))
    return {
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


@pytest.mark.parametrize(("promise", "name", "file"), rows())
def test_promise_names_a_test_that_exists(promise: str, name: str, file: Path):
    assert file.is_relative_to(ROOT)
    assert file.is_file(), f"{promise}: there is no {file}"
    if name.startswith("python -m"):
        return
    assert name in names_in(file), f"{promise}: {file} has no {name}"
