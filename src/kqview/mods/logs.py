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
from typing import Any, Final, Literal, cast

Level = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Log = Callable[[str, Level], object]

_LONGEST_LINE: Final = 65_536  # characters; a longer line becomes several
_lock: Final = threading.Lock()
_n_calls = 0
_has_factory = False


class _Lines:
    """Cuts what a call prints into lines; one thread or task at a time."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.is_open = True
        self._rest = ""

    def print(self, text: str) -> None:
        *lines, rest = (self._rest + text).split("\n")
        n_cut = max(0, len(rest) - 1) // _LONGEST_LINE * _LONGEST_LINE
        lines += (rest[i : i + _LONGEST_LINE] for i in range(0, n_cut, _LONGEST_LINE))
        self._rest = rest[n_cut:]
        for line in lines:
            self.log(line, "INFO")

    def close(self) -> None:
        """Log an unfinished line; what is printed later goes where it would without mods."""
        self.is_open = False
        if self._rest:
            self.log(self._rest, "INFO")


_lines: Final[ContextVar[_Lines | None]] = ContextVar("kqview_mod_lines", default=None)


def _current() -> _Lines | None:
    lines = _lines.get()
    return lines if lines is not None and lines.is_open else None


class _Router:
    """Stands for `sys.stdout` while mods run."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        lines = _current()
        if lines is None:
            return cast("int", self.stream.write(text))
        lines.print(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Captured:
    """Context manager: passes lines that this thread or task prints, and records, to *log*.

    Threads that the code inside starts are not captured.
    """

    __slots__ = ("_lines", "_token")

    def __init__(self, log: Log) -> None:
        self._lines = _Lines(log)

    def __enter__(self) -> None:
        global _n_calls, _has_factory
        self._token = _lines.set(self._lines)
        with _lock:
            _n_calls += 1
            if not isinstance(sys.stdout, _Router):
                sys.stdout = cast("Any", _Router(sys.stdout))
            if not _has_factory:
                logging.setLogRecordFactory(_seeing(logging.getLogRecordFactory()))
                _has_factory = True

    def __exit__(self, *_: object) -> None:
        global _n_calls
        _lines.reset(self._token)
        with _lock:
            _n_calls -= 1
            # Whoever has replaced the router meanwhile keeps the stream.
            if _n_calls == 0 and isinstance(sys.stdout, _Router):
                sys.stdout = sys.stdout.stream
        self._lines.close()


def _seeing(make: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    def factory(*arguments: Any, **options: Any) -> logging.LogRecord:
        record = make(*arguments, **options)
        lines = _current()
        if lines is not None:
            lines.log(_text_of(record), _level_of(record))
        return record

    return factory


def _text_of(record: logging.LogRecord) -> str:
    try:
        text = record.getMessage()
    except Exception:  # arguments that do not fit; logging itself reports them to stderr
        text = str(record.msg)
    if record.exc_info and record.exc_info[0] is not None:
        text += "\n" + logging.Formatter().formatException(record.exc_info)
    return text


def _level_of(record: logging.LogRecord) -> Level:
    if record.levelno >= logging.ERROR:
        return "ERROR"
    if record.levelno >= logging.WARNING:
        return "WARNING"
    return "INFO" if record.levelno >= logging.INFO else "DEBUG"
