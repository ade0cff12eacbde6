"""What only one file may know stays in that file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
CPP = ROOT / "cpp"

# What is known (a regular expression), and the only files under cpp/ that may know it.
KNOWLEDGE = {
    # Others may take one as an argument.
    "how a numpy array is made": (r"\bndarray<\s*nb::numpy\b", {"bind/bind_rows.cpp"}),
    "names of llama.cpp's graph": (
        r"\b(kq_soft_max|kqv_out|kq_scaled|cache_k_l)\b",
        {"tap/graph.cpp", "tap/graph.h"},
    ),
    "internal headers of llama.cpp": (
        r'#\s*include\s+[<"](llama-(?!cpp)\w[^>"]*|ggml-impl\.h|ggml-backend-impl\.h)[>"]',
        {
            "llama/context.cpp",
            "llama/memory_plan.cpp",
            "llama/model.cpp",
            "llama/sequence_state.cpp",
        },
    ),
    "llama.cpp's RPC client": (
        r"#\s*include\s+<(transport|ggml-rpc)\.h>",
        {"llama/rpc_transport.cpp", "llama/rpc_devices.cpp"},
    ),
    "Python": (r'#\s*include\s+[<"](Python\.h|nanobind/[^>"]*)[>"]', None),
}


def code_of(path: Path) -> str:
    """The file without its comments: naming a thing in prose is not knowing it."""
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8"))


def files_that_know(pattern: str) -> set[str]:
    files = (path for path in CPP.rglob("*") if path.suffix in (".h", ".cpp"))
    return {str(p.relative_to(CPP)) for p in files if re.search(pattern, code_of(p))}


@pytest.mark.parametrize("what", KNOWLEDGE)
def test_knowledge_stays_in_its_file(what: str):
    pattern, allowed = KNOWLEDGE[what]
    found = files_that_know(pattern)
    assert found, f"nothing knows {what}: the pattern of this test is out of date"
    if allowed is None:
        allowed = {name for name in found if name.startswith("bind/")}
    assert found <= allowed


def test_module_cpp_only_calls_the_parts_in_order():
    body = re.search(r"NB_MODULE\(.*?\{(.*)\}", code_of(CPP / "bind" / "module.cpp"), re.DOTALL)
    assert body
    statements = [line.strip() for line in body[1].splitlines() if line.strip()]
    calls = [line for line in statements if re.fullmatch(r"bind_\w+\(module\);", line)]
    setup = re.compile(
        r"using namespace |if \(is_bound_before\(module\)\) return;|module\.doc\(\) = |"
        r"nb::set_leak_warnings\("
    )
    assert len(calls) >= 5
    assert [line for line in statements if line not in calls and not setup.match(line)] == []
