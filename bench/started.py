"""A program that a benchmark starts, waits for and ends; its output is shown if it fails."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

START_LIMIT_S = 60
END_LIMIT_S = 10
_SHOWN_BYTES = 800


class Started(ABC):
    """One start of a program; a context manager that waits until it is ready, and ends it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            command, env=env, stdout=self._log, stderr=subprocess.STDOUT
        )

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers."""

    def prepare(self) -> None:  # noqa: B027  # few programs need it
        """What has to be done once, when it answers; nothing if not overridden."""

    def __enter__(self) -> Self:
        try:
            self._wait()
            self.prepare()
        except BaseException:  # an interruption as well
            self.__exit__(None, None, None)
            raise
        return self

    def _wait(self) -> None:
        until = time.monotonic() + START_LIMIT_S
        while not self.is_ready():
            if self._process.poll() is not None or time.monotonic() > until:
                self._log.seek(0)
                end = self._log.read()[-_SHOWN_BYTES:].decode(errors="replace")
                raise RuntimeError(f"{self._process.args!r} did not start; {end}")
            time.sleep(0.1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_LIMIT_S)
        finally:  # also if the wait is interrupted
            self._process.kill()
            self._process.wait()


def is_healthy(port: int) -> bool:
    """Whether the server at this port of this machine answers ``GET /health`` with 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def free_port() -> int:
    """A free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
