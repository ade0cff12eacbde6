"""llama.cpp's log lines, handed to ``logging.getLogger("kqview.llama")``."""

import contextlib
import logging
import sys
import traceback

from kqview import _core

_logger = logging.getLogger("kqview.llama")


def forward_log() -> None:
    """Hand over what llama.cpp has logged since the last call; any thread.

    What a handler of the caller's raises is printed as `logging` does it and reaches nobody: these
    lines may be another engine's.
    """
    for level, text in _core.drain_log():
        try:
            _logger.log(level, "%s", text)
        except Exception:  # printed: it is of a handler, not of who happens to call
            _report()


def _report() -> None:
    if logging.raiseExceptions and sys.stderr is not None:
        with contextlib.suppress(Exception):
            traceback.print_exc()
