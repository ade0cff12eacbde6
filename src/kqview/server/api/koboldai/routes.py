"""Routes of the KoboldAI API: KoboldCpp's, those with attention, and those of the dream dialect."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from kqview import __version__
from kqview.engine import Engine
from kqview.errors import KqviewError, RequestError
from kqview.server.api.koboldai import events, failures, schema
from kqview.server.api.koboldai.request import (
    Cancel,
    Generate,
    KoboldFields,
    KoboldGenerateBody,
    KoboldPlan,
    StreamBody,
    control_token,
    plan_of,
)
from kqview.server.api.koboldai.stream import SUBPROTOCOL, DreamSession
from kqview.server.api.wire.fields import first
from kqview.server.api.wire.logprobs import LOGPROB_BYTES, logprobs_of
from kqview.server.models.model_entry import ModelEntry, resolved
from kqview.server.models.model_files import model_names, name_in
from kqview.server.models.run import LastRun, Run
from kqview.server.models.service import OFFLOAD_BYTES, Call
from kqview.server.models.stream import Events, send_run
from kqview.server.web.endpoint import (
    HttpReply,
    Operations,
    Sample,
    decoded_with_unknown,
    empty,
    error_reply,
    json_in_slices,
)
from kqview.server.web.lenient import LenientDecoder
from kqview.server.web.sockets import Socket

_STREAM_DECODER: Final = LenientDecoder(StreamBody)
_PACK_TYPES: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
_IN_QUERY: Final = ("attention_format", "attention_values", "aggregation_mode", "dtype")
_STOP_CODES: Final = {"length": 0, "stop": 1, "stop_token": 2, "stop_sequence": 2}

_KOBOLD: Final = Operations(
    tag="kobold", error_body=failures.kobold_error_body, failure=failures.KoboldFailure,
    is_lenient=True,
)  # fmt: skip
_DREAM: Final = Operations(
    tag="dream", error_body=failures.error_body, failure=failures.KoboldFailure, is_lenient=True
)
_GENKEY: Final = {"genkey": 'KoboldAI\'s name of the request, such as "KCPP1234".'}
_EXAMPLE: Final[dict[str, Any]] = {
    "prompt": "Anna is a", "max_length": 2, "temperature": 0, "output_attentions": True,
}  # fmt: skip
_FRAMES: Final = (
    Sample("client", "The request", _EXAMPLE, type=StreamBody),
    *events.FRAMES,
)
_MESSAGES: Final = (
    Sample("client", "A request; another one may follow its end", _EXAMPLE, type=Generate),
    *events.MESSAGES[:-2],
    Sample("client", "Ends the request early", type=Cancel),
    *events.MESSAGES[-2:],
)


def _v1(name: str) -> dict[str, Any]:
    """Path of an operation that is at two places."""
    return {"path": f"/api/v1/{name}", "also": (f"/api/latest/{name}",)}


def _failing(kind: type[failures.KoboldFailure]) -> dict[str, Any]:
    """Failures of an operation that have fields of their own."""
    return {"failure": kind, "error_body": partial(failures.kobold_error_body, kind=kind)}


# ---- text and ids


@_KOBOLD.post("/api/v1/tokenize", reply=schema.KoboldTokenized, model="named")
async def tokenize(call: Call, body: schema.KoboldTokenizeBody) -> HttpReply:
    """Ids of a text, with the text of each."""
    text = first(body.text, body.content)
    if text is None:
        raise RequestError("text is missing; send text or content")
    add_special = first(body.add_special_tokens, body.add_special, False)
    pieces = await call.model.texts.tokenize(text, add_special=add_special, hold=call.hold)

    def written() -> bytes:
        tokens = [
            schema.TokenText(id_) if body.with_pieces is False else schema.TokenText(id_, piece)
            for id_, piece in pieces
        ]
        reply = schema.KoboldTokenized(tokens, [id_ for id_, _ in pieces], len(pieces))
        empty(pieces)
        return json_in_slices(reply)

    return HttpReply(await call.service.converted(call.n_body_bytes, call.hold, written))


@_KOBOLD.post("/api/v1/detokenize", model="named")
async def detokenize(call: Call, body: schema.KoboldDetokenizeBody) -> schema.Detokenized:
    """Text of ids."""
    ids = first(body.token_ids, body.tokens)
    if ids is None:
        raise RequestError("token_ids is missing; send token_ids or tokens")
    name = "tokens" if body.token_ids is None else "token_ids"
    return schema.Detokenized(
        await call.model.texts.detokenize(ids, name=name, client=call.hold.client)
    )


@_KOBOLD.post(
    "/api/extra/tokencount",
    also=("/api/extra/tokenize",),
    reply=schema.KoboldTokenCount,
    model="named",
    **_failing(failures.CountFailure),
)
async def token_count(call: Call, body: schema.TokenCountBody) -> HttpReply:
    """How many tokens a text has."""
    text = body.prompt or ""
    ids = await call.model.texts.ids(text, add_special=body.special, hold=call.hold)
    counted = schema.KoboldTokenCount(len(ids), ids)
    return HttpReply(
        await call.service.converted(call.n_body_bytes, call.hold, json_in_slices, counted)
    )


@_KOBOLD.post("/api/extra/detokenize", model="named", **_failing(failures.TextFailure))
async def extra_detokenize(call: Call, body: schema.ExtraDetokenizeBody) -> schema.ExtraDetokenized:
    """Text of ids, as KoboldCpp answers it."""
    text = await call.model.texts.detokenize(body.ids, client=call.hold.client)
    return schema.ExtraDetokenized(text, success=True)


# ---- generation


@_DREAM.post(
    **_v1("generate"),
    reply=schema.GenerateReply,
    model="named",
    example=_EXAMPLE,
    error_body=failures.generate_error_body,
)
async def generate(call: Call, body: KoboldGenerateBody) -> HttpReply:
    """Text in one reply, with the attention of every token if asked for."""
    # MessagePack if the client asks for it by name; ``*/*`` is JSON.
    accepted = call.headers.get("accept", "").lower().split(",")
    packs = any(kind.partition(";")[0].strip() in _PACK_TYPES for kind in accepted)
    service, engine = call.service, call.model.engine
    try:
        plan = await _plan(call, body, call.n_body_bytes, call.unknown)
        run = await service.start(plan.request, call.caller, call.hold, model=call.model)
        async with run:
            most = events.check_size(
                plan, engine.model, service.settings.max_reply_bytes,
                n_prompt=run.usage.prompt_tokens, n_ctx=engine.n_ctx, packs=packs,
            )  # fmt: skip
            builder = events.ReplyBuilder(plan, body, call.hold, packs=packs)
            async for block in run.prompt_blocks():
                await service.offload(most, builder.prompt, run, block)
                del block  # the pool wants its memory back
            async for step in run.final_steps():
                await service.offload(step.n_bytes, builder.token, run, step)
                del step
        data = await service.offload(builder.n_bytes, builder.body, run)
    except KqviewError as error:
        answer = failures.answer_for(call.model, error, body)
        if not answer.figures:
            raise
        return error_reply(answer, failures.generate_error_body)
    media_type = _PACK_TYPES[0] if packs else "application/json"
    return HttpReply(data, media_type, gzips=body.compression == "gzip", headers={"vary": "Accept"})


@_KOBOLD.post(
    "/api/extra/generate/stream",
    streams=True,
    model="named",
    example=_EXAMPLE,
    summary="Generate, streamed. Events have a type and attention where output_attentions or "
    "request_id is given; else they are KoboldAI's.",
    samples=events.EVENTS,
)
async def stream(call: Call, body: StreamBody) -> Events:
    """Tokens as Server-Sent Events; typed ones for clients that can know them."""
    plan = await _plan(call, body, call.n_body_bytes, call.unknown)
    run = await call.service.start(plan.request, call.caller, call.hold, model=call.model)
    asked = first(body.output_attentions, body.return_attention, body.request_id)
    if asked is not None or plan.has_start:
        return Events(run, events.KoboldEvents(plan))
    trims = body.trim_stop is not False
    return Events(run, events.PlainEvents(run.request.sampling.stop, plan.ignored, trims=trims))


@_KOBOLD.add(
    "WS",
    "/api/extra/generate/stream/ws",
    samples=_FRAMES,
    summary="Generate: send the body of /api/extra/generate/stream as the first message; each "
    "token is a text frame and a binary frame of float32.",
)
async def stream_frames(call: Call, socket: Socket) -> None:
    """Tokens as pairs of a text and a binary frame; one request a socket."""
    service = call.service
    raw = await socket.receive(timeout_s=service.settings.idle_timeout_s)
    body, unknown = await service.converted(
        len(raw), call.hold, decoded_with_unknown, _STREAM_DECODER, raw
    )
    async with service.pool.using(body.model or call.query.get("model")) as model:
        call = replace(call, model=model)
        plan = await _plan(call, resolved(body, model), len(raw), unknown, asked=True)
        run = await service.start(plan.request, call.caller, call.hold, model=model)
        frames = events.KoboldFrames(plan)
        await socket.alone(send_run(socket, run, frames))


@_DREAM.add("WS", **_v1("generate/stream"), subprotocols=(SUBPROTOCOL,), samples=_MESSAGES)
async def stream_events(call: Call, socket: Socket) -> None:
    """Text token by token with its attention; JSON, or MessagePack as subprotocol."""
    await DreamSession(call, socket).serve()


async def _plan(
    call: Call, body: KoboldFields, n_bytes: int, unknown: tuple[str, ...], *, asked: bool = False
) -> KoboldPlan:
    """What *body* asks; of a stream the URL's query may say more about attention."""
    given = {name: call.query[name] for name in _IN_QUERY if name in call.query}
    if given and isinstance(body, StreamBody):
        try:
            checked = msgspec.convert(given, StreamBody)
        except msgspec.ValidationError as error:
            raise RequestError(f"the URL's query cannot be read: {error}; correct it") from None
        missing = {name: getattr(checked, name) for name in given if getattr(body, name) is None}
        body = msgspec.structs.replace(body, **missing)
    return await call.service.converted(
        n_bytes, call.hold, plan_of, body, call.model, call.service.settings,
        request_id=call.request_id, unknown=unknown, asked=asked,
    )  # fmt: skip


# ---- generations that run


@_KOBOLD.post("/api/extra/abort")
async def abort(call: Call, body: schema.RunBody) -> schema.Aborted:
    """End a generation: that of a key or a name; without either, the only one without a key."""
    runs = _meant(call, body)
    is_named = bool(body.genkey or body.request_id)
    is_known = bool(runs) if is_named else len(runs) <= 1
    ended = runs if is_known else []
    for run in ended:
        run.end()
    return schema.Aborted(
        success="true" if ended else "false", done="true" if is_known else "false"
    )


@_KOBOLD.post("/api/extra/generate/check", body=schema.RunBody)
@_KOBOLD.get("/api/extra/generate/check", parameters=_GENKEY)
async def check(call: Call, body: schema.RunBody | None = None) -> schema.Texts:
    """Text so far of the generation of a key or a name; "" if there is none."""
    runs = _meant(call, body or schema.RunBody(genkey=call.query.get("genkey")))
    return schema.Texts([schema.ResultText(runs[-1].text if runs else "")])


@_KOBOLD.post("/api/extra/last_logprobs", body=schema.RunBody, model="named")
@_KOBOLD.get("/api/extra/last_logprobs", model="named", parameters=_GENKEY)
async def last_logprobs(call: Call, body: schema.RunBody | None = None) -> schema.LastLogprobs:
    """Logprobs of the caller's generation that ended last, if it asked for some."""
    key = call.query.get("genkey") if body is None else body.genkey
    last = call.service.last_of(call.caller, key=key or "")
    if last.model_id != call.model.id:  # its ids would be other texts here
        last = LastRun()
    if not last.logprobs:
        return schema.LastLogprobs(None)
    bytes_of = call.model.engine.token_bytes
    n_bytes = LOGPROB_BYTES * len(last.logprobs)
    return schema.LastLogprobs(
        await call.service.converted(n_bytes, call.hold, logprobs_of, last.logprobs, bytes_of)
    )


def _meant(call: Call, body: schema.RunBody) -> list[Run]:
    return call.service.find(call.caller, key=body.genkey or "", request_id=body.request_id or None)


# ---- models


@_KOBOLD.get(**_v1("model"), model="named")
async def model(call: Call) -> schema.KoboldModel:
    """The model's facts; -1 stands for a token that it does not have."""
    info, name = call.model.engine.model, f"koboldcpp/{call.model.name}"
    is_whole = info.attention_layers == tuple(range(info.n_layer))
    return schema.KoboldModel(
        result=name,
        model_name=name,
        vocab_size=info.n_vocab,
        num_layers=info.n_layer,
        num_attention_heads=info.n_head,
        num_key_value_heads=info.n_head_kv,
        embedding_size=info.n_embd,
        max_context_length=call.model.max_context,
        max_trained_context=info.n_ctx_train,
        bos_token_id=first(info.bos_token_id, -1),
        eos_token_id=first(info.eos_token_id, -1),
        eot_token_id=first(info.eot_token_id, -1),
        rope_freq_base=info.rope_freq_base,
        rope_freq_scale=info.rope_freq_scale,
        attention_layers=msgspec.UNSET if is_whole else info.attention_layers,
    )


@_DREAM.get(**_v1("model/info"), model="named")
async def show_model_info(call: Call) -> schema.ModelInfoReply:
    """Architecture, sizes, special tokens and chat template of the model."""
    return _info_of(call.model, call.model.engine, call.model.name)


def _info_of(entry: ModelEntry, engine: Engine, name: str) -> schema.ModelInfoReply:
    """What ``GET /api/v1/model/info`` says if *engine* is *entry*'s and is called *name*."""
    info = engine.model
    roles = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
    special: dict[str, str | int | None] = {
        key: info.special_tokens.get(role) for key, role in roles.items()
    }
    for key in ("im_start", "im_end"):
        if (found := control_token(engine, f"<|{key}|>")) is not None:
            special[f"{key}_id"] = found
    try:  # llama.cpp has a default if the file is silent; this is what the file says
        rope_theta = float(info.metadata.get(f"{info.architecture}.rope.freq_base", ""))
    except ValueError:
        rope_theta = None
    return schema.ModelInfoReply(
        model_name=name,
        architecture=info.architecture or None,
        vocab_size=info.n_vocab,
        num_layers=info.n_layer,
        num_attention_heads=info.n_head,
        num_key_value_heads=info.n_head_kv,
        hidden_size=info.n_embd,
        max_position_embeddings=info.n_ctx_train,
        rope_theta=rope_theta,
        bos_token_id=info.bos_token_id,
        eos_token_id=info.eos_token_id,
        special_tokens=special,
        chat_template=info.chat_template,
        torch_dtype=None,  # a GGUF has no such thing: each tensor has its own type
        context_length=entry.max_context_of(engine),
        attention_layers=list(info.attention_layers),
    )


@_DREAM.get("/api/v1/models")
async def list_models(call: Call) -> schema.ModelsReply:
    """Models that may be loaded, and the one that is."""
    pool, folder = call.service.pool, call.service.settings.models_dir
    names = await call.service.offload(OFFLOAD_BYTES, model_names, folder)
    if pool.has_several:
        names = [*(one.id for one in pool), *names]
    if pool.default.loaded is None:
        return schema.ModelsReply(list(dict.fromkeys(names)), None, None)
    name = pool.default.name
    path = pool.default.path
    file = None if pool.has_several else await asyncio.to_thread(name_in, folder, path)
    return schema.ModelsReply(list(dict.fromkeys(names)), file or name, name)


@_DREAM.post("/api/v1/model/load", access="admin", is_lenient=False)
async def load_model(call: Call, body: schema.LoadBody) -> schema.ModelInfoReply:
    """Unload the model and load another one; running requests end with MODEL_CHANGED."""
    if not body.model:
        raise RequestError("model is empty; take a name from /api/v1/models")
    options = {"n_ctx": body.n_ctx, "n_slots": body.n_slots, "n_gpu_layers": body.n_gpu_layers}
    for name, value in options.items():
        least = -1 if name == "n_gpu_layers" else 1
        if value is not None and not least <= value < 2**31:
            raise RequestError(f"{name} is {value}, the least is {least}")
    pool = call.service.pool
    engine = await pool.switch(body.model, options)
    name = engine.model.name or Path(body.model).stem
    return _info_of(pool.default, engine, pool.default.id if pool.has_several else name)


# ---- what runs


@_KOBOLD.get(
    "/api/v1/config/max_context_length",
    model="named",
    also=("/api/latest/config/max_context_length", "/api/extra/true_max_context_length"),
)
async def max_context_length(call: Call) -> schema.Number:
    """Most tokens of a prompt."""
    return schema.Number(call.model.max_context)


@_KOBOLD.get(**_v1("config/max_length"), model="named")
async def max_length(call: Call) -> schema.Number:
    """Most tokens that a request may generate."""
    return schema.Number(min(call.service.settings.max_tokens, call.model.engine.n_ctx))


@_KOBOLD.get("/api/extra/perf", model="named")
async def perf(call: Call) -> schema.Perf:
    """Figures of the caller's last generation, and how busy the server is."""
    service, now_s = call.service, time.monotonic()
    last, n_running = service.last_of(call.caller), len(service.runs)
    usage = last.usage
    n_evaluated = usage.prompt_tokens - usage.cached_tokens
    n_decoded = usage.completion_tokens - 1
    since_s = service.started_s if last.ended_s is None else last.ended_s
    return schema.Perf(
        last_process=1000 * usage.prefill_s / n_evaluated if n_evaluated > 0 else 0.0,
        last_eval=1000 * usage.decode_s / n_decoded if n_decoded > 0 else 0.0,
        last_token_count=usage.completion_tokens,
        last_input_count=usage.prompt_tokens,
        last_process_time=usage.prefill_s,
        last_eval_time=usage.decode_s,
        last_process_speed=usage.prefill_tokens_per_s,
        last_eval_speed=usage.tokens_per_s,
        last_seed=-1 if last.seed is None else last.seed,
        total_gens=service.n_runs_of(call.caller),
        stop_reason=_STOP_CODES.get(last.finish_reason, -1),
        queue=call.model.engine.stats().n_queued,
        idle=0 if n_running else 1,
        uptime=now_s - service.started_s,
        idletime=0.0 if n_running else now_s - since_s,
    )


@_KOBOLD.get("/api/extra/version", access="open")
async def extra_version(call: Call) -> schema.Version:
    """Which KoboldCpp this answers as, and which of its parts exist."""
    return schema.Version(protected=bool(call.service.settings.api_keys))


@_KOBOLD.get("/.well-known/serviceinfo", access="open")
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


def _always(path: Mapping[str, Any] | str, summary: str, reply: Any, **more: Any) -> None:
    """Add a row that always has the same *reply*."""

    async def handle(call: Call) -> Any:
        return reply

    at = {"path": path} if isinstance(path, str) else path
    more.setdefault("reply", None if isinstance(reply, HttpReply | msgspec.Raw) else type(reply))
    _KOBOLD.get(**at, summary=summary, **more)(handle)


_always(_v1("config/soft_prompt"), "There is no soft prompt.", schema.Word(""))
_always(_v1("config/soft_prompts_list"), "There are no soft prompts.", schema.Words([]))
_always(
    _v1("info/version"), "Version of KoboldAI's API.", schema.Result(schema.API_VERSION),
    access="open",
)  # fmt: skip
_always("/api/extra/preloadstory", "There is no story.", schema.EMPTY)
_always("/ping", "Whether it runs.", schema.Status("ok"), access="open")
_always(
    "/api", "Leads to /docs.", HttpReply(b"", "text/plain", 307, headers={"location": "docs"}),
    access="open",
)  # fmt: skip

OPERATIONS: Final = [*_KOBOLD, *_DREAM]
"""Rows of the route table."""
