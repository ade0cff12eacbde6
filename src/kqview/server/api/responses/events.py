"""Responses: the events of a stream as they are sent, and who writes them. Pure."""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.chat.tool_format import CallDelta
from kqview.server.api.responses import schema
from kqview.server.api.responses.convert import chat_of
from kqview.server.api.responses.schema import (
    CallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
)
from kqview.server.api.wire.chat import AnswerWriter, ChatRemoved, Part
from kqview.server.api.wire.citations import Cited, UrlCitation
from kqview.server.api.wire.event_parts import (
    PROMPT_ROWS,
    TOKEN_ROW,
    PromptAttention,
    TokenAttention,
    named,
)
from kqview.server.api.wire.fields import Clock, Progress, Timings, prompt_progress, timings
from kqview.server.api.wire.logprobs import LOGPROB_BYTES, TokenLogprob, of_token, token_logprob
from kqview.server.errors import Answer
from kqview.server.models.run import Run
from kqview.server.web.described import about
from kqview.types import Token

# ---- events


class ResponseEvent(Struct, kw_only=True):
    """An event."""

    sequence_number: Annotated[int, about("Its place in the stream, from 0.", 0)] = 0


class ResponseState(ResponseEvent, kw_only=True):
    """The response begins, or ends; response.in_progress is as response.created, and follows it."""

    type: Annotated[Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete",
        "response.failed",
    ], about('"response.created" and "response.in_progress" begin it; "response.completed", '
'"response.incomplete" and "response.failed" end it.')]  # fmt: skip
    response: Annotated[Response, about("The response, as it is at that time.")]
    timings: Annotated[Timings | UnsetType, about("What it cost, at the end.")] = UNSET
    prompt_progress: Annotated[
        Progress | UnsetType,
        about(
            "How much of the prompt is evaluated, with ``return_progress``, in two more "
            '"response.in_progress" before the first token.'
        ),
    ] = UNSET


class ItemEvent(ResponseEvent, kw_only=True):
    """An item begins, or is whole."""

    type: Annotated[
        Literal["response.output_item.added", "response.output_item.done"],
        about('"response.output_item.added" or "response.output_item.done".'),
    ]
    output_index: Annotated[int, about("Of the item in the output, from 0.", 0)]
    item: Annotated[OutputItem, about("The item.")]


class OfItem(ResponseEvent, kw_only=True):
    """An event about an item."""

    output_index: Annotated[int, about("Of the item in the output, from 0.", 0)]
    item_id: Annotated[str, about("Id of the item.", "msg_1")]


class OfPart(OfItem, kw_only=True):
    """An event about the part of an item."""

    content_index: Annotated[int, about("Always 0: an item has one part.", 0)] = 0


class PartEvent(OfPart, kw_only=True):
    """A part of an item begins, or is whole."""

    type: Annotated[
        Literal["response.content_part.added", "response.content_part.done"],
        about('"response.content_part.added" or "response.content_part.done".'),
    ]
    part: Annotated[OutputText | ReasoningText, about("The part.")]


class TextDelta(OfPart, kw_only=True, tag_field="type", tag="response.output_text.delta"):
    """Text that is new."""

    delta: Annotated[str, about("The text.", "Anna")]
    logprobs: Annotated[list[TokenLogprob], about("Those of its tokens, if asked for.", [])]
    timings: Annotated[
        Timings | UnsetType, about("What it cost so far, with ``timings_per_token``.")
    ] = UNSET


class TextDone(OfPart, kw_only=True, tag_field="type", tag="response.output_text.done"):
    """Text that is whole."""

    text: Annotated[str, about("The text.", "Anna is a teacher.")]
    logprobs: Annotated[list[TokenLogprob], about("Those of its tokens, if asked for.", [])]


class AnnotationAdded(
    OfPart, kw_only=True, tag_field="type", tag="response.output_text.annotation.added"
):
    """What a sentence that has ended is from."""

    annotation_index: Annotated[int, about("Of the annotation in its text, from 0.", 0)]
    annotation: Annotated[UrlCitation, about("The sentence, and where it is from.")]


class ReasoningDelta(OfPart, kw_only=True, tag_field="type", tag="response.reasoning_text.delta"):
    """Reasoning that is new."""

    delta: Annotated[str, about("The text.", "The user")]


class ReasoningDone(OfPart, kw_only=True, tag_field="type", tag="response.reasoning_text.done"):
    """Reasoning that is whole."""

    text: Annotated[str, about("The text.", "The user asks for a name.")]


class ArgumentsDelta(
    OfItem, kw_only=True, tag_field="type", tag="response.function_call_arguments.delta"
):
    """A piece of a call's arguments."""

    delta: Annotated[str, about("The piece.", '{"city": ')]


class ArgumentsDone(
    OfItem, kw_only=True, tag_field="type", tag="response.function_call_arguments.done"
):
    """A call's arguments are whole."""

    arguments: Annotated[str, about("The arguments as JSON.", '{"city": "Rome"}')]
    name: Annotated[str, about("Name of the function.", "weather")]


class AttentionEvent(ResponseEvent, kw_only=True, tag_field="type", tag="response.attention"):
    """Attention of a token, if asked for; an event of kqview's own."""

    attention: Annotated[TokenAttention, about("The attention.", TOKEN_ROW)]


class PromptAttentionEvent(
    ResponseEvent, kw_only=True, tag_field="type", tag="response.prompt_attention"
):
    """Rows of the prompt, if asked for; an event of kqview's own."""

    attention: Annotated[PromptAttention, about("The rows.", PROMPT_ROWS)]


class RemovedEvent(ChatRemoved, kw_only=True, tag_field="type", tag="response.removed"):
    """What mods took back, which a client drops; an event of kqview's own."""

    sequence_number: Annotated[int, about("Its place in the stream, from 0.", 0)] = 0


EVENTS: Final = (
    named(ResponseState, "response.created"),
    named(PromptAttentionEvent),
    named(ItemEvent, "response.output_item.added"),
    named(PartEvent, "response.content_part.added"),
    *(named(kind) for kind in (TextDelta, AnnotationAdded, ReasoningDelta, ArgumentsDelta)),
    *(named(kind) for kind in (AttentionEvent, RemovedEvent)),
    *(named(kind) for kind in (TextDone, ReasoningDone, ArgumentsDone)),
    named(PartEvent, "response.content_part.done"),
    named(ItemEvent, "response.output_item.done"),
    named(ResponseState, "response.completed"),
)
"""In their order."""


# ---- who writes them


class ResponseWriter(AnswerWriter):
    """Writes the response of one answer; its parts are the items of the output."""

    _body: schema.ResponsesBody

    chat_of = staticmethod(chat_of)
    prompt_event, token_event = PromptAttentionEvent, AttentionEvent
    removed_event = RemovedEvent

    def __init__(self, *given: Any) -> None:
        """As `AnswerWriter`."""
        super().__init__(*given)
        self._clock = Clock()
        self._created_at = int(time.time())
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text is held back
        self._text_logprobs: list[TokenLogprob] = []  # of the open item
        self._annotations: list[UrlCitation] = []  # of the open item
        self._n_events = 0

    def _encoded(self, events: Sequence[Any], data: bytes | None = None) -> list[bytes]:
        for number, one in enumerate(events, self._n_events):
            one.sequence_number = number
        self._n_events += len(events)
        return super()._encoded(events, data)

    def feed(self, run: Run, token: Token) -> list[Struct]:
        """Add a token; returns the events of it."""
        events: list[Struct] = []
        is_first = self._clock.first_s is None
        self._clock.note()
        if is_first and self._body.return_progress:
            response = self._response("in_progress")
            events += [
                ResponseState(type="response.in_progress", response=response, prompt_progress=one)
                for one, _ in prompt_progress(self._clock.timings(run))
            ]
        if (known := of_token(token)) is not None:
            n_bytes = LOGPROB_BYTES * (1 + len(known.top))
            run.hold.take(n_bytes)
            self.n_bytes += n_bytes
            self._logprobs.append(token_logprob(known, self._bytes_of))
        new = super().feed(run, token)
        for event in new if self._body.timings_per_token else ():
            if isinstance(event, TextDelta):
                event.timings = self._clock.timings(run)
        return events + new

    def _started(self, run: Run | None) -> list[Struct]:
        response = self._response("in_progress")
        return [
            ResponseState(type="response.created", response=response),
            ResponseState(type="response.in_progress", response=response),
        ]

    def _restart(self) -> None:
        super()._restart()
        self._logprobs, self._text_logprobs, self._annotations = [], [], []

    def _opened(self, kind: Part, call: CallDelta | None) -> list[Struct]:
        if call is not None:
            item = CallItem(id=_id("fc"), call_id=call.id or "", name=call.name or "")
        else:
            item = (
                ReasoningItem(id=_id("rs")) if kind == "reasoning" else MessageItem(id=_id("msg"))
            )
        self._parts.append(item)
        added = ItemEvent(
            type="response.output_item.added", output_index=len(self._parts) - 1, item=item
        )
        if kind == "call":
            return [added]
        part = OutputText("") if kind == "text" else ReasoningText("")
        return [added, PartEvent(type="response.content_part.added", part=part, **self._of())]

    def _added(self, kind: Part, text: str) -> list[Struct]:
        logprobs, self._logprobs = self._logprobs, []
        match kind:
            case "text":
                self._text_logprobs += logprobs
                return [TextDelta(delta=text, logprobs=logprobs, **self._of())]
            case "reasoning":
                return [ReasoningDelta(delta=text, **self._of())]
            case "call":
                return [ArgumentsDelta(delta=text, **self._of())]

    def _closed(self, kind: Part, text: str, *, is_cut: bool) -> tuple[Struct, list[Struct]]:
        status = "incomplete" if is_cut else "completed"
        of, item = self._of(), self._parts[-1]
        logprobs, self._text_logprobs = self._text_logprobs, []
        match kind:
            case "call":
                item = msgspec.structs.replace(item, status=status, arguments=text)
                events: list[Struct] = [ArgumentsDone(arguments=text, name=item.name, **of)]
            case "reasoning":
                part = ReasoningText(text)
                item = msgspec.structs.replace(item, status=status, content=[part])
                events = [ReasoningDone(text=text, **of)]
                events.append(PartEvent(type="response.content_part.done", part=part, **of))
            case "text":
                part = OutputText(text, self._annotations, logprobs)
                self._annotations = []
                item = msgspec.structs.replace(item, status=status, content=[part])
                events = [TextDone(text=text, logprobs=logprobs, **of)]
                events.append(PartEvent(type="response.content_part.done", part=part, **of))
        index = of["output_index"]
        done = ItemEvent(type="response.output_item.done", output_index=index, item=item)
        return item, [*events, done]

    def _cited(self, cited: Cited) -> list[Struct]:
        one = cited.facts(UrlCitation)
        self._annotations.append(one)
        index = len(self._annotations) - 1
        return [AnnotationAdded(annotation_index=index, annotation=one, **self._of())]

    def _of(self) -> dict[str, Any]:
        return {"output_index": len(self._parts) - 1, "item_id": self._parts[-1].id}

    def _ended(self, run: Run) -> list[Struct]:
        response = self.message(run)
        kind: Any = f"response.{response.status}"
        return [
            ResponseState(type=kind, response=response, timings=timings(run.generations[0].usage))
        ]

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        by_status = "server_error" if answer.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if answer.status == 429 else by_status
        response = self._response("failed")
        response.error = schema.ResponseError(code=code, message=answer.message)
        failed = ResponseState(type="response.failed", response=response)
        return self._encoded([*self._begun(run), failed])

    def message(self, run: Run) -> Response:
        """The whole response."""
        return self._response("incomplete" if run.finish_reason == "length" else "completed", run)

    def _response(self, status: schema.Status, run: Run | None = None) -> Response:
        body = self._body
        form = None if body.text is None else body.text.format
        effort = None if body.reasoning is None else body.reasoning.effort
        usage = None
        if run is not None:
            used = run.usage
            usage = schema.ResponseUsage(
                input_tokens=used.prompt_tokens,
                input_tokens_details=schema.InputDetails(cached_tokens=used.cached_tokens),
                output_tokens=used.completion_tokens,
                output_tokens_details=schema.OutputDetails(
                    reasoning_tokens=self._reader.tokens.n_reasoning
                ),
                total_tokens=used.prompt_tokens + used.completion_tokens,
            )
        return Response(
            id=self.request.request_id,
            created_at=self._created_at,
            completed_at=None if run is None else int(time.time()),
            status=status,
            model=self._model,
            output=[*self._parts],
            incomplete_details=schema.Incomplete() if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=schema.ReasoningShown(effort),
            temperature=body.temperature,
            text=schema.TextConfig(format=form or schema.TextFormat()),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            usage=usage,
            injection=self.injection,
        )


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
