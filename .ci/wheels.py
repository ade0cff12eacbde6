"""Show that a wheel installs and works: wheels.py WHEEL [--python PATH]... [--root SUITE]

With each Python, in an environment of its own and without a compiler on the PATH: the wheel
installs, the first program of README.md prints what stands there, `kqview demo` and
`kqview serve --demo` run. With the first one also the tests of values and of CPU variants, with
each variant that this processor has. Then on emulated processors (qemu-user): each must use the
variant that is meant for it and refuse one that it lacks, and one that is too old must say so.
--cpu names other models of qemu.

--root does all this in a fresh root of that Debian, which has Python and no compiler; it needs
mmdebstrap, and root for mounts. Where that Python is too old, --python FOLDER/bin/python3 names one
compiled on that Debian; FOLDER is copied into the root. A wheel for another processor is only
emulated, with the Python of such a root; one for Windows in wine, with --python FOLDER/python.exe
of Python's embeddable package for Windows. One line a check; exits with 1 if any failed.
vendor/wheels.py builds the wheel.
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
import tomllib
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = "ca-certificates,python3-venv"
VALUES = "tests/engine/test_values.py"
TESTS = ["tests/meta/test_wheel.py", VALUES, "tests/engine/test_cpu_variant.py"]
TEST_TOOLS = ["pytest", "pytest-asyncio", "hypothesis", "gguf", "safetensors"]
PORT = 18731
VARIANT = """
import kqview
try: print(kqview.system_info()["cpu_variant"])
except kqview.errors.RequestError as error: print(error)
"""
VARIANTS = "import kqview; print(*kqview.system_info()['cpu_variants'])"
# In a root, with mounts and processes that end with it.
IN_ROOT = """
root=$1 && shift && mount --rbind /dev "$root/dev" && mount -t tmpfs tmpfs "$root/dev/shm" &&
    mount -t proc proc "$root/proc" && mount -t tmpfs tmpfs "$root/tmp" &&
    exec chroot "$root" env PATH=/usr/bin:/bin HOME=/root LANG=C.UTF-8 "$@"
"""


@dataclass(frozen=True)
class Processor:
    """A kind of processor: Debian's name for it, and what qemu emulates of it."""

    debian: str
    # A model of qemu's -> the variant that a process must then use. It knows no AVX-512.
    models: dict[str, str]
    lacks: tuple[str, str]  # one of them, and a variant that it does not have
    too_old: str | None = None  # for any variant


PROCESSORS = {
    "x86_64": Processor(
        "amd64",
        {"Nehalem": "sse42", "SandyBridge": "sse42", "Haswell": "avx2", "max": "avx2"},
        ("Nehalem", "avx2"),
        "core2duo",
    ),
    "aarch64": Processor(
        "arm64",
        {
            "cortex-a53": "armv8",
            "cortex-a76": "dotprod",
            "neoverse-n1": "dotprod",
            "max": "i8mm",
        },
        ("cortex-a76", "i8mm"),
    ),
}


def processor_of(wheel: Path) -> str:
    """The kind of processor that *wheel* is for."""
    return next(name for name in PROCESSORS if wheel.stem.endswith(name))


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


def make_root(suite: str, root: Path, *options: str) -> None:
    """A root of Debian *suite*, from the mirror that apt uses here."""
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(COMPONENT) $(REPO_URI)", "Created-By: Packages"],
        check=False, text=True, stdout=subprocess.PIPE,
    ).stdout  # fmt: skip
    mirror = re.findall(r"^main (.*)$", targets, re.M)[:1]
    # A testing suite may be past its date.
    options += ("--quiet", '--aptopt=Acquire::Check-Valid-Until "false"')
    subprocess.run(["mmdebstrap", *options, suite, root, *mirror], check=True)


def in_root(suite: str, wheel: Path, python: Path | None, options: list[str]) -> int:
    """Run this program in a fresh root of Debian *suite* that has Python and no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        make_root(suite, root, "--variant=apt", f"--include={PACKAGES},qemu-user")
        for name in ("ssl/certs/ca-certificates.crt", "resolv.conf", "hosts"):
            shutil.copy(Path("/etc", name), root / "etc" / name)
        shutil.copytree(ROOT, root / "src", ignore=shutil.ignore_patterns(".*", "build", "*.so"))
        shutil.copytree(ROOT / ".ci", root / "src" / ".ci")
        shutil.copy(wheel, root)
        own = Path("/usr/bin/python3")
        if python:
            own = Path("/opt", *python.absolute().parts[-3:])
            shutil.copytree(python.parents[1], f"{root}/{own.parents[1]}", symlinks=True)
        inside = [own, "/src/.ci/wheels.py", f"/{wheel.name}", "--python", own]
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", IN_ROOT]
        return subprocess.run([*command, "-", root, *inside, *options], check=False).returncode


class Checks:
    """Runs checks, says how each went, and counts those that failed."""

    def __init__(self, wheel: Path, work: Path, models: list[str] | None) -> None:
        self.wheel, self.work, self.n_failed = wheel, work, 0
        self.models = models
        # Programs of the system, without a compiler.
        tools = work / "tools"
        tools.mkdir()
        for name in ("sh", "uname", "env", "ldd"):
            if path := shutil.which(name):
                (tools / name).symlink_to(path)
        self.env = {"PATH": str(tools), "HOME": str(work), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.env |= {name: text for name, text in os.environ.items() if name.startswith("PIP_")}

    @property
    def processor(self) -> Processor:
        """What there is to know of the kind that the wheel is for."""
        return PROCESSORS[processor_of(self.wheel)]

    def run(
        self, *command: object, cwd: Path | None = None, timeout_s: float = 900, **env: str
    ) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run(
            list(map(str, command)), env={**self.env, **env}, cwd=cwd or self.work, text=True,
            check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
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
        wanted = [f"{self.wheel}[cli,server]"]
        if "musllinux" in self.wheel.stem:  # of llguidance, in an extra, there is no such wheel
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
            server = extras["optional-dependencies"]["server"]
            wanted = [f"{self.wheel}[cli]", *(p for p in server if not p.startswith("kqview["))]
        self.run(tool, "-m", "pip", "install", "-q", *wanted)
        return self.run(tool, "--version").strip()

    def program(self, *python: object) -> str:
        """README's first program prints what stands there, and says which variant ran."""
        code, output = readme()
        printed = self.run(*python, "-c", code)
        assert printed == output, f"it printed {printed!r}"
        return self.run(*python, "-c", VARIANT).strip()

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

    def tests(self, venv: Path, variant: str) -> str:
        """The tests of values and of variants, with the installed package and this variant."""
        command = (venv / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
        env = {"KQVIEW_WHEEL": str(self.wheel), "KQVIEW_CPU": variant}
        return self.run(*command, cwd=ROOT, timeout_s=3000, **env).splitlines()[-1]

    def variants(self, venv: Path) -> list[str]:
        """Those of the wheel that this processor has, after the tools of the tests have come."""
        python = venv / "bin" / "python"
        self.run(python, "-m", "pip", "install", "-q", *TEST_TOOLS)
        names = self.run(python, "-c", VARIANTS).split()
        return [n for n in names if self.run(python, "-c", VARIANT, KQVIEW_CPU=n).strip() == n]

    def refused(self, venv: Path, system: str) -> str:
        """pip's own message where the wheel does not fit."""
        done = subprocess.run(
            [venv / "bin" / "python", "-m", "pip", "install", "--only-binary=:all:", "--no-deps",
             f"--platform={system}", "--target", "none", self.wheel],
            env=self.env, cwd=self.work, check=False, text=True, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )  # fmt: skip
        said = done.stderr.splitlines()[-1]
        assert done.returncode, "pip installs it"
        assert "is not a supported wheel on this platform" in said, done.stderr
        return said

    def emulated(self, *python: object) -> None:
        """What *python* does on each model of the processor, each a check."""
        qemu = shutil.which(f"qemu-{processor_of(self.wheel)}")

        def on(model: str) -> tuple[object, ...]:
            assert qemu is not None, "apt-get install qemu-user"
            return (qemu, "-cpu", model, *python, "-W", "ignore")

        def uses(model: str) -> str:
            used = self.program(*on(model))
            wanted = self.processor.models.get(model, used)
            assert used == wanted, f"it uses {used}, not {wanted}"
            return used

        def refuses(model: str, message: str, **env: str) -> str:
            said = self.run(*on(model), "-c", VARIANT, **env).strip()
            assert message in said, f"it says {said!r}"
            return said

        for model in self.models or self.processor.models:
            self.check(f"emulated {model}", lambda m=model: uses(m))
        model, variant = self.processor.lacks
        message = f'KQVIEW_CPU is "{variant}", which this processor does not have'
        self.check(f"{variant} on {model}", lambda: refuses(model, message, KQVIEW_CPU=variant))
        if too_old := self.processor.too_old:
            message = "this processor has none of"
            self.check(f"emulated {too_old}", lambda: refuses(too_old, message))


def check_here(checks: Checks, pythons: list[Path], *, with_tests: bool) -> None:
    """With each of *pythons*, and on emulated processors with the first one that installs it."""
    venvs: list[Path] = []
    for python in pythons:
        name, venv = python.parents[1].name, checks.work / f"venv-{len(venvs)}"
        if not checks.check(f"{name}: install", lambda p=python, v=venv: checks.install(p, v)):
            continue
        venvs.append(venv)
        python = venv / "bin" / "python"
        checks.check(f"{name}: README's program", lambda p=python: checks.program(p))
        checks.check(f"{name}: kqview demo", lambda v=venv: checks.demo(v))
        checks.check(f"{name}: kqview serve --demo", lambda v=venv: checks.serve(v))
    name = processor_of(checks.wheel)
    libc, other = "manylinux_2_39", "musllinux_1_2"
    if other in checks.wheel.stem:
        libc, other = other, libc
    others = [f"{libc}_{one}" for one in PROCESSORS if one != name]
    for venv in venvs[:1]:
        for system in (*others, f"{other}_{name}", "win_amd64"):
            checks.check(f"not for {system}", lambda v=venv, s=system: checks.refused(v, s))
        for variant in checks.variants(venv) if with_tests else ():
            checks.check(f"tests, {variant}", lambda v=venv, n=variant: checks.tests(v, n))
        checks.emulated(venv / "bin" / "python")
    if not venvs:
        print("the wheel installs with no Python here")
        checks.n_failed += 1


def check_foreign(checks: Checks, suite: str) -> None:
    """On emulated processors only, with the Python of Debian *suite*."""
    root, site, name = checks.work / "root", checks.work / "site", processor_of(checks.wheel)
    make_root(
        suite, root, "--variant=extract", f"--architectures={checks.processor.debian}",
        "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", f"--include={PACKAGES},libstdc++6",
    )  # fmt: skip
    python = max(root.glob("usr/bin/python3.[0-9]*[0-9]"))
    platforms = [f"--platform=manylinux_2_{minor}_{name}" for minor in range(17, 40)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", site, "--only-binary=:all:",
         f"--python-version={python.name.removeprefix('python')}", *platforms, checks.wheel],
        check=True,
    )  # fmt: skip
    checks.emulated("-L", root, "-E", f"PYTHONPATH={site}", python)


def check_windows(checks: Checks, embeddable: Path, *, with_tests: bool) -> None:
    """In wine, with the Python of this folder."""
    folder, site = checks.work / "python", checks.work / "site"
    # The first hides `site`; `platform` asks the other one for what wine 8.0 lacks.
    shutil.copytree(embeddable, folder, ignore=shutil.ignore_patterns("*._pth", "_wmi.pyd"))
    version = next(folder.glob("python3??.dll")).stem.removeprefix("python3")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", site, "--only-binary=:all:",
         f"--python-version=3.{version}", "--platform=win_amd64", f"{checks.wheel}[cli]",
         # Later ones, or what they require, call functions that wine 8.0 lacks.
         "colorama", "numpy<2.1", "typer<0.27",
         *TEST_TOOLS],
        check=True,
    )  # fmt: skip
    checks.env |= {
        "PATH": os.environ["PATH"], "WINEPREFIX": str(checks.work / "wine"), "WINEDEBUG": "-all",
        "PYTHONPATH": str(site), "PYTHONUTF8": "1",
    }  # fmt: skip
    python = ("wine", folder / "python.exe")
    checks.run(*python, "-c", "pass")  # wine says what it sets up
    demo = (*python, "-m", "kqview", "demo", "--runs", "1")
    tests = (*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", VALUES)
    checks.check("wine: README's program", lambda: checks.program(*python))
    checks.check("wine: kqview demo", lambda: checks.run(*demo).splitlines()[0])
    if with_tests:
        checks.check(
            "wine: tests",
            lambda: checks.run(*tests, cwd=ROOT, timeout_s=3000).splitlines()[-1],
        )


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", type=Path, action="append", help="instead of all there are")
    parser.add_argument("--cpu", action="append", help="a model of qemu, instead of those known")
    parser.add_argument("--root", metavar="SUITE", help="in a fresh root of Debian, such as trixie")
    parser.add_argument("--no-tests", action="store_true")
    arguments = parser.parse_args()
    wheel, is_foreign = arguments.wheel.resolve(), platform.machine() not in arguments.wheel.stem
    if arguments.root and not is_foreign:
        options = [f"--cpu={model}" for model in arguments.cpu or ()]
        options += ["--no-tests"] * arguments.no_tests
        return in_root(arguments.root, wheel, (arguments.python or [None])[0], options)
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(wheel, Path(folder), arguments.cpu)
        if wheel.stem.endswith("win_amd64"):
            if not arguments.python:
                parser.error("a wheel for Windows needs --python FOLDER/python.exe")
            check_windows(checks, arguments.python[0].parent, with_tests=not arguments.no_tests)
        elif is_foreign:
            check_foreign(checks, arguments.root or "trixie")
        else:
            found = arguments.python or pythons(wheel)
            check_here(checks, found, with_tests=not arguments.no_tests)
        return checks.n_failed > 0


if __name__ == "__main__":
    sys.exit(main())
