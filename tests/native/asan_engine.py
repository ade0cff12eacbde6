"""Build the whole extension, llama.cpp included, under AddressSanitizer and run the engine tests.

    python tests/native/asan_engine.py [--jobs N] [--build-only] [-- PYTEST_ARGS]

Needs gcc, cmake and ninja besides the test extra. PYTEST_ARGS take the place of the engine tests
without the ones that make no sense here, e.g. ``-- tests/engine/test_demo_model.py -x``. The build
is kept in ``asan-<hash of the lock>`` beside the sources that vendor/fetch.py keeps, so that a
second run compiles only what changed. Never: writes into the source tree; the tests import a copy
of ``src/kqview`` that lies in a temporary folder, with the instrumented extension in it.

CPython is not instrumented, so the sanitizer is preloaded, and leaks are not reported: interned
strings, type objects and static caches of CPython and numpy live until the process ends by design,
and would bury ours. Leaks are found elsewhere: the native tests run under LeakSanitizer, and the
pool's counters show a lease that never comes back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FETCH = REPOSITORY / "vendor" / "fetch.py"
# peers: their values equal ours to the bit only if both are compiled alike. The others measure
# speed, or memory, of which the sanitizer keeps what was freed back.
NOT_HERE = (
    "tests/engine/test_async.py::test_loop_goes_on_while_tokens_are_always_there",
    "tests/engine/test_generate.py::test_ten_thousand_dropped_generations_leave_nothing",
)
DEFAULT_ARGUMENTS = [
    "tests/engine",
    "-m",
    "not peers",
    *(f"--deselect={name}" for name in NOT_HERE),
]
# Ours, not the environment's, are the options that decide whether a finding can be missed.
ASAN_OPTIONS = "detect_leaks=0:halt_on_error=1:allocator_may_return_null=1"


class AsanError(Exception):
    """The tests could not be run; the message is one line: what, got, remedy."""


def output_of(command: list[str]) -> str:
    """Return the stdout of *command*, stripped."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise AsanError(f"asan.run: {error}; install the tool or see the lines above") from error
    return done.stdout.strip()


def build_dir() -> Path:
    """Return the folder of the instrumented build, the same for every checkout of one pin."""
    # fetch.py puts its tree into the cache: its parent is the cache, whatever the environment says.
    tree = output_of([sys.executable, str(FETCH), "--print-path"])
    root = Path(tree).parent
    if os.environ.get("KQVIEW_LLAMA_CPP_DIR"):
        root = Path(tempfile.gettempdir())
    return root / f"asan-{output_of([sys.executable, str(FETCH), '--lock-hash'])}"


def is_of_another_checkout(folder: Path) -> bool:
    """Tell whether *folder* was configured from other sources, which CMake refuses to continue."""
    cache = folder / "CMakeCache.txt"
    home = f"CMAKE_HOME_DIRECTORY:INTERNAL={REPOSITORY}"
    return cache.is_file() and home not in cache.read_text().splitlines()


def build(folder: Path, jobs: int) -> Path:
    """Configure and build into *folder*; return the path of the extension."""
    configure = ["cmake", "-G", "Ninja", "-S", str(REPOSITORY), "-B", str(folder)]
    if is_of_another_checkout(folder):
        configure.append("--fresh")
    configure += [
        "-DSKBUILD_PROJECT_NAME=kqview",
        "-DSKBUILD_PROJECT_VERSION=0",
        "-DKQVIEW_SANITIZE=address",
        # ccache would be part of every command: where it comes or goes all would be built again.
        "-DGGML_CCACHE=OFF",
        f"-DPython_EXECUTABLE={sys.executable}",
        # RelWithDebInfo, because nanobind strips the symbols of a Release. -O1 keeps stacks
        # readable; without NDEBUG, so that the assertions of llama.cpp and ggml are checked too.
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
        "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1",
        "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O1 -D_GLIBCXX_ASSERTIONS",
    ]
    make = ["cmake", "--build", str(folder), "--target", "_core", "--parallel", str(jobs)]
    # kqview's build imports nanobind of this interpreter and calls its ninja.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for command in (configure, make):
        try:
            status = subprocess.run(command, env={**os.environ, "PATH": path}).returncode
        except OSError as error:
            raise AsanError(f"asan.build: {error}; pip install cmake ninja") from error
        if status != 0:
            raise AsanError(f"asan.build: cmake exited with {status}; the lines above say why")
    built = list((folder / "cpp").glob("_core*.so"))
    if len(built) != 1:
        raise AsanError(f"asan.build: {len(built)} extensions in {folder / 'cpp'}; delete {folder}")
    return built[0]


def library(name: str) -> str:
    """Return the path of a shared library that gcc links."""
    path = output_of([os.environ.get("CC", "gcc"), f"-print-file-name={name}"])
    if not Path(path).is_file():
        raise AsanError(f"asan.preload: the compiler has no {name}; install gcc's sanitizers")
    return path


def make_package(extension: Path, folder: Path) -> None:
    """Put the package with *extension* into *folder*, and what importlib.metadata asks for."""
    shutil.copytree(
        REPOSITORY / "src" / "kqview",
        folder / "kqview",
        ignore=shutil.ignore_patterns("_core*.so", "__pycache__"),
    )
    (folder / "kqview" / extension.name).symlink_to(extension)
    metadata = folder / "kqview-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: kqview\nVersion: 0\n")


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment of the tests: package of *folder* first, sanitizer preloaded."""
    options = f"{os.environ.get('ASAN_OPTIONS', '')}:{ASAN_OPTIONS}"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        # The sanitizer looks for __cxa_throw when it starts: the C++ library must be there by then.
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        # A report on stderr would be lost with pytest's capture when the process aborts.
        "ASAN_OPTIONS": f"{options}:log_path={folder / 'report'}".lstrip(":"),
        # Objects of CPython's own allocator are one large block to the sanitizer.
        "PYTHONMALLOC": "malloc",
    }


def run_tests(extension: Path, arguments: list[str]) -> int:
    """Run pytest over the instrumented package, print every report; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="kqview-asan-") as name:
        folder = Path(name)
        make_package(extension, folder)
        environment = environment_of(folder)
        where = subprocess.run(
            [sys.executable, "-c", "import kqview._core as core; print(core.__file__)"],
            env=environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
        )
        # An editable installation may come first: the tests would pass without a sanitizer.
        if where.returncode == 0 and not where.stdout.startswith(name):
            raise AsanError(
                f"asan.import: got {where.stdout.strip()}, not the instrumented extension; "
                "uninstall the editable kqview"
            )
        status = where.returncode
        if status == 0:
            command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
            status = subprocess.run(command, env=environment, cwd=REPOSITORY).returncode
        reports = sorted(folder.glob("report.*"))
        for report in reports:
            print(report.read_text(errors="replace"))
        print(f"asan: pytest exited with {status}, {len(reports)} reports")
    return status or (1 if reports else 0)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description="Run the engine tests under AddressSanitizer.")
    parser.add_argument("--jobs", type=int, default=2, help="compiler processes (default: 2)")
    parser.add_argument("--build-only", action="store_true", help="run no tests")
    parser.add_argument("pytest_arguments", nargs="*", default=DEFAULT_ARGUMENTS, help="after --")
    options = parser.parse_args()
    try:
        extension = build(build_dir(), options.jobs)
        return 0 if options.build_only else run_tests(extension, options.pytest_arguments)
    except AsanError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
