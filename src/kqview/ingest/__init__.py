"""The optional trace receiver: an ASGI app. Needs ``pip install "kqview[ingest]"``."""

from typing import TYPE_CHECKING

from kqview.ingest.settings import IngestSettings

if TYPE_CHECKING:
    from kqview.ingest.app import create_app

__all__ = ["IngestSettings", "create_app"]


def __getattr__(name: str) -> object:
    # Settings need no extra; the app does, and says so.
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kqview.ingest.app import create_app
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed; pip install "kqview[ingest]"', name=error.name
        ) from error
    return create_app
