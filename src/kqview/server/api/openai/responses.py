"""Routes of OpenAI's Responses API. Glue only: the other files say what becomes of a body."""

import uuid
from functools import partial
from typing import Any, Final

import msgspec

from kqview.engine import Engine
from kqview.server.api.attention_field import AttentionWriter, keeps
from kqview.server.api.chat_run import counted, finished, started
from kqview.server.api.chat_work import ChatRequest
from kqview.server.api.llama_fields import error_body, with_defaults
from kqview.server.api.openai import responses_schema as schema
from kqview.server.api.openai.responses_convert import chat_of, request_of
from kqview.server.api.openai.responses_events import Asked, ResponseEvents, ResponseWriter
from kqview.server.endpoint import NAMED_HEAD, Call, Events, HttpReply, Operation


async def create(call: Call, body: schema.ResponsesBody) -> HttpReply | Events:
    """``POST /v1/responses``."""
    service = call.service
    body = with_defaults(body, service.settings)
    id_ = f"resp_{uuid.uuid4().hex}"

    def asked(engine: Engine) -> ChatRequest:
        return request_of(body, request_id=id_, engine=engine, settings=service.settings)

    name = body.model or call.model.name
    run, reading, engine = await started(call, asked)
    writer = ResponseWriter(Asked(id_, body, name, reading, engine.token_bytes))
    attention = AttentionWriter(run, engine.model, service.kept if keeps(body.attention) else None)
    if body.stream:
        events = ResponseEvents(writer, attention)
        return Events(run, events, head=NAMED_HEAD, n_repeated=call.n_body_bytes)
    lists = await finished(call, run, attention, partial(writer.feed, run))
    writer.finish(run)
    response = msgspec.structs.replace(writer.response(run), **lists.of(0))
    n_bytes = lists.n_bytes + writer.n_bytes + call.n_body_bytes
    return HttpReply(await service.offload(n_bytes, msgspec.json.encode, response))


async def count_tokens(call: Call, body: schema.InputBody) -> schema.InputTokens:
    """``POST /v1/responses/input_tokens``."""
    return schema.InputTokens(input_tokens=await counted(call, lambda: chat_of(body)))


_TAG: Final = "openai"


def _post(path: str, handler: Any, **more: Any) -> Operation:
    return Operation(
        method="POST", path=f"/v1{path}", also=(path,), handler=handler, tag=_TAG,
        error_body=error_body, **more,
    )  # fmt: skip


OPERATIONS: Final[list[Operation]] = [
    _post(
        "/responses", create, summary="OpenAI's Responses API: the next items of a chat.",
        body=schema.ResponsesBody, reply=schema.Response, streams=True, model="named",
    ),
    _post(
        "/responses/input_tokens", count_tokens,
        summary="OpenAI's Responses API: tokens of a chat's prompt.",
        body=schema.InputBody, reply=schema.InputTokens, model="named",
    ),
]  # fmt: skip
"""Rows of the route table."""
