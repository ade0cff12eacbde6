"""The field ``edits`` of the APIs: what a request changes in the model. Pure."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec

from kqview.edit import Edit
from kqview.edits.objects import edits_of
from kqview.server.settings import Settings

EditsField = Annotated[list[dict[str, Any]], msgspec.Meta(max_length=256)]


def wanted_edits(
    field: Sequence[dict[str, Any]], settings: Settings
) -> Callable[[], Sequence[Edit]]:
    """What makes the edits of a request that has some; it may read files."""
    return partial(edits_of, field, settings.control_vectors_dir)
