"""Build and run the native tests under AddressSanitizer (with UBSan) and ThreadSanitizer.

    python tests/native/run.py [BUILD_DIR] [--sanitize address thread none] [--kernel] [--grammar]
                               [-- ARGS]
    python tests/native/run.py [BUILD_DIR] --fuzz SECONDS
    python tests/native/run.py [BUILD_DIR] --soak SECONDS [--seed N]
    python tests/native/run.py [BUILD_DIR] --on arm | windows [-- ARGS]

Needs cmake, a C++20 compiler and doctest's header; nothing of llama.cpp or Python's headers.
``--kernel`` adds the tests of the row kernel, once for each vector width, which need ggml from
llama.cpp's source (vendor/fetch.py obtains it); with ``--sanitize none`` they also print its speed.
``--grammar`` compares what grammars allow with llama.cpp's own matcher, which is one file of that
source.
``--fuzz`` runs the readers of saved slots and of model files against inputs changed at random
instead, guided by coverage, under ASan and UBSan, and shares its seconds between them; a line of
each says how many inputs there were.
``--soak`` runs the scheduler under random requests, cancellations, orders and faults for that long,
once a sanitizer, and nothing else; a line says what came about and the seed of the choices.
``--on arm`` runs the tests of the row kernel alone, compiled for 64-bit ARM, in qemu: NEON code has
no other test. Needs g++-aarch64-linux-gnu and qemu-user; takes minutes. ``--on windows`` runs these
and all others but those of RPC, compiled by mingw-w64, in wine: needs g++-mingw-w64-x86-64-posix
and wine64.
ARGS go to doctest, e.g. ``-tc='block_pool: lease*'``. One line a variant and program,
``native: N passed, M failed (address)``; the exit status is 0 only if every variant built, ran and
passed without a sanitizer's report.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
SANITIZERS = ("address", "thread", "none")
FETCH = SOURCE_DIR.parents[1] / "vendor" / "fetch.py"
FUZZERS = ("fuzz_ses1", "fuzz_gguf")
KERNEL_PROGRAMS = "kernel_tests_*"
GRAMMAR_PROGRAM = "grammar_tests"
# Systems that are emulated: CMake's name and processor, compilers, what runs a program.
EMULATED = {
    "arm": (
        ("Linux", "aarch64"),
        "aarch64-linux-gnu-{}",
        ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"),
    ),
    "windows": (("Windows", "x86_64"), "x86_64-w64-mingw32-{}-posix", ("wine",)),
}
BUILD_LIMIT_S = 1800
RUN_LIMIT_S = 600
FIGURES = re.compile(r"^(?:row_kernel|soak): .*", re.MULTILINE)
SUMMARY = re.compile(r"test cases:\s*\d+ \|\s*(\d+) passed \|\s*(\d+) failed")
# gcc's TSan before 14 refuses some kernels' address layouts; without randomisation it runs.
TSAN_LAYOUT_ERROR = "unexpected memory mapping"


def default_build_dir() -> Path:
    """Return a temporary folder of this user and this checkout, the same at every run."""
    checkout = zlib.crc32(str(SOURCE_DIR).encode())
    return Path(tempfile.gettempdir()) / f"kqview-native-{os.getuid()}-{checkout:08x}"


def run_command(
    command: list[str], limit_s: int, variables: dict[str, str] | None = None
) -> tuple[int, str]:
    """Run *command*; return its exit status (124 over the limit), stdout and stderr as one."""
    environment = {"UBSAN_OPTIONS": "print_stacktrace=1", **os.environ, **(variables or {})}
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
            env=environment,
        )
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output if isinstance(output, str) else output.decode(errors="replace")
        return 124, f"{text}\nnative: no end after {limit_s} s: {command[0]}"
    except FileNotFoundError:
        return 127, f"native: {command[0]} not found; install it or put it on PATH"
    return done.returncode, done.stdout


def build(
    build_dir: Path,
    sanitizer: str,
    jobs: int,
    llama_dir: str,
    target: str = "all",
    grammar_dir: str = "",
    definitions: tuple[str, ...] = (),
) -> str | None:
    """Configure and build one variant; return the output if that failed, else None."""
    configure = [
        "cmake",
        "-S",
        str(SOURCE_DIR),
        "-B",
        str(build_dir),
        f"-DKQVIEW_SANITIZE={sanitizer}",
        f"-DKQVIEW_LLAMA_CPP_DIR={llama_dir}",
        f"-DKQVIEW_GRAMMAR_PEER_DIR={grammar_dir}",
        *definitions,
    ]
    if doctest_dir := os.environ.get("KQVIEW_DOCTEST_DIR"):
        configure.append(f"-DKQVIEW_DOCTEST_DIR={doctest_dir}")
    compile_all = ["cmake", "--build", str(build_dir), "--parallel", str(jobs), "--target", target]
    for command in (configure, compile_all):
        status, output = run_command(command, BUILD_LIMIT_S)
        if status != 0:
            return output
    return None


def run_program(
    program: Path,
    label: str,
    arguments: list[str],
    extra_s: int = 0,
    variables: dict[str, str] | None = None,
    runner: tuple[str, ...] = (),
) -> bool:
    """Run one test program, print its result line, and return whether all of it passed."""
    command = [*runner, str(program), *arguments]
    limit_s = RUN_LIMIT_S + extra_s
    status, output = run_command(command, limit_s, variables)
    if status != 0 and TSAN_LAYOUT_ERROR in output and shutil.which("setarch"):
        status, output = run_command(["setarch", "-R", *command], limit_s, variables)
    summary = SUMMARY.search(output)
    passed, failed = (int(summary[1]), int(summary[2])) if summary else (0, 0)
    if status == 0 and failed == 0 and passed > 0:
        for figures in FIGURES.findall(output):
            print(figures)
        print(f"native: {passed} passed, 0 failed ({label})")
        return True
    print(output)
    # A crash or a race report fails the run although no test case did.
    reason = f": exit status {status}" if failed == 0 else ""
    print(f"native: {passed} passed, {max(failed, 1)} failed ({label}){reason}")
    return False


def run_variant(
    build_dir: Path,
    sanitizer: str,
    jobs: int,
    llama_dir: str,
    grammar_dir: str,
    arguments: list[str],
) -> bool:
    """Build one variant and run its programs; return whether all of them passed."""
    failure = build(build_dir, sanitizer, jobs, llama_dir, grammar_dir=grammar_dir)
    if failure is not None:
        print(failure)
        print(f"native: 0 passed, 1 failed ({sanitizer}): the build failed")
        return False
    results = [run_program(build_dir / "native_tests", sanitizer, arguments)]
    # They have one thread: nothing for ThreadSanitizer to find.
    if llama_dir and sanitizer != "thread":
        programs = sorted(build_dir.glob(KERNEL_PROGRAMS))
        results += [run_program(path, f"{sanitizer}, {path.name}", arguments) for path in programs]
    if grammar_dir:
        results.append(run_program(build_dir / GRAMMAR_PROGRAM, "grammars", arguments))
    return all(results)


def run_emulated(
    build_dir: Path, system: str, jobs: int, llama_dir: str, arguments: list[str]
) -> bool:
    """Build the tests for another system and run them there; return whether all of them passed."""
    (name, processor), compiler, runner = EMULATED[system]
    definitions = (
        f"-DCMAKE_SYSTEM_NAME={name}",
        f"-DCMAKE_SYSTEM_PROCESSOR={processor}",
        f"-DCMAKE_C_COMPILER={compiler.format('gcc')}",
        f"-DCMAKE_CXX_COMPILER={compiler.format('g++')}",
        "-DKQVIEW_DOCTEST_DIR=/usr/include",
    )
    target = "kernel_tests_armv8-a" if system == "arm" else "all"
    failure = build(build_dir, "none", jobs, llama_dir, target, definitions=definitions)
    if failure is not None:
        print(failure)
        print(f"native: 0 passed, 1 failed ({system}): the build failed")
        return False
    only_values = ["-tce=*faster than its scalar twin", *arguments]  # an emulator's speed is not
    programs = sorted(
        path
        for path in (*build_dir.glob("native_tests.*"), *build_dir.glob(KERNEL_PROGRAMS))
        if path.is_file() and path.suffix in ("", ".exe")
    )
    results = [
        run_program(
            path,
            f"{system}, {path.name}",
            only_values,
            variables={"WINEDEBUG": "-all"},
            runner=runner,
        )
        for path in programs
    ]
    return all(results)


def run_fuzz(build_dir: Path, jobs: int, limit_s: int) -> bool:
    """Build the fuzzers, run them for *limit_s* seconds in all; return whether all is well."""
    failure = build(build_dir, "address", jobs, "", "fuzzers")
    if failure is not None:
        print(failure)
        return False
    each_s = limit_s / len(FUZZERS)
    is_good = True
    for name in FUZZERS:
        status, output = run_command([str(build_dir / name), str(each_s)], limit_s + RUN_LIMIT_S)
        print(output.strip(), flush=True)
        is_good = is_good and status == 0
    return is_good


def run_soak(build_dir: Path, sanitizer: str, jobs: int, limit_s: int, seed: int | None) -> bool:
    """Build one variant and run the scheduler's soak test alone; return whether it passed."""
    if (failure := build(build_dir, sanitizer, jobs, "", "native_tests")) is not None:
        print(failure)
        return False
    variables = {"KQVIEW_SOAK_S": str(limit_s)}
    if seed is not None:
        variables["KQVIEW_SOAK_SEED"] = str(seed)
    program = build_dir / "native_tests"
    return run_program(program, f"{sanitizer}, soak", ["-tc=soak:*"], limit_s, variables)


def main() -> int:
    """Run the variants that were asked for; return the exit status."""
    parser = argparse.ArgumentParser(description="Build and run the native tests under sanitizers.")
    parser.add_argument(
        "build_dir",
        nargs="?",
        type=Path,
        default=default_build_dir(),
        help="kept between runs, one folder a variant (default: %(default)s)",
    )
    parser.add_argument("--sanitize", nargs="+", choices=SANITIZERS, default=["address", "thread"])
    parser.add_argument("--kernel", action="store_true", help="also the tests of the row kernel")
    parser.add_argument("--grammar", action="store_true", help="also the comparison of grammars")
    parser.add_argument("--on", choices=EMULATED, help="tests in an emulator, nothing else")
    parser.add_argument("--jobs", type=int, default=2, help="compiler processes (default: 2)")
    parser.add_argument("--fuzz", type=int, metavar="SECONDS", help="the fuzzers, nothing else")
    parser.add_argument("--soak", type=int, metavar="SECONDS", help="the soak test, nothing else")
    parser.add_argument("--seed", type=int, help="of the soak test; printed when left out")
    own, doctest_arguments = sys.argv[1:], []
    if "--" in own:
        split = own.index("--")
        own, doctest_arguments = own[:split], own[split + 1 :]
    options = parser.parse_args(own)
    if options.fuzz:
        return 0 if run_fuzz(options.build_dir / "address", options.jobs, options.fuzz) else 1
    if options.soak:
        done = [
            run_soak(options.build_dir / name, name, options.jobs, options.soak, options.seed)
            for name in options.sanitize
        ]
        return 0 if all(done) else 1
    llama_dir = ""
    if options.kernel or options.grammar or options.on:
        status, output = run_command([sys.executable, str(FETCH), "--print-path"], BUILD_LIMIT_S)
        if status != 0:
            print(output)
            return 1
        llama_dir = output.strip().splitlines()[-1]
    if options.on:
        build_dir = options.build_dir / options.on
        is_good = run_emulated(build_dir, options.on, options.jobs, llama_dir, doctest_arguments)
        return 0 if is_good else 1
    results = [
        run_variant(
            options.build_dir / sanitizer,
            sanitizer,
            options.jobs,
            llama_dir if options.kernel else "",
            # It has no sanitizer: once is enough.
            llama_dir if options.grammar and sanitizer == options.sanitize[0] else "",
            doctest_arguments,
        )
        for sanitizer in options.sanitize
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
