"""Confined: work on what strangers wrote, in child processes that have limits.

For libraries whose single call may hold the GIL for minutes, take all memory or crash on hostile
input. A program is a file that defines ``answer(request)``; `kqview.confined_child` runs it. What
holds for each call:

- Memory: what the child maps beyond its own needs. Linux only: macOS and Windows enforce no such
  limit, so there the limits on time bound it.
- CPU time, but on Windows; and time on the clock, from the request to the answer.
- The child reads files as its user does, but writes none, and has no environment. It is no jail for
  machine code: the program keeps its own sandbox.

Each child does one call at a time. One that breaks a limit is killed, alone, and its successor
starts at once. Children end with their owner, however that ends: an idle one reads the end of its
socket, a busy one has its CPU time. Any thread; waiting needs no GIL.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Literal

from kqview import errors, system
from kqview.errors import CapacityError, ClosedError, InternalError, KqviewError, QueueFull

_START_S: Final = 60.0  # of a child, on a busy machine
_REQUEST: Final = struct.Struct("!I")  # the length
_ANSWER: Final = struct.Struct("!cI")  # a kind of confined_child, and the length
_CLOSED: Final = "the helper processes are closed, or belong to the parent of this fork"
_CHILD: Final = Path(__file__).with_name("confined_child.py")
# The time zone for programs that tell the date; the rest only where the loader needs it.
_KEPT: Final = ("TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")


class Stopped(Exception):
    """A call was ended before it had an answer; the message says which limit it broke.

    Attributes:
        reason: "memory", "time" (of the CPU or the clock), "length" (of the answer), or "died" for
            a child that ended by itself.
    """

    def __init__(self, reason: Literal["memory", "time", "length", "died"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Confined:
    """Child processes that run one program; they start with the first calls.

    Children end with `close`, with the last reference, or with the interpreter.

    Args:
        program: File that defines ``answer(request)``. It may import what this process can, and of
            kqview the modules that need no native core.
        n_processes: Most children, and so calls at a time.
        memory_bytes: Memory of a call.
        cpu_s: CPU time of a call.
        wall_s: Time of a call on the clock, its turn not included.
        queue_s: Longest wait for a turn; turns come in order.
        n_waiting: Most calls that wait.
        length_max: Most bytes of an answer in JSON.
    """

    def __init__(
        self,
        program: str | Path,
        *,
        n_processes: int = 2,
        memory_bytes: int = 512 << 20,
        cpu_s: float = 5.0,
        wall_s: float = 20.0,
        queue_s: float = 30.0,
        n_waiting: int = 64,
        length_max: int = 64 << 20,
    ) -> None:
        about = {
            "program": os.path.abspath(program),
            "packages": str(Path(__file__).parent),
            "path": [os.path.abspath(one) for one in sys.path],
            "memory_bytes": memory_bytes,
            "cpu_s": cpu_s,
            "length_max": length_max,
        }
        self._children = [_Child(about, wall_s) for _ in range(n_processes)]
        self._queue_s, self._n_waiting = queue_s, n_waiting
        self._lock = threading.Lock()
        self._free = self._children[::-1]
        self._waiting = deque[Future[_Child]]()
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end_all, self._children, self._owner)

    def call(self, request: object) -> Any:
        """The answer to *request*, both in JSON's types.

        Raises:
            Stopped: It broke a limit.
            QueueFull: Too many calls wait, or this one waited too long.
            CapacityError: The system does not start another process.
            ClosedError: It is closed, or this process is a fork of its owner.
            KqviewError: What the program raised, by its class.
            ValueError: *request* cannot be written as JSON.
        """
        data = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        child = self._taken()
        try:
            with child.in_use:
                child.renew(self._end)
                try:
                    kind, body = child.exchange(data)
                finally:
                    with contextlib.suppress(CapacityError):  # the next call tries again
                        child.renew(self._end)
        except Stopped:
            self._check_open()
            raise
        finally:
            self._give(child)
        value = json.loads(body.decode("utf-8", "surrogatepass"))
        if kind == b"e":
            error: KqviewError = getattr(errors, value["error"])(value["message"])
            error.__dict__ |= value["about"]
            raise error
        if kind != b"a":
            raise InternalError(f"a helper process failed: {value}")
        return value

    def close(self) -> None:
        """End all children; calls that run raise ClosedError. Idempotent."""
        self._end()
        with self._lock:
            while self._waiting:
                self._waiting.popleft().set_exception(ClosedError(_CLOSED))

    def _taken(self) -> "_Child":
        with self._lock:
            self._check_open()
            if self._free:
                return self._free.pop()
            if len(self._waiting) >= self._n_waiting:
                raise QueueFull(f"{len(self._waiting)} calls wait for a process; retry later")
            turn: Future[_Child] = Future()
            self._waiting.append(turn)
        try:
            return turn.result(self._queue_s)
        except BaseException as error:  # also a signal that interrupts the wait
            with self._lock:
                if turn in self._waiting:
                    self._waiting.remove(turn)
            if turn.done() and turn.exception() is None:  # just now
                self._give(turn.result())
            if not isinstance(error, TimeoutError):
                raise
            raise QueueFull(f"no process was free for {self._queue_s:g} s; retry later") from None

    def _give(self, child: "_Child") -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set_result(child)
            else:
                self._free.append(child)

    def _check_open(self) -> None:
        if not self._end.alive or os.getpid() != self._owner:
            raise ClosedError(_CLOSED)


class _Child:
    """A child process and its successors; one call at a time, `kill` at any."""

    def __init__(self, about: dict[str, Any], wall_s: float) -> None:
        self._about = about
        self._wall_s = wall_s
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_ready = False  # the process has said so
        self.is_over = True
        """Whether the next call needs another process."""
        self.in_use = threading.Lock()
        """Held by a call, and by what ends the process."""

    def exchange(self, data: bytes) -> tuple[bytes, bytearray]:
        """Send a request; returns the kind and body of the answer."""
        line = self._socket
        assert line is not None
        self.is_over = True
        end_s = time.monotonic() + _START_S
        try:
            if not self._is_ready:
                kind, body = _received(line, end_s, 1 << 20)
                if kind != b"r":
                    raise InternalError(f"a helper process does not start: {body.decode()}")
                self._is_ready = True
            end_s = time.monotonic() + self._wall_s
            line.settimeout(self._wall_s)
            line.sendall(_REQUEST.pack(len(data)) + data)
            kind, body = _received(line, end_s, self._about["length_max"])
        except TimeoutError:
            raise Stopped("time", f"it takes more than {self._wall_s:g} s") from None
        except OSError:
            raise self._why() from None
        match kind:
            case b"m":
                limit = self._about["memory_bytes"] >> 20
                raise Stopped("memory", f"it takes more than {limit} MiB of memory")
            case b"l":
                limit = self._about["length_max"]
                raise Stopped("length", f"its result has more than {limit} bytes, the limit")
            case _:
                self.is_over = kind.isupper()  # it has grown, and leaves
        return kind.lower(), body

    def renew(self, pool: "weakref.finalize[..., Any]") -> None:
        """Start another process if this one is over, ahead of the next call."""
        has_died = self._process is not None and self._process.poll() is not None
        if self.is_over or has_died:
            self.end()
            if not pool.alive:
                raise ClosedError(_CLOSED)
            self._start()

    def kill(self) -> None:
        """Kill the process; any thread."""
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> None:
        """Kill the process and wait for it."""
        self.is_over = True
        if (process := self._process) is not None:
            process.kill()
            process.wait()
        if self._socket is not None:
            self._socket.close()
        self._process = self._socket = None

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(_CHILD)]
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        about = json.dumps(self._about).encode()
        try:
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = system.start(
                    command,
                    theirs,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=kept,
                    start_new_session=True,
                )
            self._socket.sendall(_REQUEST.pack(len(about)) + about)
        except OSError as error:
            self.end()
            raise CapacityError(
                f"a helper process does not start: {error}; where none may, "
                "Engine(chat_template=...) trusts a template and renders it in this process"
            ) from error
        self._is_ready = self.is_over = False

    def _why(self) -> Stopped:
        """Why the process ended."""
        process = self._process
        assert process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        if hasattr(signal, "SIGPROF") and process.returncode == -signal.SIGPROF:
            return Stopped("time", f"it takes more than {self._about['cpu_s']:g} s of CPU time")
        when = "" if self._is_ready else " at its start"
        return Stopped("died", f"its process ended{when} with status {process.returncode}")


def _received(line: socket.socket, end_s: float, length_max: int) -> tuple[bytes, bytearray]:
    """The kind and body of a message."""
    kind, length = _ANSWER.unpack(_exactly(line, _ANSWER.size, end_s))
    if length > length_max:
        raise OSError("longer than agreed")
    return kind, _exactly(line, length, end_s)


def _exactly(line: socket.socket, n: int, end_s: float) -> bytearray:
    data = bytearray(n)
    rest = memoryview(data)
    while rest:
        line.settimeout(max(end_s - time.monotonic(), 0.001))
        if not (n_read := line.recv_into(rest)):
            raise ConnectionError
        rest = rest[n_read:]
    return data


def _end_all(children: list[_Child], owner: int) -> None:
    if os.getpid() != owner:
        return
    for child in children:
        for _ in range(20):  # a call that runs notices; at exit its thread may be frozen
            child.kill()
            if child.in_use.acquire(timeout=0.1):
                child.end()
                child.in_use.release()
                break
