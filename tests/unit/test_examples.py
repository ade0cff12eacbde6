"""The example programs run, and both type checkers accept them as a user would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.needs("mypy")
def test_mypy_accepts_the_examples(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
