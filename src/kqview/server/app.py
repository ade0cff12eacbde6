"""The ASGI app: the whole route table, and what is wrapped around it.

From the outside in: `App`, `AccessLog`, the router, and an `Endpoint`
or `SocketEndpoint` for each operation.
"""

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import cache
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route, WebSocketRoute

from kqview import __version__
from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server.api.anthropic import routes as anthropic
from kqview.server.api.koboldai import routes as koboldai
from kqview.server.api.llama_server import routes as llama_server
from kqview.server.api.models import routes as models
from kqview.server.api.openai import routes as openai
from kqview.server.api.responses import routes as responses
from kqview.server.api.wire import failures
from kqview.server.apps import status
from kqview.server.apps.conversations import ChatService
from kqview.server.apps.metrics import Metrics
from kqview.server.apps.mia4 import routes as mia4
from kqview.server.config import Config
from kqview.server.errors import Answer
from kqview.server.live_config import LiveConfig, Reloaded, reloaded
from kqview.server.settings import Settings
from kqview.server.web import openapi, pages
from kqview.server.web.access import Gate
from kqview.server.web.endpoint import Endpoint, Operation
from kqview.server.web.middleware import AccessLog, EdgeMiddleware, no_route
from kqview.server.web.sockets import SocketEndpoint

DIALECTS: Final = (koboldai, llama_server, openai, responses, anthropic, mia4, models)
"""Modules with ``OPERATIONS``; a further dialect is one folder and one entry here."""


class App(EdgeMiddleware):
    """What `create_app` returns: an ASGI 3 application.

    Attributes:
        service: For whoever runs the server: to load the model before, to end the runs at a signal.
        log: Knows the requests that run.
    """

    def __init__(self, service: ChatService, log: AccessLog) -> None:
        super().__init__(log, service.live)
        self.service = service
        self.log = log

    def reload(self, config: Config) -> Reloaded:
        """Put *config* into effect for all that begins after this; on the event loop that serves.

        Requests that run go on. What cannot change while the server runs stays as it is.

        Returns:
            What changed, and what needs a restart to change.

        Raises:
            RequestError: A folder that it names does not exist, or the server could be reached by
                others without a key; then nothing changes.
        """
        live = self.service.live
        merged, done = reloaded(live.config, config)
        merged.settings.check_bind()
        live.replace(merged)
        if "models" in done.changed:  # else those that an administrator loaded would leave
            self.service.pool.reconfigure(merged)
        return done


def create_app(
    served: Engine | Config | Settings | None = None,
    settings: Config | Settings | None = None,
) -> App:
    """The ASGI app that serves an engine, or the models of a configuration.

    Args:
        served: An engine, which stays yours to close; or a configuration or settings that name a
            model, which is opened when the app starts and closed when it ends.
        settings: Limits, keys and defaults, if the first argument is an engine.

    Raises:
        RequestError: There is neither an engine nor a model.
    """
    engine = served if isinstance(served, Engine) else None
    if settings is None:
        settings = Settings() if served is None or isinstance(served, Engine) else served
    config = settings if isinstance(settings, Config) else Config.of(settings)
    has_model = config.settings.demo or config.settings.model is not None
    if engine is None and not (has_model or (isinstance(settings, Config) and config.models)):
        raise RequestError(
            "create_app got neither an engine nor a model; pass an Engine, Settings with "
            "model=FILE or demo=True, or a Config with models"
        )
    if not config.models:
        config = msgspec.structs.replace(config, models=Config.of(config.settings).models)
    live = LiveConfig(config)
    service = ChatService(engine, live)
    metrics = Metrics(service)

    @cache
    def described(has_keys: bool) -> bytes:
        made = openapi.describe(operations, version=__version__, has_keys=has_keys)
        return msgspec.json.encode(made)

    def description() -> bytes:
        return described(bool(live.settings.api_keys or live.settings.admin_keys))

    operations = pages.operations(description) + status.operations(metrics)
    for dialect in DIALECTS:
        operations += dialect.OPERATIONS

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        await service.open()
        try:
            yield
        finally:
            await service.close()

    router = Starlette(
        routes=list(_routes(operations, service, Gate(live))),
        lifespan=lifespan,
        exception_handlers={HTTPException: no_route("/docs", _error_body_at)},
    )
    router.router.redirect_slashes = False
    paths = [path for one in operations for path in (one.path, *one.also)]
    log = AccessLog(router, live, metrics.requests, paths)
    return App(service, log)


def _error_body_at(path: str) -> Callable[[Answer], object]:
    return failures.error_body if path.startswith("/v1/") else pages.error_body


def _routes(
    operations: Iterable[Operation], service: ChatService, gate: Gate
) -> Iterable[BaseRoute]:
    for one in operations:
        for path in (one.path, *one.also):
            if one.method == "WS":
                yield WebSocketRoute(path, SocketEndpoint(one, service, gate))
            else:
                yield Route(path, Endpoint(one, service, gate), methods=[one.method])
