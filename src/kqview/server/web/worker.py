"""Worker: the process that serves, seen from outside: its supervisor and its watchdog.

`Supervised` is the line to `supervisor.py`, which documents the descriptors. `Watchdog` is a thread
that ends the process if the engine or the event loop hangs, so that the supervisor restarts it. It
reads the engine's heartbeat, which no engine lock guards, and logs with plain writes, because a
hung thread may hold a logger's lock. If something holds the GIL, not even that thread runs; then
faulthandler's own thread prints all stacks and ends the process with status 1.
"""

import contextlib
import faulthandler
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping
from typing import Final, NoReturn, Self

from kqview.server.web.supervisor import ALIVE, ENVIRONMENT, NOTES_BYTES, READY

STALLED: Final = 70
"""Exit status of a process that hung or did not end in time (EX_SOFTWARE in sysexits.h)."""
HUNG_FACTOR: Final = 2.0
"""The process ends after this many stall timeouts without progress; /health is 503 after one."""

_TICK_S: Final = 1.0
_STDERR: Final = 2


class Watchdog:
    """Watches one server of this process; `beat` is for its event loop, the rest for any thread."""

    def __init__(
        self,
        limit_s: float,
        *,
        trouble: Callable[[], str | None],
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Watch once `start` is called.

        Args:
            limit_s: Longest silence of the event loop, and longest time without the GIL; 0 for no
                limit.
            trouble: Returns what is wrong with the engine, None if nothing is.
            on_tick: Called about once a second while nothing is wrong.
        """
        self._limit_s = limit_s
        self._trouble = trouble
        self._on_tick = on_tick
        self._beat_s: float | None = None
        self._end_by_s: float | None = None
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kqview-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch; the event loop is watched from its first `beat` on."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._has_stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def beat(self) -> None:
        """Note that the event loop runs."""
        self._beat_s = time.monotonic()

    def end_within(self, seconds: float) -> None:
        """End the process if it has not ended by itself within *seconds*."""
        self._end_by_s = time.monotonic() + seconds

    def _run(self) -> None:
        tick_s = min(_TICK_S, self._limit_s / 4) if self._limit_s else _TICK_S
        while not self._has_stopped.wait(tick_s):
            if (why := self._verdict()) is not None:
                self._end(why)
            if self._limit_s:
                limit_s = min(self._limit_s + _TICK_S, threading.TIMEOUT_MAX)
                faulthandler.dump_traceback_later(limit_s, exit=True, file=_STDERR)
            self._on_tick()

    def _verdict(self) -> str | None:
        now_s = time.monotonic()
        if self._end_by_s is not None and now_s > self._end_by_s:
            return "the server did not end within its grace period"
        if not self._limit_s:
            return None
        if self._beat_s is not None and now_s - self._beat_s > self._limit_s:
            return (
                f"the event loop gave no sign of life for {now_s - self._beat_s:.1f} s, "
                f"the limit is {self._limit_s:g} s"
            )
        return self._trouble()

    def _end(self, why: str) -> NoReturn:
        os.write(_STDERR, f"kqview watchdog: {why}; the process ends\n".encode())
        faulthandler.dump_traceback(_STDERR, all_threads=True)
        os._exit(STALLED)


_MOST_NOTE: Final = 160  # characters
_ANSWER_S: Final = 2.0  # for the supervisor to answer


class Supervised:
    """This process's connection to its supervisor; any thread."""

    def __init__(self, listener: socket.socket, control: socket.socket, notes: int) -> None:
        control.setblocking(False)
        self.listener = listener
        self._control = control
        self._notes = notes

    @classmethod
    def from_env(cls, environ: MutableMapping[str, str]) -> Self | None:
        """Take the descriptors out of *environ*; None if it names none."""
        text = environ.pop(ENVIRONMENT, None)
        if text is None:
            return None
        descriptors = [int(part) for part in text.split(",")]
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        listener, control, notes = descriptors
        return cls(socket.socket(fileno=listener), socket.socket(fileno=control), notes)

    def tell_ready(self) -> None:
        """Say that requests are accepted from now on; wait until the supervisor refuses no more."""
        if self._tell(READY) and select.select([self._control], [], [], _ANSWER_S)[0]:
            with contextlib.suppress(OSError):  # the supervisor is gone
                self._control.recv(len(READY))

    def tell_alive(self) -> bool:
        """Give a sign of life; False if the supervisor is gone."""
        return self._tell(ALIVE)

    def _tell(self, what: bytes) -> bool:
        try:
            self._control.send(what)
        except BlockingIOError:  # it is not listening at the moment
            return True
        except OSError:
            return False
        return True

    def note(self, requests: Iterable[str]) -> None:
        """Store what runs where the supervisor finds it after a crash; the newest that fit."""
        data, kept = b"[]", list[str]()
        for request in reversed(list(requests)):
            kept.append(request[:_MOST_NOTE])
            longer = json.dumps(kept).encode()
            if len(longer) > NOTES_BYTES:
                break
            data = longer
        os.pwrite(self._notes, data.ljust(NOTES_BYTES), 0)
