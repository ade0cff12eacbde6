"""The receiver's ASGI app: the server's middleware around the routes in `routes`."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from kqview import __version__
from kqview.ingest.receiver import Receiver
from kqview.ingest.routes import Metrics, operations
from kqview.ingest.settings import IngestSettings
from kqview.server.web.access import Gate
from kqview.server.web.endpoint import Endpoint
from kqview.server.web.middleware import AccessLog, EdgeMiddleware, no_route
from kqview.server.web.openapi import describe

_ABOUT: Final = "Receives traces of generations with mods, and shows them."


class IngestApp(EdgeMiddleware):
    """What `create_app` returns: an ASGI 3 application.

    Attributes:
        receiver: The receiver; whoever runs the app ends its feeds at a signal.
    """

    def __init__(self, asgi: ASGIApp, receiver: Receiver) -> None:
        super().__init__(asgi, receiver.settings, preflight_status=204)
        self.receiver = receiver


def create_app(settings: IngestSettings) -> IngestApp:
    """Return the ASGI app that receives and shows traces; opens the database at once.

    Raises:
        RequestError: The database cannot be opened, or belongs to a newer kqview.
    """
    receiver = Receiver(settings)
    metrics = Metrics(receiver)
    description: dict[str, Any] = {}
    table = operations(receiver, metrics, description)
    has_keys = bool(settings.web.admin_keys)
    description |= describe(table, version=__version__, has_keys=has_keys, about=_ABOUT)
    gate = Gate(settings.web)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        receiver.open()
        try:
            yield
        finally:
            await receiver.close()

    paths = {path: one for one in table for path in (one.path, *one.also)}
    router = Starlette(
        routes=[
            Route(path, Endpoint(one, receiver, gate), methods=[one.method])
            for one in table
            for path in (one.path, *one.also)
        ],
        lifespan=lifespan,
        exception_handlers={HTTPException: no_route("/openapi.json")},
    )
    router.router.redirect_slashes = False
    log = AccessLog(router, settings.web, metrics.requests, paths)
    return IngestApp(log, receiver)
