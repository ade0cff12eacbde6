"""Routes of Anthropic's Messages API. Glue only: the other files say what becomes of a body."""

import uuid
from typing import Any, Final

import msgspec

from kqview.engine import Engine
from kqview.server.api.anthropic import schema, stream_schema
from kqview.server.api.anthropic.convert import chat_of, error_body, request_of
from kqview.server.api.anthropic.events import MessageEvents, MessageWriter
from kqview.server.api.wire.attention_field import AttentionWriter, keeps
from kqview.server.api.wire.chat_run import counted, finished, started
from kqview.server.api.wire.chat_work import ChatRequest
from kqview.server.api.wire.llama_fields import with_defaults
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import NAMED_HEAD, HttpReply, Operation, Sample


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
        method="POST",
        path=path,
        handler=handler,
        tag=_TAG,
        error_body=error_body,
        failure=stream_schema.Failure,
        **more,
    )


def _sample(about: str, type: Any, kind: str, **fields: Any) -> Sample:
    return Sample("server", about, {"type": kind, **fields}, kind, type)


_USAGE: Final[dict[str, Any]] = {
    "input_tokens": 12, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0,
    "output_tokens": 4,
}  # fmt: skip
_ROW: Final[dict[str, Any]] = {
    "values": "probs", "format": "per_layer", "shape": [4, 8, 12], "context_length": 12,
    "encoding": "base64", "dtype": "float32", "data": "…",
}  # fmt: skip
_EVENTS: Final = (
    _sample(
        "The message begins", stream_schema.MessageStart, "message_start",
        message={
            "id": "…", "type": "message", "role": "assistant", "model": "demo", "content": [],
            "stop_reason": None, "stop_sequence": None, "usage": _USAGE,
        },
    ),
    _sample(
        "Rows of the prompt, with attention.prompt", stream_schema.PromptAttentionEvent,
        "prompt_attention", attention={"start": 0, "rows": 12, **_ROW, "shape": [4, 8, 12, 12]},
    ),
    _sample(
        "A block begins: text, thinking, or a call", stream_schema.BlockStart,
        "content_block_start", index=0, content_block={"type": "text", "text": ""},
    ),
    _sample(
        "What is new in it", stream_schema.BlockDelta, "content_block_delta", index=0,
        delta={"type": "text_delta", "text": "Anna"},
    ),
    _sample(
        "With attention: that of each token", stream_schema.AttentionEvent, "attention",
        attention={"n": 0, "token_id": 259, **_ROW},
    ),
    _sample(
        "Tokens that a mod took back", stream_schema.RemovedEvent, "removed", tokens=1,
        characters=4,
    ),
    _sample("The block ends", stream_schema.BlockStop, "content_block_stop", index=0),
    _sample(
        "The message is whole", stream_schema.MessageDelta, "message_delta",
        delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=_USAGE,
    ),
    _sample("The end", stream_schema.MessageStop, "message_stop"),
    _sample(
        "A failure, in place of the end", stream_schema.Failure, "error",
        error={"type": "overloaded_error", "message": "…"},
    ),
)  # fmt: skip
_CHAT: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "Who is Anna?"}], "max_tokens": 4, "temperature": 0,
}  # fmt: skip

OPERATIONS: Final[list[Operation]] = [
    _post(
        "/v1/messages", create, summary="Anthropic's Messages API: the next message of a chat.",
        body=schema.MessagesBody, reply=schema.Message, streams=True, model="named",
        example=_CHAT, samples=_EVENTS,
    ),
    _post(
        "/v1/messages/count_tokens", count_tokens,
        summary="Anthropic's Messages API: tokens of a chat's prompt.",
        body=schema.CountBody, reply=schema.TokenCount, model="named",
    ),
]  # fmt: skip
"""Rows of the route table."""
