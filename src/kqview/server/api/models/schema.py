"""Bodies of the administrator's operations on models."""

from typing import Annotated, Literal

from msgspec import Struct

from kqview.server.web.described import example


class ModelState(Struct, kw_only=True):
    """A model and its state.

    Attributes:
        id: Its name.
        state: Whether it is loaded.
        progress: Loaded fraction, 0..1.
        pinned: Whether it stays loaded whatever others need.
        error: Why it could not be loaded; null otherwise.
        estimated_bytes: Memory that it needs, as far as its file says; null before the first load.
        measured_bytes: Memory that it took when it was loaded; null before the first load.
        requests: Requests that use it, or wait for it.
        loads: How often it was loaded.
    """

    id: Annotated[str, example("demo")]
    state: Literal["unloaded", "loading", "loaded", "failed"]
    progress: Annotated[float, example(1.0)]
    pinned: bool
    error: Annotated[str | None, example("the file is cut off")]
    estimated_bytes: Annotated[int | None, example(52428800)]
    measured_bytes: Annotated[int | None, example(50331648)]
    requests: Annotated[int, example(0)]
    loads: Annotated[int, example(1)]
