"""Answers as messages and as their events."""

from collections.abc import Mapping
from typing import Any, Final

from kqview.chat.turn import AnswerReader, Delta, Reading
from kqview.server.api.anthropic import schema
from kqview.server.api.anthropic.blocks import Blocks
from kqview.server.api.anthropic.convert import error_body
from kqview.server.api.wire.attention_field import AttentionWriter
from kqview.server.api.wire.chat_work import mod_calls, taken_back
from kqview.server.api.wire.rows import named_events
from kqview.server.errors import Answer
from kqview.server.models.run import Removal, Run, Step
from kqview.types import PromptBlock, Token

Object = dict[str, Any]

_STOP_REASONS: Final[Mapping[str, str]] = {
    "stop": "end_turn", "stop_token": "end_turn", "stop_sequence": "stop_sequence",
    "cancelled": "end_turn", "tool_calls": "end_turn",
}  # fmt: skip


class MessageWriter:
    """Writes the message of one answer while it is generated."""

    def __init__(self, id_: str, model: str, reading: Reading) -> None:
        """*model* is the name that the client called it by."""
        self._id = id_
        self._model = model
        self._reader = AnswerReader(reading)
        self._blocks = Blocks()

    def start(self, run: Run) -> Object:
        """The event that begins a message: it is empty so far."""
        return {"type": "message_start", "message": self._message(run, None)}

    def feed(self, token: Token) -> list[Object]:
        """Add a token; returns the events of it."""
        return self._events(self._reader.feed(token.text))

    def take_back(self, removal: Removal) -> list[Object]:
        """Mods took tokens back; returns the events of it."""
        taken = taken_back(self._reader, removal)
        self._reader, self._blocks = taken.reader, Blocks()
        events: list[Object] = [{"type": "removed", **taken.removed}]
        for delta in taken.deltas:
            again = self._events([delta])
            if delta.call is not None:
                events += again
        return events

    def finish(self, run: Run) -> list[Object]:
        """End the message; returns the last events."""
        generation = run.generations[0]
        events = self._events(self._reader.finish(generation.text))
        if generation.tool_calls is not None:
            events += self._events(mod_calls(self._reader, generation.tool_calls))
        message = self._message(run, self._stop_reason(run))
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        return [
            *events,
            *self._blocks.close(),
            {"type": "message_delta", "delta": delta, "usage": message.usage},
            {"type": "message_stop"},
        ]

    def message(self, run: Run) -> schema.Message:
        """The whole message; after `finish`."""
        return self._message(run, self._stop_reason(run))

    def _events(self, deltas: list[Delta]) -> list[Object]:
        events: list[Object] = []
        for delta in deltas:
            if delta.reasoning:
                events += self._blocks.think(delta.reasoning)
            if delta.content:
                events += self._blocks.write(delta.content)
            if (call := delta.call) is not None:
                if call.id is not None:
                    events += self._blocks.call(call.id, call.name or "")
                if call.arguments:
                    events += self._blocks.argue(call.arguments)
        return events

    def _stop_reason(self, run: Run) -> str:
        reason = _STOP_REASONS.get(run.finish_reason, "max_tokens")
        return "tool_use" if reason == "end_turn" and self._blocks.has_calls else reason

    def _message(self, run: Run, stop_reason: str | None) -> schema.Message:
        usage = run.usage
        stop = run.generations[0].stop_match if stop_reason == "stop_sequence" else None
        return schema.Message(
            id=self._id,
            model=self._model,
            content=[] if stop_reason is None else self._blocks.content,
            stop_reason=stop_reason,
            stop_sequence=stop,
            usage=schema.Usage(
                input_tokens=usage.prompt_tokens - usage.cached_tokens,
                cache_read_input_tokens=usage.cached_tokens,
                output_tokens=usage.completion_tokens,
            ),
        )


class MessageEvents:
    """The events of a message that is streamed; those of ``type`` "attention" are ours."""

    def __init__(self, writer: MessageWriter, attention: AttentionWriter) -> None:
        self._writer = writer
        self._attention = attention
        self._has_begun = False

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Rows of the prompt."""
        fields, data = self._attention.prompt(run, block)
        events = self._begun(run)
        if fields is not None:
            events.append({"type": "prompt_attention", "attention": fields})
        return named_events(events, data)

    def token(self, run: Run, step: Step) -> list[bytes]:
        """What is clear with this token, and its row."""
        events = self._begun(run) + self._writer.feed(step.token)
        fields, data = self._attention.token(run, step)
        if fields is not None:
            events.append({"type": "attention", "attention": fields})
        return named_events(events, data)

    def removed(self, run: Run, removal: Removal) -> list[bytes]:
        """What a client is to drop; an event of ours."""
        self._attention.removed(run, removal)
        return named_events(self._begun(run) + self._writer.take_back(removal))

    def done(self, run: Run) -> list[bytes]:
        """The end."""
        return named_events(self._begun(run) + self._writer.finish(run))

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return named_events([error_body(answer)])

    def _begun(self, run: Run) -> list[Object]:
        # With the first token it is known how much of the prompt was in the cache.
        if self._has_begun:
            return []
        self._has_begun = True
        return [self._writer.start(run)]
