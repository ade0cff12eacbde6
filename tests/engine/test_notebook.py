"""Notebooks: every cell runs, pictures are pictures, and what is printed is what the text says."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_coloured import Still, data_of

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "src" / "kqview" / "viz" / "first_hour.ipynb"
GALLERY = sorted((ROOT / "src" / "kqview" / "guards" / "gallery").glob("*.ipynb"))
WITHIN_S = 600


def cells_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text("utf-8"))["cells"]


def code_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run(notebook: Path, folder: Path) -> list[dict[str, Any]]:
    """The cells with code and their outputs."""
    for name in ("nbclient", "ipykernel", "matplotlib", "safetensors"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    result = folder / "result.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.notebook", notebook, result],
        cwd=ROOT, capture_output=True, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [cell for cell in cells_of(result) if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(NOTEBOOK, tmp_path_factory.mktemp("notebook"))


def outputs(cells: list[dict[str, Any]], kind: str) -> list[tuple[str, str]]:
    """The code of each cell with an output of *kind*, and that output."""
    return [
        (code_of(cell), "".join(output["data"][kind]))
        for cell in cells
        for output in cell["outputs"]
        if kind in output.get("data", {})
    ]


def printed(cells: list[dict[str, Any]], code: str) -> str:
    """What the cell that has *code* in it printed."""
    (cell,) = [cell for cell in cells if code in code_of(cell)]
    return "".join("".join(one["text"]) for one in cell["outputs"] if one.get("name") == "stdout")


def test_every_cell_ran_without_an_error(executed: list[dict[str, Any]]) -> None:
    assert all(cell["execution_count"] for cell in executed)
    kinds = {one["output_type"] for cell in executed for one in cell["outputs"]}
    assert kinds == {"execute_result", "stream"}


def check_pictures(pictures: list[tuple[str, str]]) -> None:
    for code, picture in pictures:
        data = base64.b64decode(picture)
        assert data.startswith(b"\x89PNG"), code
        width, height = struct.unpack(">II", data[16:24])
        assert 400 <= width <= 4000, code
        assert 300 <= height <= 4000, code
        assert 10_000 <= len(data) <= 500_000, code


def test_pictures_are_pictures(executed: list[dict[str, Any]]) -> None:
    pictures = outputs(executed, "image/png")
    assert ["head_grid" in code for code, _ in pictures] == [True, False, False]
    check_pictures(pictures)


def test_displays_show_the_text_and_its_attention(executed: list[dict[str, Any]]) -> None:
    engine, *coloured = outputs(executed, "text/html")
    assert "<table>" in engine[1]
    generation, prompt, saved = (data_of(html) for _, html in coloured)
    assert len(generation["at"]) == 20
    assert generation["texts"] == saved["texts"]
    assert prompt["nPrompt"] is None
    assert len(prompt["at"]) == len(prompt["texts"])
    assert all(len(html) < 1 << 20 for _, html in coloured)
    for _, html in coloured:
        assert Still.of(html).coloured


def test_cells_print_what_the_text_promises(executed: list[dict[str, Any]]) -> None:
    assert printed(executed, "looked most at").startswith("layers, heads, tokens before it: (4, 8,")
    assert printed(executed, "Capture(spans=").count("source") == 6
    assert printed(executed, "cancel_all").startswith("cancelled\n ")
    assert "first.html" in printed(executed, "to_html")


@pytest.mark.parametrize("path", [NOTEBOOK, *GALLERY], ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = cells_of(path)
    assert all(not cell.get("outputs") and not cell.get("execution_count") for cell in cells)
    assert "kqview" in code_of(cells[0]) + code_of(cells[1])


# ---- the gallery, on a model that can talk

# Words of a notebook's output whose numbers tell that it shows what its text says, and pictures.
PICTURES = {"alignment": 2, "citations": 1, "grounding": 1, "induction": 2, "injection": 2}


def shows_induction(text: str) -> bool:
    best = [*map(float, re.findall(r"head \d+: ([\d.]+), all", text))]
    mean = [*map(float, re.findall(r"all heads: ([\d.]+)", text))]
    return len(best) == 2 and min(best) > 0.7 and max(mean) < 0.1 and "(18, 6)" in text


def shows_citations(text: str) -> bool:
    (found,) = re.findall(r"(\d) of (\d) sentences", text)
    return int(found[0]) >= 2 and len(set(re.findall(r"^\[(\d)\]", text, re.M))) > 1


def shows_injection(text: str) -> bool:
    return re.findall(r"(\w+): [\d.]+, injected: (\w+)", text) == [
        ("benign", "False"), ("injected", "True"),
    ]  # fmt: skip


def shows_grounding(text: str) -> bool:
    said, made_up = map(float, re.findall(r"^(0\.\d+) ", text, re.M))
    (n_back,) = re.findall(r"(\d+) tokens taken back", text)
    return said > made_up + 0.1 and int(n_back) > 5


def shows_alignment(text: str) -> bool:
    steps = [(int(a), int(b)) for a, b in re.findall(r"(\d+) words heard, +(\d+) written", text)]
    never_ahead = all(written <= heard for heard, written in steps)
    return len(steps) == 6 and never_ahead and steps[-1] == (17, 17) and steps[2][1] >= 6


@pytest.mark.needs("smollm2")
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_notebook_of_the_gallery_shows_what_it_says(path: Path, tmp_path: Path) -> None:
    cells = run(path, tmp_path)
    kinds = {one["output_type"] for cell in cells for one in cell["outputs"]}
    assert kinds <= {"execute_result", "stream", "display_data"}
    pictures = outputs(cells, "image/png")
    check_pictures(pictures)
    assert len(pictures) == PICTURES[path.stem]
    text = "".join("".join(one.get("text", "")) for cell in cells for one in cell["outputs"])
    assert globals()[f"shows_{path.stem}"](text), text
