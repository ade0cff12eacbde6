"""Routes of Anthropic's Messages API. Glue only: the other files say what becomes of a body."""

import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kqview.server.api import chat_work
from kqview.server.api.anthropic import schema
from kqview.server.api.anthropic.convert import chat_of, error_body, request_of
from kqview.server.api.anthropic.events import MessageEvents, MessageWriter
from kqview.server.api.attention_field import AttentionWriter, Lists, keeps
from kqview.server.api.chat_work import ChatWork
from kqview.server.api.llama_fields import with_defaults
from kqview.server.endpoint import NAMED_HEAD, Call, Events, HttpReply, Operation

# Templates may take seconds: their work is large enough for another thread.
_LARGE: Final = 2**20


async def create(call: Call, body: schema.MessagesBody) -> HttpReply | Events:
    """``POST /v1/messages``."""
    service = call.service
    body = with_defaults(body, service.settings)
    engine = service.engine
    id_ = f"msg_{uuid.uuid4().hex}"

    def tokenize(text: str) -> Sequence[int]:
        return engine.tokenize(text, add_special=False, parse_special=False)

    def prepared() -> ChatWork:
        request = request_of(body, request_id=id_, tokenize=tokenize, settings=service.settings)
        return chat_work.prepare(engine, request)

    work = await service.converted(_LARGE, call.hold, prepared)
    name = body.model or service.model_name
    writer = MessageWriter(id_, name, work.reading)
    run = await service.start(work.request, call.caller, call.hold)
    attention = AttentionWriter(run, engine.model, service.kept if keeps(body.attention) else None)
    if body.stream:
        return Events(run, MessageEvents(writer, attention), head=NAMED_HEAD)
    lists = Lists(call.hold, service.settings.max_reply_bytes)
    async with run:
        async for block in run.prompt_blocks():
            await service.offload(_LARGE, lists.prompt, attention, run, block)
            del block  # the pool wants its memory back
        async for step in run:
            writer.feed(step.token)
            await service.offload(step.n_bytes, lists.token, attention, run, step)
            del step
    writer.finish(run)
    message = msgspec.structs.replace(writer.message(run), **lists.of(0))
    return HttpReply(await service.offload(lists.n_bytes, msgspec.json.encode, message))


async def count_tokens(call: Call, body: schema.CountBody) -> schema.TokenCount:
    """``POST /v1/messages/count_tokens``."""
    engine = call.service.engine

    def counted() -> int:
        ids, _ = chat_work.prompt_of(engine, chat_of(body))
        return len(ids)

    return schema.TokenCount(await call.service.converted(_LARGE, call.hold, counted))


_TAG: Final = "anthropic"


def _post(path: str, handler: Any, **more: Any) -> Operation:
    return Operation(
        method="POST", path=path, handler=handler, tag=_TAG, error_body=error_body, **more
    )


OPERATIONS: Final[list[Operation]] = [
    _post(
        "/v1/messages", create, summary="Anthropic's Messages API: the next message of a chat.",
        body=schema.MessagesBody, reply=schema.Message, streams=True,
    ),
    _post(
        "/v1/messages/count_tokens", count_tokens,
        summary="Anthropic's Messages API: tokens of a chat's prompt.",
        body=schema.CountBody, reply=schema.TokenCount,
    ),
]  # fmt: skip
"""Rows of the route table."""
