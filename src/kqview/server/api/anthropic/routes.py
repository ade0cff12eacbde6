"""Routes of Anthropic's Messages API. Glue only: the other files say what becomes of a body."""

from typing import Any, Final

from kqview.server.api.anthropic import events, schema
from kqview.server.api.anthropic.convert import prompt_of
from kqview.server.api.wire.chat import answered, counted
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import HttpReply, Operations

_CHAT: Final[dict[str, Any]] = {
    "messages": [{"role": "user", "content": "Who is Anna?"}], "max_tokens": 4, "temperature": 0,
}  # fmt: skip

OPERATIONS: Final = Operations(
    tag="anthropic", error_body=events.error_body, failure=events.MessageFailure, model="named",
)  # fmt: skip
"""Rows of the route table."""


@OPERATIONS.post(
    "/v1/messages",
    reply=schema.Message,
    streams=True,
    samples=events.EVENTS,
    example=_CHAT,
)
async def create(call: Call, body: schema.MessagesBody) -> HttpReply | Events:
    """Anthropic's Messages API: the next message of a chat."""
    return await answered(call, body, events.MessageWriter.planned, prefix="msg_")


@OPERATIONS.post("/v1/messages/count_tokens")
async def count_tokens(call: Call, body: schema.CountBody) -> schema.TokenCount:
    """Anthropic's Messages API: tokens of a chat's prompt."""
    return schema.TokenCount(await counted(call, lambda: prompt_of(body)))
