"""Check that each file of cpp/ includes what it uses: includes.py [--fix].

A file that lives on what another one includes compiles until that other one, a library or a
compiler changes. Asks clang-tidy's misc-include-cleaner; a source may rely on what the header of
its own name, or of its name without the system's, includes. Needs clang-tidy, clang-format, cmake,
nanobind and the compiler of a build; builds nothing. The last line counts files and what is
missing. ``--fix`` adds it.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
# Not asked for: parts of a header that stands for them all (nanobind.h, Python.h, the system's).
# Nor does it say what is unused: it does not see what a smart pointer's target needs.
CONFIG = """{
  Checks: "-*,misc-include-cleaner",
  CheckOptions: {
    misc-include-cleaner.UnusedIncludes: false,
    misc-include-cleaner.IgnoreHeaders:
      "nanobind/.*;python3[.][0-9]+/.*;bits/.*;asm-generic/.*;sys/poll.h"
  }
}"""
_INCLUDE = re.compile(r'^#include ([<"].+[>"])', re.M)


def missing(file: Path, build: Path) -> dict[str, list[dict]]:
    """The headers that *file* wants -> what clang-tidy says, with the change that it proposes."""
    notes = build / f"{'-'.join(file.relative_to(ROOT).parts)}.yaml"
    done = subprocess.run(
        ["clang-tidy", "--quiet", "-p", build, f"--config={CONFIG}", "--extra-arg=-w",
         f"--export-fixes={notes}", file], capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"clang-tidy cannot read {file}:\n{done.stdout}{done.stderr}")
    told = yaml.safe_load(notes.read_text())["Diagnostics"] if notes.exists() else []
    header = file.with_name(file.stem.removesuffix("_unix") + ".h")
    held = _INCLUDE.findall(header.read_text()) if file.suffix == ".cpp" and header.exists() else ()
    found: dict[str, list[dict]] = defaultdict(list)
    for one in (diagnostic["DiagnosticMessage"] for diagnostic in told):
        for change in one["Replacements"]:  # none where an earlier one adds the same header
            wanted = _INCLUDE.match(change["ReplacementText"])[1]
            if wanted not in held:
                found[wanted].append({**change, "name": one["Message"].split('"')[1]})
    return found


def mend(file: Path, changes: Iterable[dict]) -> None:
    """Make the *changes* in *file*."""
    text = file.read_bytes()
    for at, new in sorted(
        {(one["Offset"], one["ReplacementText"]) for one in changes}, reverse=True
    ):
        text = text[:at] + new.encode() + text[at:]
    file.write_bytes(text)
    subprocess.run(["clang-format", "-i", file], check=True)


def main(*, fixes: bool) -> int:
    """Print what is missing; 1 if anything is."""
    # Without those that need CUDA's headers, or those of Windows.
    files = sorted(
        one
        for kind in ("h", "cpp")
        for one in ROOT.glob(f"cpp/**/*.{kind}")
        if one.parent.name != "cuda" and not one.stem.endswith("_windows")
    )
    n_missing = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        subprocess.run(
            ["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
             "-DKQVIEW_UNITY=OFF", "-DSKBUILD_PROJECT_NAME=kqview", "-DSKBUILD_PROJECT_VERSION=0",
             f"-DPython_EXECUTABLE={sys.executable}"], check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found = list(pool.map(lambda one: missing(one, Path(folder)), files))
    for file, headers in zip(files, found, strict=True):
        n_missing += len(headers)
        for header, changes in headers.items():
            names = ", ".join(one["name"] for one in changes)
            print(f"{file.relative_to(ROOT)}: #include {header} for {names}")
        if fixes and headers:
            mend(file, (one for changes in headers.values() for one in changes))
    print(f"includes: {len(files)} files, {n_missing} missing")
    return n_missing > 0


if __name__ == "__main__":
    raise SystemExit(main(fixes=sys.argv[1:] == ["--fix"]))
