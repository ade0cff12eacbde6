"""What the repository and a built wheel carry; .ci/run builds one and names it in KQVIEW_WHEEL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_BYTES_MAX = 5 * 2**20
# What a person downloads; the demo model is up to 4 MB of it. A release has code for each level of
# the processor.
N_BYTES_MAX, N_RELEASE_BYTES_MAX = 8 * 2**20, 20 * 10**6
NEEDED = {
    "kqview/py.typed",
    "kqview/_core.pyi",
    "kqview/engine.py",
    "kqview/coloured/view.css",
    "kqview/coloured/view.js",
    "kqview/demo/__init__.py",
    "kqview/demo/model.gguf",
    "kqview/licenses/LICENSE.llama.cpp",
    "kqview/licenses/LICENSE.llamafile",
    "kqview/licenses/LICENSE.nanobind",
    "kqview/licenses/LICENSE.robin_map",
}


def test_repository_has_no_file_above_five_mebibytes():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout, or no git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    files = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    assert len(files) > 100
    large = [str(p) for p in files if p.is_file() and p.stat().st_size > FILE_BYTES_MAX]
    assert large == []


def test_extras_of_gpus_ask_for_their_package_in_this_very_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = [
        tomllib.loads(path.read_text("utf-8"))["project"]["name"]
        for path in ROOT.glob("vendor/backends/*/pyproject.toml")
    ]
    asked = [one for name in ("cuda", "vulkan") for one in project["optional-dependencies"][name]]
    assert sorted(asked) == sorted(f"{name}=={project['version']}" for name in names)


@pytest.mark.needs("build tools")
def test_free_threaded_python_is_refused_before_anything_is_built(tmp_path: Path):
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (packages / "free.pth").write_text(
        "import sysconfig; sysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n"
    )
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path / "build", "-G", "Ninja",
         "-DSKBUILD_PROJECT_NAME=kqview", "-DSKBUILD_PROJECT_VERSION=0",
         f"-DPython_EXECUTABLE={tmp_path / 'venv/bin/python'}"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    said = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert "is a free-threaded Python; install with one that has" in said
    assert said.count("CMake Error") == 1


@pytest.fixture(scope="module")
def wheel() -> Path:
    return Path(os.environ["KQVIEW_WHEEL"])


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_wheel_carries_module_model_stub_and_licences(wheel: Path):
    names = files_of(wheel)
    assert names >= NEEDED
    modules = [n for n in names if n.startswith("kqview/_core.") and not n.endswith(".pyi")]
    assert len(modules) == 1, modules
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_carries_nothing_but_the_package(wheel: Path):
    names = files_of(wheel)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"kqview"}
    demo = {name for name in names if name.startswith("kqview/demo/")}
    assert demo == {"kqview/demo/__init__.py", "kqview/demo/model.gguf"}
    code = [name for name in names if not name.startswith("kqview/licenses/")]
    assert [n for n in code if n.endswith((".a", ".h", ".cmake", ".cpp"))] == []


def test_wheel_is_small(wheel: Path):
    is_release = "-linux_" not in wheel.name
    assert wheel.stat().st_size <= (N_RELEASE_BYTES_MAX if is_release else N_BYTES_MAX)


def test_wheel_lists_what_is_linked_into_it(wheel: Path):
    (name,) = (one for one in files_of(wheel) if ".dist-info/sboms/" in one)
    with zipfile.ZipFile(wheel) as archive:
        bom = json.loads(archive.read(name))
    texts = {one for one in files_of(wheel) if one.startswith("kqview/licenses/LICENSE.")}
    lock = tomllib.loads((ROOT / "vendor" / "llama.lock.toml").read_text("utf-8"))
    parts = {part["name"]: part for part in bom["components"]}
    assert parts["llama.cpp"]["purl"] == f"pkg:github/ggml-org/llama.cpp@{lock['commit']}"
    assert texts == {f"kqview/licenses/LICENSE.{one.replace('-', '_')}" for one in parts}
    assert f"-{bom['metadata']['component']['version']}-" in wheel.name


def test_wheel_licences_have_text(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        for name in NEEDED:
            if "/licenses/" in name:
                assert "SOFTWARE IS PROVIDED" in archive.read(name).decode().upper(), name
