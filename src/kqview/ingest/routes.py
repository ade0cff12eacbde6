"""Routes: every path of the receiver; the work is done in `receiver` and `store`."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from kqview.errors import RequestError
from kqview.ingest.payload import microseconds
from kqview.ingest.receiver import Receiver
from kqview.ingest.schema import FilterValues, Health, Time, Trace, TraceList
from kqview.ingest.store import Reader, TraceFilter
from kqview.server.errors import Answer, NotFound, Unprocessable, UnsupportedMedia
from kqview.server.web import pages
from kqview.server.web.access import Access, sent_key
from kqview.server.web.endpoint import AnyCall, Feed, HttpReply, Operation, Upload

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
_SHARED: Final = ("base.css", "client.js", "dom.js", "events.js")  # of the server's pages


class Metrics:
    """Counters of one receiver, and totals read from the database on request."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "kqview_http_requests", "HTTP requests answered.", ("path", "status"),
            registry=self._registry,
        )  # fmt: skip

    async def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        totals = await self._receiver.read(self._receiver.store.totals)
        gauges = CollectorRegistry()
        for name, help_text, value in (
            ("kqview_ingest_traces", "Traces stored.", totals.n_traces),
            ("kqview_ingest_stored_bytes", "Bytes of traces as posted.", totals.n_bytes),
            ("kqview_ingest_posts", "Posts being received or stored.", self._receiver.n_posts),
        ):
            Gauge(name, help_text, registry=gauges).set(value)
        return generate_latest(self._registry) + generate_latest(gauges)


def error_body(answer: Answer) -> dict[str, Any]:
    """The body of a failure."""
    return {"error": answer.message}


def operations(
    receiver: Receiver, metrics: Metrics, description: dict[str, Any]
) -> list[Operation]:
    """The route table; *description* is read on request, so it may be filled later."""
    store = receiver.store
    has_keys = bool(receiver.settings.admin_keys)

    async def ingest(call: AnyCall, upload: Upload) -> HttpReply:
        _check_media(call)
        with receiver.admitted():
            await receiver.put(await upload.read())
        return HttpReply(b"", "", status=201)

    async def list_traces(call: AnyCall) -> TraceList:
        chosen, limit = _chosen(call), _limit(call)
        cursor = call.query.get("cursor") or None
        traces, next_cursor = await receiver.read(
            lambda: store.summaries(_reader(call), chosen, limit=limit, cursor=cursor)
        )
        return TraceList(traces, next_cursor)

    async def trace(call: AnyCall) -> HttpReply:
        request_id = _text(call.path["request_id"])
        body = await receiver.read(store.trace, request_id, _reader(call))
        if body is None:
            raise _unknown(request_id)
        return HttpReply(body, gzips=True)

    async def delete(call: AnyCall) -> HttpReply:
        request_id = _text(call.path["request_id"])
        if not await receiver.delete(request_id):
            raise _unknown(request_id)
        return HttpReply(b"", "", status=204)

    async def stream(call: AnyCall) -> Feed:
        after = call.headers.get("last-event-id", "")
        revision = int(after) if after.isdecimal() and len(after) < 19 else None
        return Feed(receiver.feed(_reader(call), revision))

    async def values(call: AnyCall) -> FilterValues:
        return await receiver.read(store.values, _reader(call))

    async def health(call: AnyCall) -> HttpReply:
        is_well, body = await receiver.health()
        return HttpReply(msgspec.json.encode(body), status=200 if is_well else 503)

    async def show_metrics(call: AnyCall) -> HttpReply:
        return HttpReply(await metrics.text(), CONTENT_TYPE_LATEST)

    async def openapi(call: AnyCall) -> HttpReply:
        return HttpReply(msgspec.json.encode(description), gzips=True)

    def _reader(call: AnyCall) -> Reader:
        sees_all = call.caller.is_admin or not has_keys
        # Clients send UTF-8 in headers, which ASGI leaves as bytes.
        key = sent_key(call.headers).encode("latin-1").decode("utf-8", "replace")
        return Reader(owner=call.caller.owner, key=key or None, sees_all=sees_all)

    whoever_may_delete: Access = "admin" if has_keys else "open"
    return [
        _operation("POST", "/ingest", ingest, "Store a trace; replaces an older one with its id.",
                   also=("/v1/ingest",), access="user", body=Upload, upload=Trace, status=201),
        _operation("GET", "/v1/traces", list_traces, "Traces, newest first.",
                   reply=TraceList, parameters=_FILTERS),
        _operation("GET", "/v1/traces/{request_id:path}", trace, "One trace, as it was posted.",
                   reply=Trace, parameters=_ONE),
        _operation("DELETE", "/v1/traces/{request_id:path}", delete, "Delete a trace.",
                   access=whoever_may_delete, status=204, parameters=_ONE),
        _operation("GET", "/v1/stream", stream, "A summary of each trace when it is stored.",
                   streams=True),
        _operation("GET", "/v1/values", values, "What lists can be filtered by.",
                   reply=FilterValues),
        _operation("GET", "/health", health, "Whether the database answers.", reply=Health,
                   access="open"),
        _operation("GET", "/metrics", show_metrics, "Counters in Prometheus' format.",
                   access=whoever_may_delete),
        _operation("GET", "/openapi.json", openapi, "The OpenAPI description.", access="open"),
        *_pages(),
    ]  # fmt: skip


def _operation(
    method: Literal["GET", "POST", "DELETE"],
    path: str,
    handler: Callable[..., Awaitable[Any]],
    summary: str,
    **more: Any,
) -> Operation:
    more.setdefault("access", "any_key")
    more.setdefault("tag", "ingest")
    return Operation(
        method=method, path=path, handler=handler, summary=summary, error_body=error_body, **more
    )


def _pages() -> list[Operation]:
    """The trace page, which shares some of its parts with the server's pages."""
    own, shared = pages.folder("kqview.ingest"), pages.folder("kqview.server")
    return [
        _operation("GET", "/", pages.page(own / "index.html"), "A page.", tag="",
                   access="open"),
        *pages.parts(own, error_body),
        *(
            _operation("GET", f"/static/{name}", pages.page(shared / name), "Part of it.",
                       tag="", access="open")
            for name in _SHARED
        ),
    ]  # fmt: skip


def _unknown(request_id: str) -> NotFound:
    return NotFound(f"there is no trace {request_id!r}; GET /v1/traces lists all")


def _check_media(call: AnyCall) -> None:
    kind = call.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and "+json" in kind):
        raise UnsupportedMedia(f"the body is of type {kind!r}; send JSON as application/json")


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
    query = {name: _text(call.query.get(name, "")) or None for name in _FILTERS}
    return TraceFilter(
        model=query["model"],
        mod=query["mod"],
        finish_reason=query["finish_reason"],
        since=_time("since", query["since"]),
        until=_time("until", query["until"]),
        search=query["search"],
    )


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
