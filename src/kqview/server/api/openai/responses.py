"""Routes of OpenAI's Responses API. Glue only: the other files say what becomes of a body."""

import uuid
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kqview.server.api import chat_work
from kqview.server.api.attention_field import AttentionWriter, Lists, keeps
from kqview.server.api.chat_work import ChatWork
from kqview.server.api.llama_fields import error_body, with_defaults
from kqview.server.api.openai import responses_schema as schema
from kqview.server.api.openai.responses_convert import chat_of, request_of
from kqview.server.api.openai.responses_events import Asked, ResponseEvents, ResponseWriter
from kqview.server.endpoint import NAMED_HEAD, Call, Events, HttpReply, Operation

# Templates may take seconds: their work is large enough for another thread.
_LARGE: Final = 2**20


async def create(call: Call, body: schema.ResponsesBody) -> HttpReply | Events:
    """``POST /v1/responses``."""
    service = call.service
    body = with_defaults(body, service.settings)
    engine = service.engine
    id_ = f"resp_{uuid.uuid4().hex}"

    def tokenize(text: str) -> Sequence[int]:
        return engine.tokenize(text, add_special=False, parse_special=False)

    def prepared() -> ChatWork:
        request = request_of(body, request_id=id_, tokenize=tokenize, settings=service.settings)
        return chat_work.prepare(engine, request)

    work = await service.converted(_LARGE, call.hold, prepared)
    asked = Asked(id_, body, body.model or service.model_name, work.reading, engine.token_bytes)
    writer = ResponseWriter(asked)
    run = await service.start(work.request, call.caller, call.hold)
    attention = AttentionWriter(run, engine.model, service.kept if keeps(body.attention) else None)
    if body.stream:
        return Events(run, ResponseEvents(writer, attention), head=NAMED_HEAD)
    lists = Lists(call.hold, service.settings.max_reply_bytes)
    async with run:
        async for block in run.prompt_blocks():
            await service.offload(_LARGE, lists.prompt, attention, run, block)
            del block  # the pool wants its memory back
        async for step in run:
            writer.feed(run, step.token)
            await service.offload(step.n_bytes, lists.token, attention, run, step)
            del step
    writer.finish(run)
    response = msgspec.structs.replace(writer.response(run), **lists.of(0))
    return HttpReply(await service.offload(lists.n_bytes, msgspec.json.encode, response))


async def count_tokens(call: Call, body: schema.InputBody) -> schema.InputTokens:
    """``POST /v1/responses/input_tokens``."""
    engine = call.service.engine

    def counted() -> int:
        ids, _ = chat_work.prompt_of(engine, chat_of(body))
        return len(ids)

    n_tokens = await call.service.converted(_LARGE, call.hold, counted)
    return schema.InputTokens(input_tokens=n_tokens)


_TAG: Final = "openai"


def _post(path: str, handler: Any, **more: Any) -> Operation:
    return Operation(
        method="POST", path=f"/v1{path}", also=(path,), handler=handler, tag=_TAG,
        error_body=error_body, **more,
    )  # fmt: skip


OPERATIONS: Final[list[Operation]] = [
    _post(
        "/responses", create, summary="OpenAI's Responses API: the next items of a chat.",
        body=schema.ResponsesBody, reply=schema.Response, streams=True,
    ),
    _post(
        "/responses/input_tokens", count_tokens,
        summary="OpenAI's Responses API: tokens of a chat's prompt.",
        body=schema.InputBody, reply=schema.InputTokens,
    ),
]  # fmt: skip
"""Rows of the route table."""
