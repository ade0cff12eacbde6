"""What is attacked over the network: ``kqview serve --demo`` as a process, watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.support.processes import command_of, processes_below, rss_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.attack.summary import Summary

STARTS_WITHIN_S = 60.0
ENDS_WITHIN_S = 20.0
SAMPLE_S = 0.1
_ADDRESS = re.compile(r"at https?://127\.0\.0\.1:(\d+)")


def helper_bytes(pid: int) -> int:
    """The most memory in use by one of the helper processes below *pid*."""
    most = 0
    for one in processes_below(pid)[1:]:
        with contextlib.suppress(OSError):
            # Before it runs its program, a child has the memory of its parent.
            if "confined_child" in command_of(one):
                most = max(most, rss_bytes(one))
    return most


class Target:
    """A server that runs. Owns the process and a thread that samples its memory."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.peak_bytes = 0
        self._is_done = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

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

    def close(self, summary: Summary) -> None:
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
    """``kqview serve --demo`` with *flags*; its log goes to a file that is shown where it fails."""
    command = [
        sys.executable, "-m", "kqview", "serve", "--demo", "--port", "0", "--threads", "1",
        "--no-access-log", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    lines: list[str] = []
    has_started = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            del lines[:-200]
            if _ADDRESS.search(line):
                has_started.set()
        has_started.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    has_started.wait(STARTS_WITHIN_S)
    address = next((m for m in map(_ADDRESS.search, lines) if m), None)
    if address is None:
        process.kill()
        process.wait()
        raise RuntimeError("the server did not start:\n" + "\n".join(lines))
    running = Target(process, int(address[1]))
    n_wrong = summary.n_wrong
    try:
        yield running
    finally:
        running.close(summary)
        reader.join(5)
        process.stdout.close()
        if summary.n_wrong > n_wrong:
            print("\n".join(["the server's last lines:", *lines[-40:]]))
        tracebacks = [line for line in lines if line.startswith("Traceback")]
        if tracebacks:
            summary.fail(f"{len(tracebacks)} tracebacks in its log, the last lines: {lines[-3:]}")
