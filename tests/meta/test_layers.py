"""Includes and imports point one way, so that a part can be read without what is built on it.

C++ has layers: a file includes those below its own, and parts of one layer do not know each other.
Python has rings around a core: a ring imports inwards only. No module imports itself by way of
others, not even for types alone.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full

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
# Rings that the server uses.
SERVED = {"chat", "demo", "edits", "guards", "heads", "mods", "rpc", "state", "trace"}
# Rings around the core, which is every other module. A ring imports the core, itself and what it
# names here.
PYTHON_RINGS: dict[str, set[str]] = {
    "state": set(),
    "chat": set(),
    "rpc": set(),
    "demo": set(),
    "trace": set(),
    "mods": {"trace"},
    "saved": set(),
    "viz": set(),
    "bench": set(),
    "convert": set(),
    "corpora": {"saved"},
    "edits": set(),
    "heads": set(),
    "guards": {"heads", "mods"},
    "integrations": set(),
    "server": SERVED,
    # What the server loads, ray.serve and ingest load.
    "ray": {"corpora", "saved", "server"} | SERVED,
    "ingest": {"server"} | SERVED,
    "cli": {"viz", "saved", "bench", "convert", "corpora", "server", "ingest"} | SERVED,
    "__main__": {"cli"},
}
# The rings that the core uses, each through one or two doors, and all of the core that they know.
INNER_RINGS = {
    "state": {"engine", "slot"},
    "chat": {"conversation", "engine", "engine_options", "many"},
    "rpc": {"engine_options"},
    "demo": {"engine"},
    "trace": {"engine", "generation", "submission", "kqview"},
    "mods": {"engine", "generation", "submission", "conversation", "kqview"},
}
# What `kqview.NAME` loads at its first use; importing the package does not.
LOADED_WHEN_USED = {"kqview": {"saved", "viz", "corpora", "ray", "edits", "heads", "guards"}}
KNOWN_TO_INNER_RINGS = {
    "arguments", "confined", "constraint_child", "durable", "errors", "extras", "json_input",
    "types", "machine", "stop_strings", "edit", "system", "_core",
}  # fmt: skip


def violations(part: str, used: set[str], layers: tuple[set[str], ...]) -> list[str]:
    """Name each of *used* that *part* may not see."""
    rank = {name: i for i, layer in enumerate(layers) for name in layer}
    unknown = sorted({part, *used} - rank.keys())
    assert not unknown, f"{unknown} is in no layer; add it to the layers of this test"
    return sorted(name for name in used if name != part and rank[name] >= rank[part])


def python_violations(part: str, used: set[str]) -> list[str]:
    """Name each of *used* that *part*, a ring or a module of the core, may not import."""
    allowed = PYTHON_RINGS.get(part, {ring for ring, doors in INNER_RINGS.items() if part in doors})
    return sorted(
        name
        for name in used - allowed - {part} - LOADED_WHEN_USED.get(part, set())
        if name in PYTHON_RINGS or (part in INNER_RINGS and name not in KNOWN_TO_INNER_RINGS)
    )


def included_parts(part: str, text: str) -> set[str]:
    quoted = re.findall(r'^\s*#\s*include\s+"([^"]+)"', text, re.MULTILINE)
    return {name.partition("/")[0] if "/" in name else part for name in quoted} - {part}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Each (module, name taken from it or "") that a file imports, for types too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: imports are written in full"
            yield from ((str(node.module), alias.name) for alias in node.names)


def imported_parts(path: Path) -> set[str]:
    """Parts of kqview that a file imports; names of the package itself count as "kqview"."""
    submodules = {p.stem for p in PACKAGE.iterdir() if p.suffix in (".py", ".pyi") or p.is_dir()}
    parts: set[str] = set()
    for module, taken in imported(path):
        head, _, rest = f"{module}.{taken}".partition(".")
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


NO_CODE = re.compile(r'//[^\n]*|^ *#[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.MULTILINE)


def private_functions(text: str) -> dict[str, int]:
    """Count them for each class of C++; those of a class within it are its own."""
    text, found = NO_CODE.sub("", text), dict[str, int]()
    while block := re.search(r"([^;{}]*)\{([^{}]*)\}", text):  # the innermost first
        if kind := re.search(r"(?<!enum )\b(class|struct)\s+(\w+)[^()]*$", block[1]):
            default = "private:" if kind[1] == "class" else "public:"
            parts = re.split(r"\b(public|protected|private)\s*:", default + block[2])
            private = ";".join(
                parts[i + 1] for i in range(1, len(parts), 2) if parts[i] == "private"
            )
            while private != (private := re.sub(r"<[^<>;]*>", "", private)):
                pass
            functions = re.findall(r"(?:^|;)(?!\s*(?:using|friend)\b)[^=(;]*\w\s*\(", private)
            found[kind[2]] = len(functions)
        text = f"{text[: block.start()]}{block[1]};{text[block.end() :]}"
    return found


def test_private_functions_of_a_class_fit_in_a_head():
    own = (
        "class a { void b(); struct c { int d() { return 1; } }; public: int e(); private: a(); };"
    )
    assert private_functions(own) == {"a": 2, "c": 0}
    counts = [private_functions(path.read_text(encoding="utf-8")) for path in CPP_FILES]
    assert {name: n for of_file in counts for name, n in of_file.items() if n > 15} == {}


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_python_file_imports_only_inwards(path: Path):
    assert python_violations(part_of(path), imported_parts(path)) == []


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_imports_itself_by_way_of_others():
    files = {module_of(path): path for path in (*PYTHON_FILES, *PACKAGE.rglob("*.pyi"))}
    graph = {
        name: {
            inner if (inner := f"{module}.{taken}") in files else module
            for module, taken in imported(path)
        }
        - {name}
        for name, path in files.items()
    }
    TopologicalSorter(graph).prepare()


# What is known (a regular expression), and the only files or folders of cpp/ that may know it.
KNOWLEDGE = {
    "how a numpy array is made": (r"\bndarray<\s*nb::numpy\b", ("bind/bind_rows.cpp",)),
    "names of llama.cpp's graph": (
        r"\b(kq_soft_max|kqv_out|kq_scaled|cache_k_l)\b",
        ("tap/graph.",),
    ),
    "internal headers of llama.cpp": (
        r'#\s*include\s+[<"](llama-(?!cpp)\w[^>"]*|ggml-impl\.h|ggml-backend-impl\.h)[>"]',
        ("llama/", "tap/device/cuda/"),  # the driver's event behind one of ggml's
    ),
    "llama.cpp's RPC client": (r"#\s*include\s+<(transport|ggml-rpc)\.h>", ("llama/rpc_",)),
    "Python": (r'#\s*include\s+[<"](Python\.h|nanobind/[^>"]*)[>"]', ("bind/",)),
}  # fmt: skip


@pytest.mark.parametrize("what", KNOWLEDGE)
def test_knowledge_stays_where_it_belongs(what: str):
    pattern, places = KNOWLEDGE[what]
    texts = {str(path.relative_to(CPP)): path.read_text(encoding="utf-8") for path in CPP_FILES}
    found = [name for name, text in texts.items() if re.search(pattern, re.sub("//.*", "", text))]
    assert found, f"nothing knows {what}: the pattern of this test is out of date"
    assert [name for name in found if not name.startswith(places)] == []


@pytest.mark.parametrize("ring", ["kqview", *(f"kqview.{ring}" for ring in PYTHON_RINGS)])
def test_ring_is_importable_alone_and_loads_no_ring_but_its_own(ring: str):
    code = f"import sys, {ring}; print(*(name for name in sys.modules if name[:6] == 'kqview'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[1] for name in done.stdout.split() if "." in name}
    name = ring.removeprefix("kqview").removeprefix(".")
    allowed = PYTHON_RINGS.get(name, set()) | INNER_RINGS.keys() | {name}
    assert (loaded & PYTHON_RINGS.keys()) - allowed == set()


def test_file_that_knows_what_lies_outwards_or_sideways_is_found(tmp_path: Path):
    path = tmp_path / "files.py"
    path.write_text(
        "from kqview import Engine\nfrom kqview.errors import StateError\n"
        "from kqview.slot import Slot\nimport kqview.cli.main\n"
    )
    used = imported_parts(path)
    assert used == {"kqview", "errors", "slot", "cli"}
    assert python_violations("state", used) == ["cli", "kqview", "slot"]
    assert python_violations("__main__", used) == []
    text = (
        '#include <vector>\n#include "sample/params.h"\n#include "sched/step.h"\n#include "own.h"\n'
    )
    assert violations("tap", included_parts("tap", text), CPP_LAYERS) == ["sample", "sched"]
