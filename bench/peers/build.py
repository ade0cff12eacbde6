"""Build the stock peers (llama-bench, kq-eval-rows, ...) once a machine and print their folder.

Owns: the cache folder ``peers-<key>``, beside the sources that vendor/fetch.py keeps. The key is
the hash of the lock file, plus a hash of what differs from the pin (another source folder, CMake
definitions). Runs: by hand, or for tests and benchmarks; standard library only. Never: part of an
installation, writes into the source tree, prints anything but the folder on stdout. A second call
finds its stamp and is done at once.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

HERE = Path(__file__).resolve().parent
FETCH = HERE.parents[1] / "vendor" / "fetch.py"
LOCK_FILE = FETCH.with_name("llama.lock.toml")
INPUTS = (LOCK_FILE, HERE / "CMakeLists.txt", HERE / "eval_rows.cpp", HERE / "eval_options.h")
# Of vendor/, which CMakeLists.txt includes.
CMAKE_FILES = ("amx.cmake", "amx_tiles.h", "cuda.cmake", "cuda_find.cmake")
DEFAULT_TARGETS = ("kq-eval-rows", "llama-bench")
TARGETS = (
    *DEFAULT_TARGETS,
    "test-llama-archs",
    "llama-server",
    "llama-batched-bench",
    "llama-perplexity",
    "rpc-server",
)
# The name under which people look for it, and llama.cpp's.
ALIASES = {"rpc-server": "ggml-rpc-server"}


class PeersError(Exception):
    """The peers cannot be built; the message is one line: what, got, remedy."""


def cache_root() -> Path:
    """Return ``$KQVIEW_CACHE_DIR``, ``$XDG_CACHE_HOME/kqview`` or ``~/.cache/kqview``."""
    if own := os.environ.get("KQVIEW_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "kqview"


def build_dir(source_dir: str | None, defines: list[str]) -> Path:
    """Return the cache folder for this pin, source override and set of CMake definitions."""
    try:
        key = hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()[:8]
    except OSError as error:
        raise PeersError(f"peers.key: {error}; restore vendor/llama.lock.toml") from error
    differs = [str(Path(source_dir).expanduser().absolute())] if source_dir else []
    differs += sorted(defines)
    if differs:
        key += "-" + hashlib.sha256("\n".join(differs).encode()).hexdigest()[:8]
    return cache_root() / f"peers-{key}"


def inputs_hash() -> str:
    """Return a hash of every file of ours that the binaries depend on."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in INPUTS)).hexdigest()


def missing_targets(folder: Path, targets: list[str]) -> list[str]:
    """Return the targets that are not built, or were built from other inputs."""
    try:
        stamp = json.loads((folder / "built.json").read_text())
        current = set(stamp["targets"]) if stamp["inputs"] == inputs_hash() else set[str]()
    except (OSError, ValueError, KeyError, TypeError):
        return targets
    return [t for t in targets if t not in current or not (folder / "bin" / t).is_file()]


def source_path(source_dir: str | None) -> str:
    """Return the folder of llama.cpp's source; fetch.py downloads it where it is not there yet."""
    command = [sys.executable, str(FETCH), "--print-path"]
    if source_dir:
        command += ["--source-dir", source_dir]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise PeersError("peers.source: vendor/fetch.py failed; the line above says what to do")
    return done.stdout.strip()


def stage(folder: Path) -> Path:
    """Copy the CMake files and sources of ours below `folder`; return the folder to configure.

    CMake binds a build folder to one source folder, and the cache is shared by every checkout.
    """
    root = HERE.parents[1]
    for path in (*INPUTS, *(root / "vendor" / name for name in CMAKE_FILES)):
        target = folder / "source" / path.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or target.read_bytes() != path.read_bytes():
            shutil.copyfile(path, target)
    return folder / "source" / HERE.relative_to(root)


def build(folder: Path, targets: list[str], source: str, defines: list[str], jobs: int) -> None:
    """Configure (again) and build `targets`; then stamp them."""
    cmake = shutil.which("cmake")
    if cmake is None:
        raise PeersError("peers.build: no cmake on the PATH; install it (pip install cmake ninja)")
    staged = stage(folder)
    cache = folder / "CMakeCache.txt"
    if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={staged}\n" not in cache.read_text():
        cache.unlink()
    configure = [cmake, "-S", str(staged), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DKQVIEW_LLAMA_CPP_DIR={source}", *(f"-D{define}" for define in defines)]
    if ninja := shutil.which("ninja"):
        configure += [] if cache.is_file() else ["-G", "Ninja"]
        # The cache names the ninja of an earlier run, whose virtual environment may be gone.
        configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    for command in (
        configure,
        [cmake, "--build", str(folder), "-j", str(jobs), "--target", *targets],
    ):
        returncode = subprocess.run(command, stdout=sys.stderr, check=False).returncode
        if returncode != 0:
            raise PeersError(
                f"peers.build: cmake {command[1]} exited with {returncode}; the lines above say why"
            )
    stamp = folder / "built.json"
    known = set(targets)
    with contextlib.suppress(OSError, ValueError, KeyError):
        old = json.loads(stamp.read_text())
        # After a change of inputs only what was asked for now is current.
        known |= set(old["targets"]) if old["inputs"] == inputs_hash() else set()
    stamp.write_text(json.dumps({"inputs": inputs_hash(), "targets": sorted(known)}))


@contextlib.contextmanager
def exclusive(folder: Path) -> Generator[None]:
    """Hold the lock of `folder`, so that two runs do not build into it at once."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise PeersError(
            f"peers.cache: {error}; set KQVIEW_CACHE_DIR to a writable folder"
        ) from error
    with lock:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="build.py", description="Build the stock peers; print their folder."
    )
    parser.add_argument(
        "targets",
        nargs="*",
        metavar="TARGET",
        help=f"of {', '.join(TARGETS)}",
    )
    parser.add_argument(
        "--where", action="store_true", help="build nothing; exit 1 if a target is not built"
    )
    parser.add_argument(
        "--source-dir", default=os.environ.get("KQVIEW_LLAMA_CPP_DIR"), help="another llama.cpp"
    )
    parser.add_argument(
        "--define",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a CMake definition, such as GGML_CUDA=ON",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parallel compilers")
    args = parser.parse_args(argv)
    try:
        wanted: list[str] = args.targets or list(DEFAULT_TARGETS)
        for target in wanted:
            if target not in (*TARGETS, *ALIASES.values()):
                raise PeersError(f"peers.target: got {target!r}; choose from {', '.join(TARGETS)}")
        wanted = [ALIASES.get(target, target) for target in wanted]
        folder = build_dir(args.source_dir, args.define)
        missing = missing_targets(folder, wanted)
        if missing and not args.where:
            with exclusive(folder):
                missing = missing_targets(folder, wanted)
                if missing:
                    build(folder, missing, source_path(args.source_dir), args.define, args.jobs)
            missing = missing_targets(folder, wanted)
        if missing:
            raise PeersError(
                f"peers.find: {', '.join(missing)} not built in {folder}; run bench/peers/build.py"
            )
    except PeersError as error:
        print(f"kqview: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "kqview: peers.build: interrupted; run it again, it goes on where it was",
            file=sys.stderr,
        )
        return 130
    print(folder / "bin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
