"""How errors of commands become one line on stderr and an exit status.

Exit statuses: 0 success, 1 error, 2 wrong usage or request, 3 a model cannot be loaded, 4 a limit
of this machine, 130 interrupted, 141 the reader of a pipe has gone.
"""

import errno
import os
import sys
from collections.abc import Mapping
from typing import Final

from kqview.cli.terminal import discard_stdout
from kqview.errors import CapacityError, KqviewError, ModelError, RequestError

REPORTED: Final = (KqviewError, KeyboardInterrupt, OSError, MemoryError, ImportError)
"""What `reported` is for; any other exception is a bug, and keeps its traceback."""

_EXIT_CODES: Final[Mapping[type, int]] = {
    RequestError: 2,
    ModelError: 3,
    CapacityError: 4,
    KqviewError: 1,
}
_INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
# What flushing stdout may raise, at exit once more.
_UNWRITTEN: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)

_EXTRAS: Final[Mapping[str, str]] = {
    "serve": "server",
    "config": "server",
    "ingest": "ingest",
    "extract": "corpora",
}
"""What to install for commands that need more than the command line does."""


def reported(error: BaseException, command: str | None) -> int:
    """Tell of what ended *command*, and return the exit status."""
    if isinstance(error, KeyboardInterrupt):
        print(file=sys.stderr)
        return _INTERRUPTED
    if isinstance(error, BrokenPipeError):
        discard_stdout()
        return BROKEN_PIPE
    if isinstance(error, MemoryError) and not isinstance(error, KqviewError):
        error = CapacityError("this machine has too little memory for that")
    if isinstance(error, ImportError):
        if command not in _EXTRAS or not isinstance(error, ModuleNotFoundError):
            raise error
        missing, remedy = error.name, f'run pip install "kqview[{_EXTRAS[command]}]"'
        if missing in sys.stdlib_module_names:  # of Python itself: _sqlite3, _ssl
            remedy = f"this Python was built without it; use one that can import {missing}"
        error = RequestError(f"kqview {command} needs {missing}, which is not installed; {remedy}")
    print_error(error)
    if isinstance(error, OSError) and error.errno in _UNWRITTEN:
        discard_stdout()
    return next((_EXIT_CODES[kind] for kind in type(error).__mro__ if kind in _EXIT_CODES), 1)


def print_error(error: BaseException) -> None:
    """Write *error* to stderr as one line."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror is not None and error.filename2 is None:
        place = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        text = f"{place}{error.strerror}"
    lines = [line.strip() for line in text.splitlines()]
    print(f"error: {' | '.join(line for line in lines if line)}", file=sys.stderr)
