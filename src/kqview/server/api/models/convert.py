"""States of models as JSON. Pure."""

from kqview.server.api.models.schema import ModelState
from kqview.server.models.model_entry import ModelEntry


def state_of(served: ModelEntry) -> ModelState:
    """What a reply says of *served*."""
    return ModelState(
        id=served.id, state=served.state, progress=served.progress, pinned=served.pinned,
        error=served.error, estimated_bytes=served.estimated_bytes,
        measured_bytes=served.measured_bytes, requests=served.work.n_uses, loads=served.n_loads,
    )  # fmt: skip
