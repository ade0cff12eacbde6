"""What differs between operating systems, in one place: files, locks and processes.

Windows has no forks, no hangups, no limits that a process sets itself, no handles of folders and no
readers in its event loop; it neither renames nor removes a file that is open. A function for what
it lacks says what happens there instead. Imports nothing that takes long.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import asyncio
    import socket
    import subprocess


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


_fcntl: Final = _module("fcntl")
_resource: Final = _module("resource")

HAS_FORK: Final = hasattr(os, "fork")
HANGUP: Final[signal.Signals | None] = getattr(signal, "SIGHUP", None)
MOVES_OPEN_FILES: Final = _fcntl is not None
"""Whether a file can be renamed and removed while it is open."""

LIBRARY_SUFFIX: Final = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
"""Of a shared library's name; vendor/backends/CMakeLists.txt gives its own the same."""

# Flags of os.open; none where a system lacks them.
OPEN: Final[int] = sum(getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NOINHERIT", "O_BINARY"))
"""Bytes as they are, and no descriptor for the programs that this process starts."""
NO_WAIT: Final[int] = getattr(os, "O_NONBLOCK", 0)
"""Without it, opening a named pipe would wait for its other side."""
NO_LINK: Final[int] = getattr(os, "O_NOFOLLOW", 0)

_AGAIN_S: Final = 0.05
_LOCKED_BYTE: Final = 1 << 40  # Windows locks bytes, also those behind the end of a file
_FOLDER_LOCK: Final = ".kqview-lock"

_seeking = threading.Lock()


def lock(handle: int, *, waits: bool = False) -> None:
    """Keep others from locking an open file, until it is closed.

    Raises:
        BlockingIOError: Somebody else has locked it, and this call does not wait.
        OSError: Files cannot be locked there.
    """
    if _fcntl is not None:
        try:
            _fcntl.flock(handle, _fcntl.LOCK_EX | (0 if waits else _fcntl.LOCK_NB))
        except PermissionError as error:  # as some file systems say it
            raise BlockingIOError(*error.args) from None
        return
    locking = import_module("msvcrt")
    while True:
        at = os.lseek(handle, 0, os.SEEK_CUR)
        os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
        try:
            return locking.locking(handle, locking.LK_NBLCK, 1)
        except PermissionError as error:
            if not waits:
                raise BlockingIOError(*error.args) from None
        finally:
            os.lseek(handle, at, os.SEEK_SET)
        time.sleep(_AGAIN_S)


def open_folder(folder: str | os.PathLike[str]) -> int:
    """A handle that stands for *folder* in `lock`; on Windows that of a file in it."""
    if hasattr(os, "O_DIRECTORY"):
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | OPEN)
    return os.open(os.path.join(folder, _FOLDER_LOCK), os.O_RDWR | os.O_CREAT | OPEN)


def read_at(handle: int, n: int, at: int) -> bytes:
    """At most *n* bytes of an open file from *at* on; any thread."""
    if hasattr(os, "pread"):
        return os.pread(handle, n, at)
    with _seeking:
        os.lseek(handle, at, os.SEEK_SET)
        return os.read(handle, n)


def allow_files(n: int) -> None:
    """Raise the soft limit of this process's open files to *n*, if possible."""
    if _resource is None:  # sockets are no files there
        return
    soft, hard = _resource.getrlimit(_resource.RLIMIT_NOFILE)
    wanted = n if hard == _resource.RLIM_INFINITY else min(n, hard)
    if soft != _resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError):  # macOS has another limit, below its hard one
            _resource.setrlimit(_resource.RLIMIT_NOFILE, (wanted, hard))


def start(command: list[str], line: "socket.socket", **options: Any) -> "subprocess.Popen[bytes]":
    """Start a program that speaks on *line*.

    It is descriptor 0 of the program. On Windows descriptor 0 has what ``socket.fromshare`` needs.

    Raises:
        OSError: It does not start.
    """
    popen: Any = import_module("subprocess").Popen
    share: Any = getattr(line, "share", None)
    if share is None:
        return popen(command, stdin=line.fileno(), **options)
    process = popen(command, stdin=-1, **options)  # -1: a pipe
    with process.stdin as stdin:
        stdin.write(share(process.pid))
    return process


def watch(
    loop: "asyncio.AbstractEventLoop", wait: Callable[[], bool], on_signal: Callable[[], object]
) -> Callable[[], object]:
    """Call *on_signal* on a loop that has no readers, as on Windows; returns what ends that.

    Args:
        wait: Blocks until there is something, or returns False after a moment; a thread calls it.
    """
    has_ended = threading.Event()

    def signalled() -> None:
        if not has_ended.is_set():
            on_signal()
            loop.run_in_executor(None, wait_on)

    def wait_on() -> None:
        while not has_ended.is_set():
            if wait():
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(signalled)
                return

    loop.run_in_executor(None, wait_on)
    return has_ended.set
