"""Routes of Anthropic's Messages API. Glue only: the other files say what becomes of a body."""

from typing import Any, Final

from kqview.server.api.anthropic import events, schema
from kqview.server.api.anthropic.convert import chat_of, request_of
from kqview.server.api.wire.chat import answered, counted, named_sample
from kqview.server.api.wire.event_parts import PROMPT_ROWS, TOKEN_ROW
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import HttpReply, Operations

_EVENTS: Final = (
    named_sample("The message begins", events.MessageStart),
    named_sample(
        "Rows of the prompt, with attention.prompt", events.PromptAttentionEvent,
        attention=PROMPT_ROWS,
    ),
    named_sample("A block begins: text, thinking, or a call", events.BlockStart),
    named_sample("What is new in it", events.BlockDelta),
    named_sample("With attention: that of each token", events.AttentionEvent, attention=TOKEN_ROW),
    named_sample("Tokens that a mod took back", events.RemovedEvent),
    named_sample("The block ends", events.BlockStop),
    named_sample("The message is whole", events.MessageDelta),
    named_sample("The end", events.MessageStop),
    named_sample("A failure, in place of the end", events.MessageFailure),
)  # fmt: skip
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
    samples=_EVENTS,
    example=_CHAT,
)
async def create(call: Call, body: schema.MessagesBody) -> HttpReply | Events:
    """Anthropic's Messages API: the next message of a chat."""
    return await answered(
        call, body, prefix="msg", request_of=request_of, writer_of=events.MessageWriter
    )


@OPERATIONS.post("/v1/messages/count_tokens")
async def count_tokens(call: Call, body: schema.CountBody) -> schema.TokenCount:
    """Anthropic's Messages API: tokens of a chat's prompt."""
    return schema.TokenCount(await counted(call, lambda: chat_of(body)))
