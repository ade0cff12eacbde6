"""What is promised, and the test: every row of that table names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "kqview" / "server" / "README.md"
# | promise | [`test`](path) ... |
ROW = re.compile(r"^\| (?P<promise>[^|]+) \| (?P<tests>[^|]*\]\([^|]+) \|$", re.MULTILINE)
LINK = re.compile(r"\[`([^`]+)`\]\(([^)]+)\)")


def rows() -> list[tuple[str, str, str]]:
    """(promise, name of the test, path of its file) of each link in the table."""
    text = PAGE.read_text(encoding="utf-8")
    return [
        (row["promise"], name, path)
        for row in ROW.finditer(text)
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


def test_table_has_rows():
    assert len(rows()) > 40


@pytest.mark.parametrize(("promise", "name", "path"), rows())
def test_promise_names_a_test_that_exists(promise: str, name: str, path: str):
    file = (PAGE.parent / path).resolve()
    assert file.is_relative_to(ROOT)
    assert file.is_file(), f"{promise}: there is no {path}"
    if name.startswith("python -m"):
        return
    assert name in names_in(file), f"{promise}: {path} has no {name}"
