"""What the server says about itself: start page, description, health, metrics."""

from importlib import resources
from typing import Any, Final

import msgspec

from kqview.errors import KqviewError
from kqview.server.endpoint import Call, Handler, Operation, Reply
from kqview.server.errors import Answer
from kqview.server.metrics import MEDIA_TYPE, Metrics

_TAG: Final = "server"
_POLICY: Final = "default-src 'self'; img-src 'self' data:"
_STATIC: Final = ("style.css", "start.js", "docs.js")
_MEDIA_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
}


class Health(msgspec.Struct):
    """Whether the server takes requests."""

    status: str
    model: str | None = None
    reason: str | msgspec.UnsetType = msgspec.UNSET  # where it is stalled


def error_body(answer: Answer) -> dict[str, Any]:
    """A failure where no dialect is asked."""
    return {"error": answer.message, "error_code": answer.code, **answer.figures}


def operations(metrics: Metrics, description: dict[str, Any]) -> list[Operation]:
    """Rows of the route table; *description* is read when it is asked for, so it may grow."""

    async def start_page(call: Call) -> Reply:
        return _page("index.html")

    async def docs(call: Call) -> Reply:
        return _page("docs.html")

    async def openapi(call: Call) -> Reply:
        return Reply(msgspec.json.encode(description))

    async def show_metrics(call: Call) -> Reply:
        return Reply(metrics.text(), MEDIA_TYPE)

    return [
        _get("/", start_page, "What is running, with links."),
        _get("/docs", docs, "This API for people."),
        _get("/openapi.json", openapi, "This API for programs."),
        _get("/health", health, "Whether requests are taken; 503 where not.", Health),
        *(_get(f"/static/{name}", _static(name), "Part of a page.", tag="") for name in _STATIC),
        _get("/metrics", show_metrics, "Counters in Prometheus' format.", access="user"),
    ]


async def health(call: Call) -> Reply:
    """200 where requests are taken and get on, 503 where not."""
    try:
        if (reason := call.service.stall()) is not None:
            body = Health("stalled", call.service.model_name, reason)
            return Reply(msgspec.json.encode(body), status=503)
        body = Health("ok", call.service.model_name)
    except KqviewError:
        status = "closing" if call.service.is_closing else "no model"
        return Reply(msgspec.json.encode(Health(status)), status=503)
    return Reply(msgspec.json.encode(body))


def _get(path: str, handler: Any, summary: str, reply: Any = None, **more: Any) -> Operation:
    more.setdefault("access", "open")
    more.setdefault("tag", _TAG)
    return Operation(
        method="GET", path=path, handler=handler, summary=summary,
        error_body=error_body, reply=reply, **more,
    )  # fmt: skip


def _static(name: str) -> Handler:
    async def serve_file(call: Call) -> Reply:
        return _page(name)

    return serve_file


def _page(name: str) -> Reply:
    data = resources.files("kqview.server").joinpath("static", name).read_bytes()
    kind = _MEDIA_TYPES[name.rpartition(".")[2]]
    return Reply(data, kind, headers={"content-security-policy": _POLICY})
