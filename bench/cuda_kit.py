"""What travels to a machine without a network, and what that machine lacks; cuda.sh calls it.

python bench/cuda_kit.py requirements       of the package, its build and what cuda.sh runs
python bench/cuda_kit.py weigh KIT          sizes of the kit and of the checkout; do they fit?
python bench/cuda_kit.py missing            which requirements this Python and this PATH do not meet
python bench/cuda_kit.py sources PATH...    the hash of each source file, to be kept beside a build
python bench/cuda_kit.py compare FILE       are the sources those that FILE lists?

Exit status 1: no, with a line on stderr that says why. Standard library only, and `packaging`,
which is one of the requirements.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("cli", "chat", "constraints", "save")
# Of the extra `test`. Tests that need one of its other packages are skipped without it.
OF_TEST = ("pytest", "pytest-asyncio", "hypothesis", "gguf")
# pip's wheels of them are one way to get them; what a build needs is the program.
PROGRAMS = {"cmake": "cmake>=3.26", "ninja": "ninja"}
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
        KitError: The extra `test` does not name a package that this file takes from it.
    """
    content = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = content["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    of_test = {name_of(one): one for one in extras["test"]}
    if unknown := [name for name in OF_TEST if name not in of_test]:
        raise KitError(
            f"the extra 'test' of pyproject.toml names no {', '.join(unknown)}; "
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


def weigh(kit: Path, limit_bytes: int, root: Path = ROOT) -> str:
    """The sizes of what travels, as text; with *limit_bytes* 0 any size is fine.

    Raises:
        KitError: It is more than *limit_bytes*.
    """
    of_kit = file_sizes(kit)
    of_checkout = checkout_sizes(root)
    every = of_checkout | of_kit
    total = sum(every.values())
    sizes = (
        f"{_mb(total)}: {_mb(sum(of_kit.values()))} in {kit.name}, "
        f"{_mb(total - sum(of_kit.values()))} in the checkout"
    )
    if not limit_bytes:
        return sizes
    limit = f"{_mb(limit_bytes)} ({limit_bytes // MIB} MiB)"
    if total <= limit_bytes:
        return f"{sizes}; {limit} may travel"
    largest = sorted(every, key=lambda path: -every[path])[:N_LARGEST]
    names = ", ".join(f"{path.name} {_mb(every[path])}" for path in largest)
    raise KitError(
        f"{sizes}; {limit} may travel. The largest files: {names}. Leave out packages that the "
        "other machine has (--without), or say how much may travel (--fit MIB)"
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


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("requirements")
    weighing = commands.add_parser("weigh")
    weighing.add_argument("kit", type=Path)
    weighing.add_argument("--fit", type=int, default=64, metavar="MIB", help="0: any size")
    commands.add_parser("missing")
    listing = commands.add_parser("sources")
    listing.add_argument("path", nargs="+")
    comparing = commands.add_parser("compare")
    comparing.add_argument("file", type=Path)
    args = parser.parse_args()
    try:
        match args.command:
            case "requirements":
                print(*requirements(), sep="\n")
            case "weigh":
                print(weigh(args.kit, args.fit * MIB))
            case "missing":
                if lacking := missing(requirements()):
                    raise KitError(
                        f"missing here: {', '.join(lacking)}. Install them, or put them into the "
                        "kit: bench/cuda.sh prepare --without with fewer names"
                    )
                print("every package and program is here")
            case "sources":
                print(" ".join(args.path), *sources(args.path), sep="\n")
            case _:
                compare(args.file)
    except KitError as error:
        print(f"kit: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
