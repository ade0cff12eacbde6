"""What is attacked over the network: ``kqview serve --demo`` as a process, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tests.support.processes import command_of, processes_below, rss_bytes
from tests.support.serve_process import Parent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.attack.summary import Summary

ENDS_WITHIN_S = 20.0
SAMPLE_S = 0.1


def helper_bytes(pid: int) -> int:
    """The most memory in use by one of the helper processes below *pid*."""
    most = 0
    for one in processes_below(pid)[1:]:
        with contextlib.suppress(OSError):
            # Before it runs its program, a child has the memory of its parent.
            if "confined_child" in command_of(one):
                most = max(most, rss_bytes(one))
    return most


class Target(Parent):
    """A server that runs, and a thread that samples its memory."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(command, errors="replace")
        self.peak_bytes = 0
        self._is_done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    @cached_property
    def port(self) -> int:
        """Where it serves, once it does."""
        return int(self.url.rpartition(":")[2])

    def _sample(self) -> None:
        while not self._is_done.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, rss_bytes(self.process.pid))

    def connect(self, *, timeout_s: float = 10.0, receive_bytes: int | None = None) -> Any:
        """A TCP connection to it."""
        sock = socket.socket()
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(timeout_s)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def request(
        self, method: str, path: str, value: Any = None, *, timeout_s: float = 30.0, key: str = ""
    ) -> tuple[int, bytes]:
        """One ordinary request on a connection of its own: status and body."""
        body = b"" if value is None else json.dumps(value).encode()
        named = f"authorization: Bearer {key}\r\n" if key else ""
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n{named}\r\n"
        )
        with self.connect(timeout_s=timeout_s) as sock:
            sock.sendall(head.encode() + body)
            parts = []
            while part := sock.recv(1 << 16):
                parts.append(part)
        head_bytes, _, rest = b"".join(parts).partition(b"\r\n\r\n")
        status = head_bytes.split(b" ", 2)[1:2]
        return int(status[0]) if status else 0, rest

    def is_well(self, summary: Summary) -> bool:
        """Whether it still answers and generates; what is wrong goes into *summary*."""
        if self.process.poll() is not None:
            summary.fail(f"the server ended with {self.process.returncode}")
            return False
        try:
            status, body = self.request("GET", "/health")
            if status != 200:
                summary.fail(f"/health says {status}: {body[:200]!r}")
                return False
            asked = {"prompt": "Tom has", "max_length": 4, "temperature": 0}
            status, body = self.request("POST", "/api/v1/generate", asked)
            if status != 200 or not json.loads(body)["results"][0]["text"]:
                summary.fail(f"an ordinary request got {status}: {body[:200]!r}")
                return False
        except (OSError, ValueError, LookupError) as error:
            summary.fail(f"an ordinary request failed: {type(error).__name__}: {error}")
            return False
        return True

    def end(self, summary: Summary) -> None:
        """End it with SIGTERM, as an operator does."""
        self._is_done.set()
        self._sampler.join()
        self.process.send_signal(signal.SIGTERM)
        started_s = time.monotonic()
        try:
            self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            summary.fail(f"SIGTERM did not end it within {ENDS_WITHIN_S:.0f} s")
            for pid in processes_below(self.process.pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
        summary.figures["sigterm_ms"] = (time.monotonic() - started_s) * 1000
        summary.figures["peak_memory_MiB"] = self.peak_bytes / 2**20


@contextlib.contextmanager
def target(summary: Summary, *flags: str) -> Iterator[Target]:
    """``kqview serve --demo`` with *flags*; the last lines of its log are shown where it fails."""
    command = [
        sys.executable, "-m", "kqview", "serve", "--demo", "--port", "0", "--threads", "1",
        "--no-access-log", *flags,
    ]  # fmt: skip
    running = Target(command)
    n_wrong = summary.n_wrong
    try:
        assert running.port
        yield running
    finally:
        running.end(summary)
        running.close()
        if summary.n_wrong > n_wrong:
            print("\n".join(["the server's last lines:", *running.said[-40:]]))
        tracebacks = [line for line in running.said if line.startswith("Traceback")]
        if tracebacks:
            last = running.said[-3:]
            summary.fail(f"{len(tracebacks)} tracebacks in its log, the last lines: {last}")
