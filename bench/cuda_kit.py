"""What travels to a machine without a network, and what that machine lacks; cuda.sh calls it.

python bench/cuda_kit.py requirements       of the package, its build and what cuda.sh runs
python bench/cuda_kit.py weigh FOLDER...    sizes of the kit and of the checkout; do they fit?
python bench/cuda_kit.py missing            what this machine lacks: packages, programs, CUDA
python bench/cuda_kit.py sources PATH...    the hash of each source file, to be kept beside a build
python bench/cuda_kit.py compare FILE       are the sources those that FILE lists?
python bench/cuda_kit.py processor [FILE]   its instruction sets; has it those of FILE?

Exit status 1: no, with a line on stderr that says why. Standard library only, and `packaging`,
which is one of the requirements.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cli", "chat", "constraints", "save")
# Of the extras `test` and `server`. Tests that need another package of them are skipped without it.
OF_TEST = ("pytest", "pytest-asyncio", "pytest-xdist", "hypothesis", "gguf", "msgspec", "pybase64")
# pip's wheels of them are one way to get them; what a build needs is the program.
PROGRAMS = {"cmake": "cmake>=3.26", "ninja": "ninja"}
CXX_NAMES = ("c++", "g++", "clang++")
# Beginnings of the flags of an x86 processor that stand for instructions of compiled code.
X86_INSTRUCTIONS = (
    "abm", "amx", "avx", "bmi", "f16c", "fma", "gfni", "movbe", "popcnt", "sse", "ssse", "vaes",
)  # fmt: skip
MIB = 2**20
N_LARGEST = 4


class KitError(Exception):
    """Something does not fit or is not there; the message is one line."""


def name_of(requirement: str) -> str:
    """The package that *requirement* names, as pip compares names."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", match[0] if match else "").lower()


def requirements(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """What the package, its build and the parts of cuda.sh need, as pip reads it.

    Raises:
        KitError: No extra names a package that this file takes from them.
    """
    content = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = content["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    of_test = {name_of(one): one for extra in ("test", "server") for one in extras[extra]}
    if unknown := [name for name in OF_TEST if name not in of_test]:
        raise KitError(
            f"the extras 'test' and 'server' of pyproject.toml name no {', '.join(unknown)}; "
            "correct OF_TEST in bench/cuda_kit.py"
        )
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in extras[extra])]
    wanted += [of_test[name] for name in OF_TEST]
    wanted += content["build-system"]["requires"]
    wanted = [one for one in wanted if name_of(one) not in ("kqview", "pip")]
    return list(dict.fromkeys([*wanted, *PROGRAMS.values()]))


# ---- what travels


def file_sizes(folder: Path) -> dict[Path, int]:
    """Bytes of every file below *folder*."""
    return {path: path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()}


def checkout_sizes(root: Path) -> dict[Path, int]:
    """Bytes of what a copy of the checkout holds: all but what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, check=True,
    )  # fmt: skip
    paths = {root / name for name in listed.stdout.decode().split("\0") if name}
    return {path: path.lstat().st_size for path in paths if path.exists()}


def weigh(folders: Sequence[Path], limit_bytes: int, root: Path = ROOT) -> str:
    """The sizes of the checkout and *folders*, as text; with *limit_bytes* 0 any size is fine.

    Raises:
        KitError: It is more than *limit_bytes*.
    """
    every = checkout_sizes(root)
    for folder in folders:
        every |= file_sizes(folder)
    total = sum(every.values())
    of_folders = [sum(file_sizes(folder).values()) for folder in folders]
    parts = [
        f"{_mb(size)} in {folder.name}" for folder, size in zip(folders, of_folders, strict=True)
    ]
    sizes = f"{_mb(total)}: {', '.join(parts)}, {_mb(total - sum(of_folders))} in the checkout"
    if not limit_bytes:
        return sizes
    limit = f"{_mb(limit_bytes)} ({limit_bytes // MIB} MiB)"
    if total <= limit_bytes:
        return f"{sizes}; {limit} may travel"
    largest = sorted(every, key=lambda path: -every[path])[:N_LARGEST]
    names = ", ".join(f"{path.name} {_mb(every[path])}" for path in largest)
    raise KitError(
        f"{sizes}; {limit} may travel. The largest files: {names}. Leave out packages that the "
        "GPU machine has (--without) and, once everything is built, llama.cpp.tar.gz; or say how "
        "much may travel (--fit MIB)"
    )


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"


# ---- what is missing on this machine


def missing(wanted: Iterable[str]) -> list[str]:
    """Requirements that are not met here, those of what is installed included; a line for each."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return ["packaging (without it nothing else can be checked)"]
    found: list[str] = []
    seen: set[str] = set()
    queue = [(Requirement(one), "") for one in wanted]
    while queue:
        requirement, of = queue.pop(0)
        text = f"{requirement.name}{requirement.specifier}"
        if text in seen or not (requirement.marker is None or requirement.marker.evaluate()):
            continue
        seen.add(text)
        needs: list[str] = []
        if requirement.name in PROGRAMS:
            version = program_version(requirement.name)
        else:
            version, needs = _installed(requirement.name)
        if not version:
            found.append(f"{text}{of}")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{text}{of}: {version} is here")
        queue += [(Requirement(need), f" (for {requirement.name})") for need in needs]
    return found


def _installed(name: str) -> tuple[str, list[str]]:
    """Version ("" if it is not installed) and requirements, those of its extras left out."""
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return "", []
    needs = [need for need in distribution.requires or () if "extra ==" not in need]
    return distribution.version, needs


def program_version(name: str) -> str:
    """What program *name* of the PATH says of itself; "" if there is none that runs."""
    path = shutil.which(name)
    if path is None:
        return ""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    number = re.search(r"\d+(\.\d+)+", done.stdout)
    return number[0] if number and done.returncode == 0 else ""


def compiler_missing() -> list[str]:
    """What a build of the package lacks of C, C++ and Python's headers; a sentence for each."""
    found: list[str] = []
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        found.append(f"no Python.h in {include}: install the headers of this Python (python3-dev)")
    for language, names, text in (
        ("c", (os.environ.get("CC"), "cc", "gcc", "clang"), "#include <stdlib.h>\n"),
        ("c++", (os.environ.get("CXX"), *CXX_NAMES), "#include <concepts>\n"),
    ):
        if not (program := _first_program(names)):
            known = ", ".join(name for name in names if name)
            found.append(f"no {language.upper()} compiler ({known}): install gcc and g++")
            continue
        flags = ["-std=c++20"] if language == "c++" else []
        command = [program, "-fsyntax-only", *flags, "-x", language, "-"]
        if reason := _failure(command, text):
            found.append(f"{program} does not compile {language.upper()}: {reason}")
    return found


def gpu_missing() -> list[str]:
    """Whether there is a GPU with its driver; a sentence if not."""
    if not shutil.which("nvidia-smi"):
        return ["no nvidia-smi on the PATH: this machine has no NVIDIA driver, or hides it"]
    reason = _failure(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
    return [f"nvidia-smi finds no GPU: {reason}"] if reason else []


def toolkit_missing(work: Path, arch: str) -> list[str]:
    """What a build with CUDA lacks: nvcc, cuBLAS, a C++ compiler that nvcc takes, CUB.

    Runs the search of the build itself (vendor/cuda_find.cmake) in *work*, and the preprocessor.
    """
    cmake, compiler = shutil.which("cmake"), _first_program((os.environ.get("CXX"), *CXX_NAMES))
    if not cmake or not compiler:
        return []  # is missing itself
    defines = {
        "CMAKE_CXX_COMPILER": compiler, "Python_EXECUTABLE": sys.executable, "WORK_DIR": work,
        "IS_NATIVE": "OFF" if arch else "ON",
    }  # fmt: skip
    search = ROOT / "tests" / "meta" / "cuda_find.cmake"
    done = subprocess.run(
        [cmake, *(f"-D{name}={value}" for name, value in defines.items()), "-P", str(search)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        text = " ".join(done.stderr.split()).partition("(message): ")[2] or done.stderr
        return [text.partition(" Call Stack")[0].partition(" Without GGML_CUDA=ON")[0].strip()]
    values = dict(line.split("=", 1) for line in done.stderr.splitlines() if "=" in line)
    command = [values["NVCC"], "-ccbin", values["CUDA_HOST_COMPILER"], "-std=c++17", "-E"]
    probe = work / "cub.cu"
    probe.write_text("#include <cub/cub.cuh>\n", encoding="utf-8")
    if reason := _failure([*command, str(probe), "-o", os.devnull]):
        return [f"{values['NVCC']} finds no cub/cub.cuh, which is part of the toolkit: {reason}"]
    return []


def _first_program(names: Iterable[str | None]) -> str:
    return next((path for name in names if name and (path := shutil.which(name))), "")


def _failure(command: Sequence[str], text: str = "") -> str:
    """ "" if *command* succeeds, else the line of its output that says why."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    telling = [line for line in lines if re.search("error", line, re.IGNORECASE)]
    return (telling or lines or [f"exit status {done.returncode}"])[0][:300]


# ---- which sources something was built from


def sources(paths: Sequence[str], root: Path = ROOT) -> list[str]:
    """A line for each file below *paths*, with its hash; what a build leaves there is no source."""
    lines: list[str] = []
    for path in paths:
        top = root / path
        files = sorted(file for file in top.rglob("*") if file.is_file()) or [top]
        for file in files:
            if "__pycache__" in file.parts or file.suffix == ".so":
                continue
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            lines.append(f"{digest}  {file.relative_to(root)}")
    return lines


def compare(listing: Path, root: Path = ROOT) -> None:
    """Check that the sources are those of *listing*, whose first line names their paths.

    Raises:
        KitError: They are others; the message names some of the files.
    """
    first, *listed = listing.read_text(encoding="utf-8").splitlines()
    differing = set(listed) ^ set(sources(first.split(), root))
    if not differing:
        return
    names = sorted({line.partition("  ")[2] for line in differing})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    raise KitError(
        f"{listing.parent} holds a build of other sources ({', '.join(names[:3])}{more} differ); "
        f"run bench/cuda.sh build {listing.stem}, or name another folder in KQVIEW_CUDA_WORK"
    )


def _check_machine(args: argparse.Namespace) -> str:
    """What was found to be here, as text.

    Raises:
        KitError: Something is missing.
    """
    sentences: list[str] = []
    wanted = requirements()
    if args.no_build:
        wanted = [one for one in wanted if name_of(one) not in PROGRAMS]
    if packages := missing(wanted):
        sentences.append(
            f"missing here: {', '.join(packages)}; install them, or rerun bench/cuda.sh prepare "
            "without excluding them (--without)"
        )
    checked = ["packages"]
    if args.device == "gpu":
        sentences += gpu_missing()
        checked.append("GPU")
    if not args.no_build:
        sentences += compiler_missing()
        checked += ["programs", "compilers"]
        if args.device == "gpu":
            sentences += toolkit_missing(args.work, args.arch)
            checked.append("CUDA toolkit")
    if sentences:
        raise KitError("; ".join(sentences))
    return f"all here: {', '.join(checked)}"


# ---- for which processor something was built


def instruction_sets(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """What a compiler may use of this processor, without what only the kernel uses."""
    fields: dict[str, str] = {}
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value)
    features = fields.get("flags", fields.get("Features", "")).split()
    if "Features" not in fields:
        features = [one for one in features if one.startswith(X86_INSTRUCTIONS)]
    return sorted([platform.machine(), *features])


def check_processor(listing: Path, here: Iterable[str]) -> None:
    """Check that code for the processor of *listing* runs on one that has *here*.

    Raises:
        KitError: It does not; the message names what this processor lacks.
    """
    if lacking := sorted(set(listing.read_text(encoding="utf-8").split()) - set(here)):
        raise KitError(f"built for a processor that has {', '.join(lacking)}; this one has not")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("requirements")
    weighing = commands.add_parser("weigh")
    weighing.add_argument("folder", type=Path, nargs="+")
    weighing.add_argument("--fit", type=int, default=64, metavar="MIB", help="0: any size")
    lacking = commands.add_parser("missing")
    lacking.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    lacking.add_argument("--no-build", action="store_true", help="what runs, not what builds")
    lacking.add_argument("--arch", default="", help="CUDA architectures; else those of the GPU")
    lacking.add_argument("--work", type=Path, default=Path(), help="folder for small files")
    listing = commands.add_parser("sources")
    listing.add_argument("path", nargs="+")
    processor = commands.add_parser("processor")
    processor.add_argument("file", type=Path, nargs="?")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    args = parser.parse_args()
    try:
        match args.command:
            case "requirements":
                print(*requirements(), sep="\n")
            case "weigh":
                print(weigh(args.folder, args.fit * MIB))
            case "missing":
                print(_check_machine(args))
            case "sources":
                print(" ".join(args.path), *sources(args.path), sep="\n")
            case "processor" if args.file:
                check_processor(args.file, instruction_sets())
            case "processor":
                print(*instruction_sets(), sep="\n")
            case _:
                compare(args.file)
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
