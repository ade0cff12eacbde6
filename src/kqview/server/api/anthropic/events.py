"""Anthropic's messages: the events of a stream as they are sent, and who writes them. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Struct

from kqview.chat.tool_format import CallDelta
from kqview.server.api.anthropic.convert import chat_of
from kqview.server.api.anthropic.schema import (
    BlockLocation,
    CharLocation,
    Message,
    Object,
    StopSequence,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    Usage,
)
from kqview.server.api.wire.chat import AnswerWriter, ChatRemoved, Part
from kqview.server.api.wire.citations import Cited
from kqview.server.api.wire.event_parts import (
    PROMPT_ROWS,
    TOKEN_ROW,
    PromptAttention,
    TokenAttention,
    named,
)
from kqview.server.errors import Answer
from kqview.server.models.run import Run
from kqview.server.web.described import about

# ---- events


class MessageFailureFacts(Struct, kw_only=True):
    """What went wrong."""

    type: Annotated[str, about("Kind of the failure for programs.", "invalid_request_error")]
    message: Annotated[
        str, about("What was wrong, what the limit is and what to do.", "top_k is -5")
    ]


class MessageFailure(Struct, tag_field="type", tag="error"):
    """A failure, also as the last event of a stream."""

    error: Annotated[MessageFailureFacts, about("What went wrong.")]


class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The message, which is empty so far."""

    message: Annotated[Message, about("The message.")]


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """A block begins."""

    index: Annotated[int, about("Of the block, from 0.", 0)]
    content_block: Annotated[
        TextBlock | ThinkingBlock | ToolUseBlock, about("The block, which is empty so far.")
    ]


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """Text that is new."""

    text: Annotated[str, about("The text.", "Anna")]


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """Thinking that is new."""

    thinking: Annotated[str, about("The text.", "The user")]


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    """The signature of a block of thinking."""

    signature: Annotated[str, about('Always "": nothing checks it.', "")] = ""


class JsonDelta(Struct, tag_field="type", tag="input_json_delta"):
    """A piece of a call's arguments."""

    partial_json: Annotated[str, about('The piece, such as "{\\"city\\": ".', '{"city": ')]


class CitationsDelta(Struct, tag_field="type", tag="citations_delta"):
    """What the text of the block is from."""

    citation: Annotated[CharLocation | BlockLocation, about("The passage of a document.")]


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """A block goes on."""

    index: Annotated[int, about("Of the block, from 0.", 0)]
    delta: Annotated[
        TextDelta | CitationsDelta | ThinkingDelta | SignatureDelta | JsonDelta,
        about("What is new in it."),
    ]


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: Annotated[int, about("Of the block, from 0.", 0)]


class AttentionEvent(Struct, tag_field="type", tag="attention"):
    """Attention of a token, if asked for; an event of kqview's own."""

    attention: Annotated[TokenAttention, about("The attention.", TOKEN_ROW)]


class PromptAttentionEvent(Struct, tag_field="type", tag="prompt_attention"):
    """Rows of the prompt, if asked for; an event of kqview's own."""

    attention: Annotated[PromptAttention, about("The rows.", PROMPT_ROWS)]


class RemovedEvent(ChatRemoved, tag_field="type", tag="removed"):
    """What mods took back, which a client drops; an event of kqview's own."""


class StopFacts(Struct):
    """Why a message ended."""

    stop_reason: Annotated[
        str, about('"end_turn", "max_tokens", "stop_sequence" or "tool_use".', "end_turn")
    ]
    stop_sequence: StopSequence


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The message is whole."""

    delta: Annotated[StopFacts, about("Why it ended.")]
    usage: Annotated[Usage, about("Tokens of the request.")]


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The end."""


EVENTS: Final = tuple(
    named(kind)
    for kind in (
        MessageStart, PromptAttentionEvent, BlockStart, BlockDelta, AttentionEvent, RemovedEvent,
        BlockStop, MessageDelta, MessageStop, MessageFailure,
    )
)  # fmt: skip
"""In their order."""


# ---- who writes them

_STOP_REASONS: Final[Mapping[str, str]] = {
    "stop": "end_turn", "stop_token": "end_turn", "stop_sequence": "stop_sequence",
    "cancelled": "end_turn", "tool_calls": "end_turn",
}  # fmt: skip
_ERROR_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 409: "conflict_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
_DELTAS: Final = {"text": TextDelta, "reasoning": ThinkingDelta, "call": JsonDelta}


class MessageWriter(AnswerWriter):
    """Writes the message of one answer; its parts are blocks, one a sentence with citations."""

    chat_of = staticmethod(chat_of)
    prompt_event, token_event = PromptAttentionEvent, AttentionEvent
    removed_event = RemovedEvent
    _ends_with_citation = True
    _citations: Sequence[CharLocation | BlockLocation] = ()  # of the open block

    def _started(self, run: Run | None) -> list[Struct]:
        assert run is not None
        return [MessageStart(self._message(run, None))]

    def _opened(self, kind: Part, call: CallDelta | None) -> list[Struct]:
        if call is not None:
            block = ToolUseBlock(call.id or "", call.name or "", {})
        else:
            block = ThinkingBlock("") if kind == "reasoning" else TextBlock("")
        self._parts.append(block)
        return [BlockStart(len(self._parts) - 1, block)]

    def _added(self, kind: Part, text: str) -> list[Struct]:
        return [BlockDelta(len(self._parts) - 1, _DELTAS[kind](text))]

    def _closed(self, kind: Part, text: str, *, is_cut: bool) -> tuple[Struct, list[Struct]]:
        i, block = len(self._parts) - 1, self._parts[-1]
        match kind:
            case "text":
                citations = UNSET if self.citing is None else [*self._citations]
                self._citations = ()
                return TextBlock(text, citations), [BlockStop(i)]
            case "reasoning":
                return ThinkingBlock(text), [BlockDelta(i, SignatureDelta()), BlockStop(i)]
            case "call":
                return msgspec.structs.replace(block, input=_input(text)), [BlockStop(i)]

    def _cited(self, cited: Cited) -> list[Struct]:
        passage, document = cited.passage, cited.passage.document
        facts: dict[str, Any] = {
            "cited_text": passage.text, "document_index": document.index,
            "document_title": document.title or None, "score": cited.score,
            "grounding": cited.grounding,
        }  # fmt: skip
        if document.blocks:
            end = passage.block + passage.n_blocks
            one = BlockLocation(start_block_index=passage.block, end_block_index=end, **facts)
        else:
            one = CharLocation(start_char_index=passage.start, end_char_index=passage.stop, **facts)
        self._citations = [one]
        return [BlockDelta(len(self._parts) - 1, CitationsDelta(one))]

    def _ended(self, run: Run) -> list[Struct]:
        reason = self._stop_reason(run)
        message = self._message(run, reason)
        return [
            MessageDelta(StopFacts(reason, message.stop_sequence), message.usage),
            MessageStop(),
        ]

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return self._encoded([error_body(answer)])

    def message(self, run: Run) -> Message:
        """The whole message."""
        return self._message(run, self._stop_reason(run))

    def _stop_reason(self, run: Run) -> str:
        reason = _STOP_REASONS.get(run.finish_reason, "max_tokens")
        if reason == "end_turn" and any(isinstance(one, ToolUseBlock) for one in self._parts):
            return "tool_use"
        return reason

    def _message(self, run: Run, stop_reason: str | None) -> Message:
        usage = run.usage
        return Message(
            id=self.request.request_id,
            model=self._model,
            content=[*self._parts],
            stop_reason=stop_reason,
            stop_sequence=(
                run.generations[0].stop_match if stop_reason == "stop_sequence" else None
            ),
            usage=Usage(
                input_tokens=usage.prompt_tokens - usage.cached_tokens,
                cache_read_input_tokens=usage.cached_tokens,
                output_tokens=usage.completion_tokens,
            ),
            injection=self.injection,
        )


def error_body(answer: Answer) -> MessageFailure:
    """A failure as Anthropic tells it."""
    by_status = "api_error" if answer.status >= 500 else "invalid_request_error"
    kind = _ERROR_TYPES.get(answer.status, by_status)
    return MessageFailure(MessageFailureFacts(type=kind, message=answer.message))


def _input(text: str) -> Object:
    """Arguments as an object; none if the JSON was cut off."""
    try:
        return msgspec.json.decode(text or "{}", type=Object)
    except msgspec.DecodeError:
        return {}
