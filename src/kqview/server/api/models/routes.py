"""Routes of models, for administrators, and what they say of a model."""

from typing import Annotated, Final, Literal

from msgspec import Struct

from kqview.server.errors import UnknownModel
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.service import Call
from kqview.server.web.described import about
from kqview.server.web.endpoint import Operations
from kqview.server.web.pages import Failure, error_body

OPERATIONS: Final = Operations(
    tag="models", error_body=error_body, failure=Failure, access="admin",
    parameters={"id": 'Id of the model, such as "demo".'},
)  # fmt: skip
"""Rows of the route table."""


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


def _named(call: Call) -> ModelEntry:
    """The model in the path, of one model as well only by its name."""
    name, pool = call.path["id"], call.service.pool
    for served in pool:
        if name == served.id or (served.loaded is not None and name == served.name):
            return served
    raise UnknownModel(f"there is no model {name[:80]!r}; GET /v1/models lists those there are")


def _state_of(served: ModelEntry) -> ModelState:
    """What a reply says of *served*."""
    return ModelState(
        id=served.id, state=served.state, progress=served.progress, pinned=served.pinned,
        error=served.error, estimated_bytes=served.estimated_bytes,
        measured_bytes=served.measured_bytes, requests=served.work.n_uses, loads=served.n_loads,
    )  # fmt: skip


@OPERATIONS.post("/models/{id:path}/load")
async def load(call: Call) -> ModelState:
    """Load a model, and wait until it is."""
    served = _named(call)
    await call.service.pool.load_now(served)
    return _state_of(served)


@OPERATIONS.post("/models/{id:path}/unload")
async def unload(call: Call) -> ModelState:
    """Unload a model; running requests end with MODEL_CHANGED."""
    served = _named(call)
    await call.service.pool.unload_now(served)
    return _state_of(served)


@OPERATIONS.post("/models/{id:path}/pin")
async def pin(call: Call) -> ModelState:
    """Load a model and keep it, whatever others need."""
    served = _named(call)
    await call.service.pool.load_now(served)
    served.pinned = True
    return _state_of(served)


@OPERATIONS.post("/models/{id:path}/unpin")
async def unpin(call: Call) -> ModelState:
    """Let a model leave again when another needs its memory."""
    served = _named(call)
    served.pinned = False
    call.service.pool.note_idle()
    return _state_of(served)
