"""The outermost ASGI app: names every request, counts and logs it, limits how many.

It sees every reply, whoever made it, and knows nothing of what is inside. CORS headers are set
around it (app.py).
"""

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kqview.server.connection import frames_of
from kqview.server.metrics import Metrics
from kqview.server.peers import client_name
from kqview.server.settings import Settings

_log: Final = logging.getLogger("kqview.access")
_failures: Final = logging.getLogger("kqview.server")
# A name that neither breaks a log nor a header.
_NAME: Final = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,64}")
_MOST_PATH: Final = 256  # characters of it in a log line
# What a client may say when it closes; anything else is counted as one.
_THEIR_CODES: Final = frozenset({1000, 1001, 1002, 1003, 1005, 1006, 1007, 1008, 1009, 1011, 1012})
_LEFT: Final = 499  # nginx's number for a client that left
_TOO_MANY: Final = {
    503: b'{"error":"server.accept: too many connections; try again","error_code":"BUSY"}',
    429: b'{"error":"server.accept: too many requests at a time from your address; wait for the '
    b'others, or raise max_connections_per_client (--max-connections-per-client)",'
    b'"error_code":"BUSY"}',
}


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
        self._n_of: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        # A name the client may send, to find its request in our log.
        request_id = sent_id(scope) or uuid.uuid4().hex
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
            # Now it is out: one that the client did not take in time comes again.
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
                status.append(code if code in _THEIR_CODES else _LEFT)
                is_whole = code in (1000, 1001)
            return message

        # Behind a trusted proxy a client's connections are not ours, but its requests are.
        client = client_name((scope.get("client") or ("local", 0))[0])
        self._n_open += 1
        self._n_of[client] += 1
        try:
            if self._n_open > self._settings.max_connections:
                await _refuse(scope, hear, watch, 503)
            elif self._n_of[client] > self._settings.max_connections_per_client:
                await _refuse(scope, hear, watch, 429)
            else:
                await self._app(scope, hear, watch)
        except OSError:
            return  # the client is gone; endpoints answer every other one
        except Exception:  # a bug of ours: logged under the name that the client knows, and raised
            _failures.exception("request %s failed", request_id)
            raise
        finally:
            self._n_open -= 1
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
        known = path if path in self._paths else "other"
        self._metrics.requests.labels(known, str(line["status"])).inc()
        if self._settings.access_log:
            line["client"] = (scope.get("client") or ("local", 0))[0]
            line["method"] = scope.get("method", "WS")
            line["path"] = path[:_MOST_PATH]
            _log.info(msgspec.json.encode(line).decode())


def sent_id(scope: Scope) -> str | None:
    """The name that the client gave the request, None where it gave none that we take."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _NAME.fullmatch(value):
            return value.decode()
    return None


def _n_bytes(frame: bytes | str) -> int:
    if isinstance(frame, str) and not frame.isascii():
        return len(frame.encode())
    return len(frame)


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "too many connections"})
        return
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": _TOO_MANY[status]})
