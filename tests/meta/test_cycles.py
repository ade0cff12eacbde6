"""No module of the package imports itself by way of others, not even for types alone."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full

PACKAGE = Path(__file__).parents[2] / "src" / "kqview"


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Every module that is imported anywhere in a file: in functions and for types too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                name = inner if inner in modules else node.module
                if name in modules:
                    yield name


def imports_of(files: dict[str, str]) -> dict[str, set[str]]:
    return {
        name: set(imported(ast.parse(text), set(files))) - {name} for name, text in files.items()
    }


def check(graph: dict[str, set[str]]) -> None:
    TopologicalSorter(graph).prepare()


def test_no_module_imports_itself_by_way_of_others():
    files = {
        module_of(path): path.read_text("utf-8")
        for path in PACKAGE.rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    check(imports_of(files))


def test_a_cycle_for_types_alone_is_found():
    files = {
        "a.b": "from a.c import x",
        "a.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import b",
        "a": "",
    }
    with pytest.raises(CycleError):
        check(imports_of(files))
