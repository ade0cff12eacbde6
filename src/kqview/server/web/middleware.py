"""Middleware: what every request passes through, whatever app answers it.

`EdgeMiddleware` finds out who calls, and tells browsers what they may do with a reply;
`AccessLog` names, counts, logs and limits requests, and refuses
those whose end is in doubt; `no_route` answers what the router refused.
"""

import contextlib
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec
import prometheus_client
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kqview.errors import CapacityError, RequestError
from kqview.server.errors import Answer, MethodNotAllowed, NotFound, RateLimited, answer_of
from kqview.server.live_config import LiveConfig
from kqview.server.settings import Settings
from kqview.server.web import pages
from kqview.server.web.access import LOOPBACK_ORIGIN
from kqview.server.web.endpoint import UNKNOWN, error_reply, frames_of, n_bytes_of
from kqview.server.web.peers import Peers, client_name

BROWSER_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; "
        b"frame-ancestors 'none'; object-src 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),  # for browsers that do not know frame-ancestors
    # With "no-referrer" a form of a page would be sent with an origin of "null".
    (b"referrer-policy", b"same-origin"),
)
"""Go with every reply: a browser may show any of them as a page."""

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


class EdgeMiddleware:
    """The outermost ASGI app: which client calls by which path, and what browsers may do.

    Every reply gets the headers that let pages of the allowed origins read it.
    """

    def __init__(
        self, asgi: ASGIApp, settings: Settings | LiveConfig, *, preflight_status: int = 200
    ) -> None:
        """Let connections in to *asgi*.

        Preflights get *preflight_status*, by default that of llama.cpp's server, and no body.
        """

        def cors(origins: Sequence[str]) -> _Cors:
            made = _Cors(
                asgi,
                allow_origins=[one for one in origins if one != "loopback"],
                allow_origin_regex=LOOPBACK_ORIGIN.pattern if "loopback" in origins else None,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[
                    "x-request-id",
                    "retry-after",
                    "warning",
                    "content-range",
                    "x-attention-shape",
                ],
                allow_private_network=True,
                max_age=_PREFLIGHT_S,
            )
            made.preflight_status = preflight_status
            return made

        self._live = LiveConfig.of(settings)
        self._cors = self._live.derived(lambda config: config.settings.cors_origins, cors)
        self._peers = self._live.derived(lambda config: config.settings.trusted_proxies, Peers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI says."""
        if scope["type"] == "lifespan":
            await self._cors.value(scope, receive, send)
            return
        connection = UNKNOWN
        owner = getattr(send, "__self__", None)
        if hasattr(owner, "transport"):  # a server's own
            with contextlib.suppress(ImportError):  # a uvicorn in which its parts are elsewhere
                from kqview.server.web import uvicorn_parts

                connection = uvicorn_parts.connection(owner)
        scope.setdefault("state", {})["connection"] = connection
        if self._peers.value.are_any:
            self._peers.value.resolve(scope)
        # "/x/" is "/x"; in "/x%2F" the slash belongs to a name.
        if len(scope["path"]) > 1 and not scope.get("raw_path", b"").lower().endswith(b"%2f"):
            scope["path"] = scope["path"].rstrip("/") or "/"

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *BROWSER_HEADERS]}
            await send(message)

        try:
            await self._cors.value(scope, receive, guarded)
        finally:
            if connection is not UNKNOWN:
                connection.watch(self._live.settings.idle_timeout_s)


def no_route(
    guide: str, body_at: Callable[[str], Callable[[Answer], Any]] = lambda _: pages.error_body
) -> Callable[[Request, Exception], Awaitable[Response]]:
    """What answers requests that the router refuses: 404, or 405 with the methods that there are.

    Messages point to *guide*, a path that tells what there is; ``body_at(path)`` puts them as the
    clients of that path read them.
    """

    async def answer(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.scope["path"]
        if error.status_code != 405:
            missing = NotFound(f"there is nothing at {path}; see {guide}")
            return _failure(missing, error_body=body_at(path))
        # Starlette names the methods of one row of the table; a path may have several.
        routes = [
            one
            for one in request.app.routes
            if isinstance(one, Route) and one.path_regex.match(path)
        ]
        methods = ", ".join(sorted({"OPTIONS"}.union(*(one.methods or () for one in routes))))
        if request.method == "OPTIONS":
            return Response(None, 204, {"allow": methods})
        wrong = MethodNotAllowed(
            f"{path} has no method {request.method}; use {methods}, see {guide}"
        )
        return _failure(wrong, {"allow": methods}, body_at(path))

    return answer


def _failure(
    error: Exception,
    headers: dict[str, str] | None = None,
    error_body: Callable[[Answer], Any] = pages.error_body,
) -> Response:
    reply = error_reply(answer_of(error), error_body)
    return Response(
        reply.body, reply.status, {**(headers or {}), **reply.headers}, reply.media_type
    )


class _Cors(CORSMiddleware):
    """Answers preflights with one status and no body, also if it refuses; headers say the rest."""

    preflight_status: int

    def preflight_response(self, request_headers: Headers) -> Response:
        reply = super().preflight_response(request_headers)
        names = ("content-length", "content-type")
        kept = {name: value for name, value in reply.headers.items() if name not in names}
        return Response(None, self.preflight_status, kept)


class AccessLog:
    """Names every request, counts and logs it, and limits how many there are at a time.

    It sees every reply, whoever made it, and knows nothing of what is inside.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings | LiveConfig,
        requests: prometheus_client.Counter,
        paths: Iterable[str],
    ) -> None:
        """Wrap *app*; requests to paths other than *paths* are counted in *requests* as one."""
        self._app = app
        self._live = LiveConfig.of(settings)
        self._requests = requests
        self._paths = frozenset(paths)
        self._running: dict[object, str] = {}
        self._n_of: Counter[str] = Counter()
        self.on_running: Callable[[Iterable[str]], None] | None = None
        """Called with the name and path of every request that runs, when one begins or ends."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        request_id, codings, is_socket = "", list[bytes](), scope["type"] == "websocket"
        for name, value in scope["headers"]:
            if name == b"x-request-id" and not request_id and _REQUEST_ID.fullmatch(value):
                request_id = value.decode()  # the client finds it in our log
            elif name == b"transfer-encoding":
                codings.append(value)
        request_id = request_id or uuid.uuid4().hex
        status, n_bytes, is_whole = 0, 0, False

        async def watch(message: Message) -> None:
            nonlocal status, n_bytes, is_whole
            kind = message["type"]
            if kind in ("http.response.start", "websocket.accept"):
                named = (b"x-request-id", request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)
            # Only now is it out: a message that the client did not take in time is sent again.
            if kind == "http.response.start":
                status = message["status"]
            elif kind == "websocket.close":
                status, is_whole = message.get("code", 1000), True
            elif kind == "http.response.body":
                n_bytes += len(message.get("body", b""))
                is_whole = not message.get("more_body", False)
            elif kind == "websocket.send":
                n_bytes += sum(map(n_bytes_of, frames_of(message)))

        async def hear() -> Message:
            nonlocal status, is_whole
            message = await receive()
            if message["type"] == "websocket.disconnect" and not status:
                code = message.get("code", 1005)
                status = code if code in _CLIENT_CODES else _LEFT
                is_whole = code in (1000, 1001)
            return message

        # Behind a trusted proxy a client's connections are not ours, but its requests are.
        client = client_name((scope.get("client") or ("local", 0))[0])
        scope.setdefault("state", {}).update(request_id=request_id, client_name=client)
        key, settings = object(), self._live.settings
        self._running[key] = f"{request_id} {scope['path']}"
        self._n_of[client] += 1
        if self.on_running is not None:
            self.on_running(self._running.values())
        heard, refusal = hear if is_socket else receive, None
        if len(self._running) > settings.max_connections:
            refusal = CapacityError("too many connections; try again later")
        elif self._n_of[client] > settings.max_connections_per_client:
            refusal = RateLimited(_TOO_MANY)
        try:
            if refusal is not None and is_socket:
                await heard()
                reason = "too many connections"
                await watch({"type": "websocket.close", "code": 1008, "reason": reason})
            elif refusal is not None:
                await _failure(refusal)(scope, heard, watch)
            elif codings and not is_socket and (why := _doubtful_end(scope, codings)) is not None:
                await _failure(RequestError(why), {"connection": "close"})(scope, heard, watch)
            else:
                await self._app(scope, heard, watch)
        except OSError:
            return  # the client is gone; endpoints answer every other one
        except Exception:  # a bug of ours: logged under the name that the client knows, and raised
            _log.exception("request %s failed", request_id)
            raise
        finally:
            del self._running[key]
            self._n_of[client] -= 1
            if not self._n_of[client]:
                del self._n_of[client]
            if self.on_running is not None:
                self.on_running(self._running.values())
            path: str = scope["path"]
            template = getattr(scope.get("route"), "path", path)
            known = template if template in self._paths else "other"
            self._requests.labels(known, str(status or _LEFT)).inc()
            if self._live.settings.access_log:
                line = {
                    "request_id": request_id,
                    "status": status or _LEFT,
                    "bytes": n_bytes,
                    "whole": is_whole,
                    "ms": round((time.monotonic() - started_s) * 1000, 1),
                    "client": (scope.get("client") or ("local", 0))[0],
                    "method": scope.get("method", "WS"),
                    "path": path[:_MOST_PATH],
                }
                _access.info(msgspec.json.encode(line).decode())


def _doubtful_end(scope: Scope, codings: list[bytes]) -> str | None:
    """Why a proxy in front may see another end of the request than the server; None if it cannot.

    Parsers differ in what they make of several codings, or of one where there is none (HTTP/1.0).
    What one takes for the rest of a body is the next request to another.
    """
    if [one.strip().lower() for one in codings] != [b"chunked"]:
        given = b", ".join(codings).decode("latin-1")
        return f"the Transfer-Encoding is {given!r}; send chunked, once, or a Content-Length"
    if any(name == b"content-length" for name, _ in scope["headers"]) or (
        scope["http_version"] == "1.0"
    ):
        return "Transfer-Encoding is for HTTP/1.1 and goes without Content-Length; send one of them"
    return None
