"""The outermost ASGI app: names every request, counts and logs it, limits how many.

It sees every reply, whoever made it, and knows nothing of what is inside. CORS headers are set
around it (app.py).
"""

import logging
import time
import uuid
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kqview.server.metrics import Metrics
from kqview.server.settings import Settings

_log: Final = logging.getLogger("kqview.access")
_failures: Final = logging.getLogger("kqview.server")
_MOST_NAME: Final = 64
_BUSY: Final = b'{"error":"server.accept: too many connections; try again","error_code":"BUSY"}'


class Access:
    """Wraps an ASGI app."""

    def __init__(
        self, app: ASGIApp, settings: Settings, metrics: Metrics, paths: Iterable[str]
    ) -> None:
        """Wrap *app*; requests to other paths than *paths* are counted as one."""
        self._app = app
        self._settings = settings
        self._metrics = metrics
        self._paths = frozenset(paths)
        self._n_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        # A name the client may send, to find its request in our log.
        request_id = _sent_id(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status: list[int] = []
        n_bytes = 0

        async def watch(message: Message) -> None:
            nonlocal n_bytes
            kind = message["type"]
            if kind == "http.response.start":
                status.append(message["status"])
                message["headers"] = [
                    *message.get("headers", ()), (b"x-request-id", request_id.encode())
                ]  # fmt: skip
            elif kind == "websocket.close":
                status.append(message.get("code", 1000))
            elif kind == "http.response.body":
                n_bytes += len(message.get("body", b""))
            elif kind == "websocket.send":
                n_bytes += len(message.get("bytes") or message.get("text") or b"")
            await send(message)

        self._n_open += 1
        try:
            if self._n_open > self._settings.max_connections:
                await _refuse(scope, receive, watch)
            else:
                await self._app(scope, receive, watch)
        except Exception:
            _failures.exception("request %s failed", request_id)
            raise
        finally:
            self._n_open -= 1
            self._note(scope, status, n_bytes, request_id, time.monotonic() - started_s)

    def _note(
        self, scope: Scope, status: list[int], n_bytes: int, request_id: str, seconds: float
    ) -> None:
        path: str = scope["path"]
        code = status[-1] if status else 499  # nginx's number for a client that left
        known = path if path in self._paths else "other"
        self._metrics.requests.labels(known, str(code)).inc()
        if not self._settings.access_log:
            return
        line: dict[str, Any] = {
            "request_id": request_id,
            "client": (scope.get("client") or ("local", 0))[0],
            "method": scope.get("method", "WS"),
            "path": path,
            "status": code,
            "bytes": n_bytes,
            "ms": round(seconds * 1000, 1),
        }
        _log.info(msgspec.json.encode(line).decode())


def _sent_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and 0 < len(value) <= _MOST_NAME:
            text = value.decode("ascii", "replace")
            if text.isascii() and text.isprintable() and "?" not in text:
                return text
    return None


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "too many connections"})
        return
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _BUSY})
