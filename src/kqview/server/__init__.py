"""The optional server: an ASGI app over an Engine. Needs ``pip install "kqview[server]"``."""

from typing import TYPE_CHECKING

from kqview.server.settings import Settings

if TYPE_CHECKING:
    from kqview.server.app import create_app

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> object:
    # Settings need no extra; the app does, and says so.
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kqview.server.app import create_app
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed; pip install "kqview[server]"', name=error.name
        ) from error
    return create_app
