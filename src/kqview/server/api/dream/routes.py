"""Routes of the dream dialect: glue between endpoints, the service and the pure parts."""

from pathlib import Path
from typing import Final

from kqview.errors import KqviewError
from kqview.server.api.dream import schema
from kqview.server.api.dream.convert import (
    asks_for_tokens,
    error_body,
    load_options,
    shared_error_body,
    trims_stop,
)
from kqview.server.api.dream.planning import answer_for, model_info, plan_for, token_bytes_of
from kqview.server.api.dream.reply import ReplyBuilder, check_reply, reply_bytes
from kqview.server.api.dream.session import Session
from kqview.server.endpoint import Call, Operation, Reply, error_reply
from kqview.server.sockets import Socket

_TAG: Final = "dream"
_PACK_TYPES: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


async def show_model_info(call: Call) -> schema.ModelInfoReply:
    """``GET /api/v1/model/info``."""
    return model_info(call.service, call.service.engine, call.service.model_name)


async def generate(call: Call, body: schema.GenerateBody) -> Reply:
    """``POST /api/v1/generate``."""
    try:
        return await _generate(call, body)
    except KqviewError as error:
        answer = answer_for(call.service, error, body)
        if not answer.figures:
            raise
        return error_reply(answer, shared_error_body)


async def _generate(call: Call, body: schema.GenerateBody) -> Reply:
    service = call.service
    packs = _takes_packs(call)
    plan = await service.converted(
        call.n_body_bytes, call.hold, plan_for, service, body, call.request_id
    )
    engine, token_bytes = service.engine, token_bytes_of(service)
    run = await service.start(plan.request, call.caller, call.hold)
    async with run:
        n_prompt = run.usage.prompt_tokens
        most = reply_bytes(plan, engine.model, n_prompt=n_prompt, n_ctx=engine.n_ctx, packs=packs)
        check_reply(most, service.settings.max_reply_bytes, n_prompt=n_prompt)
        builder = ReplyBuilder(
            plan,
            token_bytes,
            call.hold,
            packs=packs,
            has_tokens=asks_for_tokens(body),
            has_logprobs=plan.request.sampling.top_logprobs is not None,
            trims_stop=trims_stop(body),
        )
        async for block in run.prompt_blocks():
            await service.offload(most, builder.prompt, run, block)
            del block  # the pool wants its memory back
        async for step in run:
            await service.offload(step.n_bytes, builder.token, run, step)
            del step
    data = await service.offload(builder.n_bytes, builder.body, run)
    media_type = _PACK_TYPES[0] if packs else "application/json"
    return Reply(data, media_type, gzips=body.compression == "gzip", headers={"vary": "Accept"})


def _takes_packs(call: Call) -> bool:
    """Whether the client asks for MessagePack by name; ``*/*`` is JSON."""
    accepted = call.headers.get("accept", "").lower()
    kinds = (part.partition(";")[0].strip() for part in accepted.split(","))
    return any(kind in _PACK_TYPES for kind in kinds)


async def stream(call: Call, socket: Socket) -> None:
    """``WS /api/v1/generate/stream``."""
    await Session(call.service, socket, call.caller, call.hold).serve()


async def list_models(call: Call) -> schema.ModelsReply:
    """``GET /api/v1/models``."""
    names = await call.service.models()
    try:
        loaded = call.service.model_name
    except KqviewError:
        loaded = None
    return schema.ModelsReply(names, loaded)


async def load_model(call: Call, body: schema.LoadBody) -> schema.ModelInfoReply:
    """``POST /api/v1/model/load``."""
    engine = await call.service.switch_model(body.model, **load_options(body))
    return model_info(call.service, engine, engine.model.name or Path(body.model).stem)


OPERATIONS: Final[list[Operation]] = [
    Operation(
        method="GET", path="/api/v1/model/info", also=("/api/latest/model/info",),
        handler=show_model_info, tag=_TAG, error_body=error_body, reply=schema.ModelInfoReply,
        summary="Architecture, sizes, special tokens and chat template of the model.",
    ),
    Operation(
        method="POST", path="/api/v1/generate", also=("/api/latest/generate",),
        handler=generate, tag=_TAG, error_body=shared_error_body,
        body=schema.GenerateBody, reply=schema.GenerateReply,
        summary="Text in one reply, with the attention of every token where it is asked for.",
    ),
    Operation(
        method="WS", path="/api/v1/generate/stream", also=("/api/latest/generate/stream",),
        handler=stream, tag=_TAG, error_body=error_body, subprotocols=(schema.SUBPROTOCOL,),
        summary="Text token by token with its attention; JSON, or MessagePack as subprotocol.",
    ),
    Operation(
        method="GET", path="/api/v1/models", handler=list_models, tag=_TAG,
        error_body=error_body, reply=schema.ModelsReply,
        summary="Models that may be loaded, and the one that is.",
    ),
    Operation(
        method="POST", path="/api/v1/model/load", handler=load_model, tag=_TAG,
        error_body=error_body, body=schema.LoadBody, reply=schema.ModelInfoReply, access="admin",
        summary="Unload the model and load another one; running requests end with MODEL_CHANGED.",
    ),
]  # fmt: skip
"""Rows of the route table."""
