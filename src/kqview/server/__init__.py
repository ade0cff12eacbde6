"""The optional server: an ASGI app over an Engine. Needs ``pip install "kqview[server]"``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kqview.server.app import create_app
    from kqview.server.settings import Settings

__all__ = ["Settings", "create_app"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from kqview.server import app
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{error.name} is not installed; pip install "kqview[server]"', name=error.name
        ) from error
    return getattr(app, name)
