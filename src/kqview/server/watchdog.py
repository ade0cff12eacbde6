"""Watchdog: ends a process whose engine or event loop hangs, so that a supervisor starts it again.

A thread beside the event loop looks at the engine's heartbeat, which no lock of the engine guards,
and at the loop's own. It logs with plain writes: a thread that hangs may hold a logger's lock.
Where something holds the GIL so that not even this thread runs, faulthandler's own thread, which
needs no GIL, prints all stacks and ends the process with status 1.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from typing import Final, NoReturn

STALLED: Final = 70
"""Exit status of a process that hung, or did not end in its grace (EX_SOFTWARE of sysexits.h)."""

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
        """Watch from `start` on.

        Args:
            limit_s: Longest silence of the event loop, and of whatever holds the GIL; 0 for no
                limit.
            trouble: What is wrong with the engine, None where nothing is.
            on_tick: Called about once a second while all is well.
        """
        self._limit_s = limit_s
        self._trouble = trouble
        self._on_tick = on_tick
        self._beat_s: float | None = None
        self._end_by_s: float | None = None
        self._has_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kqview-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch; the event loop from its first `beat` on."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._has_stopped.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def beat(self) -> None:
        """The event loop runs."""
        self._beat_s = time.monotonic()

    def end_within(self, seconds: float) -> None:
        """The process is to end by itself within *seconds*; after that it is ended."""
        self._end_by_s = time.monotonic() + seconds

    def _run(self) -> None:
        tick_s = min(_TICK_S, self._limit_s / 4) if self._limit_s else _TICK_S
        while not self._has_stopped.wait(tick_s):
            if (why := self._verdict()) is not None:
                self._end(why)
            if self._limit_s:
                faulthandler.dump_traceback_later(self._limit_s + _TICK_S, exit=True, file=_STDERR)
            self._on_tick()

    def _verdict(self) -> str | None:
        now_s = time.monotonic()
        if self._end_by_s is not None and now_s > self._end_by_s:
            return "the server did not end within its grace"
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
