"""The ASGI app: the whole route table in one place, and what is wrapped around it.

From the outside in: CORS headers on every reply, the access log, the router, an `Endpoint` for each
operation.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server import pages
from kqview.server.access import Access
from kqview.server.api.dream import routes as dream
from kqview.server.api.kobold import routes as kobold
from kqview.server.connection import Connection
from kqview.server.endpoint import Endpoint, Operation, error_reply
from kqview.server.errors import MethodNotAllowed, NotFound, answer_of
from kqview.server.metrics import Metrics
from kqview.server.openapi import describe
from kqview.server.peers import Peers
from kqview.server.security import LOOPBACK_ORIGIN, Gate
from kqview.server.service import Service
from kqview.server.settings import Settings
from kqview.server.sockets import SocketEndpoint

DIALECTS: Final = (kobold, dream)
"""Modules with ``OPERATIONS``; a further dialect is one folder and one entry here."""

_PREFLIGHT_S: Final = 24 * 3600


class App:
    """What `create_app` returns: an ASGI 3 application.

    Attributes:
        service: For who runs the server: to open the model before, to end the runs at a signal.
    """

    def __init__(self, asgi: ASGIApp, service: Service) -> None:
        self._asgi = asgi
        self.service = service
        self._peers = Peers(service.settings.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI says."""
        if scope["type"] == "lifespan":
            await self._asgi(scope, receive, send)
            return
        connection = Connection(send)
        scope.setdefault("state", {})["connection"] = connection
        self._peers.resolve(scope)
        if len(scope["path"]) > 1:  # "/x/" is "/x"
            scope["path"] = scope["path"].rstrip("/") or "/"
        try:
            await self._asgi(scope, receive, send)
        finally:
            connection.watch(self.service.settings.idle_timeout_s)


def create_app(
    engine_or_settings: Engine | Settings | None = None, settings: Settings | None = None
) -> App:
    """The ASGI app that serves an engine.

    Args:
        engine_or_settings: An engine, which stays yours to close; or settings that name a model,
            which is then opened when the app starts and closed when it ends.
        settings: Beside an engine: limits, keys and defaults.

    Raises:
        RequestError: Settings without a model.
    """
    engine = engine_or_settings if isinstance(engine_or_settings, Engine) else None
    if settings is None:
        settings = engine_or_settings if isinstance(engine_or_settings, Settings) else Settings()
    if engine is None and settings.model is None and not settings.demo:
        raise RequestError(
            "server.create_app: neither an engine nor a model; pass an Engine, or Settings with "
            "model=FILE or demo=True"
        )
    service = Service(engine, settings)
    metrics = Metrics(service)
    description: dict[str, Any] = {}
    operations = [*pages.operations(metrics, description)]
    for dialect in DIALECTS:
        operations += dialect.OPERATIONS
    description.update(
        describe(
            operations, version=_version(), has_keys=bool(settings.api_keys or settings.admin_keys)
        )
    )

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        await service.open()
        try:
            yield
        finally:
            await service.close()

    router = Starlette(
        routes=list(_routes(operations, service, Gate(settings))),
        lifespan=lifespan,
        exception_handlers={HTTPException: _no_route},
    )
    router.router.redirect_slashes = False
    paths = [path for one in operations for path in (one.path, *one.also)]
    asgi = CORSMiddleware(
        Access(router, settings, metrics, paths),
        allow_origins=[one for one in settings.cors_origins if one != "loopback"],
        allow_origin_regex=LOOPBACK_ORIGIN.pattern if "loopback" in settings.cors_origins else None,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
        allow_private_network=True,
        max_age=_PREFLIGHT_S,
    )
    return App(asgi, service)


def _routes(operations: Iterable[Operation], service: Service, gate: Gate) -> Iterable[BaseRoute]:
    for one in operations:
        for path in (one.path, *one.also):
            if one.method == "WS":
                yield WebSocketRoute(path, SocketEndpoint(one, service, gate))
            else:
                yield Route(path, Endpoint(one, service, gate), methods=[one.method])


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code != 405:
        wrong: Exception = NotFound(f"route: there is nothing at {path}; see /docs")
        reply = error_reply(answer_of(wrong), pages.error_body)
        return Response(reply.body, reply.status, reply.headers, reply.media_type)
    # Starlette names the methods of one row of the table; a path may have several.
    routes = [one for one in request.app.routes if isinstance(one, Route) and one.path == path]
    methods = sorted({"OPTIONS"}.union(*(one.methods or () for one in routes)))
    allow = {"allow": ", ".join(methods)}
    if request.method == "OPTIONS":
        return Response(None, 204, allow)
    wrong = MethodNotAllowed(f"route: {request.method} {path}; use {allow['allow']}, see /docs")
    reply = error_reply(answer_of(wrong), pages.error_body)
    return Response(reply.body, reply.status, {**allow, **reply.headers}, reply.media_type)


def _version() -> str:
    try:
        return version("kqview")
    except PackageNotFoundError:
        return "0"
