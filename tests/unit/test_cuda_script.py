"""bench/cuda.sh and cuda_kit.py: what they refuse, and what they leave behind.

No GPU, network or compiler: packages are wheels of a few lines, and llama.cpp's source is the files
without which fetch.py refuses a tree. .ci/full runs the benchmarks, with --device cpu --quick.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench import report
from kqview.bench.pairs import Pairs
from vendor import fetch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.full, pytest.mark.needs("build tools")]

BENCH = Path(report.__file__).parent
MIB = 2**20


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, as the script runs it."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("cuda_kit")


@dataclass
class Script:
    """cuda.sh with folders of its own."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def kit(self) -> Path:
        return self.root / "kit"

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def fake_python(self, *cases: str) -> Path:
        """This Python, but for calls that one of the shell's *cases* matches."""
        path = self.root / "python"
        text = " ;;\n".join(cases)
        path.write_text(f'#!/bin/sh\ncase "$*" in\n{text} ;;\nesac\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return path

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """The exit status, and what was printed."""
        done = subprocess.run(
            ["bash", str(BENCH / "cuda.sh"), *arguments],
            env={
                **os.environ,
                "KQVIEW_PYTHON": sys.executable,
                "KQVIEW_CUDA_KIT": str(self.kit),
                "KQVIEW_CUDA_WORK": str(self.work),
                "KQVIEW_CACHE_DIR": str(self.root / "cache"),
                "OUT": str(self.out),
                **self.environment,
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def write_wheel(folder: Path, name: str, code: str = "", data: bytes = b"") -> Path:
    """A wheel with a module of *code* and a program, both called *name*, and a file of *data*."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": f"def main(): print('{name} runs')\n{code}",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{name}/data", f"{info}/RECORD"])
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(member, text)
        wheel.writestr(f"{name}/data", data)
    return path


def write_source(folder: Path, root: str | None = None) -> None:
    """A packed llama.cpp, as `prepare` makes it, called *root* instead of by the lock file."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = fetch.read_lock(fetch.LOCK_FILE)
    with tarfile.open(folder / "llama.cpp.tar.gz", "w:gz") as archive:
        for name in (*lock.required, fetch.COMPLETE_MARKER):
            archive.addfile(tarfile.TarInfo(f"{root or lock.tree_name}/{name}"), io.BytesIO())


# ---- the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("paint",), ("'paint'", "prepare, all, build and run")),
        (("prepare", "table"), ("'table' of prepare", "wheels source size")),
        (("build", "values"), ("'values' of build", "tools package peers")),
        (
            ("run", "wheels"),
            ("'wheels' of run", "values sanitize pinned table tests architectures"),
        ),
        (("all", "table"), ("'table' of all", "tools package first values pinned copies places")),
        (("all", "--row", "cuda-copy"), ("--row goes with run table, not with all",)),
        (("run", "--fast"), ("'--fast'", "--help")),
        (("run", "--row"), ("--row needs a value",)),
        (("run", "--limit", "soon"), ("'soon'", "number of seconds")),
        (("run", "--device", "tpu"), ("'tpu'", "gpu or cpu")),
    ],
)
def test_what_the_command_line_does_not_know_is_refused_with_what_there_is(
    script: Script, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    status, printed = script(*arguments)
    assert status == 2
    assert all(word in printed for word in words), printed
    assert not script.work.exists()


def test_row_that_no_table_has_is_refused_before_anything_is_measured(script: Script) -> None:
    status, printed = script("run", "values", "table", "--device", "cpu", "--row", "cuda-9k-*")
    assert status == 2
    assert "no row 'cuda-9k-*'; there are " in printed
    assert "cuda-16k-8-logits" in printed
    assert not (script.work / "values.log").exists()


# ---- the kit


def test_kit_that_is_too_big_is_refused_with_its_largest_files(script: Script) -> None:
    script.kit.mkdir()
    for name, size in (("browser.whl", 70 * MIB), ("small.whl", MIB)):
        with (script.kit / name).open("wb") as file:
            file.truncate(size)
    status, printed = script("prepare", "size")
    assert status == 1
    assert "67.1 MB (64 MiB) may travel" in printed
    assert "The largest files: browser.whl 73.4 MB, " in printed
    assert "--without" in printed
    status, printed = script("prepare", "size", "--fit", "100")
    assert status == 0, printed
    assert "may travel" in printed
    status, printed = script("prepare", "size", "--fit", "0")
    assert status == 0, printed


# ---- builds


def test_programs_of_the_kit_survive_the_install_of_the_package(script: Script) -> None:
    write_source(script.kit)
    write_wheel(script.kit / "wheels", "sometool")
    package = write_wheel(
        script.root, "kqview", "def system_info(): return {'devices': [{'name': 'made-up'}]}\n"
    )
    status, printed = script(
        "build", "tools", "package", "--device", "cpu", "--package", str(package)
    )
    assert status == 0, printed
    assert (script.work / "package-site" / "bin" / "kqview").is_file()
    done = subprocess.run(
        [script.work / "site" / "bin" / "sometool"],
        env={"PYTHONPATH": str(script.work / "site")},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "sometool runs\n"
    lock = fetch.read_lock(fetch.LOCK_FILE)
    assert fetch.is_complete(script.root / "cache" / lock.tree_name, lock)


def lose_source(kit: Path) -> None:
    (kit / "llama.cpp.tar.gz").unlink()


def bring_another_source(kit: Path) -> None:
    write_source(kit, "llama.cpp-older")


def serve_another_python(kit: Path) -> None:
    (kit / "python").write_text("2.7\n")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lose_source, "no llama.cpp.tar.gz in "),
        (bring_another_source, "another llama.cpp than"),
        (serve_another_python, "are for Python 2.7, but "),
    ],
)
def test_kit_that_does_not_serve_is_refused(
    script: Script, spoil: Callable[[Path], None], words: str
) -> None:
    write_source(script.kit)
    spoil(script.kit)
    status, printed = script("build", "--device", "cpu")
    assert status == 1
    assert words in printed
    assert "run bench/cuda.sh prepare" in printed
    assert "package " not in printed.partition("FAIL")[0]  # nothing is built after it
    assert not (script.work / "package.log").exists()


def install_package(script: Script, n_bytes: int = 0) -> str:
    """Let a machine install a package with *n_bytes* that do not shrink; what it printed."""
    write_source(script.kit)
    package = write_wheel(
        script.root, "kqview", "def system_info(): return {'devices': [{'name': 'made-up'}]}\n",
        random.Random(0).randbytes(n_bytes),
    )  # fmt: skip
    parts = ("tools", "package")
    status, printed = script("all", "--device", "cpu", *parts, "--package", str(package))
    assert status == 0, printed
    return printed


@pytest.fixture(scope="module")
def first_machine(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """One that has installed a package; tests leave it as it is."""
    script = Script(tmp_path_factory.mktemp("first"))
    install_package(script, 16 * MIB)
    return script


@pytest.fixture
def bare(script: Script) -> Script:
    """A machine without a kit, which cannot install anything."""
    script.environment["KQVIEW_PYTHON"] = str(
        script.fake_python("*pip*) echo it is built again; exit 3")
    )
    return script


def test_what_was_built_is_brought_back_in_pieces_and_unpacked_on_a_bare_machine(
    first_machine: Script, bare: Script
) -> None:
    pieces = sorted(first_machine.out.glob("package.tar.gz.*"))
    assert [piece.name[-1] for piece in pieces] == ["0", "1"]
    assert pieces[0].stat().st_size == 15 * MIB
    earlier = bare.root / "earlier"
    shutil.copytree(first_machine.out, earlier)
    (earlier / "cuda.jsonl").write_text('{"row": "measured before"}\n')
    arguments = ("all", "--device", "cpu", "tools", "package", "--resume", str(earlier))
    status, printed = bare(*arguments)
    assert status == 0, printed
    assert "package is here\n" in printed
    # An editable install of kqview may come before it in sys.path, so its files are compared.
    files = [one.work / "package-site" / "kqview" / "data" for one in (first_machine, bare)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not list(bare.out.glob("package.tar.gz.*"))  # is there already
    assert (bare.out / "cuda.jsonl").read_text() == '{"row": "measured before"}\n'
    lines = (earlier / "printed.txt").read_text()
    assert (bare.out / "printed.txt").read_text() == lines + printed


def test_part_that_takes_too_long_is_cut_off_and_what_is_there_is_brought_back(
    script: Script,
) -> None:
    write_source(script.kit)
    write_wheel(script.kit / "wheels", "sometool")
    python = script.root / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pip*) exec sleep 600;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    script.environment["KQVIEW_PYTHON"] = str(python)
    status, printed = script("build", "--device", "cpu", "--limit", "4")
    assert status == 1
    # The second where the machine was so slow that no time was left to begin.
    assert "cut off tools" in printed or "left out tools" in printed
    assert (script.out / "printed.txt").read_text() == printed
    if "cut off tools" in printed:
        with tarfile.open(script.out / "logs.tar.gz") as logs:
            assert logs.getnames() == ["tools.log"]


def test_table_that_is_cut_off_leaves_the_rows_that_it_had(script: Script) -> None:
    record = report.to_record(
        report.Timing(
            "cuda-4k-1-logits", "logits", "no capture", "a step", Pairs([10.0] * 5, [10.25] * 5),
            None, "python bench/cuda_cost.py",
        ),
        {
            "date": "2025-01-02T03:04:05+00:00", "cpu": "some cpu", "flags": "--threads 1",
        },
    )  # fmt: skip
    measured = script.root / "measured.jsonl"
    measured.write_text(json.dumps(record) + "\n")
    python = script.root / "python"
    # A benchmark that has saved a row when its time is over, on a machine with kqview.
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '    "-m kqview info" | "- cpu") echo no GPU ;;\n'
        f'    "bench/cuda_cost.py "*) cat {measured} >>"$OUT/cuda.jsonl"; exit 124 ;;\n'
        f'    *) exec {sys.executable} "$@" ;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    script.environment["KQVIEW_PYTHON"] = str(python)
    for n_rows in (1, 2):
        status, printed = script("run", "table", "--device", "cpu")
        assert status == 1
        assert "cut off table" in printed
        assert "1.025" in (script.out / "table.txt").read_text()
        assert "1.025" in printed
        # The folder is emptied between two calls; the work folder is not.
        assert len((script.out / "cuda.jsonl").read_text().splitlines()) == n_rows
        shutil.rmtree(script.out)
