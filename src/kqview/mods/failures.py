"""Failures of mods: what is kept of them, and who is told.

A failed call counts as Noop unless the request needs its mod. In a program the first failure of
each mod is a warning at the line that failed; in a server, whose standard error nobody reads per
request, each request logs it (`logging_failures`). Only texts are kept: an exception would keep the
arguments of its frames alive, and with them views of attention.
"""

import contextlib
import inspect
import logging
import os
import threading
import traceback
import warnings
import weakref
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

_log: Final = logging.getLogger("kqview.mods")
_MOST_KEPT: Final = 100
_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_warned: Final[dict[int, weakref.ref[Any]]] = {}
_lock: Final = threading.Lock()
_is_logging: Final[ContextVar[bool]] = ContextVar("kqview_logs_mod_failures", default=False)


class ModWarning(RuntimeWarning):
    """A mod failed, and its request went on without it."""


@dataclass(frozen=True, slots=True)
class ModFailure:
    """A call of a mod that failed.

    Attributes:
        mod: Name of the mod.
        event: What it was called with, such as "ForwardPass"; "RequestEnd" for its end hook.
        step: Step of the event; None for the end hook.
        error: Why it failed, such as "NameError: name 'x' is not defined".
        traceback: Traceback of the exception, "" without one.
    """

    mod: str
    event: str
    step: int | None
    error: str
    traceback: str = ""

    @property
    def place(self) -> str:
        """Event and step, such as "ForwardPass of step 3"."""
        return self.event if self.step is None else f"{self.event} of step {self.step}"

    def __str__(self) -> str:
        return f"mod {self.mod} failed at {self.place}: {self.error}"


class ModFailures:
    """The failures of one request; made where the request is."""

    def __init__(self, request_id: str) -> None:
        self.kept: list[ModFailure] = []
        """The first 100."""
        self._request_id = request_id
        self._is_logged = _is_logging.get()
        self._told: set[int] = set()  # ids of mods, which live as long as this

    def add(
        self,
        mod: object,
        failure: ModFailure,
        error: BaseException | None,
        *,
        is_raised: bool = False,
    ) -> None:
        """Keep a failure of *mod*, the object that the caller gave, and tell of the first one.

        *error* is the exception of the mod, if there is one; if the request raises it, *is_raised*,
        a program needs no warning.

        Raises:
            ModWarning: Warnings are errors, by ``warnings.simplefilter("error")``.
        """
        if len(self.kept) < _MOST_KEPT:
            self.kept.append(failure)
        if (key := id(mod)) in self._told:
            return
        self._told.add(key)
        if self._is_logged:
            _log.warning("request %s: %s", self._request_id, failure, exc_info=error)
            return
        if is_raised:
            return
        with _lock:
            if key in _warned:
                return
            with contextlib.suppress(TypeError):  # of objects without weak references: each time
                _warned[key] = weakref.ref(mod, lambda _: _warned.pop(key, None))
        frame, line = _place(error)
        warnings.warn_explicit(
            f"{failure}. Failed calls count as Noop: the text goes on without what the mod "
            "does. generation.mod_errors has them; mods_strict=True, or required = True in the "
            "mod, ends the request instead.",
            ModWarning,
            frame.f_code.co_filename,
            line,
            frame.f_globals.get("__name__"),
        )


@contextlib.contextmanager
def logging_failures() -> Generator[None]:
    """Log the failures of requests that are made inside the context, instead of warning."""
    token = _is_logging.set(True)
    try:
        yield
    finally:
        _is_logging.reset(token)


def describe(error: BaseException) -> str:
    """*error* as "ValueError: text"."""
    try:
        text = str(error)
    except Exception:  # a class of the mod's own may fail here
        text = "<no message>"
    return f"{type(error).__name__}: {text}"


def traceback_of(error: BaseException) -> str:
    """The traceback of *error* as Python prints it."""
    return "".join(traceback.format_exception(error))


def _place(error: BaseException | None) -> tuple[FrameType, int]:
    """The first line outside of kqview on the way to *error*, else the one that called kqview."""
    raised = None if error is None else error.__traceback__
    while raised is not None:
        if not raised.tb_frame.f_code.co_filename.startswith(_PACKAGE):
            return raised.tb_frame, raised.tb_lineno
        raised = raised.tb_next
    frame = inspect.currentframe()
    assert frame is not None
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame, frame.f_lineno
