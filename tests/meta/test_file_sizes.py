"""The repository stays small enough to be cloned, and every Python file says what it is."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("cpp", "src", "tests", "bench", "vendor", ".ci")
N_BYTES_MAX = 5 * 2**20
SUFFIXES = (".py", ".h", ".cpp", ".cmake", ".cu", ".js", ".css", ".html", ".md")
# Folders and files that are not part of the repository, see .gitignore.
IGNORED = {".git", "build", "dist", ".venv", "__pycache__", "node_modules"}


def repository_files() -> list[Path]:
    found: list[Path] = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        is_ours = not IGNORED & {*parts} and not any(p.endswith("_cache") for p in parts)
        if is_ours and path.is_file() and path.suffix != ".so" and ".egg-info" not in str(path):
            found.append(path)
    return found


FILES = repository_files()
TEXTS = [
    path for path in FILES if path.relative_to(ROOT).parts[0] in SOURCES and path.suffix in SUFFIXES
]


def test_source_files_are_found():
    names = {str(path.relative_to(ROOT)) for path in TEXTS}
    assert {"cpp/sched/step.cpp", "src/kqview/engine.py", "tests/meta/test_file_sizes.py"} <= names


def test_repository_has_no_file_above_five_mebibytes():
    assert [str(path) for path in FILES if path.stat().st_size > N_BYTES_MAX] == []


def test_python_sources_have_a_head_comment():
    sources = [path for path in TEXTS if path.suffix == ".py"]
    bare = [
        str(path) for path in sources if ast.get_docstring(ast.parse(path.read_bytes())) is None
    ]
    assert bare == []
