"""Routes of MIA4: glue between endpoints, the service and the pure parts."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from kqview.errors import InternalError, KqviewError
from kqview.server import config
from kqview.server.api.wire.attention_field import AttentionWriter
from kqview.server.apps.chat_service import Call, ChatService
from kqview.server.apps.mia4 import convert, frames, schema, stream_schema
from kqview.server.apps.mia4.cancelling import Cancelled
from kqview.server.apps.mia4.convert import error_body
from kqview.server.apps.mia4.persona import Persona, Text
from kqview.server.apps.mia4.turn import Named, Turn
from kqview.server.config import UNNAMED
from kqview.server.errors import NotFound, answer_of, too_late
from kqview.server.live_config import LiveConfig
from kqview.server.models import events_bus
from kqview.server.models.events_bus import Subscription
from kqview.server.models.model_entry import ModelEntry, resolved
from kqview.server.models.row_cache import CachedRows
from kqview.server.models.service import OFFLOAD_BYTES
from kqview.server.web.endpoint import (
    EVENT_TAIL,
    Feed,
    Frames,
    Handler,
    HttpReply,
    Operation,
    Sample,
    json_in_slices,
)
from kqview.types import Usage

_TAG: Final = "mia4"
# Templates may take seconds: their work is large enough for another thread.
_LARGE: Final = 2**20
_ID_BYTES: Final = 40  # of an id of a prompt, of which there are at most as many as bytes
_LISTED_BYTES: Final = 512  # of a row or a session in a list, with its JSON
_PROMPT_TIMES: Final = 10  # bytes of a prompt's ids and texts as lists, per byte that is kept
_KEEP_ALIVE_S: Final = 15.0
_KEEP_ALIVE: Final = b": nothing happened"

# The values know nothing of their keys, so a server that nobody has any more is freed.
_personas: Final[WeakKeyDictionary[LiveConfig, tuple[str | None, Persona]]] = WeakKeyDictionary()

_log: Final = logging.getLogger("kqview.server")


# ---- generating


async def generate(call: Call, body: schema.GenerateBody) -> Feed:
    """A turn of a conversation; errors before its stream begins are those of HTTP."""
    # A name in a path has no slash, which the header may have.
    request_id = body.request_id or call.request_id.replace("/", "-")
    named = call.service.pool.find(body.model)
    body = resolved(body, named)
    async with contextlib.AsyncExitStack() as resources:
        work = resources.enter_context(call.service.cancelling.known(call.caller.owner, request_id))
        limit_s = call.service.settings.request_timeout_s
        limit = asyncio.timeout(limit_s or None)
        try:
            async with work.waiting(), limit:
                turn = await _begun(call, body, request_id, resources)
        except TimeoutError:
            raise (too_late(limit_s) if limit.expired() else TimeoutError) from None
        except Cancelled:
            return Feed(_of_nothing(request_id, _id_of(named)))
        work.runs(turn.run)
        return Feed(_streamed(call.service, turn, resources.pop_all()))


async def _begun(
    call: Call,
    body: schema.GenerateBody,
    request_id: str,
    resources: contextlib.AsyncExitStack,
) -> Turn:
    service, caller = call.service, call.caller
    given, talk = service.live.config, None
    if body.session_id is not None:
        talk = await resources.enter_async_context(
            service.conversations.turn(caller.owner, body.session_id, call.hold)
        )
    model = await resources.enter_async_context(service.pool.using(body.model))
    engine, model_id = model.engine, _id_of(model)
    with call.hold.part() as ids:  # a prompt that fits is small
        ids.take(_ID_BYTES * call.n_body_bytes)
        plan = await service.converted(
            _LARGE, call.hold, convert.plan_of, body, request_id=request_id, engine=engine,
            settings=given.settings, llm=given.llm, model=_configured(call, model),
            max_context=model.max_context, persona=await _persona(call),
            **({} if talk is None else {"fit": talk.fit}),
        )  # fmt: skip
        seat = None
        if talk is not None:
            seat = await resources.enter_async_context(talk.seat(model, caller, plan.ids))
        run = await service.start(plan.request, caller, call.hold, model=model)
    resources.push_async_callback(run.aclose)
    if seat is not None:
        seat.follow(run)
    attention, hidden = None, set[int]()
    if plan.request.attention is not None:
        attention = AttentionWriter(run, engine.model, service.kept, plan.prompt_text, hidden)
    publish = partial(service.bus.publish, owner=caller.owner)
    store = None if talk is None else partial(talk.append, body.prompt, model=model_id)
    n_left_out = 0 if talk is None else talk.n_left_out
    named = Named(request_id, model_id, body.session_id)
    return Turn(run, plan, named, attention, publish, store, n_left_out, hidden)


async def _persona(call: Call) -> Text | None:
    """The persona, from its file if that has changed."""
    live = call.service.live
    file = live.config.persona.file
    known = _personas.get(live)
    if known is None or known[0] != file:
        known = _personas[live] = file, Persona(file)
    persona = known[1]
    if persona.is_due:
        return await call.service.converted(_LARGE, call.hold, persona.refresh)
    return persona.current


async def _streamed(
    service: ChatService, turn: Turn, resources: contextlib.AsyncExitStack
) -> AsyncGenerator[Frames]:
    """Every frame of *turn*, the last one ``end``; holds *resources* meanwhile."""
    run = turn.run
    failure: KqviewError | None = None
    async with resources:
        try:
            yield ()  # the client hears that it was admitted
            async for step in run:
                sent = await _written(service, turn.n_bytes_of(step), turn.token, step)
                del step  # the pool wants its memory back while the client reads
                if sent:
                    yield _events(sent)
            if sent := await _written(service, turn.n_bytes_of(), turn.finish):
                yield _events(sent)
        except Exception as error:
            failure = _failure(turn, error)
        finally:
            # Also if the client left: the slot is freed, and what was produced is stored.
            last = await _ended(service, turn, failure)
    # What the turn held is free before the client hears that it ended.
    yield _events(last)


async def _written(
    service: ChatService, n_bytes: int, write: Callable[..., list[bytes]], *args: Any
) -> list[bytes]:
    """*write*, of *n_bytes*; in another thread if that is much.

    That thread is done before a cancellation goes on: the end of the turn writes as well.
    """
    if n_bytes < OFFLOAD_BYTES:
        return write(*args)
    writing = asyncio.ensure_future(service.offload(n_bytes, write, *args))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        writing.exception()  # nobody is left to hear it
        raise


async def _ended(service: ChatService, turn: Turn, failure: KqviewError | None) -> list[bytes]:
    """End *turn*, and store its answer in the conversation; returns the last frames."""
    try:
        await turn.run.aclose()
        await _written(service, turn.n_bytes_of(), turn.finish)
        if turn.store is not None and turn.answer:
            await turn.store(turn.answer)
    except Exception as error:
        failure = failure or _failure(turn, error)
    return turn.end(None if failure is None else answer_of(failure))


def _failure(turn: Turn, error: Exception) -> KqviewError:
    """What the client hears of *error*."""
    if isinstance(error, KqviewError):
        return error
    _log.error("stream of %s failed", turn.run.request_id, exc_info=error)
    return InternalError("the server failed; its log says more")


async def _of_nothing(request_id: str, model_id: str) -> AsyncGenerator[Frames]:
    """The stream of a request that was cancelled before it was admitted."""
    usage = frames.usage(request_id, model_id, frames.figures_of(Usage(), 0.0))
    yield _events([usage, frames.end(request_id, "cancelled")])


def _events(sent: Sequence[bytes]) -> Frames:
    return (EVENT_TAIL.join(sent),)


async def cancel(call: Call) -> HttpReply:
    """End a request in whatever phase it is."""
    request_id = call.path["request_id"]
    state = call.service.cancelling.cancel(call.caller, request_id)
    if state is None:
        raise NotFound(f"there is no request {request_id[:80]!r}, or it ended long ago")
    body = msgspec.json.encode(schema.Cancelled(request_id, state))
    return HttpReply(body, status=202)


# ---- attention that is kept


async def list_attention(call: Call) -> HttpReply:
    """Which rows are kept of a request."""
    name = call.path["request_id"]
    rows = _kept(call, name)
    n_bytes = _LISTED_BYTES * len(rows.choices[0])
    call.hold.take(n_bytes)
    return await _in_slices(call, n_bytes, convert.kept_attention, name, rows)


async def show_attention(call: Call) -> HttpReply:
    """The row of one token: little-endian values in C order, or JSON for "sparse" and "viz"."""
    name, seq = call.path["request_id"], call.path["seq"]
    rows = _kept(call, name)
    n = int(seq) if seq.isascii() and seq.isdecimal() and len(seq) < 10 else -1
    row = rows.choices[0].get(n)
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


async def show_prompt(call: Call) -> HttpReply:
    """The prompt that the rows of a request look at."""
    name = call.path["request_id"]
    prompt = _kept(call, name).prompt
    assert prompt is not None
    call.hold.take(_PROMPT_TIMES * prompt.n_bytes)
    return await _in_slices(call, prompt.n_bytes, convert.kept_prompt, name, prompt)


async def _in_slices(
    call: Call, n_bytes: int, convert: Callable[..., msgspec.Struct], *args: Any
) -> HttpReply:
    """The JSON of *convert*, whose lists may be long."""
    return HttpReply(
        await call.service.converted(n_bytes, call.hold, lambda: json_in_slices(convert(*args)))
    )


# ---- conversations


async def list_sessions(call: Call) -> HttpReply:
    """The conversations of the caller's key."""
    found = await call.service.conversations.list(call.caller.owner)
    return await _in_slices(call, _LISTED_BYTES * len(found), convert.sessions_of, found)


async def show_session(call: Call) -> HttpReply:
    """A conversation with its messages."""
    session_id = call.path["session_id"]
    info, history = await call.service.conversations.get(call.caller.owner, session_id, call.hold)
    whole = convert.whole_session_of(info, history.messages)
    return HttpReply(await call.service.offload(history.n_bytes, msgspec.json.encode, whole))


async def delete_session(call: Call) -> HttpReply:
    """Forget a conversation."""
    await call.service.conversations.delete(call.caller.owner, call.path["session_id"])
    return HttpReply(b"", "", status=204)


# ---- events


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
                sent = frames.frame(type(event).__name__, event)
            except TimeoutError:
                sent = _KEEP_ALIVE
            except StopAsyncIteration:
                return
            if settings is not call.service.settings:  # a configuration was read
                settings = call.service.settings
                if not call.caller.is_known(settings):
                    return
            yield (sent,)


# ---- what there is


async def show_config(call: Call) -> schema.Config:
    """What pages show."""
    config = call.service.live.config
    return schema.Config(config.ui.mode, list(config.llm.reasoning_presets))


async def list_models(call: Call) -> schema.Models:
    """Every model that is configured."""
    created = int(time.time())
    cards = [
        convert.card_of(
            _id_of(model), _configured(call, model),
            context_length=_context_length(call, model),
            state={
                "state": model.state, "progress": model.progress, "pinned": model.pinned,
                "error": model.error,
            },
        )
        for model in call.service.pool
    ]  # fmt: skip
    data = [
        {"id": card["id"], "object": "model", "created": created, "owned_by": "kqview"}
        for card in cards
    ]
    return schema.Models(models=cards, data=data)


def _id_of(model: ModelEntry) -> str:
    """What clients call a model: its id, or its own name where the configuration gives it none."""
    return model.name if model.id == UNNAMED and model.loaded is not None else model.id


def _context_length(call: Call, model: ModelEntry) -> int | None:
    """Longest prompt in tokens; None of a model that was not loaded yet and takes its own."""
    if model.loaded is not None:
        return model.max_context_of(model.loaded)
    settings = call.service.settings
    given = _configured(call, model).n_ctx or settings.n_ctx
    limits = [one for one in (given, settings.max_context) if one is not None]
    return None if given is None else min(limits)


def _configured(call: Call, model: ModelEntry) -> config.Model:
    """What the configuration says of a model; its passport may have changed since it was loaded."""
    return call.service.live.config.models.get(model.id, model.config)


# ---- the table


def _operation(method: Any, path: str, handler: Handler, summary: str, **more: Any) -> Operation:
    return Operation(
        method=method, path=path, handler=handler, tag=_TAG, summary=summary,
        error_body=error_body, failure=stream_schema.Failure, **more,
    )  # fmt: skip


_EXAMPLE: Final[dict[str, Any]] = {
    "session_id": "tea", "prompt": "Who is Anna?",
    "overrides": {"temperature": 0, "max_output_tokens": 2},
}  # fmt: skip
_NAMED: Final[dict[str, Any]] = {"request_id": "…", "model_id": "…"}
_TIME: Final[dict[str, Any]] = {"at_s": 1767225600.5}
_FRAMES: Final = (
    Sample(
        "server", "Reasoning while it comes, unless it is dropped",
        {"seq": 0, "text": "The user", **_NAMED}, "analysis", stream_schema.AnalysisFrame,
    ),
    Sample(
        "server", "Where a marker ends the reasoning: the whole of it, unless it is dropped",
        {"reasoning": "The user asks for a name.", **_NAMED}, "reasoning",
        stream_schema.ReasoningFrame,
    ),
    Sample(
        "server", "The answer while it comes",
        {"seq": 0, "text": "Anna", "tokens_out": 3, **_NAMED}, "token", stream_schema.TokenFrame,
    ),
    Sample(
        "server", "Tokens that a mod took back",
        {"tokens": 1, "characters": 4, **_NAMED}, "removed", stream_schema.RemovedFrame,
    ),
    Sample(
        "server", "What it took",
        {
            **_NAMED, "prompt_tokens": 14, "output_tokens": 4, "latency_ms": 20,
            "decode_tps": 200.0, "reasoning_tokens": 2, "final_tokens": 2, "reasoning_ratio": 0.5,
        },
        "usage", stream_schema.UsageFrame,
    ),
    Sample(
        "server", "A failure once the stream has begun, in place of the usage",
        {"code": "MODEL_CHANGED", "error_type": "unavailable", "message": "…", **_NAMED},
        "error", stream_schema.ErrorFrame,
    ),
    Sample(
        "server", "The end, always the last",
        {"request_id": "…", "status": "ok", "stop_reason": "length"}, "end",
        stream_schema.EndFrame,
    ),
)  # fmt: skip
_EVENTS: Final = (
    Sample(
        "server", "A request named a preset of reasoning",
        {"preset": "brief", "reasoning_max_tokens": 64, **_NAMED, **_TIME},
        "ReasoningPresetApplied", events_bus.ReasoningPresetApplied,
    ),
    Sample(
        "server", "A generation was admitted",
        {
            **_NAMED, "session_id": None, "prompt_tokens": 14, "sampling": {"temperature": 0.8},
            "sampling_origin": {"temperature": "default"}, "passport_hash": "sha256:…",
            "passport_version": 1, **_TIME,
        },
        "GenerationStarted", events_bus.GenerationStarted,
    ),
    Sample(
        "server", "A generation ended",
        {
            **_NAMED, "session_id": None, "status": "ok", "stop_reason": "length", "code": None,
            "result_summary": {"output_tokens": 4}, "reasoning_buffer_latency_ms": None, **_TIME,
        },
        "GenerationCompleted", events_bus.GenerationCompleted,
    ),
    Sample(
        "server", "A model is being loaded", {"model_id": "…", "progress": 0.5, **_TIME},
        "ModelLoading", events_bus.ModelLoading,
    ),
    Sample(
        "server", "A model was loaded",
        {"model_id": "…", "memory_bytes": 50331648, "seconds": 0.4, **_TIME},
        "ModelLoaded", events_bus.ModelLoaded,
    ),
    Sample(
        "server", "A model was unloaded", {"model_id": "…", "reason": "memory", **_TIME},
        "ModelUnloaded", events_bus.ModelUnloaded,
    ),
    Sample(
        "server", "A model could not be loaded",
        {"model_id": "…", "error": "…", "retry_s": 1.0, **_TIME},
        "ModelFailed", events_bus.ModelFailed,
    ),
    Sample(
        "server", "This client read too slowly: events were lost here", {"n": 3, **_TIME},
        "Dropped", events_bus.Dropped,
    ),
)  # fmt: skip

_REQUEST: Final = {"request_id": 'Name of the request, such as "r1".'}
_SESSION: Final = {"session_id": 'Name of the conversation, such as "s1".'}

OPERATIONS: Final[Sequence[Operation]] = [
    _operation(
        "GET", "/config", show_config, "What a page shows.", reply=schema.Config
    ),
    _operation("GET", "/models", list_models, "Every model.", reply=schema.Models),
    _operation(
        "POST", "/generate", generate, "A turn of a conversation, as Server-Sent Events.",
        body=schema.GenerateBody, streams=True, example=_EXAMPLE, samples=_FRAMES,
    ),
    _operation(
        "POST", "/cancel/{request_id}", cancel, "End a request.",
        reply=schema.Cancelled, status=202, parameters=_REQUEST,
    ),
    _operation(
        "GET", "/generate/{request_id}/attention", list_attention,
        "Attention rows that are kept of a request with overrides.attention.",
        reply=schema.KeptAttention, parameters=_REQUEST,
    ),
    _operation(
        "GET", "/generate/{request_id}/attention/{seq}", show_attention,
        "The attention row of one token as bytes.",
        parameters={**_REQUEST, "seq": "Index of the token, such as 0."},
    ),
    _operation(
        "GET", "/generate/{request_id}/prompt", show_prompt,
        "The tokens that kept rows look at.", reply=schema.Prompt, parameters=_REQUEST,
    ),
    _operation(
        "GET", "/chat/sessions", list_sessions, "Conversations.", reply=schema.Sessions
    ),
    _operation(
        "GET", "/chat/sessions/{session_id:path}", show_session, "A conversation.",
        reply=schema.WholeSession, parameters=_SESSION,
    ),
    _operation(
        "DELETE", "/chat/sessions/{session_id:path}", delete_session, "Forget a conversation.",
        status=204, parameters=_SESSION,
    ),
    _operation(
        "GET", "/events", events, "What happens, as Server-Sent Events.", streams=True,
        samples=_EVENTS,
    ),
]  # fmt: skip
