"""Run the tests of packages that are too large for the extra ``test``: ``python -m tests.clients``.

Each line of requirements.txt gets an environment of its own, because these packages pin different
versions of ``openai``; what runs this module is seen in it too. `--only WORD` takes the lines with
that word, `--keep FOLDER` keeps the environments there for the next time. The exit status is 0 when
every test passed.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from importlib import metadata
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
MAKES_WITHIN_S = 1800
RUNS_WITHIN_S = 600


def lines() -> list[str]:
    """The environments: packages of each."""
    text = (FOLDER / "requirements.txt").read_text("utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def name_of(requirement: str) -> str:
    """The package that a requirement, or the first one of a line, asks for."""
    return re.split(r"[\[=<>~ ]", requirement, maxsplit=1)[0]


def make(folder: Path, packages: list[str]) -> Path:
    """An environment in *folder* with *packages*, and behind them what this one has."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    ours = "".join(f"import site; site.addsitedir({path!r})\n" for path in sorted(here))
    base = {"base": str(folder), "platbase": str(folder)}
    Path(sysconfig.get_path("purelib", vars=base), "zz-ours.pth").write_text(ours)
    command = [python, "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(command, check=True, timeout=MAKES_WITHIN_S)
    return python


def run(line: str, folder: Path) -> bool:
    """Run the tests with the packages of one line; True when they passed."""
    python = folder / "bin" / "python"
    packages = line.split()
    if not python.exists():
        make(folder, packages)
    site = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    found = {one.name.lower(): one.version for one in metadata.distributions(path=[site])}
    named = sorted({name_of(one) for one in packages} | {"anthropic", "openai"})
    print("==", *(f"{name} {found[name]}" for name in named if name in found), flush=True)
    # Warnings of these packages are not ours.
    command = [python, "-m", "pytest", "-q", "-W", "default", "-p", "no:cacheprovider", FOLDER]
    return subprocess.run(command, cwd=ROOT, check=False, timeout=RUNS_WITHIN_S).returncode == 0


def main() -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="only the lines with this word")
    parser.add_argument("--keep", type=Path, help="folder for the environments")
    args = parser.parse_args()
    wanted = [line for line in lines() if args.only in line]
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        passed = [run(line, folder / name_of(line)) for line in wanted]
    return 0 if passed and all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
