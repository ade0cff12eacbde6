"""Run a command of README.md as it stands: readme.py install|test CLONE HOME. Exits as it does.

``install`` is the page's first command, which installs and runs the demo, in a fresh clone of the
last commit, with an empty HOME and no environment but PATH, CC, CXX, PIP_LOG and PIP_COMPILE, so
that nothing which was installed, compiled or downloaded before can help. ``test`` is the second, in
that clone, as for a reader who goes on, but with a virtual environment of its own, and with SIGINT
ignored, as behind a shell's "&". Both folders stay: what comes next may take the clone, its build
and the downloaded source.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def commands() -> list[str]:
    """The lines of the page's first block of shell commands."""
    block = re.search(r"^```sh\n(.*?)^```$", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    assert block is not None, "README.md has no block of shell commands"
    return [line for line in block[1].splitlines() if not line.startswith("#")]


def main(which: str, clone: Path, home: Path) -> int:
    """Run what the page says."""
    command = dict(zip(("install", "test"), commands(), strict=True))[which]
    if which == "install":
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        home.mkdir()
    shutil.rmtree(clone / ".venv", ignore_errors=True)
    passed = ("PATH", "CC", "CXX", "PIP_LOG", "PIP_COMPILE")
    kept = {name: os.environ[name] for name in passed if name in os.environ}
    print(f"$ {command}", flush=True)
    began_s = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", f"trap '' INT; {command}" if which == "test" else command],
        cwd=clone, env={**kept, "HOME": str(home)}, check=False,
    )  # fmt: skip
    print(f"exit status {done.returncode}, {time.monotonic() - began_s:.0f} s", flush=True)
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], *map(Path, sys.argv[2:])))
