"""llama.cpp's own RPC server as a process of its own, and impostors that a client may meet.

Owns: starting, stopping and killing. Never: leaves a
process behind: whatever was started ends with its `with` block.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support import stock
from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

HOST = "127.0.0.1"
N_TRIES = 5
START_LIMIT_S = 20.0
HELLO = 14
HELLO_ANSWER = struct.Struct("<Q4B24x")  # size of what follows, version 7.0.0, padding, nothing


class RpcServer:
    """One ggml-rpc-server on the CPU with one thread; ``endpoint`` is its ``host:port``."""

    def __init__(self, port: int | None = None) -> None:
        self._binary: Path = stock.find_binary("ggml-rpc-server")
        self.port = 0
        for _ in range(N_TRIES):  # another process may take the port that was free a moment ago
            self.port = port or free_port()
            self._start()
            if self._accepts():
                return
            self.kill()
            if port is not None:
                time.sleep(0.5)
        raise AssertionError(f"ggml-rpc-server does not listen on port {self.port}")

    @property
    def endpoint(self) -> str:
        return f"{HOST}:{self.port}"

    def _start(self) -> None:
        command = [str(self._binary), "--host", HOST, "--port", str(self.port), "--threads", "1"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def _accepts(self) -> bool:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((HOST, self.port), 1):
                return True
            time.sleep(0.02)
        return False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """It keeps its connections and answers nothing any more."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """It is gone without a word, also when it is stopped."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(timeout=30)


@contextmanager
def serving(port: int | None = None) -> Generator[RpcServer]:
    """Yield a server that is ended with the block."""
    server = RpcServer(port)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def impostor(talk: Callable[[socket.socket], None]) -> Generator[str]:
    """Yield the endpoint of something that is no server: *talk* is run with each connection."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(4)
        is_over = threading.Event()

        def serve() -> None:
            while not is_over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listener.accept()
                    with connection:
                        if not is_over.is_set():  # that connection only ends the wait
                            connection.settimeout(30)
                            talk(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        port = listener.getsockname()[1]
        try:
            yield f"{HOST}:{port}"
        finally:
            is_over.set()
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
                pass
            thread.join(timeout=30)
            assert not thread.is_alive()


def read_request(connection: socket.socket) -> tuple[int, bytes]:
    """Return command and payload of one request; an empty payload at the end of the connection."""
    head = _read(connection, 9)
    if len(head) < 9:
        return -1, b""
    return head[0], _read(connection, int.from_bytes(head[1:], "little"))


def greet(connection: socket.socket, major: int = 7, minor: int = 0) -> None:
    """Answer the first request as a server of that version does."""
    assert read_request(connection) == (HELLO, bytes(24))
    connection.sendall(HELLO_ANSWER.pack(28, major, minor, 0, 0))


def answer(connection: socket.socket, payload: bytes) -> None:
    """Answer a request."""
    connection.sendall(len(payload).to_bytes(8, "little") + payload)


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    got = b""
    while len(got) < n_bytes and (part := connection.recv(n_bytes - len(got))):
        got += part
    return got
