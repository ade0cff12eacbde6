"""Routes of MIA4: its table, and what has no stream of its own; `turn` generates."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

import msgspec

from kqview.server.api.wire.attention import index_of
from kqview.server.api.wire.event_parts import sent
from kqview.server.apps.conversations import Call
from kqview.server.apps.mia4 import schema
from kqview.server.apps.mia4.passport import passport_of
from kqview.server.apps.mia4.request import system_prompt_of
from kqview.server.apps.mia4.turn import configured, encoded, error_body, generate, model_id_of
from kqview.server.errors import NotFound
from kqview.server.models.events_bus import EVENTS, Subscription
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.row_cache import CachedRows
from kqview.server.web.endpoint import (
    Feed,
    Frames,
    HttpReply,
    Operations,
    json_in_slices,
)

_LISTED_BYTES: Final = 512  # of a row or a conversation in a list, with its JSON
_PROMPT_TIMES: Final = 10  # bytes of a prompt's ids and texts as lists, per byte that is kept
_KEEP_ALIVE_S: Final = 15.0
_KEEP_ALIVE: Final = b": nothing happened"


_REQUEST: Final = {"request_id": 'Name of the request, such as "r1".'}
_SESSION: Final = {"session_id": 'Name of the conversation, such as "s1".'}
_EXAMPLE: Final[dict[str, Any]] = {
    "session_id": "tea", "prompt": "Who is Anna?",
    "overrides": {"temperature": 0, "max_output_tokens": 2},
}  # fmt: skip


_FRAMES: Final = tuple(sent(one, one.event) for one in schema.FRAMES)
_EVENTS: Final = tuple(sent(one, one.__name__) for one in EVENTS)

OPERATIONS: Final = Operations(tag="mia4", error_body=error_body, failure=schema.TurnFailure)
"""Rows of the route table."""
OPERATIONS.post(
    "/generate", summary="A turn of a conversation, as Server-Sent Events.", streams=True,
    example=_EXAMPLE, samples=_FRAMES,
)(generate)  # fmt: skip


@OPERATIONS.post("/cancel/{request_id}", reply=schema.Cancelled, status=202, parameters=_REQUEST)
async def cancel(call: Call) -> HttpReply:
    """End a request, in whatever phase it is."""
    request_id = call.path["request_id"]
    state = call.service.cancelling.cancel(call.caller, request_id)
    if state is None:
        raise NotFound(f"there is no request {request_id[:80]!r}, or it ended long ago")
    body = msgspec.json.encode(schema.Cancelled(request_id, state))
    return HttpReply(body, status=202)


# ---- attention that is kept


@OPERATIONS.get("/generate/{request_id}/attention", reply=schema.TurnRows, parameters=_REQUEST)
async def list_attention(call: Call) -> HttpReply:
    """Attention rows that are kept of a request with overrides.attention."""
    name = call.path["request_id"]
    rows = _kept(call, name)
    n_bytes = _LISTED_BYTES * len(rows.choices[0])
    call.hold.take(n_bytes)
    [n_left_out] = rows.n_left_out
    wanted = rows.wanted

    def listed() -> schema.TurnRows:
        return schema.TurnRows(
            request_id=name, values=wanted.kind, format=wanted.format, dtype=wanted.dtype,
            layers=rows.layers, n_left_out=n_left_out,
            rows=[
                schema.TurnRow(n, row.token_id, row.text, row.shape) for n, row in rows.shown(0)
            ],
        )  # fmt: skip

    return await _in_slices(call, n_bytes, listed)


@OPERATIONS.get(
    "/generate/{request_id}/attention/{seq}",
    parameters={**_REQUEST, "seq": "Index of the token, such as 0."},
)
async def show_attention(call: Call) -> HttpReply:
    """The row of one token: little-endian values in C order, or JSON for "sparse" and "viz"."""
    name, seq = call.path["request_id"], call.path["seq"]
    row = _kept(call, name).row(0, index_of(seq))
    if row is None:
        raise NotFound(
            f"row {seq[:20]!r} of {name[:80]!r} is not kept; GET /generate/{name[:80]}/attention "
            "lists those that are"
        )
    headers = {
        "cache-control": "private, no-store",
        "x-attention-shape": ",".join(map(str, row.shape)),
    }
    return HttpReply(row.data, row.media_type, headers=headers)


def _kept(call: Call, name: str) -> CachedRows:
    rows = call.service.kept.find(call.caller.owner, name)
    if rows is None or rows.prompt is None:  # those of other APIs' replies have none
        raise NotFound(
            f"no attention of {name[:80]!r} is kept: it was never asked for with "
            "overrides.attention, or newer rows took its place"
        )
    return rows


@OPERATIONS.get("/generate/{request_id}/prompt", reply=schema.PromptTokens, parameters=_REQUEST)
async def show_prompt(call: Call) -> HttpReply:
    """The tokens that kept rows look at."""
    name = call.path["request_id"]
    prompt = _kept(call, name).prompt
    assert prompt is not None
    call.hold.take(_PROMPT_TIMES * prompt.n_bytes)
    return await _in_slices(
        call, prompt.n_bytes, lambda: schema.PromptTokens(name, prompt.ids, prompt.texts)
    )


async def _in_slices(call: Call, n_bytes: int, reply: Callable[[], msgspec.Struct]) -> HttpReply:
    """The JSON of *reply*, whose lists may be long."""
    return HttpReply(
        await call.service.converted(n_bytes, call.hold, lambda: json_in_slices(reply()))
    )


# ---- conversations


@OPERATIONS.get("/chat/sessions", reply=schema.SessionList)
async def list_sessions(call: Call) -> HttpReply:
    """The conversations of the caller's key."""
    found = await call.service.conversations.list(call.caller.owner)
    return await _in_slices(call, _LISTED_BYTES * len(found), lambda: schema.SessionList(found))


@OPERATIONS.get("/chat/sessions/{session_id:path}", reply=schema.WholeSession, parameters=_SESSION)
async def show_session(call: Call) -> HttpReply:
    """A conversation with its messages."""
    session_id = call.path["session_id"]
    info, history = await call.service.conversations.get(call.caller.owner, session_id, call.hold)
    whole = schema.WholeSession(**msgspec.structs.asdict(info), messages=history.messages)
    return HttpReply(await call.service.offload(history.n_bytes, msgspec.json.encode, whole))


@OPERATIONS.add("DELETE", "/chat/sessions/{session_id:path}", status=204, parameters=_SESSION)
async def delete_session(call: Call) -> HttpReply:
    """Forget a conversation."""
    await call.service.conversations.delete(call.caller.owner, call.path["session_id"])
    return HttpReply(b"", "", status=204)


# ---- events


@OPERATIONS.get(
    "/events", summary="What happens, as Server-Sent Events.", streams=True, samples=_EVENTS
)
async def events(call: Call) -> Feed:
    """What happens: generations of the caller's key, and models."""
    async with contextlib.AsyncExitStack() as resources:
        subscription = await resources.enter_async_context(
            call.service.bus.subscribed(sees=call.caller.may_see)
        )
        return Feed(_published(call, subscription, resources.pop_all()))


async def _published(
    call: Call, subscription: Subscription, resources: contextlib.AsyncExitStack
) -> AsyncGenerator[Frames]:
    """What *subscription* gets, until its end or that of the caller's key."""
    async with resources:
        yield ()
        settings = call.service.settings
        while True:
            try:
                async with asyncio.timeout(_KEEP_ALIVE_S):
                    event = await anext(subscription)
                data = encoded(event)
            except TimeoutError:
                data = _KEEP_ALIVE
            except StopAsyncIteration:
                return
            if settings is not call.service.settings:  # a configuration was read
                settings = call.service.settings
                if not call.caller.is_known(settings):
                    return
            yield (data,)


# ---- what there is


@OPERATIONS.get("/config")
async def show_config(call: Call) -> schema.PageConfig:
    """What pages show."""
    config = call.service.live.config
    return schema.PageConfig(config.ui.mode, list(config.llm.reasoning_presets))


@OPERATIONS.get("/models")
async def list_models(call: Call) -> schema.ModelCards:
    """Every model that is configured."""
    created = int(time.time())
    cards = [_card(call, model) for model in call.service.pool]
    data = [
        {"id": card["id"], "object": "model", "created": created, "owned_by": "kqview"}
        for card in cards
    ]
    return schema.ModelCards(models=cards, data=data)


def _card(call: Call, model: ModelEntry) -> dict[str, Any]:
    known = configured(call, model)
    prompt = system_prompt_of(known)
    return {
        "id": model_id_of(model),
        "role": known.role,
        "capabilities": list(known.capabilities),
        "context_length": _context_length(call, model),
        "flags": msgspec.to_builtins(known.flags),
        "passport": msgspec.to_builtins(passport_of(known.passport)),
        **({} if prompt is None else {"system_prompt": msgspec.to_builtins(prompt)}),
        "state": model.state,
        "progress": model.progress,
        "pinned": model.pinned,
        "error": model.error,
    }


def _context_length(call: Call, model: ModelEntry) -> int | None:
    """Longest prompt in tokens; None of a model that was not loaded yet and takes its own."""
    if model.loaded is not None:
        return model.max_context_of(model.loaded)
    settings = call.service.settings
    given = configured(call, model).n_ctx or settings.n_ctx
    limits = [one for one in (given, settings.max_context) if one is not None]
    return None if given is None else min(limits)
