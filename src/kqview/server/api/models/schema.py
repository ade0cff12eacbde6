"""Bodies of the administrator's operations on models."""

from typing import Annotated, Literal

from msgspec import Struct

from kqview.server.web.described import about


class ModelState(Struct, kw_only=True):
    """A model and its state."""

    id: Annotated[str, about("Its name.", "demo")]
    state: Annotated[
        Literal["unloaded", "loading", "loaded", "failed"], about("Whether it is loaded.")
    ]
    progress: Annotated[float, about("Loaded fraction, 0..1.", 1.0)]
    pinned: Annotated[bool, about("Whether it stays loaded whatever others need.")]
    error: Annotated[
        str | None, about("Why it could not be loaded; null otherwise.", "the file is cut off")
    ]
    estimated_bytes: Annotated[
        int | None,
        about(
            "Memory that it needs, as far as its file says; null before the first load.", 52428800
        ),
    ]
    measured_bytes: Annotated[
        int | None,
        about("Memory that it took when it was loaded; null before the first load.", 50331648),
    ]
    requests: Annotated[int, about("Requests that use it, or wait for it.", 0)]
    loads: Annotated[int, about("How often it was loaded.", 1)]
