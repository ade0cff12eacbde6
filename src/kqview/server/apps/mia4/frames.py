"""Frames of a ``POST /generate``: named Server-Sent Events. Pure.

A frame is ``event: NAME`` and ``data: JSON``. Each stream ends with exactly one ``end``.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from kqview.chat.reasoning import Piece, TokenCounter
from kqview.chat.turn import Reading
from kqview.server.api.wire.mods_field import removed
from kqview.server.apps.mia4.convert import error_type_of
from kqview.server.errors import Answer
from kqview.server.models.run import Removal
from kqview.stop_strings import ShownText
from kqview.types import Token, Usage

Object = dict[str, Any]

_STOP_REASONS: Final = {"stop_token": "stop", "tool_calls": "stop"}


def frame(name: str, data: object) -> bytes:
    """One event, without the empty line that ends it."""
    return b"event: %s\ndata: %s" % (name.encode(), msgspec.json.encode(data))


def stop_reason_of(reason: str) -> str:
    """Why an answer ended: "stop", "stop_sequence", "length", "cancelled" or "error"."""
    return _STOP_REASONS.get(reason, reason)


@dataclass(slots=True)
class _Waiting:
    """A token of which *n_left* characters are not certain."""

    index: int
    n_left: int
    is_reasoning: bool = False


class Writer:
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
        self._named = {"request_id": request_id, "model_id": model_id}
        self._reading = reading
        self._splitter = reading.split.splitter()
        self._shown = ShownText(reading.stops)
        self._drops = drops_reasoning
        self._streams = reading.split.mode != "marker"
        self._waiting: deque[_Waiting] | None = deque() if has_attention else None
        self._hidden = set[int]() if hidden is None else hidden
        self._n_sent = {"token": 0, "analysis": 0}
        self._parts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self._reasoned_s: float | None = None  # when the mark came that ended the reasoning
        self._is_reasoning_sent = False
        self._n_tokens = 0
        self.tokens = TokenCounter()
        """How many tokens of each kind there are, whole after `finish`."""

    # ---- while it comes

    def token(self, token: Token) -> list[bytes]:
        """Frames of the next token, and of those before it whose text is certain now."""
        return self._feed(token.text, token.index)

    def _feed(self, text: str, index: int) -> list[bytes]:
        self._n_tokens += 1
        self.tokens.add(text)
        if self._waiting is not None:
            self._waiting.append(_Waiting(index, len(text)))
            if self._drops:
                self._hidden.add(index)
        return self._frames(self._splitter.feed(self._shown.feed(text)))

    def take_back(self, removal: Removal) -> tuple["Writer", list[bytes]]:
        """Mods took tokens back: the writer of what follows, and a frame ``removed``.

        The frame says how many characters of the answer, and of the reasoning that was streamed,
        the client drops; tokens that follow are numbered on.
        """
        left = Writer(
            self._named["request_id"], self._named["model_id"], self._reading,
            drops_reasoning=self._drops, has_attention=self._waiting is not None,
            hidden=self._hidden,
        )  # fmt: skip
        for i, text in enumerate(removal.texts):
            left._feed(text, i)
        left._n_sent = self._n_sent
        left._is_reasoning_sent = self._is_reasoning_sent
        lost = removed(removal, len(self.answer) - len(left.answer))
        n_reasoning = len(self._reasoned) - len(left._reasoned)
        if n_reasoning and self._streams and not self._drops:
            lost["reasoning_characters"] = n_reasoning
        return left, [frame("removed", lost | self._named)]

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
            if piece.kind == "content":
                self._parts["content"].append(piece.text)
                if self._reasoned_s is None and self._parts["reasoning"]:
                    self._reasoned_s = time.monotonic()
                frames += [*self._reasoning(), *self._texts("token", texts)]
                continue
            # Calls of functions that nobody offered are no part of an answer.
            self._parts["reasoning"].append(piece.text)
            if not self._drops and self._streams:
                frames += self._texts("analysis", texts)
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

    def _show(self, token: "_Waiting") -> None:
        if not token.is_reasoning:
            self._hidden.discard(token.index)

    def _texts(self, name: str, texts: Sequence[tuple[str, int | None]]) -> list[bytes]:
        frames: list[bytes] = []
        for text, index in texts:
            fields: Object = {"seq": self._n_sent[name], "text": text}
            if name == "token":
                fields["tokens_out"] = self._n_tokens if index is None else index + 1
            if index is not None:
                fields["attention"] = f"/generate/{self._named['request_id']}/attention/{index}"
            frames.append(frame(name, fields | self._named))
            self._n_sent[name] += 1
        return frames

    def _reasoning(self) -> list[bytes]:
        """The whole reasoning, once, unless it was streamed."""
        whole = self._reasoned
        if self._drops or self._streams or self._is_reasoning_sent or not whole:
            return []
        self._is_reasoning_sent = True
        return [frame("reasoning", self._named | {"reasoning": whole})]

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

    def error(self, answer: Answer) -> bytes:
        """The frame ``error``."""
        failed = {
            "code": answer.code, "error_type": error_type_of(answer), "message": answer.message,
        }  # fmt: skip
        return frame("error", self._named | failed)


def end(request_id: str, stop_reason: str) -> bytes:
    """The last frame."""
    status = "error" if stop_reason == "error" else "ok"
    return frame("end", {"request_id": request_id, "status": status, "stop_reason": stop_reason})


def usage(request_id: str, model_id: str, figures: Object) -> bytes:
    """What it took."""
    return frame("usage", {"request_id": request_id, "model_id": model_id, **figures})


def figures_of(used: Usage, elapsed_s: float, tokens: TokenCounter | None = None) -> Object:
    """The figures of a ``usage``.

    ``latency_ms`` begins when the request was admitted, and ``decode_tps`` is ``output_tokens`` by
    it. Marks are tokens of the output, but neither of its reasoning nor of its answer.
    """
    n_out = used.completion_tokens
    n_reasoning = 0 if tokens is None else tokens.n_reasoning
    latency_ms = max(1, round(elapsed_s * 1000))
    return {
        "prompt_tokens": used.prompt_tokens,
        "output_tokens": n_out,
        "latency_ms": latency_ms,
        "decode_tps": n_out / (latency_ms / 1000),
        "reasoning_tokens": n_reasoning,
        "final_tokens": 0 if tokens is None else tokens.n_final,
        "reasoning_ratio": n_reasoning / n_out if n_out else 0.0,
    }


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """*pieces* with adjacent ones of a kind as one, without empty ones."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and whole[-1].kind == piece.kind:
            whole[-1] = Piece(piece.kind, whole[-1].text + piece.text)
        elif piece.text:
            whole.append(piece)
    return whole
