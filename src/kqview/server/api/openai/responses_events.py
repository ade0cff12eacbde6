"""Answers as responses and as their events."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kqview.chat.turn import AnswerReader, Delta, Reading
from kqview.server.api.openai import responses_schema as schema
from kqview.server.api.openai.responses_items import Items
from kqview.server.api.wire.attention_field import AttentionWriter
from kqview.server.api.wire.chat_work import mod_calls, taken_back
from kqview.server.api.wire.event_parts import AttentionObject
from kqview.server.api.wire.llama_fields import Clock, Timings, prompt_progress, timings_of
from kqview.server.api.wire.logprobs import LOGPROB_BYTES
from kqview.server.api.wire.rows import named_events
from kqview.server.errors import Answer
from kqview.server.models.run import Removal, Run, Step
from kqview.types import PromptBlock, Token

Object = dict[str, Any]

_FAILURES: Final[Mapping[int, str]] = {429: "rate_limit_exceeded"}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a response repeats of its request.

    Attributes:
        id: The response's own.
        body: The request.
        model: The name that the client called the model by.
        reading: How the answer is read.
        bytes_of: Bytes of an id, for logprobs.
    """

    id: str
    body: schema.ResponsesBody
    model: str
    reading: Reading
    bytes_of: Callable[[int], bytes]


class ResponseWriter:
    """Writes the response of one answer while it is generated."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.body = asked.body
        self._created_at = int(time.time())
        self._reader = AnswerReader(asked.reading)
        self._items = Items()
        self._logprobs: list[Object] = []  # of tokens whose text is held back
        self._n_events = 0
        self.n_bytes = 0
        """Bytes of the logprobs so far."""

    def start(self) -> list[Object]:
        """The events that begin a response: it is empty so far."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._numbered([{"type": kind, "response": response} for kind in kinds])

    def feed(self, run: Run, token: Token) -> list[Object]:
        """Add a token; returns the events of it."""
        if token.logprob is not None:
            top = [self._logprob(id_, value) for id_, value in token.top_logprobs or ()]
            n_bytes = LOGPROB_BYTES * (1 + len(top))
            run.hold.take(n_bytes)
            self.n_bytes += n_bytes
            one = self._logprob(token.id, token.logprob)
            self._logprobs.append({**one, "top_logprobs": top})
        return self._numbered(self._events(self._reader.feed(token.text)))

    def take_back(self, removal: Removal) -> list[Object]:
        """Mods took tokens back; returns the events of it."""
        taken = taken_back(self._reader, removal)
        self._reader, self._items, self._logprobs = taken.reader, Items(), []
        events: list[Object] = [{"type": "response.removed", **taken.removed}]
        for delta in taken.deltas:
            again = self._events([delta])
            if delta.call is not None:
                events += again
        return self._numbered(events)

    def finish(self, run: Run) -> list[Object]:
        """End the response; returns the last events."""
        generation = run.generations[0]
        events = self._events(self._reader.finish(generation.text))
        if generation.tool_calls is not None:
            events += self._events(mod_calls(self._reader, generation.tool_calls))
        events += self._items.close(self._status(run))
        response = self._response(self._status(run), run)
        event: Object = {"type": f"response.{response.status}", "response": response}
        event["timings"] = timings_of(run)
        return self._numbered([*events, event])

    def progress(self, spent: Timings) -> list[Object]:
        """The events about the prompt, at the first token, whose timings are *spent*."""
        event: Object = {"type": "response.in_progress", "response": self._response("in_progress")}
        events = prompt_progress(spent)
        return self._numbered([{**event, "prompt_progress": one} for one, _ in events])

    def row(self, kind: str, fields: AttentionObject) -> list[Object]:
        """The event of an attention object, which is ours."""
        return self._numbered([{"type": f"response.{kind}", "attention": fields}])

    def fail(self, answer: Answer) -> list[Object]:
        """The event of what went wrong; nothing follows it."""
        by_status = "server_error" if answer.status >= 500 else "invalid_prompt"
        code = _FAILURES.get(answer.status, by_status)
        response = self._response("failed")
        response.error = {"code": code, "message": answer.message}
        return self._numbered([{"type": "response.failed", "response": response}])

    def response(self, run: Run) -> schema.Response:
        """The whole response; after `finish`."""
        return self._response(self._status(run), run)

    def _events(self, deltas: list[Delta]) -> list[Object]:
        events: list[Object] = []
        for delta in deltas:
            logprobs, self._logprobs = self._logprobs, []
            if delta.reasoning:
                events += self._items.think(delta.reasoning)
            if delta.content:
                events += self._items.write(delta.content, logprobs)
            if (call := delta.call) is not None:
                if call.id is not None:
                    events += self._items.call(call.id, call.name or "")
                if call.arguments:
                    events += self._items.argue(call.arguments)
        return events

    def _numbered(self, events: list[Object]) -> list[Object]:
        numbered = [{**one, "sequence_number": self._n_events + i} for i, one in enumerate(events)]
        self._n_events += len(events)
        return numbered

    def _logprob(self, id_: int, logprob: float) -> Object:
        data = self._asked.bytes_of(id_)
        return {"token": data.decode("utf-8", "replace"), "bytes": [*data], "logprob": logprob}

    def _status(self, run: Run) -> schema.Status:
        return "incomplete" if run.finish_reason == "length" else "completed"

    def _response(self, status: schema.Status, run: Run | None = None) -> schema.Response:
        body, is_cut = self._asked.body, status == "incomplete"
        form = None if body.text is None else body.text.format
        effort = None if body.reasoning is None else body.reasoning.effort
        return schema.Response(
            id=self._asked.id,
            created_at=self._created_at,
            completed_at=None if run is None else int(time.time()),
            status=status,
            model=self._asked.model,
            output=[*self._items.output],
            incomplete_details={"reason": "max_output_tokens"} if is_cut else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": effort, "summary": None},
            temperature=body.temperature,
            text={"format": form or schema.TextFormat()},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            usage=None if run is None else self._usage(run),
        )

    def _usage(self, run: Run) -> schema.Usage:
        usage = run.usage
        return schema.Usage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=schema.InputDetails(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=schema.OutputDetails(
                reasoning_tokens=self._reader.tokens.n_reasoning
            ),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )


class ResponseEvents:
    """The events of a response that is streamed."""

    def __init__(self, writer: ResponseWriter, attention: AttentionWriter) -> None:
        self._clock = Clock()
        self._writer = writer
        self._attention = attention
        self._has_begun = False

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Rows of the prompt."""
        events = self._begun()
        fields, data = self._attention.prompt(run, block)
        if fields is not None:
            events += self._writer.row("prompt_attention", fields)
        return named_events(events, data)

    def token(self, run: Run, step: Step) -> list[bytes]:
        """What is clear with this token, and its row."""
        is_first, events = not self._has_begun, self._begun()
        self._clock.note()
        spent = self._clock.timings(run)
        if is_first and self._writer.body.return_progress:
            events += self._writer.progress(spent)
        new = self._writer.feed(run, step.token)
        for event in new if self._writer.body.timings_per_token else ():
            if event["type"] == "response.output_text.delta":
                event["timings"] = spent
        events += new
        fields, data = self._attention.token(run, step)
        if fields is not None:
            events += self._writer.row("attention", fields)
        return named_events(events, data)

    def removed(self, run: Run, removal: Removal) -> list[bytes]:
        """What a client is to drop; an event of ours."""
        self._attention.removed(run, removal)
        return named_events(self._begun() + self._writer.take_back(removal))

    def done(self, run: Run) -> list[bytes]:
        """The end."""
        return named_events(self._begun() + self._writer.finish(run))

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return named_events(self._begun() + self._writer.fail(answer))

    def _begun(self) -> list[Object]:
        if self._has_begun:
            return []
        self._has_begun = True
        return self._writer.start()
