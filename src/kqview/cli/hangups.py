"""Hangups: SIGHUP while ``kqview serve`` starts, which neither ends it nor is lost.

Whether it asks for the end or for the configuration to be read again is known only once the command
line was read. A file of its own, because it comes before everything that takes long to import.
"""

import os
import signal
from types import FrameType

from kqview.system import HANGUP

is_program = False
"""Set by the entry point: this process runs the command alone, so a supervisor may replace it."""

has_come = False
"""Whether it came while it was held."""


def hold() -> None:
    """Note SIGHUP from now on; a supervisor has held it back until here."""
    if HANGUP is None:
        return
    if signal.getsignal(HANGUP) is signal.SIG_DFL:  # nohup leaves it ignored
        signal.signal(HANGUP, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [HANGUP])


def release() -> None:
    """Let SIGHUP end the program again, now if it has come."""
    if HANGUP is not None and signal.getsignal(HANGUP) is _note:
        signal.signal(HANGUP, signal.SIG_DFL)
        if has_come:
            os.kill(os.getpid(), HANGUP)


def _note(_number: int, _frame: FrameType | None) -> None:
    global has_come
    has_come = True
