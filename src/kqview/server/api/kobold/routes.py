"""Routes of the KoboldAI API with attention and of KoboldCpp; ``/api/v1/generate`` is dream's.

Glue only: `schema` says what bodies are, `convert` and `events` what becomes of them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kqview import __version__
from kqview.engine import Engine
from kqview.server.api.kobold import convert, schema, stream_schema
from kqview.server.api.kobold.convert import PlainEvents, SocketFrames, TypedEvents
from kqview.server.api.wire.attention_protocol import (
    LOGPROB_BYTES,
    RowFacts,
    control_token_of,
    ignored_of,
    logprobs_of,
    random_seed,
)
from kqview.server.api.wire.event_parts import StartEvent
from kqview.server.models.model_entry import resolved
from kqview.server.models.run import LastRun, Run
from kqview.server.models.service import Call
from kqview.server.models.stream import Events, send_run
from kqview.server.web.endpoint import (
    Handler,
    HttpReply,
    Operation,
    Sample,
    decoded_with_unknown,
    empty,
    json_in_slices,
)
from kqview.server.web.lenient import LenientDecoder
from kqview.server.web.sockets import Socket

_TAG: Final = "kobold"
_STREAM_DECODER: Final = LenientDecoder(schema.StreamBody)

# ---- text and ids


async def tokenize(call: Call, body: schema.TokenizeBody) -> HttpReply:
    """Ids and texts of a text."""
    add_special = convert.first(body.add_special_tokens, body.add_special, False)
    pieces = await call.model.tokenize(
        convert.text_of(body), add_special=add_special, hold=call.hold
    )
    with_pieces = body.with_pieces is not False

    def written() -> bytes:
        reply = convert.tokenized(pieces, with_pieces=with_pieces)
        empty(pieces)
        return json_in_slices(reply)

    return HttpReply(await call.service.converted(call.n_body_bytes, call.hold, written))


async def detokenize(call: Call, body: schema.DetokenizeBody) -> schema.Detokenized:
    """Text of ids."""
    ids = convert.ids_of(body)
    name = "tokens" if body.token_ids is None else "token_ids"
    text = await call.model.detokenize(ids, name=name, client=call.hold.client)
    return schema.Detokenized(text)


async def token_count(call: Call, body: schema.TokenCountBody) -> HttpReply:
    """How many tokens a prompt has."""
    text = body.prompt or ""
    ids = await call.model.ids(text, add_special=body.special, hold=call.hold)
    counted = schema.TokenCount(len(ids), ids)
    return HttpReply(
        await call.service.converted(call.n_body_bytes, call.hold, json_in_slices, counted)
    )


async def extra_detokenize(call: Call, body: schema.ExtraDetokenizeBody) -> schema.ExtraDetokenized:
    """Text of ids, as KoboldCpp answers it."""
    text = await call.model.detokenize(body.ids, client=call.hold.client)
    return schema.ExtraDetokenized(text, success=True)


# ---- generation


async def stream(call: Call, body: schema.StreamBody) -> Events:
    """Tokens as Server-Sent Events."""
    body = convert.with_query(body, call.query)
    begun = await _begun(call, body, call.n_body_bytes, call.unknown, asked=False)
    run = begun.run
    if convert.is_typed(body):
        return Events(
            run,
            TypedEvents(
                begun.facts, begun.engine.token_text, begun.ignored,
                has_start=bool(body.start_event),
            ),
        )  # fmt: skip
    trims = body.trim_stop is not False
    return Events(run, PlainEvents(run.request.sampling.stop, begun.ignored, trims=trims))


async def stream_socket(call: Call, socket: Socket) -> None:
    """Tokens as pairs of a text and a binary frame; one request a socket."""
    raw = await socket.receive(timeout_s=call.service.settings.idle_timeout_s)
    body, unknown = await call.service.converted(
        len(raw), call.hold, decoded_with_unknown, _STREAM_DECODER, raw
    )
    body = convert.with_query(body, call.query)
    async with call.service.pool.using(body.model or call.query.get("model")) as model:
        body = resolved(body, model)
        begun = await _begun(replace(call, served=model), body, len(raw), unknown, asked=True)
        frames = SocketFrames(begun.facts, begun.ignored, has_start=bool(body.start_event))
        await socket.alone(send_run(socket, begun.run, frames))


@dataclass(frozen=True, slots=True)
class _Begun:
    run: Run
    engine: Engine
    facts: RowFacts | None
    ignored: Sequence[str]


async def _begun(
    call: Call, body: schema.StreamBody, n_bytes: int, unknown: Sequence[str], *, asked: bool
) -> _Begun:
    service, engine = call.service, call.model.engine
    request = await service.converted(
        n_bytes, call.hold, convert.request_of, body, service.settings,
        request_id=call.request_id, max_context=call.model.max_context,
        control_token=control_token_of(engine), seed=random_seed(), asked=asked,
    )  # fmt: skip
    run = await service.start(request, call.caller, call.hold, model=call.model)
    wanted = request.attention
    facts = None if wanted is None else RowFacts.of(wanted, engine.model)
    return _Begun(run, engine, facts, ignored_of(body, unknown, wanted))


async def abort(call: Call, body: schema.RunBody) -> schema.Aborted:
    """End the generation of a key or a name; without either, the only one without a key."""
    runs = _meant(call, body)
    is_named = bool(body.genkey or body.request_id)
    is_known = bool(runs) if is_named else len(runs) <= 1
    ended = runs if is_known else []
    for run in ended:
        run.end()
    return convert.aborted(n_ended=len(ended), is_known=is_known)


async def check(call: Call, body: schema.RunBody) -> schema.Texts:
    """Text so far of the generation of a key or a name; "" if there is none."""
    runs = _meant(call, body)
    return schema.Texts([schema.ResultText(runs[-1].text if runs else "")])


async def last_logprobs(call: Call, body: schema.RunBody) -> schema.LastLogprobs:
    """Logprobs of the caller's generation that ended last, if it asked for some."""
    last = call.service.last_of(call.caller, key=body.genkey or "")
    if last.model_id != call.model.id:  # its ids would be other texts here
        last = LastRun()
    bytes_of = call.model.engine.token_bytes
    n_bytes = LOGPROB_BYTES * len(last.logprobs)
    return schema.LastLogprobs(
        await call.service.converted(n_bytes, call.hold, logprobs_of, last.logprobs, bytes_of)
    )


def _meant(call: Call, body: schema.RunBody) -> list[Run]:
    return call.service.find(call.caller, key=body.genkey or "", request_id=body.request_id or None)


def _by_query(handler: Handler) -> Handler:
    """*handler* for GET: the URL names the generation."""

    async def handle(call: Call) -> Any:
        query = call.query
        return await handler(call, schema.RunBody(genkey=query.get("genkey")))

    return handle


# ---- what runs


async def model(call: Call) -> schema.Model:
    """The model's facts."""
    return convert.model_of(
        call.model.engine.model, name=call.model.name, max_context=call.model.max_context
    )


async def max_context_length(call: Call) -> schema.Number:
    """Most tokens of a prompt."""
    return schema.Number(call.model.max_context)


async def max_length(call: Call) -> schema.Number:
    """Most tokens that a request may generate."""
    return schema.Number(min(call.service.settings.max_tokens, call.model.engine.n_ctx))


async def perf(call: Call) -> schema.Perf:
    """Figures of the caller's last generation, and how busy the server is."""
    service = call.service
    return convert.perf_of(
        service.last_of(call.caller),
        call.model.engine.stats(),
        n_runs=service.n_runs_of(call.caller),
        n_running=len(service.runs),
        started_s=service.started_s,
        now_s=time.monotonic(),
    )


async def extra_version(call: Call) -> schema.Version:
    """Which KoboldCpp this answers as."""
    return schema.Version(protected=bool(call.service.settings.api_keys))


async def service_info(call: Call) -> schema.ServiceInfo:
    """Which APIs are here, as KoboldAI's services tell each other."""
    koboldai = schema.Api(
        name="KoboldAI API", rel_url="/api", documentation="/docs", version=schema.API_VERSION
    )
    return schema.ServiceInfo(
        version="0.2",
        software=schema.Software("kqview", __version__),
        api=schema.Apis(koboldai),
    )


def _always(reply: Any) -> Handler:
    async def handle(call: Call) -> Any:
        return reply

    return handle


# ---- the table


def _operation(method: Any, path: str, handler: Handler, summary: str, **more: Any) -> Operation:
    more.setdefault("error_body", convert.error_body)
    more.setdefault("failure", stream_schema.Failure)
    return Operation(method=method, path=path, handler=handler, tag=_TAG, summary=summary, **more)


def _get(path: str, handler: Handler, summary: str, reply: Any = None, **more: Any) -> Operation:
    return _operation("GET", path, handler, summary, reply=reply, **more)


def _post(
    path: str, handler: Handler, summary: str, body: Any, reply: Any = None, **more: Any
) -> Operation:
    return _operation(
        "POST", path, handler, summary, body=body, reply=reply, is_lenient=True, **more
    )


def _v1(name: str) -> dict[str, Any]:
    """Path of an operation that is at two places."""
    return {"path": f"/api/v1/{name}", "also": (f"/api/latest/{name}",)}


_CHECK: Final = "Text so far of a generation that runs."
_LOGPROBS: Final = "Logprobs of the generation that ended last."
_CHECK_PATH: Final = "/api/extra/generate/check"
_GENKEY: Final = {"genkey": 'KoboldAI\'s name of the request, such as "KCPP1234".'}
_LOGPROBS_PATH: Final = "/api/extra/last_logprobs"

_EXAMPLE: Final[dict[str, Any]] = {
    "prompt": "Anna is a", "max_length": 2, "temperature": 0, "attention_values": "probs",
}  # fmt: skip
_TOKEN: Final[dict[str, Any]] = {"token_id": 354, "text": " teac"}
_DONE: Final[dict[str, Any]] = {"type": "done", "finish_reason": "length", "total_tokens": 2}
_DETAILS: Final[dict[str, Any]] = {
    "reason": "length", "seed": 2531011, "prompt_tokens": 7, "cached_tokens": 0,
    "queue_ms": 0.1, "prompt_ms": 4.2, "generation_ms": 1.7,
}  # fmt: skip
_ERROR: Final[dict[str, Any]] = {
    "type": "error", "error": "the model was switched; send the request again",
    "error_code": "MODEL_CHANGED", "detail": {
        "error": "Service Unavailable", "msg": "the model was switched; send the request again",
        "type": "service_unavailable",
    },
}  # fmt: skip
_PROMPT: Final[dict[str, Any]] = {"type": "prompt_attention", "start": 0, "rows": 7}
_REMOVED: Final[dict[str, Any]] = {"type": "removed", "tokens": 1, "characters": 5}
_ROW: Final[dict[str, Any]] = {
    "format": "per_layer", "shape": [4, 8, 7], "context_length": 7, "encoding": "base64",
    "dtype": "float32", "values": "probs", "data": "…",
}  # fmt: skip
_START: Final[dict[str, Any]] = {
    "type": "start", "request_id": "…", "prompt_tokens": 7, "cached_tokens": 0,
    "prompt_ids": [0, 35, 444, 67, 268, 67, 258], "seed": 2531011, "attention": {
        "format": "per_layer", "values": "probs", "row_sum": "1", "dtype": "float32",
        "shape": [4, 8, None], "columns": "the prompt, then the tokens before this one",
    },
}  # fmt: skip
_EVENTS: Final = (
    Sample("server", "With start_event: what follows", _START, type=StartEvent),
    Sample(
        "server", "Rows of the prompt, with prompt_attention",
        {**_PROMPT, "request_id": "…", "attention": {**_ROW, "shape": [4, 8, 7, 7]}},
        type=stream_schema.PromptEvent,
    ),
    Sample(
        "server", "Each token, with its row",
        {"type": "token", "token": _TOKEN, "request_id": "…", "attention": _ROW},
        type=stream_schema.TokenEvent,
    ),
    Sample(
        "server", "Tokens that a mod took back", {**_REMOVED, "request_id": "…"},
        type=stream_schema.RemovedEvent,
    ),
    Sample(
        "server", "The end", {**_DONE, "request_id": "…", **_DETAILS},
        type=stream_schema.DoneEvent,
    ),
    Sample(
        "server", "A failure, in place of the end", {**_ERROR, "request_id": "…"},
        type=stream_schema.ErrorEvent,
    ),
    Sample(
        "server", "Without output_attentions and request_id: text that is new, and at last the "
        "reason of the end",
        {"token": " teac", "finish_reason": None}, type=stream_schema.PlainEvent,
    ),
)  # fmt: skip
_FRAMES: Final = (
    Sample("client", "The request", _EXAMPLE, type=schema.StreamBody),
    Sample("server", "With start_event: what follows; no row does", _START, type=StartEvent),
    Sample(
        "server", "Rows of the prompt, with prompt_attention", _PROMPT,
        type=stream_schema.PromptFrame,
    ),
    Sample("server", "Their values", "float32 values, layers × heads × rows × tokens"),
    Sample("server", "Each token", {"type": "token", **_TOKEN}, type=stream_schema.TokenFrame),
    Sample("server", "Its row", "float32 values, layers × heads × tokens before it"),
    Sample(
        "server", "Tokens that a mod took back; no row follows", _REMOVED,
        type=stream_schema.RemovedFrame,
    ),
    Sample(
        "server", "The end; the socket is closed", {**_DONE, **_DETAILS},
        type=stream_schema.DoneFrame,
    ),
    Sample("server", "A failure, in place of the end", _ERROR, type=stream_schema.ErrorEvent),
)  # fmt: skip

OPERATIONS: Final[list[Operation]] = [
    _post(
        "/api/v1/tokenize", tokenize, "Ids of a text, with the text of each.",
        schema.TokenizeBody, schema.Tokenized, model="named",
    ),
    _post(
        "/api/v1/detokenize", detokenize, "Text of ids.", schema.DetokenizeBody,
        schema.Detokenized, model="named",
    ),
    _get(
        handler=model, summary="Facts about the model.", reply=schema.Model, model="named",
        **_v1("model"),
    ),
    _post(
        "/api/extra/generate/stream", stream,
        "Generate, streamed. Events have a type and attention where output_attentions or "
        "request_id is given; else they are KoboldAI's.",
        schema.StreamBody, streams=True, model="named",
        example={**_EXAMPLE, "output_attentions": True}, samples=_EVENTS,
    ),
    _operation(
        "WS", "/api/extra/generate/stream/ws", stream_socket,
        "Generate: send the body of /api/extra/generate/stream as the first message; each token is "
        "a text frame and a binary frame of float32.",
        samples=_FRAMES,
    ),
    _post(
        "/api/extra/abort", abort, "End a generation.", schema.RunBody, schema.Aborted
    ),
    _post(_CHECK_PATH, check, _CHECK, schema.RunBody, schema.Texts),
    _get(_CHECK_PATH, _by_query(check), _CHECK, schema.Texts, parameters=_GENKEY),
    _post(
        _LOGPROBS_PATH, last_logprobs, _LOGPROBS, schema.RunBody, schema.LastLogprobs,
        model="named",
    ),
    _get(
        _LOGPROBS_PATH, _by_query(last_logprobs), _LOGPROBS, schema.LastLogprobs, model="named",
        parameters=_GENKEY,
    ),
    _post(
        "/api/extra/tokencount", token_count, "How many tokens a text has.",
        schema.TokenCountBody, schema.TokenCount,
        also=("/api/extra/tokenize",), error_body=convert.token_count_error,
        failure=stream_schema.CountFailure,
        model="named",
    ),
    _post(
        "/api/extra/detokenize", extra_detokenize, "Text of ids.",
        schema.ExtraDetokenizeBody, schema.ExtraDetokenized,
        error_body=convert.extra_detokenize_error,
        failure=stream_schema.TextFailure, model="named",
    ),
    _get(
        handler=max_context_length, summary="Most tokens of a prompt.", reply=schema.Number,
        path="/api/v1/config/max_context_length",
        also=("/api/latest/config/max_context_length", "/api/extra/true_max_context_length"),
        model="named",
    ),
    _get(
        handler=max_length, summary="Most tokens that a request may generate.",
        reply=schema.Number, model="named", **_v1("config/max_length"),
    ),
    _get(
        handler=_always(schema.Word("")), summary="There is no soft prompt.", reply=schema.Word,
        **_v1("config/soft_prompt"),
    ),
    _get(
        handler=_always(schema.Words([])), summary="There are no soft prompts.",
        reply=schema.Words, **_v1("config/soft_prompts_list"),
    ),
    _get(
        handler=_always(schema.Result(schema.API_VERSION)), summary="Version of KoboldAI's API.",
        reply=schema.Result, access="open", **_v1("info/version"),
    ),
    _get(
        "/api/extra/version", extra_version, "Version of KoboldCpp whose routes these are.",
        schema.Version, access="open",
    ),
    _get("/api/extra/perf", perf, "Figures of the last generation.", schema.Perf, model="named"),
    _get("/api/extra/preloadstory", _always(schema.EMPTY), "There is no story."),
    _get("/ping", _always(schema.Status("ok")), "Whether it runs.", schema.Status, access="open"),
    _get(
        "/.well-known/serviceinfo", service_info, "Which APIs are here.", schema.ServiceInfo,
        access="open",
    ),
    _get(
        "/api", _always(HttpReply(b"", "text/plain", 307, headers={"location": "docs"})),
        "Leads to /docs.", access="open",
    ),
]  # fmt: skip
