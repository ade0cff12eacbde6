"""The examples of the page run, each with its own library."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full
EXAMPLES = Path(__file__).with_name("examples")


def run(name: str, library: str, folder: Path) -> list[str]:
    pytest.importorskip(library)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), str(folder / "corpus")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_probe_knows_who_the_story_is_about(tmp_path: Path):
    lines = run("probe", "sklearn", tmp_path)
    right = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(right) == 4
    assert max(right) > 0.9


def test_input_of_a_sparse_autoencoder_is_a_data_set(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    (n, shape) = run("sae_input", "datasets", tmp_path)[-1].split(" ", 1)
    assert shape == "(32, 128)"
    found = datasets.load_from_disk(str(tmp_path / "corpus" / "activations")).with_format("numpy")
    assert len(found) == int(n) > 10
    assert found[0]["blocks.2.hook_resid_post"].shape == (32, 128)
    assert found[0]["token_ids"].shape == (32,)


def test_features_of_spans_of_two_thousand_documents(tmp_path: Path):
    first, second = run("span_features", "pyarrow", tmp_path)
    assert first.startswith("(2000, 4, 8, 2) most on the context")
    least, most = map(float, re.findall(r"\d\.\d+", second))
    assert 0 <= least < most <= 1


def test_vector_index_finds_the_nearest_document(tmp_path: Path):
    (line,) = run("vector_index", "faiss", tmp_path)
    assert line.startswith("['key', ")
    assert line.endswith("True")
