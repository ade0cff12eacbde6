"""Captures what a mod prints and logs during a call, and leaves the output of other threads alone.

While a mod runs, `sys.stdout` is a router that reads a context variable: text printed in a mod's
context goes to its call, all other text to the original stream. Context variables follow a
thread or a task, so mods of several requests may print at the same time. Records of `logging` are
seen as they are made, by a record factory that is installed once and passes everything on: which
records exist is decided by the levels of their loggers, and handlers get them as usual.
"""

import logging
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Literal, cast

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Log = Callable[[str, Level], object]

_LONGEST_LINE: Final = 65_536  # characters; a longer line becomes several
_lock: Final = threading.Lock()
_n_calls = 0
_has_factory = False


class Captured:
    """Context manager: passes lines that this thread or task prints, and records, to *log*.

    Threads that the code inside starts are not captured.
    """

    __slots__ = ("_rest", "_token", "is_open", "log")

    def __init__(self, log: Log) -> None:
        self.log = log
        self.is_open = True
        self._rest = ""  # of a line that goes on

    def print(self, text: str) -> None:
        """Pass on the lines that *text* ends."""
        *lines, rest = (self._rest + text).split("\n")
        n_cut = max(0, len(rest) - 1) // _LONGEST_LINE * _LONGEST_LINE
        lines += (rest[i : i + _LONGEST_LINE] for i in range(0, n_cut, _LONGEST_LINE))
        self._rest = rest[n_cut:]
        for line in lines:
            self.log(line, "INFO")

    def __enter__(self) -> None:
        global _n_calls, _has_factory
        self._token = _captured.set(self)
        with _lock:
            _n_calls += 1
            if not isinstance(sys.stdout, _Router):
                sys.stdout = cast("Any", _Router(sys.stdout))
            if not _has_factory:
                logging.setLogRecordFactory(partial(_seen, logging.getLogRecordFactory()))
                _has_factory = True

    def __exit__(self, *_: object) -> None:
        global _n_calls
        _captured.reset(self._token)
        with _lock:
            _n_calls -= 1
            # Whoever has replaced the router meanwhile keeps the stream.
            if _n_calls == 0 and isinstance(sys.stdout, _Router):
                sys.stdout = sys.stdout.stream
        self.is_open = False  # what is printed later goes where it would without mods
        if self._rest:
            self.log(self._rest, "INFO")


_captured: Final[ContextVar[Captured | None]] = ContextVar("kqview_mod_lines", default=None)


def _current() -> Captured | None:
    captured = _captured.get()
    return captured if captured is not None and captured.is_open else None


class _Router:
    """Stands for `sys.stdout` while mods run."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        captured = _current()
        if captured is None:
            return cast("int", self.stream.write(text))
        captured.print(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _seen(
    make: Callable[..., logging.LogRecord], *arguments: Any, **options: Any
) -> logging.LogRecord:
    record = make(*arguments, **options)
    if (captured := _current()) is not None:
        levels = (name for least, name in _LEVELS if record.levelno >= least)
        captured.log(_text_of(record), cast("Level", next(levels)))
    return record


_LEVELS: Final[tuple[tuple[int, Level], ...]] = (
    (logging.ERROR, "ERROR"), (logging.WARNING, "WARNING"), (logging.INFO, "INFO"), (0, "DEBUG"),
)  # fmt: skip


def _text_of(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception:  # arguments that do not fit; logging itself reports them to stderr
        text = str(record.msg)
    if record.exc_info and record.exc_info[0] is not None:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    return text
