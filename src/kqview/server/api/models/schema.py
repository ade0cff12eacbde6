"""Bodies of the administrator's operations on models."""

from typing import Literal

from msgspec import Struct


class ModelState(Struct, kw_only=True):
    """A model and its state.

    Attributes:
        id: Its name, such as "demo".
        state: Whether it is loaded.
        progress: Loaded fraction, 0..1, such as 1.0.
        pinned: Whether it stays loaded whatever others need.
        error: Why it could not be loaded, such as "the file is cut off"; null otherwise.
        estimated_bytes: Memory that it needs, as far as its file says, such as 52428800; null
            before the first load.
        measured_bytes: Memory that it took when it was loaded, such as 50331648; null before the
            first load.
        requests: Requests that use it, or wait for it, such as 0.
        loads: How often it was loaded, such as 1.
    """

    id: str
    state: Literal["unloaded", "loading", "loaded", "failed"]
    progress: float
    pinned: bool
    error: str | None
    estimated_bytes: int | None
    measured_bytes: int | None
    requests: int
    loads: int
