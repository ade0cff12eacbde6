"""Processes of ``kqview serve``: started, heard, and ended with the test."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WITHIN_S = 40.0


class Parent:
    """A supervisor in a process of its own; what it and its workers say is in ``said``."""

    def __init__(self, command: list[str], **options: Any) -> None:
        clean = {name: value for name, value in os.environ.items() if name[:7] != "KQVIEW_"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean,
            **options,
        )  # fmt: skip
        self.said: list[str] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(iter(self.process.stdout.readline, ""))

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(WITHIN_S)
        finally:
            self.process.kill()
            self._listener.join(WITHIN_S)  # until its workers are gone too
            assert self.process.stdout is not None
            self.process.stdout.close()

    def wait_for(self, pattern: str, n: int = 1) -> str:
        """The *n*-th line with *pattern*."""
        found: list[str] = []

        def is_said() -> bool:
            found[:] = [line for line in list(self.said) if re.search(pattern, line)]
            return len(found) >= n

        assert until(is_said), f"no {pattern!r} in {self.said}"
        return found[n - 1]

    @property
    def url(self) -> str:
        """Where it serves, once it does."""
        match = re.search(r"https?://[^ )]+", self.wait_for("serves"))
        assert match is not None
        return match[0]

    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


def until(is_true: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + WITHIN_S
    while not is_true():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[Parent]:
    parent = Parent(command, **options)
    try:
        yield parent
    finally:
        parent.close()
