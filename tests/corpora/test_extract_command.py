"""``kqview extract`` in a shell."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kqview import open_corpus

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two documents and a broken line."""
    records = [
        {"id": "a", "text": "Q: Who is Anna? A: A girl.", "label": "x"},
        {"id": "b", "text": "Q: Who is Tom? A: A boy.", "label": "y"},
    ]
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records) + "{broken\n")
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "kqview", "extract", *map(str, arguments), "--demo", "-c", "256"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


def test_spans_and_columns(source: Path, tmp_path: Path):
    done = run(
        source, tmp_path / "c", "--span", r"question=Q:[^?]*\?", "--span", "answer=A: .*",
        "--reduce", "mean_heads", "--keep", "label",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 documents, 1 failed" in done.stdout
    assert "3/3 documents" in done.stderr
    corpus = open_corpus(str(tmp_path / "c"))
    assert [name for name, _, _ in corpus["a"].spans] == ["question", "answer"]
    assert corpus["a"].attention.shape == (4, len(corpus["a"].token_ids), 2)
    assert corpus["b"].columns == {"label": "y"}
    assert "line 3 is not JSON" in (corpus["2"].error or "")
    again = run(
        source, tmp_path / "c", "--span", r"question=Q:[^?]*\?", "--span", "answer=A: .*",
        "--reduce", "mean_heads", "--keep", "label",
    )  # fmt: skip
    assert again.returncode == 0
    assert "documents," not in again.stderr  # nothing is done again


def test_fields(source: Path, tmp_path: Path):
    done = run(
        source, tmp_path / "c", "--fields", "hidden,scores", "--hidden", "-1", "--pool", "last"
    )
    assert done.returncode == 0, done.stderr
    entry = open_corpus(str(tmp_path / "c"))["a"]
    assert entry.hidden.shape[0] == 1
    assert entry.hidden.ndim == 2
    assert entry.logprobs.shape == (len(entry.token_ids),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--yes"),
        (["--fields", "rows", "--last", "1"], "fields"),
        (["--column", "body=text", "--last", "1"], "--column has body"),
        (["--span", "x=(", "--span", "y=1"], "no regular expression"),
        (["--last", "1", "--max-errors", "0"], "1 documents failed, max_errors is 0"),
    ],
)
def test_what_is_refused(source: Path, tmp_path: Path, options: list[str], words: str):
    done = run(source, tmp_path / "c", *options)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_estimate(source: Path):
    done = run(source, "--estimate")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 documents, 1 of them fail, ")
