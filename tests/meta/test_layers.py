"""Includes and imports point one way, so that a part can be read without what is built on it.

The order is that of the layers below; parts of one rank do not know each other.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPP = ROOT / "cpp"
PACKAGE = ROOT / "src" / "kqview"

CPP_LAYERS = (
    {"base"},
    {"memory", "rpc", "gguf"},
    {"llama"},
    {"tap", "sample", "state"},
    {"sched"},
    {"bind"},
)
PYTHON_LAYERS = (
    {"errors", "demo"},
    {"types"},
    {"_core"},
    {"machine"},
    {"generation", "chat", "mods", "state", "trace", "store", "rpc"}
    | {"model_info", "request_options", "capture_plan", "constraints", "llama_log"},
    {"requests", "vocabulary", "conversation", "slot", "engine_stats"},
    {"embedding"},
    {"engine"},
    {"kqview"},  # the package itself, which names what is public
    {"viz", "server", "scale", "bench"},
    {"cli"},
    {"__main__"},
)


def violations(part: str, used: set[str], layers: tuple[set[str], ...]) -> list[str]:
    """Name each of *used* that *part* may not see."""
    rank = {name: i for i, layer in enumerate(layers) for name in layer}
    unknown = sorted({part, *used} - rank.keys())
    assert not unknown, f"{unknown} is in no layer; add it to the layers of this test"
    return sorted(name for name in used if name != part and rank[name] >= rank[part])


def included_parts(part: str, text: str) -> set[str]:
    quoted = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
    return {name.partition("/")[0] if "/" in name else part for name in quoted} - {part}


def imported_parts(path: Path) -> set[str]:
    """Parts of kqview that a file imports; names of the package itself count as "kqview"."""
    submodules = {p.stem for p in PACKAGE.iterdir() if p.suffix in (".py", ".pyi") or p.is_dir()}
    parts: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are written in full"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            head, _, rest = module.partition(".")
            if head == "kqview":
                name = rest.partition(".")[0]
                parts.add(name if name in submodules else "kqview")
    return parts


def part_of(path: Path) -> str:
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "kqview" if name == "__init__" else name


CPP_FILES = sorted(path for path in CPP.rglob("*") if path.suffix in (".h", ".cpp"))
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", CPP_FILES, ids=lambda path: str(path.relative_to(CPP)))
def test_cpp_file_includes_only_layers_below(path: Path):
    part = path.relative_to(CPP).parts[0]
    used = included_parts(part, path.read_text(encoding="utf-8"))
    assert violations(part, used, CPP_LAYERS) == []


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_python_file_imports_only_layers_below(path: Path):
    assert violations(part_of(path), imported_parts(path), PYTHON_LAYERS) == []


def test_python_file_that_imports_upwards_or_sideways_is_found(tmp_path: Path):
    path = tmp_path / "stream.py"
    path.write_text(
        "from kqview import Engine\nfrom kqview.slot import Slot\nimport kqview.cli.x\n"
    )
    used = imported_parts(path)
    assert used == {"kqview", "slot", "cli"}
    assert violations("generation", used, PYTHON_LAYERS) == ["cli", "kqview", "slot"]
    assert violations("cli", used, PYTHON_LAYERS) == []


def test_cpp_file_that_includes_upwards_or_sideways_is_found():
    text = (
        '#include <vector>\n#include "sample/params.h"\n#include "sched/step.h"\n#include "own.h"\n'
    )
    used = included_parts("tap", text)
    assert used == {"sample", "sched"}
    assert violations("tap", used, CPP_LAYERS) == ["sample", "sched"]
