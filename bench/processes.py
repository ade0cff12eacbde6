"""A piece of work in a process of its own: what is compared shares no threads and no memory.

Owns: the processes. Each is killed at the end of its block and ends itself when its parent is gone,
so none outlives a benchmark, whether that ends, fails, or is interrupted, terminated or killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from multiprocessing.connection import Connection
    from types import FrameType

    # Opens the work; what it yields does it once and returns its figures.
    Opener = Callable[..., AbstractContextManager[Callable[..., Any]]]


class OwnProcess:
    """Work that waits in a process of its own until it is asked for; a context manager.

    Entering it waits until the work is open, so several of them open one after the other.
    """

    def __init__(self, opener: Opener, *arguments: object) -> None:
        """Work that *opener*, a function of a module, opens with *arguments*."""
        self._opener = opener
        self._arguments = arguments

    def ask(self, *arguments: object) -> Any:
        """Do the work once with *arguments*."""
        self.send(*arguments)
        return self.answer()

    def send(self, *arguments: object) -> None:
        """Begin the work; `answer` waits for it."""
        self._pipe.send(arguments)

    def answer(self) -> Any:
        """What the work returned.

        Raises:
            RuntimeError: The process ended.
            Exception: What the work raised.
        """
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(
                f"a process of the benchmark ended with exit status {self._process.exitcode}"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(end, self._opener, self._arguments), daemon=True
        )
        self._process.start()
        end.close()
        try:
            self.answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.kill()  # nothing of it is needed: not its memory, and no file of its own
        self._process.join()


def _serve(pipe: Connection, opener: Opener, arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches all processes of a terminal; the parent decides what ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with opener(*arguments) as work:
            pipe.send(None)
            while True:
                pipe.send(work(*pipe.recv()))
    except EOFError:
        return
    except Exception as error:  # told to whoever asks
        pipe.send(error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def end_on_sigterm() -> None:
    """Let SIGTERM end this program as Ctrl-C does: through the ends of all open blocks."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
