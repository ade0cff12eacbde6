"""Frames of a ``POST /generate``: named Server-Sent Events, each encoded as it is. Pure.

A frame is ``event: NAME`` and ``data: JSON``. Each stream ends with exactly one ``end``.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, TypeAlias, cast, get_args

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.chat.reasoning import Piece, TokenCounter
from kqview.chat.turn import Reading
from kqview.server.api.wire.event_parts import Removed
from kqview.server.errors import Answer
from kqview.server.models.run import Removal
from kqview.server.web.described import about
from kqview.stop_strings import ShownText
from kqview.types import Usage

StopReason = Literal["stop", "stop_sequence", "length", "cancelled", "error"]

_RequestName = Annotated[str, about("Name of the request.", "r1")]
_ModelId = Annotated[str, about("The model that answers.", "demo")]
_Seq = Annotated[int, about("Number of the frame among those of its name, from 0.", 0)]
_RowPath = Annotated[
    str | UnsetType, about("Path of the token's row, if rows are kept.", "/generate/r1/attention/0")
]
_STOP_REASONS: Final = {"stop_token": "stop", "tool_calls": "stop"}
_ERROR_TYPES: Final = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 408: "timeout", 409: "conflict",
    413: "too_large", 429: "rate_limited", 501: "not_supported", 503: "unavailable",
    504: "timeout", 507: "out_of_space",
}  # fmt: skip


class AnalysisFrame(Struct, kw_only=True):
    """Reasoning while it comes, unless it is dropped."""

    event: ClassVar = "analysis"
    seq: _Seq
    text: Annotated[str, about("The text that is new.", "The user")]
    attention: _RowPath = UNSET
    request_id: _RequestName
    model_id: _ModelId


class ReasoningFrame(Struct, kw_only=True):
    """Where a marker ends the reasoning: the whole of it, unless it is dropped."""

    event: ClassVar = "reasoning"
    request_id: _RequestName
    model_id: _ModelId
    reasoning: Annotated[str, about("The text.", "The user asks for a name.")]


class TokenFrame(Struct, kw_only=True):
    """The answer while it comes."""

    event: ClassVar = "token"
    seq: _Seq
    text: Annotated[str, about("The text that is new.", "Anna")]
    tokens_out: Annotated[int, about("Tokens that were generated so far.", 3)]
    attention: _RowPath = UNSET
    request_id: _RequestName
    model_id: _ModelId


class RemovedFrame(Removed, kw_only=True):
    """Tokens that a mod took back, which a client drops."""

    event: ClassVar = "removed"
    reasoning_characters: Annotated[
        int | UnsetType, about("So many of the last characters of reasoning.", 4)
    ] = UNSET
    request_id: _RequestName
    model_id: _ModelId


class UsageFrame(Struct, kw_only=True):
    """What the answer took."""

    event: ClassVar = "usage"
    request_id: _RequestName
    model_id: _ModelId
    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 14)]
    output_tokens: Annotated[int, about("Tokens that were generated; marks of reasoning count.", 4)]
    latency_ms: Annotated[int, about("Milliseconds from admission to the end.", 20)]
    decode_tps: Annotated[float, about("``output_tokens`` by these, a second.", 200.0)]
    reasoning_tokens: Annotated[
        int, about("Tokens of the reasoning; its marks are none of them.", 2)
    ]
    final_tokens: Annotated[int, about("Tokens of the answer, without marks.", 2)]
    reasoning_ratio: Annotated[float, about("Share of the output that is reasoning, 0..1.", 0.5)]
    messages_left_out: Annotated[
        int | UnsetType, about("Messages of the conversation that did not fit into the prompt.", 2)
    ] = UNSET


class ErrorFrame(Struct, kw_only=True):
    """A failure once the stream has begun, in place of the usage."""

    event: ClassVar = "error"
    request_id: _RequestName
    model_id: _ModelId
    code: Annotated[str, about("Kind of the failure for programs.", "MODEL_CHANGED")]
    error_type: Annotated[str, about("Wider kind of the failure.", "unavailable")]
    message: Annotated[str, about("What was wrong, and what to do.", "the model was switched")]


class EndFrame(Struct, kw_only=True):
    """The end, always the last."""

    event: ClassVar = "end"
    request_id: _RequestName
    status: Annotated[Literal["ok", "error"], about("Whether it went well.", "ok")]
    stop_reason: Annotated[StopReason, about("Why it ended.", "length")]


Frame: TypeAlias = (
    AnalysisFrame | ReasoningFrame | TokenFrame | RemovedFrame | UsageFrame | ErrorFrame | EndFrame
)
FRAMES: Final = get_args(Frame)
"""Every frame, in the order in which they come."""


class Failure(Struct, kw_only=True):
    """What went wrong before a stream began."""

    code: Annotated[str, about("Kind of the failure for programs.", "INVALID_REQUEST")]
    error_type: Annotated[str, about("Wider kind of the failure.", "invalid_request")]
    message: Annotated[
        str, about("What was wrong, what the limit is and what to do.", "prompt is missing")
    ]
    field: Annotated[
        str | UnsetType,
        about("The field that is wrong, if a single one is known.", "overrides.top_p"),
    ] = UNSET
    prompt_tokens: Annotated[
        int | UnsetType, about("Tokens of a prompt that is too long.", 3000)
    ] = UNSET
    context_length: Annotated[int | UnsetType, about("The most that it may have.", 2048)] = UNSET


def error_body(answer: Answer) -> dict[str, Any]:
    """The body of a reply for a failure before a stream began."""
    body: dict[str, Any] = {
        "code": answer.code, "error_type": _error_type_of(answer), "message": answer.message,
    }  # fmt: skip
    if answer.parameter is not None:
        body["field"] = answer.parameter
    if answer.n_prompt_tokens is not None:
        body |= {"prompt_tokens": answer.n_prompt_tokens, "context_length": answer.n_ctx}
    return {**body, **answer.figures}


def _error_type_of(answer: Answer) -> str:
    if (answer.status, answer.code) == (404, "NO_MODEL"):
        return "model_not_found"
    by_status = "server_error" if answer.status >= 500 else "invalid_request"
    return _ERROR_TYPES.get(answer.status, by_status)


def encoded(name: str, data: Struct) -> bytes:
    """One event, without the empty line that ends it."""
    return b"event: %s\ndata: %s" % (name.encode(), msgspec.json.encode(data))


def end_of(request_id: str, stop_reason: StopReason) -> EndFrame:
    """The last frame."""
    status = "error" if stop_reason == "error" else "ok"
    return EndFrame(request_id=request_id, status=status, stop_reason=stop_reason)


def stop_reason_of(reason: str) -> StopReason:
    """Why an answer ended, from the reason of its generation."""
    return cast("StopReason", _STOP_REASONS.get(reason, reason))


@dataclass(slots=True)
class _Waiting:
    """A token of which *n_left* characters are not certain."""

    index: int
    n_left: int
    is_reasoning: bool = False


class FrameWriter:
    """Writes the frames of one answer while it is generated, and counts its tokens.

    With attention each token has frames of its own, even those whose text is only certain later,
    so that each is sent with the path of its row.
    """

    def __init__(
        self,
        request_id: str,
        model_id: str,
        reading: Reading,
        *,
        drops_reasoning: bool,
        has_attention: bool = False,
        hidden: set[int] | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            request_id: Name of the request.
            model_id: Id of the model.
            reading: How the answer is read.
            drops_reasoning: Whether no reasoning is sent. Otherwise it is sent in frames
                ``analysis`` while it comes, or, of an answer with a marker, as one ``reasoning``.
            has_attention: Whether rows of its tokens are kept.
            hidden: Gets the indices of tokens that are, or may be, of reasoning that is dropped, if
                rows are kept.
        """
        self.request_id = request_id
        self.model_id = model_id
        self._reading = reading
        self._splitter = reading.split.splitter()
        self._shown = ShownText(reading.stops)
        self._drops = drops_reasoning
        self._streams = reading.split.mode != "marker"
        self._waiting: deque[_Waiting] | None = deque() if has_attention else None
        self._hidden = set[int]() if hidden is None else hidden
        self._n_answer = self._n_analysis = 0  # frames sent
        self._parts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._reasoned_s: float | None = None  # when the mark came that ended the reasoning
        self._is_reasoning_sent = False
        self._n_tokens = 0
        self.tokens = TokenCounter()
        """How many tokens of each kind there are, whole after `finish`."""

    # ---- while it comes

    def feed(self, text: str, index: int) -> list[bytes]:
        """Frames of the next token, and of those before it whose text is certain now."""
        self._n_tokens += 1
        self.tokens.add(text)
        if self._waiting is not None:
            self._waiting.append(_Waiting(index, len(text)))
            if self._drops:
                self._hidden.add(index)
        return self._frames(self._splitter.feed(self._shown.feed(text)))

    def take_back(self, removal: Removal) -> tuple["FrameWriter", list[bytes]]:
        """Mods took tokens back: the writer of what follows, and a frame ``removed``.

        The frame says how many characters of the answer, and of the reasoning that was streamed,
        the client drops; tokens that follow are numbered on.
        """
        left = FrameWriter(
            self.request_id, self.model_id, self._reading, drops_reasoning=self._drops,
            has_attention=self._waiting is not None, hidden=self._hidden,
        )  # fmt: skip
        for i, text in enumerate(removal.texts):
            left.feed(text, i)
        left._n_answer, left._n_analysis = self._n_answer, self._n_analysis
        left._is_reasoning_sent = self._is_reasoning_sent
        n_reasoning = len(self._reasoned) - len(left._reasoned)
        is_told = n_reasoning and self._streams and not self._drops
        lost = RemovedFrame(
            tokens=removal.n_tokens,
            characters=len(self.answer) - len(left.answer),
            reasoning_characters=n_reasoning if is_told else UNSET,
            request_id=self.request_id,
            model_id=self.model_id,
        )
        return left, [encoded(lost.event, lost)]

    def finish(self, text: str) -> list[bytes]:
        """Frames of what was held back; *text* is the whole without its stop sequence."""
        rest = self._splitter.feed(self._shown.rest(text))
        frames = self._frames([*rest, *self._splitter.flush()])
        self.tokens.end()
        for token in self._waiting or ():  # such as those of a stop sequence
            self._show(token)
        return [*frames, *self._reasoning()]

    def _frames(self, pieces: Sequence[Piece]) -> list[bytes]:
        self.tokens.classify(pieces)
        frames: list[bytes] = []
        for piece in _joined(pieces):
            is_reasoning = piece.kind not in ("content", "mark")
            texts = self._by_token(piece.text, is_reasoning=is_reasoning)
            if piece.kind == "mark":
                continue
            # Calls of functions that nobody offered are no part of an answer.
            self._parts["reasoning" if is_reasoning else "content"].append(piece.text)
            if not is_reasoning:
                if self._reasoned_s is None and self._parts["reasoning"]:
                    self._reasoned_s = time.monotonic()
                frames += [*self._reasoning(), *self._answer(texts)]
            elif not self._drops and self._streams:
                frames += self._analysis(texts)
        return frames

    def _by_token(self, text: str, *, is_reasoning: bool) -> list[tuple[str, int | None]]:
        """*text* in parts by token, each with the token's index; whole where nobody asks."""
        if self._waiting is None:
            return [(text, None)]
        parts: list[tuple[str, int | None]] = []
        start = 0
        while self._waiting and (start < len(text) or not self._waiting[0].n_left):
            first = self._waiting[0]
            part = text[start : start + first.n_left]
            start += len(part)
            parts.append((part, first.index))
            first.n_left -= len(part)
            first.is_reasoning |= is_reasoning
            if not first.n_left:
                self._show(self._waiting.popleft())
        return parts

    def _show(self, token: _Waiting) -> None:
        if not token.is_reasoning:
            self._hidden.discard(token.index)

    def _answer(self, texts: Sequence[tuple[str, int | None]]) -> list[bytes]:
        frames: list[bytes] = []
        for text, index in texts:
            one = TokenFrame(
                seq=self._n_answer, text=text,
                tokens_out=self._n_tokens if index is None else index + 1,
                attention=self._row_path(index), request_id=self.request_id,
                model_id=self.model_id,
            )  # fmt: skip
            frames.append(encoded(one.event, one))
            self._n_answer += 1
        return frames

    def _analysis(self, texts: Sequence[tuple[str, int | None]]) -> list[bytes]:
        frames: list[bytes] = []
        for text, index in texts:
            one = AnalysisFrame(
                seq=self._n_analysis, text=text, attention=self._row_path(index),
                request_id=self.request_id, model_id=self.model_id,
            )  # fmt: skip
            frames.append(encoded(one.event, one))
            self._n_analysis += 1
        return frames

    def _row_path(self, index: int | None) -> str | UnsetType:
        return UNSET if index is None else f"/generate/{self.request_id}/attention/{index}"

    def _reasoning(self) -> list[bytes]:
        """The whole reasoning, once, unless it was streamed."""
        if self._drops or self._streams or self._is_reasoning_sent or not (whole := self._reasoned):
            return []
        self._is_reasoning_sent = True
        one = ReasoningFrame(request_id=self.request_id, model_id=self.model_id, reasoning=whole)
        return [encoded(one.event, one)]

    # ---- what came

    @property
    def answer(self) -> str:
        """Text of the answer so far."""
        return "".join(self._parts["content"])

    @property
    def _reasoned(self) -> str:
        """Text of the reasoning so far."""
        return "".join(self._parts["reasoning"])

    @property
    def buffer_latency_ms(self) -> float | None:
        """Milliseconds since the reasoning ended and the answer began, None without reasoning."""
        return None if self._reasoned_s is None else (time.monotonic() - self._reasoned_s) * 1000

    def error(self, answer: Answer) -> ErrorFrame:
        """The frame of a failure."""
        return ErrorFrame(
            request_id=self.request_id, model_id=self.model_id, code=answer.code,
            error_type=_error_type_of(answer), message=answer.message,
        )  # fmt: skip


def usage_of(
    request_id: str,
    model_id: str,
    used: Usage,
    elapsed_s: float,
    tokens: TokenCounter | None = None,
    n_left_out: int = 0,
) -> UsageFrame:
    """What an answer took since it was admitted, *elapsed_s* ago."""
    n_out = used.completion_tokens
    n_reasoning = 0 if tokens is None else tokens.n_reasoning
    latency_ms = max(1, round(elapsed_s * 1000))
    return UsageFrame(
        request_id=request_id,
        model_id=model_id,
        prompt_tokens=used.prompt_tokens,
        output_tokens=n_out,
        latency_ms=latency_ms,
        decode_tps=n_out / (latency_ms / 1000),
        reasoning_tokens=n_reasoning,
        final_tokens=0 if tokens is None else tokens.n_final,
        reasoning_ratio=n_reasoning / n_out if n_out else 0.0,
        messages_left_out=n_left_out or UNSET,
    )


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """*pieces* with adjacent ones of a kind as one, without empty ones."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and whole[-1].kind == piece.kind:
            whole[-1] = Piece(piece.kind, whole[-1].text + piece.text)
        elif piece.text:
            whole.append(piece)
    return whole
