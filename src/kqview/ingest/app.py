"""The receiver's ASGI app: its route table, and the server's middleware around it.

The work is done in `receiver` and `store`.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from kqview import __version__
from kqview.errors import RequestError
from kqview.ingest.payload import microseconds
from kqview.ingest.receiver import Receiver
from kqview.ingest.schema import FilterValues, Health, IngestFailure, Time, Trace, TraceList
from kqview.ingest.settings import IngestSettings
from kqview.ingest.store import Reader, TraceFilter
from kqview.server.errors import Answer, NotFound, Unprocessable, UnsupportedMedia
from kqview.server.web import pages
from kqview.server.web.access import Gate, sent_key
from kqview.server.web.endpoint import AnyCall, Endpoint, Feed, HttpReply, Operations, Upload
from kqview.server.web.middleware import AccessLog, EdgeMiddleware, no_route
from kqview.server.web.openapi import describe

_ABOUT: Final = "Receives traces of generations with mods, and shows them."
_MOST_LISTED: Final = 200
_LISTED: Final = 50
_FILTERS: Final = {
    "model": 'Those of this model, such as "demo".',
    "mod": 'Those that this mod steered, such as "stop_early".',
    "finish_reason": 'Those that ended so, such as "length".',
    "since": "Those from this time on, in seconds since 1970, such as 1767225600.",
    "until": "Those before this time.",
    "search": 'Those with this text, such as "Anna".',
    "limit": "Most traces, such as 20; 50 if not given.",
    "cursor": "``next_cursor`` of the page before; from the newest if not given.",
}
_ONE: Final = {"request_id": 'Name of the request, such as "r1".'}
# Of the server's pages.
_SHARED: Final = ("base.css", "client.js", "coloured.js", "dom.js", "events.js", "rows.js")


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
    registry = CollectorRegistry()
    requests = Counter(
        "kqview_http_requests", "HTTP requests answered.", ("path", "status"), registry=registry
    )
    table = _operations(receiver, registry)
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
    return IngestApp(AccessLog(router, settings.web, requests, paths), receiver)


def _error_body(answer: Answer) -> dict[str, Any]:
    """The body of a failure."""
    return {"error": answer.message}


def _operations(receiver: Receiver, registry: CollectorRegistry) -> Operations:
    """The route table; *registry* counts requests, for the metrics."""
    store = receiver.store
    has_keys = bool(receiver.settings.admin_keys)
    whoever_may_delete = "admin" if has_keys else "open"
    description: dict[str, Any] = {}
    table = Operations(
        tag="ingest", access="any_key", error_body=_error_body, failure=IngestFailure
    )

    def reader(call: AnyCall) -> Reader:
        sees_all = call.caller.is_admin or not has_keys
        # Clients send UTF-8 in headers, which ASGI leaves as bytes.
        key = sent_key(call.headers).encode("latin-1").decode("utf-8", "replace")
        return Reader(owner=call.caller.owner, key=key or None, sees_all=sees_all)

    @table.post(
        "/ingest", also=("/v1/ingest",), access="user", body=Upload, upload=Trace, status=201
    )
    async def ingest(call: AnyCall, upload: Upload) -> HttpReply:
        """Store a trace; replaces an older one with its id."""
        kind = upload.media_type
        if kind != "application/json" and not (kind.startswith("application/") and "+json" in kind):
            raise UnsupportedMedia(f"the body is of type {kind!r}; send JSON as application/json")
        with receiver.admitted():
            await receiver.put(await upload.read())
        return HttpReply(b"", "", status=201)

    @table.get("/v1/traces", parameters=_FILTERS)
    async def list_traces(call: AnyCall) -> TraceList:
        """Traces, newest first."""
        chosen, limit = _chosen(call), _limit(call)
        cursor = call.query.get("cursor") or None
        traces, next_cursor = await receiver.read(
            lambda: store.summaries(reader(call), chosen, limit=limit, cursor=cursor)
        )
        return TraceList(traces, next_cursor)

    @table.get("/v1/traces/{request_id:path}", reply=Trace, parameters=_ONE)
    async def trace(call: AnyCall) -> HttpReply:
        """One trace, as it was posted."""
        request_id = _text(call.path["request_id"])
        body = await receiver.read(store.trace, request_id, reader(call))
        if body is None:
            raise _unknown(request_id)
        return HttpReply(body, gzips=True)

    @table.add(
        "DELETE", "/v1/traces/{request_id:path}", access=whoever_may_delete, status=204,
        parameters=_ONE,
    )  # fmt: skip
    async def delete(call: AnyCall) -> HttpReply:
        """Delete a trace."""
        request_id = _text(call.path["request_id"])
        if not await receiver.write(store.delete, request_id):
            raise _unknown(request_id)
        return HttpReply(b"", "", status=204)

    @table.get("/v1/stream", streams=True)
    async def stream(call: AnyCall) -> Feed:
        """A summary of each trace when it is stored."""
        after = call.headers.get("last-event-id", "")
        revision = int(after) if after.isdecimal() and len(after) < 19 else None
        return Feed(receiver.feed(reader(call), revision))

    @table.get("/v1/values")
    async def values(call: AnyCall) -> FilterValues:
        """What lists can be filtered by."""
        return await receiver.read(store.values, reader(call))

    @table.get("/health", reply=Health, access="open")
    async def health(call: AnyCall) -> HttpReply:
        """Whether the database answers."""
        is_well, body = await receiver.health()
        return HttpReply(msgspec.json.encode(body), status=200 if is_well else 503)

    @table.get("/metrics", access=whoever_may_delete)
    async def metrics(call: AnyCall) -> HttpReply:
        """Counters in Prometheus' format."""
        n_traces, n_bytes = await receiver.read(store.totals)
        gauges = CollectorRegistry()
        for name, help_text, value in (
            ("kqview_ingest_traces", "Traces stored.", n_traces),
            ("kqview_ingest_stored_bytes", "Bytes of traces as posted.", n_bytes),
            ("kqview_ingest_posts", "Posts being received or stored.", receiver.n_posts),
        ):
            Gauge(name, help_text, registry=gauges).set(value)
        return HttpReply(generate_latest(registry) + generate_latest(gauges), CONTENT_TYPE_LATEST)

    @table.get("/openapi.json", access="open")
    async def openapi(call: AnyCall) -> HttpReply:
        """The OpenAPI description."""
        return HttpReply(msgspec.json.encode(description), gzips=True)

    # The trace page, which shares some of its parts with the server's pages.
    own, shared = pages.folder("kqview.ingest"), pages.folder("kqview.server")
    files = {"/": own / "index.html", **{f"/static/{name}": shared / name for name in _SHARED}}
    for path, file in files.items():
        table.get(path, tag="", access="open", summary="Part of the page.")(pages.page(file))
    table += pages.parts(own, _error_body)
    description |= describe(table, version=__version__, has_keys=has_keys, about=_ABOUT)
    return table


def _unknown(request_id: str) -> NotFound:
    return NotFound(f"there is no trace {request_id!r}; GET /v1/traces lists all")


def _text(sent: str) -> str:
    """*sent* without NUL, as texts are stored."""
    return sent.replace("\0", "")


def _limit(call: AnyCall) -> int:
    text = call.query.get("limit") or str(_LISTED)
    if not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= _MOST_LISTED:
        raise RequestError(
            f"limit is {text!r}; use a number from 1 to {_MOST_LISTED}", parameter="limit"
        )
    return int(text)


def _chosen(call: AnyCall) -> TraceFilter:
    names = TraceFilter.__dataclass_fields__
    query: dict[str, Any] = {name: _text(call.query.get(name, "")) or None for name in names}
    times: dict[str, Any] = {name: _time(name, query[name]) for name in ("since", "until")}
    return TraceFilter(**{**query, **times})


def _time(name: str, text: str | None) -> int | None:
    """Microseconds since 1970 of a time in the query, written as in a payload."""
    if text is None:
        return None
    try:
        value: Any = msgspec.convert(text, Time, strict=False)
        if value is None:
            raise ValueError
        return microseconds(value, name)
    except (ValueError, Unprocessable):
        raise RequestError(
            f"{name} is {text!r}; write a time with an offset, such as 2025-12-01T18:30:00Z, or "
            "seconds since 1970",
            parameter=name,
        ) from None
