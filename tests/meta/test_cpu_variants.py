"""vendor/cpu_variants.py: levels in one program share no code, and the table chooses between them.

Two levels of one small source stand for those of the kernels. An inline function that differs
between them, and between them and the rest, shows whether the linker took one for all.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "vendor" / "cpu_variants.py"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        shutil.which("g++") is None or platform.system() != "Linux", reason="needs g++ and Linux"
    ),
]

# Compiled without inlining, so that each object has a copy of which() for the linker to merge.
HEADER = "#pragma once\ninline int which() { return LEVEL; }\nint answer();\nint unused();\n"
KERNEL = '#include "which.h"\nint answer() { return which(); }\nint unused() { return which(); }\n'
MAIN = r"""
#include <cstdio>
#include <cstring>
#include "which.h"
using function = void (*)();
struct level { const char* name; int (*is_supported)(); const function* functions; };
extern "C" {
extern function kqview_cpu_functions[];
extern const int kqview_n_cpu_functions, kqview_n_cpu_levels;
extern const level kqview_cpu_levels[];
}
int main() {
    std::printf("%d %d", answer(), which());
    for (int i = 0; i < kqview_n_cpu_levels; ++i) {
        const auto& one = kqview_cpu_levels[i];
        std::memcpy(kqview_cpu_functions, one.functions, sizeof(function) * kqview_n_cpu_functions);
        std::printf(" %s:%d:%d:%d", one.name, one.is_supported(), answer(), which());
    }
    std::printf(" of %d\n", kqview_n_cpu_functions);
}
"""


def compile_to(target: Path, source: Path, level: int) -> None:
    subprocess.run(
        ["g++", "-O1", "-fno-inline", "-fPIC", f"-DLEVEL={level}", "-c", source, "-o", target],
        check=True,
    )


def join(folder: Path, extra: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script on two levels of the kernel, in *folder*."""
    sources = {"which.h": HEADER, "kernel.cpp": KERNEL + extra, "main.cpp": MAIN}
    for name, text in sources.items():
        (folder / name).write_text(text)
    compile_to(folder / "main.o", folder / "main.cpp", 0)
    (folder / "outside.txt").write_text(f"{folder / 'main.o'}\n")
    for level in (1, 2):
        compile_to(folder / f"{level}.o", folder / "kernel.cpp", level)
        (folder / f"{level}.txt").write_text(f"{folder / f'{level}.o'}\n")
    levels = [f"low|1|{folder / '1.txt'}", f"high|0|{folder / '2.txt'}"]
    arguments = [folder / "out", platform.machine(), "ld", "nm", "objcopy", folder / "outside.txt"]
    return subprocess.run(
        [sys.executable, SCRIPT, *arguments, *levels], check=False, text=True, capture_output=True
    )


def test_each_level_keeps_its_own_code_and_the_table_chooses(tmp_path: Path):
    done = join(tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    # The levels first: a linker takes the first copy of an inline function that it sees.
    objects = [out / "high.o", out / "low.o", tmp_path / "main.o"]
    program = tmp_path / "program"
    subprocess.run(["gcc", "-c", out / "cpu_variants.c", "-o", out / "table.o"], check=True)
    subprocess.run(["g++", *objects, out / "table.o", "-o", program], check=True)
    printed = subprocess.run([program], check=True, text=True, capture_output=True).stdout
    # Before a choice the lowest; which() of the rest is always its own; unused() is no entry.
    assert printed == "1 0 low:1:1:0 high:0:2:0 of 1\n"


def test_level_that_runs_code_when_it_is_loaded_is_refused(tmp_path: Path):
    done = join(tmp_path, "int now = which();\n")
    assert done.returncode != 0
    assert "low.o" in done.stderr
    assert "constructed before main" in done.stderr
