"""Routes of OpenAI's Responses API. Glue only: the other files say what becomes of a body."""

import uuid
from functools import partial
from typing import Any, Final

import msgspec

from kqview.engine import Engine
from kqview.server.api.openai import responses_schema as schema
from kqview.server.api.openai import responses_stream_schema as stream_schema
from kqview.server.api.openai.responses_convert import chat_of, request_of
from kqview.server.api.openai.responses_events import Asked, ResponseEvents, ResponseWriter
from kqview.server.api.wire.attention_field import AttentionWriter, keeps
from kqview.server.api.wire.chat_run import counted, finished, started
from kqview.server.api.wire.chat_work import ChatRequest
from kqview.server.api.wire.llama_fields import Failure, error_body, with_defaults
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import NAMED_HEAD, HttpReply, Operation, Sample


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
        error_body=error_body, failure=Failure, **more,
    )  # fmt: skip


def _sample(about: str, type: Any, kind: str, **fields: Any) -> Sample:
    name = f"response.{kind}"
    return Sample("server", about, {"type": name, "sequence_number": 0, **fields}, name, type)


_RESPONSE: Final[dict[str, Any]] = {
    "id": "…", "object": "response", "created_at": 1767225600, "status": "in_progress",
    "model": "demo", "output": [], "instructions": None, "max_output_tokens": 4, "metadata": {},
    "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None},
    "temperature": 0.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
    "top_logprobs": 0, "top_p": None,
}  # fmt: skip
_ITEM: Final[dict[str, Any]] = {
    "type": "message", "id": "…", "status": "in_progress", "role": "assistant", "content": [],
}  # fmt: skip
_TEXT: Final[dict[str, Any]] = {
    "type": "output_text", "text": "Anna", "annotations": [], "logprobs": [],
}  # fmt: skip
_OF: Final[dict[str, Any]] = {"output_index": 0, "item_id": "…"}
_ROW: Final[dict[str, Any]] = {
    "values": "probs", "format": "per_layer", "shape": [4, 8, 12], "context_length": 12,
    "encoding": "base64", "dtype": "float32", "data": "…",
}  # fmt: skip
_EVENTS: Final = (
    _sample(
        "The response begins; response.in_progress, which is the same, follows",
        stream_schema.ResponseEvent, "created", response=_RESPONSE,
    ),
    _sample(
        "Rows of the prompt, with attention.prompt", stream_schema.PromptAttentionEvent,
        "prompt_attention",
        attention={"start": 0, "rows": 12, **_ROW, "shape": [4, 8, 12, 12]},
    ),
    _sample(
        "An item begins: a message, reasoning, or a call", stream_schema.ItemEvent,
        "output_item.added", output_index=0, item=_ITEM,
    ),
    _sample(
        "A part of it begins", stream_schema.PartEvent, "content_part.added",
        content_index=0, part={**_TEXT, "text": ""}, **_OF,
    ),
    _sample(
        "Text that is new", stream_schema.TextDelta, "output_text.delta",
        content_index=0, delta="Anna", logprobs=[], **_OF,
    ),
    _sample(
        "Reasoning that is new, in an item of its own", stream_schema.ReasoningDelta,
        "reasoning_text.delta", content_index=0, delta="The user", **_OF,
    ),
    _sample(
        "A piece of a call's arguments, in an item of its own", stream_schema.ArgumentsDelta,
        "function_call_arguments.delta", delta='{"city": ', **_OF,
    ),
    _sample(
        "With attention: that of each token", stream_schema.AttentionEvent, "attention",
        attention={"n": 0, "token_id": 259, **_ROW},
    ),
    _sample(
        "Tokens that a mod took back", stream_schema.RemovedEvent, "removed",
        tokens=1, characters=4,
    ),
    _sample(
        "Text that is whole", stream_schema.TextDone, "output_text.done",
        content_index=0, text="Anna", logprobs=[], **_OF,
    ),
    _sample(
        "Reasoning that is whole", stream_schema.ReasoningDone, "reasoning_text.done",
        content_index=0, text="The user asks for a name.", **_OF,
    ),
    _sample(
        "Arguments that are whole", stream_schema.ArgumentsDone, "function_call_arguments.done",
        arguments='{"city": "Rome"}', name="weather", **_OF,
    ),
    _sample(
        "The part is whole", stream_schema.PartEvent, "content_part.done",
        content_index=0, part=_TEXT, **_OF,
    ),
    _sample(
        "The item is whole", stream_schema.ItemEvent, "output_item.done",
        output_index=0, item={**_ITEM, "status": "completed", "content": [_TEXT]},
    ),
    _sample(
        "The end; response.incomplete if a limit cut it, response.failed in a failure",
        stream_schema.ResponseEvent, "completed", response={**_RESPONSE, "status": "completed"},
    ),
)  # fmt: skip

OPERATIONS: Final[list[Operation]] = [
    _post(
        "/responses", create, summary="OpenAI's Responses API: the next items of a chat.",
        body=schema.ResponsesBody, reply=schema.Response, streams=True, model="named",
        example={"input": "Who is Anna?", "max_output_tokens": 4, "temperature": 0},
        samples=_EVENTS,
    ),
    _post(
        "/responses/input_tokens", count_tokens,
        summary="OpenAI's Responses API: tokens of a chat's prompt.",
        body=schema.InputBody, reply=schema.InputTokens, model="named",
    ),
]  # fmt: skip
"""Rows of the route table."""
