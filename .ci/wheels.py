"""Show that a wheel installs and works: wheels.py WHEEL [--python PATH]... [--cpu MODEL]...

With each Python, in an environment of its own and without a compiler on the PATH: the wheel
installs, the first program of README.md prints what stands there, `kqview demo` and
`kqview serve --demo` run. With the first one also the tests of values and of CPU variants. Then the
program again on each emulated processor (qemu-user), which must use the variant that is meant for
it. One line a check; exits with 1 if any failed. vendor/wheels.py builds the wheel.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
# What qemu emulates -> what a process must then use. It knows no AVX-512.
CPUS = {
    "x86_64": {"Nehalem": "sse42", "SandyBridge": "sse42", "Haswell": "avx2", "max": "avx2"},
    "aarch64": {"cortex-a53": "armv8", "cortex-a76": "dotprod", "neoverse-n1": "dotprod"},
}[platform.machine()]
TESTS = ["tests/engine/test_values.py", "tests/engine/test_cpu_variant.py"]
TEST_TOOLS = ["pytest", "pytest-asyncio", "hypothesis", "gguf", "safetensors"]
INFO = "import kqview; print(kqview.system_info()['cpu_variant'])"
PORT = 18731


def readme() -> tuple[str, str]:
    """The first program of the page, and what it prints there."""
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.search(r"^```python\n(.*?)^```$.*?^```text\n(.*?)^```$", text, re.M | re.S)
    assert found is not None, "README.md has no program with its output"
    return found[1], found[2]


def pythons(wheel: Path) -> list[Path]:
    """Those of pyenv and of the PATH that the wheel is for."""
    first, abi = re.search(r"-cp3(\d+)-(\w+)-", wheel.name).groups()  # type: ignore[union-attr]
    minors = range(int(first), 16 if abi == "abi3" else int(first) + 1)
    found: list[Path] = []
    for minor in minors:
        found += sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python3"))
        path = shutil.which(f"python3.{minor}")
        found += [Path(path)] if path and ".pyenv" not in path else []
    return list({path.resolve(): path for path in found}.values())


class Checks:
    """Runs checks, says how each went, and counts those that failed."""

    def __init__(self, wheel: Path, work: Path) -> None:
        self.wheel, self.work, self.n_failed = wheel, work, 0
        # Programs of the system, without a compiler.
        tools = work / "tools"
        tools.mkdir()
        for name in ("sh", "uname", "env", "ldd"):
            if path := shutil.which(name):
                (tools / name).symlink_to(path)
        self.env = {"PATH": str(tools), "HOME": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.env |= {name: text for name, text in os.environ.items() if name.startswith("PIP_")}

    def run(self, *command: object, cwd: Path | None = None, timeout_s: float = 900) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run(
            list(map(str, command)), env=self.env, cwd=cwd or self.work, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
        )  # fmt: skip
        if done.returncode != 0:
            end = "\n".join(done.stdout.splitlines()[-12:])
            raise AssertionError(f"exit status {done.returncode} of {command[0]}:\n{end}")
        # What qemu says about features of a processor that it leaves out.
        lines = done.stdout.splitlines(keepends=True)
        return "".join(line for line in lines if not line.startswith("qemu-"))

    def check(self, name: str, what: Callable[[], str]) -> bool:
        """Run one check; say what it found, or how it failed."""
        began_s = time.monotonic()
        try:
            said, is_good = what(), True
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            said, is_good = str(error), False
        self.n_failed += not is_good
        took_s = time.monotonic() - began_s
        print(f"{'ok' if is_good else 'FAILED':6} {name:34} {took_s:5.1f} s  {said}", flush=True)
        return is_good

    def install(self, python: Path, venv: Path) -> str:
        """A new environment with the wheel in it."""
        subprocess.run([python, "-m", "venv", venv], check=True)
        tool = venv / "bin" / "python"
        self.run(tool, "-m", "pip", "install", "-q", f"{self.wheel}[cli,server]")
        return self.run(tool, "--version").strip()

    def program(self, *python: object) -> str:
        """README's first program prints what stands there, and says which variant ran."""
        code, output = readme()
        printed = self.run(*python, "-c", code)
        assert printed == output, f"it printed {printed!r}"
        return self.run(*python, "-c", INFO).strip()

    def demo(self, venv: Path) -> str:
        """`kqview demo`."""
        return self.run(venv / "bin" / "kqview", "demo", "--runs", "1").splitlines()[0]

    def serve(self, venv: Path) -> str:
        """`kqview serve --demo` answers."""
        server = subprocess.Popen(
            [venv / "bin" / "kqview", "serve", "--demo", "--port", str(PORT)], env=self.env,
            cwd=self.work, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            deadline_s = time.monotonic() + 60
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health") as answer:
                        return answer.read().decode()
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline_s:
                        server.kill()
                        raise AssertionError(server.communicate()[1][-500:]) from None
                    time.sleep(0.2)
        finally:
            server.terminate()
            server.wait(30)

    def tests(self, venv: Path) -> str:
        """The tests of values and of variants, with the installed package."""
        python = venv / "bin" / "python"
        self.run(python, "-m", "pip", "install", "-q", *TEST_TOOLS)
        command = (python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
        return self.run(*command, cwd=ROOT, timeout_s=3000).splitlines()[-1]

    def emulated(self, venv: Path, cpu: str) -> str:
        """The program on another processor."""
        qemu = shutil.which(f"qemu-{platform.machine()}")
        assert qemu is not None, "apt-get install qemu-user"
        used = self.program(qemu, "-cpu", cpu, venv / "bin" / "python", "-W", "ignore")
        wanted = CPUS.get(cpu, used)
        assert used == wanted, f"it uses {used}, not {wanted}"
        return used


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", type=Path, action="append", help="instead of all there are")
    parser.add_argument("--cpu", action="append", help="a model of qemu, instead of those known")
    parser.add_argument("--no-tests", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(arguments.wheel.resolve(), Path(folder))
        venvs: list[Path] = []
        for python in arguments.python or pythons(arguments.wheel):
            name, venv = python.parents[1].name, Path(folder, f"venv-{len(venvs)}")
            if not checks.check(f"{name}: install", lambda p=python, v=venv: checks.install(p, v)):
                continue
            venvs.append(venv)
            python = venv / "bin" / "python"
            checks.check(f"{name}: README's program", lambda p=python: checks.program(p))
            checks.check(f"{name}: kqview demo", lambda v=venv: checks.demo(v))
            checks.check(f"{name}: kqview serve --demo", lambda v=venv: checks.serve(v))
        for venv in venvs[:1]:
            if not arguments.no_tests:
                checks.check("tests", lambda v=venv: checks.tests(v))
            for cpu in arguments.cpu or CPUS:
                checks.check(f"emulated {cpu}", lambda v=venv, c=cpu: checks.emulated(v, c))
        if not venvs:
            print("the wheel installs with no Python here")
        return checks.n_failed > 0 or not venvs


if __name__ == "__main__":
    sys.exit(main())
