"""Routes of OpenAI's Responses API. Glue only: the other files say what becomes of a body."""

from typing import Final

from kqview.server.api.responses import events, schema
from kqview.server.api.responses.convert import prompt_of
from kqview.server.api.wire.chat import InputTokens, answered, counted
from kqview.server.api.wire.failures import FailureBody, error_body
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import HttpReply, Operations

OPERATIONS: Final = Operations(
    tag="openai", error_body=error_body, failure=FailureBody, model="named"
)  # fmt: skip
"""Rows of the route table."""


@OPERATIONS.post(
    "/v1/responses",
    also=("/responses",),
    reply=schema.Response,
    streams=True,
    samples=events.EVENTS,
    example={"input": "Who is Anna?", "max_output_tokens": 4, "temperature": 0},
)
async def create(call: Call, body: schema.ResponsesBody) -> HttpReply | Events:
    """OpenAI's Responses API: the next items of a chat."""
    return await answered(call, body, events.ResponseWriter.planned, prefix="resp_")


@OPERATIONS.post("/v1/responses/input_tokens", also=("/responses/input_tokens",))
async def count_tokens(call: Call, body: schema.InputBody) -> InputTokens:
    """OpenAI's Responses API: tokens of a chat's prompt."""
    return InputTokens(input_tokens=await counted(call, lambda: prompt_of(body)))
