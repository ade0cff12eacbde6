"""Shows on a terminal how far a model is loaded; without one, rich is not imported."""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final

_AS_TERMINAL: Final = ("FORCE_COLOR", "TTY_COMPATIBLE")  # rich takes them for a terminal


@contextmanager
def load_progress() -> Generator[Callable[[float], None] | None]:
    """A callback that shows loading as a progress bar on stderr; None without a terminal."""
    if not (sys.stderr.isatty() or any(os.environ.get(name) for name in _AS_TERMINAL)):
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading the model", total=1.0)

        def show(fraction: float) -> None:
            bar.update(task, completed=fraction)

        yield show
