"""Programs that tests run in processes of their own: ports, ends, forked children, their memory."""

from __future__ import annotations

import contextlib
import mmap
import random
import socket
import subprocess
import time
from pathlib import Path

import pytest

# For scripts that import os, signal and sys. `in_child(check)` is the child's exit status: 0 where
# `check` raised nothing. `fork()` is os.fork without its warning.
FORK = """
import warnings
def fork():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of 3.12 and later, beside threads
        return os.fork()
def in_child(check):
    sys.stdout.flush()
    pid = fork()
    if pid == 0:
        signal.alarm(20)  # ends a child that hangs
        status = 1
        try:
            check()
            status = 0
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def free_port() -> int:
    """A port of the loopback device that nobody listens on, for a program that has to be told one.

    None of those that the kernel gives out by itself: it might, before the program listens.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def output_of(process: subprocess.Popen[str], timeout_s: float = 60) -> str:
    """What it printed; it must end by itself with status 0 and without a word on stderr."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"it hung; stdout {out!r}, stderr {err!r}")
    assert (process.returncode, err) == (0, ""), out
    return out.strip()


def wait_until_asleep(process: subprocess.Popen[str]) -> None:
    """Return when its main thread waits in the kernel, inside the call that it makes."""
    status = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
    while process.poll() is None and status.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.001)


# ---- the processes below one; Linux

PAGE_BYTES = mmap.PAGESIZE


def processes_below(pid: int) -> list[int]:
    """*pid* and every process that it started, directly or not."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for tasks in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (tasks / "children").read_text().split())
    return found


def rss_bytes(pid: int) -> int:
    """Memory in use by *pid* and the processes below it."""
    total = 0
    for one in processes_below(pid):
        with contextlib.suppress(OSError, IndexError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * PAGE_BYTES
    return total


def n_threads() -> int:
    """Threads of this process, those of the core too."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("Threads:")[2].split()[0])


def command_of(pid: int) -> str:
    """Its command line; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
