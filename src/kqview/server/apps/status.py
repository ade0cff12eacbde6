"""What the server says about itself: whether it is healthy, the mods of its folder, its metrics."""

from typing import Annotated, Any

import msgspec

from kqview.server.apps.metrics import MEDIA_TYPE, Metrics
from kqview.server.models.service import OFFLOAD_BYTES, Call
from kqview.server.web.described import about
from kqview.server.web.endpoint import HttpReply, Operation
from kqview.server.web.pages import public_table


class Health(msgspec.Struct):
    """Whether the server accepts requests."""

    status: Annotated[str, about('"ok", "closing", "no model" or "stalled".', "ok")]
    model: Annotated[
        str | None, about("Name of the model; null if none is loaded yet.", "demo")
    ] = None
    reason: Annotated[str | msgspec.UnsetType, about("Why it is stalled.", "no step for 60 s")] = (
        msgspec.UNSET
    )
    error: Annotated[
        dict[str, Any] | msgspec.UnsetType,
        about("Why it accepts none, in the form of llama.cpp's server.", {"code": 503}),
    ] = msgspec.UNSET


class ModItem(msgspec.Struct):
    """A mod that requests may name."""

    id: Annotated[str, about("Its name.", "stop_early")]
    summary: Annotated[str, about("What it does.", "Ends the answer early.")]
    error: Annotated[
        str | None, about("Why its file cannot be used; null if it can.", "line 3: invalid syntax")
    ]
    object: Annotated[str, about('Always "mod".', "mod")] = "mod"


class ModList(msgspec.Struct):
    """The mods of the server's folder."""

    data: Annotated[list[ModItem], about("The mods.")]
    object: Annotated[str, about('Always "list".', "list")] = "list"


def operations(metrics: Metrics) -> list[Operation]:
    """Rows of the route table."""

    async def show_metrics(call: Call) -> HttpReply:
        started = {"process-start-time-unix": str(metrics.started_s)}
        return HttpReply(metrics.text(), MEDIA_TYPE, headers=started)

    table = public_table()
    table.get(
        "/health", summary="Whether requests are accepted; 503 if not.", reply=Health,
        also=("/v1/health",),
    )(health)  # fmt: skip
    table.get("/v1/mods", summary="Mods that requests may name.", access="user")(list_mods)
    table.get("/metrics", summary="Counters in Prometheus' format.", access="user")(show_metrics)
    return table


async def list_mods(call: Call) -> ModList:
    """The mods of the server's folder."""
    service = call.service
    found = await service.converted(OFFLOAD_BYTES, call.hold, service.mod_runs.list)
    return ModList([ModItem(one.name, one.summary, one.error) for one in found])


async def health(call: Call) -> HttpReply:
    """200 if requests are accepted and make progress, 503 if not."""
    pool = call.service.pool
    if pool.is_closing:
        return _unhealthy(Health("closing"), "the server is shutting down")
    if not pool.is_ready:
        return _unhealthy(Health("no model"), "Loading model")
    name = pool.default.name if pool.has_several or pool.default.loaded is not None else None
    if (reason := pool.stall()) is not None:
        return _unhealthy(Health("stalled", name, reason), reason)
    return HttpReply(msgspec.json.encode(Health("ok", name)))


def _unhealthy(body: Health, message: str) -> HttpReply:
    body.error = {"code": 503, "message": message, "type": "unavailable_error"}
    return HttpReply(msgspec.json.encode(body), status=503)
