"""Routes of OpenAI's Responses API. Glue only: the other files say what becomes of a body."""

from typing import Final

from kqview.server.api.responses import events, schema
from kqview.server.api.responses.convert import chat_of, request_of
from kqview.server.api.wire.chat import answered, counted, named_sample
from kqview.server.api.wire.event_parts import PROMPT_ROWS, TOKEN_ROW
from kqview.server.api.wire.failures import FailureBody, error_body
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import HttpReply, Operations

_EVENTS: Final = (
    named_sample(
        "The response begins; response.in_progress, which is the same, follows",
        events.ResponseState, "response.created",
    ),
    named_sample(
        "Rows of the prompt, with attention.prompt", events.PromptAttentionEvent,
        attention=PROMPT_ROWS,
    ),
    named_sample(
        "An item begins: a message, reasoning, or a call", events.ItemEvent,
        "response.output_item.added",
    ),
    named_sample("A part of it begins", events.PartEvent, "response.content_part.added"),
    named_sample("Text that is new", events.TextDelta),
    named_sample("With documents: what a sentence is from", events.AnnotationAdded),
    named_sample("Reasoning that is new, in an item of its own", events.ReasoningDelta),
    named_sample("A piece of a call's arguments, in an item of its own", events.ArgumentsDelta),
    named_sample("With attention: that of each token", events.AttentionEvent, attention=TOKEN_ROW),
    named_sample("Tokens that a mod took back", events.RemovedEvent),
    named_sample("Text that is whole", events.TextDone),
    named_sample("Reasoning that is whole", events.ReasoningDone),
    named_sample("Arguments that are whole", events.ArgumentsDone),
    named_sample("The part is whole", events.PartEvent, "response.content_part.done"),
    named_sample("The item is whole", events.ItemEvent, "response.output_item.done"),
    named_sample(
        "The end; response.incomplete if a limit cut it, response.failed in a failure",
        events.ResponseState, "response.completed",
    ),
)  # fmt: skip

OPERATIONS: Final = Operations(
    tag="openai", error_body=error_body, failure=FailureBody, model="named"
)  # fmt: skip
"""Rows of the route table."""


@OPERATIONS.post(
    "/v1/responses",
    also=("/responses",),
    reply=schema.Response,
    streams=True,
    samples=_EVENTS,
    example={"input": "Who is Anna?", "max_output_tokens": 4, "temperature": 0},
)
async def create(call: Call, body: schema.ResponsesBody) -> HttpReply | Events:
    """OpenAI's Responses API: the next items of a chat."""
    return await answered(
        call, body, prefix="resp", request_of=request_of, writer_of=events.ResponseWriter,
        repeats=True,
    )  # fmt: skip


@OPERATIONS.post("/v1/responses/input_tokens", also=("/responses/input_tokens",))
async def count_tokens(call: Call, body: schema.InputBody) -> schema.InputTokens:
    """OpenAI's Responses API: tokens of a chat's prompt."""
    return schema.InputTokens(input_tokens=await counted(call, lambda: chat_of(body)))
