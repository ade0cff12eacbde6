"""Routes of Anthropic's Messages API. Glue only: the other files say what becomes of a body."""

import uuid
from typing import Any, Final

import msgspec

from kqview.engine import Engine
from kqview.server.api.anthropic import schema
from kqview.server.api.anthropic.convert import chat_of, error_body, request_of
from kqview.server.api.anthropic.events import MessageEvents, MessageWriter
from kqview.server.api.attention_field import AttentionWriter, keeps
from kqview.server.api.chat_run import counted, finished, started
from kqview.server.api.chat_work import ChatRequest
from kqview.server.api.llama_fields import with_defaults
from kqview.server.endpoint import NAMED_HEAD, Call, Events, HttpReply, Operation


async def create(call: Call, body: schema.MessagesBody) -> HttpReply | Events:
    """``POST /v1/messages``."""
    service = call.service
    body = with_defaults(body, service.settings)
    id_ = f"msg_{uuid.uuid4().hex}"

    def asked(engine: Engine) -> ChatRequest:
        return request_of(body, request_id=id_, engine=engine, settings=service.settings)

    name = body.model or call.model.name
    run, reading, engine = await started(call, asked)
    writer = MessageWriter(id_, name, reading)
    attention = AttentionWriter(run, engine.model, service.kept if keeps(body.attention) else None)
    if body.stream:
        return Events(run, MessageEvents(writer, attention), head=NAMED_HEAD)
    lists = await finished(call, run, attention, writer.feed)
    writer.finish(run)
    message = msgspec.structs.replace(writer.message(run), **lists.of(0))
    return HttpReply(await service.offload(lists.n_bytes, msgspec.json.encode, message))


async def count_tokens(call: Call, body: schema.CountBody) -> schema.TokenCount:
    """``POST /v1/messages/count_tokens``."""
    return schema.TokenCount(await counted(call, lambda: chat_of(body)))


_TAG: Final = "anthropic"


def _post(path: str, handler: Any, **more: Any) -> Operation:
    return Operation(
        method="POST", path=path, handler=handler, tag=_TAG, error_body=error_body, **more
    )


OPERATIONS: Final[list[Operation]] = [
    _post(
        "/v1/messages", create, summary="Anthropic's Messages API: the next message of a chat.",
        body=schema.MessagesBody, reply=schema.Message, streams=True, model="named",
    ),
    _post(
        "/v1/messages/count_tokens", count_tokens,
        summary="Anthropic's Messages API: tokens of a chat's prompt.",
        body=schema.CountBody, reply=schema.TokenCount, model="named",
    ),
]  # fmt: skip
"""Rows of the route table."""
