"""The example programs run, and both type checkers accept them as a user would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import pages, typed

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "tests" / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    if "import pydantic" in (text := path.read_text("utf-8")) or "from pydantic" in text:
        pytest.importorskip("pydantic")
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_first_loop_is_that_of_the_readme() -> None:
    block = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert block is not None
    assert block[1] == (ROOT / "tests" / "examples" / "first_loop.py").read_text("utf-8")


def checked(*command: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs("type checkers")
def test_mypy_accepts_the_examples(tmp_path: Path) -> None:
    checked("mypy", "--cache-dir", tmp_path)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Python of each page, which both checkers take as strictly as they can."""
    folder = tmp_path_factory.mktemp("pages")
    for page in pages():
        if (code := typed(page)).strip():
            name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
            (folder / f"{name}.py").write_text(code, encoding="utf-8")
    config = {
        "include": ["."], "extraPaths": [str(ROOT / "src")], "pythonVersion": "3.11",
        "typeCheckingMode": "strict", "reportMissingModuleSource": False,
        "reportUnknownMemberType": False,  # of matplotlib
        "reportMissingTypeStubs": False,  # of pyarrow
    }  # fmt: skip
    (folder / "pyrightconfig.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.needs("type checkers")
def test_mypy_accepts_the_pages(programs: Path, tmp_path: Path) -> None:
    checked("mypy", "--scripts-are-modules", "--cache-dir", tmp_path, *programs.glob("*.py"))


@pytest.mark.needs("type checkers")
def test_pyright_accepts_the_pages(programs: Path) -> None:
    checked("pyright", "--project", programs, "--pythonpath", sys.executable)


@pytest.mark.needs("type checkers")
def test_checkers_know_what_parsed_is_and_find_a_wrong_option(tmp_path: Path) -> None:
    """Else the pages would pass because everything is Any."""
    program = tmp_path / "program.py"
    program.write_text(
        "from typing import assert_type\nfrom pydantic import BaseModel, TypeAdapter\n"
        "from kqview import *\n"
        "class Pet(BaseModel):\n    name: str\n"
        "engine = Engine.demo()\n"
        "assert_type(engine.generate('a', json_schema=Pet, seed=1).parsed, Pet)\n"
        "assert_type(engine.chat([], json_schema=TypeAdapter(list[int])).parsed, list[int])\n"
        "assert_type([one.parsed for one in engine.map(['a'], json_schema=Pet)], list[Pet])\n"
        "def read(one: Generation) -> str:\n    return one.read()\n"
        "print(read(engine.generate('a', json_schema={'type': 'integer'})))\n"
        "engine.generate('a', max_tokens='many')  # wrong\n"
        "engine.generate('a', max_new_tokens=1)  # wrong\n"
        "engine.create_completion('a')  # wrong\n"
        "next(engine.generate('a', capture='probs')).attention.shap  # wrong\n",
        encoding="utf-8",
    )
    wrong = [n for n, line in enumerate(program.read_text().splitlines(), 1) if "# wrong" in line]
    for command in (
        ["mypy", "--cache-dir", tmp_path / "cache", program],
        ["pyright", "--pythonpath", sys.executable, program],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600
        )
        found = re.findall(r"program\.py:(\d+).*error", done.stdout)
        assert sorted({*map(int, found)}) == wrong, done.stdout
