"""What GGML_CUDA=ON finds and says, with a made-up nvcc: no toolkit, GPU or download is needed.

The made-up compiler says its release and takes or refuses what a test tells it to; cuBLAS is a
header of two lines and empty libraries. The real thing is built by hand, see vendor/README.md.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cuda_find.cmake")
CMAKE = shutil.which("cmake")
pytestmark = [pytest.mark.full, pytest.mark.needs("build tools")]

NVCC = r"""#!/bin/sh
case "$*" in
    *--version*) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
    *--dryrun*) echo "#$ TOP={root}" >&2 ;;
    *"-ccbin "*"{taken}"*) {warning} ;;
    *) echo "probe.cu: In file included from"
       echo "host_config.h:137: error: #error gcc versions later than 15 are not supported!" >&2
       exit 1 ;;
esac
"""


@dataclass
class Machine:
    """A folder that stands for a machine: toolkit, wheels, C++ compilers."""

    root: Path
    defines: dict[str, str] = field(default_factory=dict[str, str])

    def add_nvcc(self, version: str = "13.0", *, taken: str = "", warning: str = ":") -> Path:
        """Write nvcc of that release, which compiles with C++ compilers of that name alone."""
        toolkit = self.root / "toolkit"
        nvcc = toolkit / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(NVCC.format(version=version, root=toolkit, taken=taken, warning=warning))
        nvcc.chmod(0o755)
        return nvcc

    def add_cublas(self, folder: str, version: str = "13.1", *, soname: str | None = None) -> Path:
        """Write cuBLAS below *folder*; *soname* is the number that its library has."""
        major, minor = version.split(".")
        where = self.root / folder
        (where / "include").mkdir(parents=True)
        (where / "lib").mkdir()
        text = f"#define CUBLAS_VER_MAJOR {major}\n#define CUBLAS_VER_MINOR {minor}\n"
        (where / "include" / "cublas_api.h").write_text(text)
        for name in ("cublas", "cublasLt"):
            (where / "lib" / f"lib{name}.so.{soname or major}").touch()
        return where

    def add_compiler(self, name: str) -> Path:
        """Write a C++ compiler, on the PATH."""
        path = self.root / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    def find(self, *, is_native: bool = False) -> tuple[dict[str, str], str]:
        """What was found, and the text of the refusal ("" without one), on one line."""
        defines = {
            "CMAKE_CXX_COMPILER": self.root / "c++",
            "IS_NATIVE": "ON" if is_native else "OFF",
            "WORK_DIR": self.root / "work",
            "KQVIEW_SYSTEM_ROOT": self.root / "usr",
            "Python_EXECUTABLE": sys.executable,
            "KQVIEW_NVIDIA_DIR": self.root / "nvidia",
            **self.defines,
        }
        (self.root / "nvidia").mkdir(exist_ok=True)
        assert CMAKE is not None
        done = subprocess.run(
            [CMAKE, *(f"-D{name}={value}" for name, value in defines.items()), "-P", str(SCRIPT)],
            env={"PATH": str(self.root / "bin"), "HOME": os.environ.get("HOME", "/")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            return {}, " ".join(done.stderr.split())
        lines = (line.partition("=") for line in done.stderr.splitlines())
        return {name: value for name, sign, value in lines if sign}, ""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Without a toolkit, and with one C++ compiler, "c++"."""
    return Machine(tmp_path)


def use(machine: Machine, nvcc: Path) -> None:
    machine.defines["CMAKE_CUDA_COMPILER"] = str(nvcc)


def test_toolkit_with_cublas_is_taken_from_its_folder(machine: Machine):
    use(machine, machine.add_nvcc("12.6"))
    machine.add_cublas("toolkit", "12.6")
    machine.add_cublas("nvidia/cublas", "12.8")
    found, refusal = machine.find()
    assert refusal == ""
    assert found["CUDA_VERSION"] == "12.6"
    assert found["CUDA_ROOT"] == str(machine.root / "toolkit")
    assert found["CUBLAS_SOURCE"] == "toolkit"
    assert found["CUBLAS_LIBRARY"] == str(machine.root / "toolkit" / "lib" / "libcublas.so.12")
    assert found["CUDA_HOST_COMPILER"] == str(machine.root / "c++")


@pytest.mark.parametrize(("version", "part"), [("13.0", "cu13"), ("12.4", "cublas")])
def test_cublas_of_the_wheels_is_taken_where_the_toolkit_has_none(
    machine: Machine, version: str, part: str
):
    use(machine, machine.add_nvcc(version))
    wheels = machine.add_cublas(f"nvidia/{part}", version)
    found, refusal = machine.find()
    assert refusal == ""
    assert found["CUBLAS_SOURCE"] == "wheels"
    assert found["CUBLAS_INCLUDE_DIR"] == str(wheels / "include")
    assert found["CUBLAS_VERSION"] == version


def test_nvcc_is_found_on_the_path_and_through_cuda_home(machine: Machine):
    nvcc = machine.add_nvcc()
    machine.add_cublas("toolkit")
    machine.add_compiler("nvcc").unlink()
    (machine.root / "bin" / "nvcc").symlink_to(nvcc)
    found, refusal = machine.find()
    assert refusal == ""
    assert found["NVCC"] == str(machine.root / "bin" / "nvcc")
    assert found["CUDA_ROOT"] == str(machine.root / "toolkit")


def test_wheels_of_the_building_interpreter_are_looked_at(machine: Machine):
    use(machine, machine.add_nvcc())
    machine.defines["KQVIEW_NVIDIA_DIR"] = ""
    wheels = machine.add_cublas("site/nvidia/cu13")
    python = machine.add_compiler("python")
    python.write_text(f"#!/bin/sh\nprintf '%s' '/nowhere/nvidia;{machine.root}/site/nvidia'\n")
    machine.defines["Python_EXECUTABLE"] = str(python)
    found, refusal = machine.find()
    assert refusal == ""
    assert found["CUBLAS_INCLUDE_DIR"] == str(wheels / "include")


def test_missing_toolkit_says_how_to_name_one(machine: Machine):
    _, refusal = machine.find()
    assert "no CUDA toolkit" in refusal
    assert "-C cmake.define.CMAKE_CUDA_COMPILER=/path/to/nvcc" in refusal


def test_nvcc_that_does_not_run_is_refused_with_its_words(machine: Machine):
    nvcc = machine.add_compiler("broken")
    nvcc.write_text("#!/bin/sh\necho 'no such library: libnvvm' >&2\nexit 3\n")
    use(machine, nvcc)
    _, refusal = machine.find()
    assert "says no CUDA release (status 3): no such library: libnvvm" in refusal


def test_missing_cublas_says_where_it_looked_and_which_wheel_has_it(machine: Machine):
    use(machine, machine.add_nvcc("13.0"))
    _, refusal = machine.find()
    assert "cuBLAS 13, with headers, is needed by nvcc 13.0" in refusal
    assert "found: nothing" in refusal
    assert "toolkit" in refusal
    assert "pip install 'nvidia-cublas==13.*'" in refusal
    assert "KQVIEW_NVIDIA_DIR=" in refusal


def test_cublas_of_another_major_version_is_named_and_refused(machine: Machine):
    use(machine, machine.add_nvcc("12.4"))
    machine.add_cublas("toolkit", "13.0")
    _, refusal = machine.find()
    assert "cuBLAS 12, with headers, is needed by nvcc 12.4; found: cuBLAS 13.0 in" in refusal
    assert "pip install 'nvidia-cublas-cu12'" in refusal


def test_headers_without_their_library_are_refused(machine: Machine):
    use(machine, machine.add_nvcc("13.0"))
    machine.add_cublas("toolkit", "13.0", soname="12")
    _, refusal = machine.find()
    assert "headers without libcublas.so.13" in refusal


def test_compiler_that_is_too_new_gives_way_to_the_newest_that_fits(machine: Machine):
    use(machine, machine.add_nvcc(taken="g++-13"))
    machine.add_cublas("toolkit")
    machine.add_compiler("g++-12")
    expected = machine.add_compiler("g++-13")
    found, refusal = machine.find()
    assert refusal == ""
    assert found["CUDA_HOST_COMPILER"] == str(expected)


def test_no_fitting_compiler_says_what_the_toolkit_takes(machine: Machine):
    use(machine, machine.add_nvcc(taken="g++-none"))
    machine.add_cublas("toolkit")
    _, refusal = machine.find()
    assert f"{machine.root / 'c++'}: " in refusal
    assert "gcc versions later than 15 are not supported" in refusal
    assert "CMAKE_CUDA_HOST_COMPILER=/path/to/g++" in refusal


def test_host_compiler_that_was_named_is_the_only_one_tried(machine: Machine):
    use(machine, machine.add_nvcc(taken="g++-13"))
    machine.add_cublas("toolkit")
    machine.add_compiler("g++-13")
    machine.defines["CMAKE_CUDA_HOST_COMPILER"] = "/opt/g++-16"
    _, refusal = machine.find()
    assert "/opt/g++-16: " in refusal
    assert "g++-13: " not in refusal


def test_native_without_a_gpu_asks_for_architectures(machine: Machine):
    warning = "echo \"nvcc warning : Cannot find valid GPU for '-arch=native'\" >&2"
    use(machine, machine.add_nvcc(warning=warning))
    machine.add_cublas("toolkit")
    found, refusal = machine.find(is_native=True)
    assert "no GPU on this machine" in refusal
    assert "-C cmake.define.CMAKE_CUDA_ARCHITECTURES=90" in refusal
    found, refusal = machine.find(is_native=False)
    assert refusal == ""
    assert found["CUDA_VERSION"] == "13.0"


def test_folder_of_wheels_that_is_not_there_is_refused(machine: Machine):
    use(machine, machine.add_nvcc())
    machine.defines["KQVIEW_NVIDIA_DIR"] = str(machine.root / "none")
    _, refusal = machine.find()
    assert "no such folder" in refusal
