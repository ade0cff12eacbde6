"""vendor/sbom.py writes valid CycloneDX, the same bytes each time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "vendor" / "sbom.py"
LINKED = [
    "llama.cpp|0c1e57098bba|MIT|pkg:github/ggml-org/llama.cpp",
    "llamafile||MIT|pkg:github/mozilla-ai/llamafile",
    "CUDA Runtime|13.0|LicenseRef-NVIDIA-CUDA-EULA|",
    "fork|unpinned (KQVIEW_LLAMA_CPP_DIR)|MIT|pkg:github/a/b",
]


def write(path: Path) -> str:
    subprocess.run([sys.executable, SCRIPT, path, "kqview", "1.2.3", *LINKED], check=True)
    return path.read_text("utf-8")


def test_components_have_their_version_licence_and_url(tmp_path: Path) -> None:
    text = write(tmp_path / "a.json")
    assert text == write(tmp_path / "b.json")
    found = json.loads(text)
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/kqview@1.2.3"
    rows = [(part["name"], part.get("version"), part.get("purl")) for part in found["components"]]
    assert rows == [
        ("llama.cpp", "0c1e57098bba", "pkg:github/ggml-org/llama.cpp@0c1e57098bba"),
        ("llamafile", None, "pkg:github/mozilla-ai/llamafile"),
        ("CUDA Runtime", "13.0", None),
        ("fork", "unpinned (KQVIEW_LLAMA_CPP_DIR)", "pkg:github/a/b"),
    ]


@pytest.mark.needs("cyclonedx")
def test_document_is_valid(tmp_path: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    check = JsonStrictValidator(SchemaVersion.V1_6).validate_str
    text = write(tmp_path / "a.json")
    assert check(text) is None
    assert check(text.replace('"library"', '"librarian"')) is not None
