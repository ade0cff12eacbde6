"""The ASGI app: the whole route table, and what is wrapped around it.

From the outside in: `App` (the client's address, the path), CORS headers on every reply,
`AccessLog` (names, counts and limits requests), the router, and an `Endpoint` or `SocketEndpoint`
for each operation.
"""

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kqview import __version__
from kqview.engine import Engine
from kqview.errors import CapacityError, KqviewError, RequestError
from kqview.server import pages
from kqview.server.api.anthropic import routes as anthropic
from kqview.server.api.dream import routes as dream
from kqview.server.api.kobold import routes as kobold
from kqview.server.api.llama_server import routes as llama_server
from kqview.server.api.openai import responses
from kqview.server.api.openai import routes as openai
from kqview.server.endpoint import UNKNOWN, Connection, Endpoint, Operation, error_reply, frames_of
from kqview.server.errors import MethodNotAllowed, NotFound, RateLimited, answer_of
from kqview.server.security import LOOPBACK_ORIGIN, Gate, Peers, client_name
from kqview.server.service import Service
from kqview.server.settings import Settings
from kqview.server.sockets import SocketEndpoint

DIALECTS: Final = (kobold, dream, llama_server, openai, responses, anthropic)
"""Modules with ``OPERATIONS``; a further dialect is one folder and one entry here."""

_PREFLIGHT_S: Final = 24 * 3600
_access: Final = logging.getLogger("kqview.access")
_log: Final = logging.getLogger("kqview.server")
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,64}")  # safe in logs and headers
_MOST_PATH: Final = 256  # characters of a path in a log line
# Codes that a client may give when it closes; any other one counts as 499.
_CLIENT_CODES: Final = frozenset({1000, 1001, 1002, 1003, 1005, 1006, 1007, 1008, 1009, 1011, 1012})
_LEFT: Final = 499  # nginx's status for a client that left
_TOO_MANY: Final = (
    "too many requests at a time from your address; wait for the others, or raise "
    "max_connections_per_client (--max-connections-per-client)"
)


class App:
    """What `create_app` returns: an ASGI 3 application.

    Attributes:
        service: For whoever runs the server: to load the model before, to end the runs at a signal.
        log: Knows the requests that run.
    """

    def __init__(self, asgi: ASGIApp, service: Service, log: "AccessLog") -> None:
        self._asgi = asgi
        self.service = service
        self.log = log
        self._peers = Peers(service.settings.trusted_proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI says."""
        if scope["type"] == "lifespan":
            await self._asgi(scope, receive, send)
            return
        connection = _connection(send)
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
            which is opened when the app starts and closed when it ends.
        settings: Limits, keys and defaults, if the first argument is an engine.

    Raises:
        RequestError: There is neither an engine nor a model.
    """
    engine = engine_or_settings if isinstance(engine_or_settings, Engine) else None
    if settings is None:
        settings = engine_or_settings if isinstance(engine_or_settings, Settings) else Settings()
    if engine is None and settings.model is None and not settings.demo:
        raise RequestError(
            "create_app got neither an engine nor a model; pass an Engine, or Settings with "
            "model=FILE or demo=True"
        )
    service = Service(engine, settings)
    metrics = pages.Metrics(service)
    description: dict[str, Any] = {}
    operations = pages.operations(metrics, description)
    for dialect in DIALECTS:
        operations += dialect.OPERATIONS
    has_keys = bool(settings.api_keys or settings.admin_keys)
    description |= pages.describe(operations, version=__version__, has_keys=has_keys)

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
    log = AccessLog(router, settings, metrics, paths)
    asgi = CORSMiddleware(
        log,
        allow_origins=[one for one in settings.cors_origins if one != "loopback"],
        allow_origin_regex=LOOPBACK_ORIGIN.pattern if "loopback" in settings.cors_origins else None,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "content-range", "x-attention-shape"],
        allow_private_network=True,
        max_age=_PREFLIGHT_S,
    )
    return App(asgi, service, log)


def _connection(send: Send) -> Connection:
    """What is known of the connection behind a server's own *send*."""
    try:
        from kqview.server import uvicorn_parts
    except ImportError:  # another server, or a uvicorn in which these parts are elsewhere
        return UNKNOWN
    return uvicorn_parts.connection(send)


# ---- routes


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
        return _failure(NotFound(f"there is nothing at {path}; see /docs"))
    # Starlette names the methods of one row of the table; a path may have several.
    routes = [
        one for one in request.app.routes if isinstance(one, Route) and one.path_regex.match(path)
    ]
    methods = ", ".join(sorted({"OPTIONS"}.union(*(one.methods or () for one in routes))))
    if request.method == "OPTIONS":
        return Response(None, 204, {"allow": methods})
    wrong = MethodNotAllowed(f"{path} has no method {request.method}; use {methods}, see /docs")
    return _failure(wrong, {"allow": methods})


def _failure(error: Exception, headers: dict[str, str] | None = None) -> Response:
    reply = error_reply(answer_of(error), pages.error_body)
    return Response(
        reply.body, reply.status, {**(headers or {}), **reply.headers}, reply.media_type
    )


# ---- every request


class AccessLog:
    """Names every request, counts and logs it, and limits how many there are at a time.

    It sees every reply, whoever made it, and knows nothing of what is inside.
    """

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: pages.Metrics, paths: Iterable[str]
    ) -> None:
        """Wrap *app*; requests to paths other than *paths* are counted as one."""
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._running: dict[object, str] = {}
        self._n_of: Counter[str] = Counter()
        self.on_running: Callable[[Iterable[str]], None] = lambda requests: None
        """Called with the name and path of every request that runs, when one begins or ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        request_id = _sent_id(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status: list[int] = []
        n_bytes = 0
        is_whole = False

        async def watch(message: Message) -> None:
            nonlocal n_bytes, is_whole
            kind = message["type"]
            if kind in ("http.response.start", "websocket.accept"):
                named = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)
            # Only now is it out: a message that the client did not take in time is sent again.
            if kind == "http.response.start":
                status.append(message["status"])
            elif kind == "websocket.close":
                status.append(message.get("code", 1000))
                is_whole = True
            elif kind == "http.response.body":
                n_bytes += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
            elif kind == "websocket.send":
                n_bytes += sum(map(_n_bytes, frames_of(message)))

        async def hear() -> Message:
            nonlocal is_whole
            message = await receive()
            if message["type"] == "websocket.disconnect" and not status:
                code = message.get("code", 1005)
                status.append(code if code in _CLIENT_CODES else _LEFT)
                is_whole = code in (1000, 1001)
            return message

        # Behind a trusted proxy a client's connections are not ours, but its requests are.
        client = client_name((scope.get("client") or ("local", 0))[0])
        key = object()
        self._running[key] = f"{request_id} {scope['path']}"
        self.on_running(self._running.values())
        self._n_of[client] += 1
        try:
            if len(self._running) > self._settings.max_connections:
                await _refuse(
                    scope, hear, watch, CapacityError("too many connections; try again later")
                )
            elif self._n_of[client] > self._settings.max_connections_per_client:
                await _refuse(scope, hear, watch, RateLimited(_TOO_MANY))
            else:
                await self._app(scope, hear, watch)
        except OSError:
            return  # the client is gone; endpoints answer every other one
        except Exception:  # a bug of ours: logged under the name that the client knows, and raised
            _log.exception("request %s failed", request_id)
            raise
        finally:
            del self._running[key]
            self.on_running(self._running.values())
            self._n_of[client] -= 1
            if not self._n_of[client]:
                del self._n_of[client]
            line = {
                "request_id": request_id,
                "status": status[-1] if status else _LEFT,
                "bytes": n_bytes,
                "whole": is_whole,
                "ms": round((time.monotonic() - started_s) * 1000, 1),
            }
            self._note(scope, line)

    def _note(self, scope: Scope, line: dict[str, Any]) -> None:
        path: str = scope["path"]
        template = getattr(scope.get("route"), "path", path)
        known = template if template in self._paths else "other"
        self._metrics.requests.labels(known, str(line["status"])).inc()
        if self._settings.access_log:
            line["client"] = (scope.get("client") or ("local", 0))[0]
            line["method"] = scope.get("method", "WS")
            line["path"] = path[:_MOST_PATH]
            _access.info(msgspec.json.encode(line).decode())


def _sent_id(scope: Scope) -> str | None:
    """The name that the client gave the request, so that it finds it in our log; None without."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return None


def _n_bytes(frame: bytes | str) -> int:
    if isinstance(frame, str) and not frame.isascii():
        return len(frame.encode())
    return len(frame)


async def _refuse(scope: Scope, receive: Receive, send: Send, error: KqviewError) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "too many connections"})
        return
    await _failure(error)(scope, receive, send)
