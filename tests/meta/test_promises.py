"""The table of what is promised: every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "src" / "kqview" / "server" / "PROMISES.md"
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


@cache
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


def test_promises_name_tests_that_exist():
    missing = [
        f"{promise} {path.relative_to(ROOT)} has no {name}"
        for promise, name, path in rows()
        if not name.startswith("python -m") and (not path.is_file() or name not in names_in(path))
    ]
    assert missing == []
