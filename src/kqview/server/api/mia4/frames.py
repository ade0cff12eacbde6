"""Frames of a ``POST /generate``: named Server-Sent Events. Pure.

A frame is ``event: NAME`` and ``data: JSON``. Each stream ends with exactly one ``end``.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kqview.server.api.held_text import HeldText
from kqview.server.api.mia4.convert import error_type_of
from kqview.server.api.reasoning import Piece, Splitter
from kqview.server.errors import Answer
from kqview.types import Token, Usage

Object = dict[str, Any]

_STOP_REASONS: Final = {"stop_token": "stop", "tool_calls": "stop"}


def frame(name: str, data: object) -> bytes:
    """One event, without the empty line that ends it."""
    return b"event: %s\ndata: %s" % (name.encode(), msgspec.json.encode(data))


def stop_reason_of(reason: str) -> str:
    """Why an answer ended: "stop", "stop_sequence", "length", "cancelled" or "error"."""
    return _STOP_REASONS.get(reason, reason)


class Writer:
    """Writes the frames of one answer while it is generated, and counts its parts.

    A token belongs to the reasoning or to the answer as the first text does that is certain once it
    came; marks belong to what is before them.
    """

    def __init__(
        self,
        request_id: str,
        model_id: str,
        *,
        splitter: Splitter,
        stops: Sequence[str],
        drops_reasoning: bool,
        streams_reasoning: bool = True,
        has_attention: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            request_id: Name of the request.
            model_id: Id of the model.
            splitter: Takes the text apart.
            stops: Sequences that end the answer and are not shown.
            drops_reasoning: Whether no reasoning is sent.
            streams_reasoning: Whether reasoning is sent while it comes, in frames ``analysis``, or
                as one ``reasoning`` when it is complete.
            has_attention: Whether each token has a frame of its own, with the path of its row.
        """
        self._named = {"request_id": request_id, "model_id": model_id}
        self._splitter = splitter
        self._held = HeldText(stops)
        self._drops = drops_reasoning
        self._streams = streams_reasoning
        self._has_attention = has_attention
        self._n_shown = 0  # characters given to the splitter
        self._n_frames = {"token": 0, "analysis": 0}
        self._n_pending = 0  # tokens of which no text is certain
        self._n_of = {"content": 0, "reasoning": 0}
        self._reasoned_s: float | None = None
        self._is_reasoning_sent = False
        self._parts: dict[str, list[str]] = {"content": [], "reasoning": []}
        self.n_tokens = 0
        """Tokens that came."""

    # ---- while it comes

    def token(self, token: Token) -> list[bytes]:
        """Frames of the next token."""
        self.n_tokens += 1
        self._n_pending += 1
        text = self._held.feed(token.text)
        self._n_shown += len(text)
        return self._frames(self._splitter.feed(text))

    def finish(self, text: str) -> list[bytes]:
        """Frames of what was held back; *text* is the whole without its stop sequence."""
        rest = text[self._n_shown :]
        frames = self._frames([*self._splitter.feed(rest), *self._splitter.flush()])
        self._n_of["reasoning" if self._has_open_reasoning else "content"] += self._n_pending
        self._n_pending = 0
        return [*frames, *self._reasoning()]

    @property
    def _has_open_reasoning(self) -> bool:
        return bool(self._parts["reasoning"]) and not self._parts["content"]

    def _frames(self, pieces: Sequence[Piece]) -> list[bytes]:
        frames: list[bytes] = []
        for kind, text in _joined(pieces):
            n_waiting, self._n_pending = self._n_pending, 0
            self._n_of[kind] += n_waiting
            self._parts[kind].append(text)
            if kind == "content":
                self._end_reasoning()
                frames += [*self._reasoning(), *self._texts("token", text, n_waiting)]
            elif not self._drops and self._streams:
                frames += self._texts("analysis", text, n_waiting)
        return frames

    def _texts(self, name: str, text: str, n_waiting: int) -> list[bytes]:
        """Frames of *text*, the first that is certain of *n_waiting* tokens."""
        n_empty = n_waiting - 1 if self._has_attention else 0
        first = self.n_tokens - 1 - n_empty
        texts = [*[""] * n_empty, text]
        return [self._text(name, one, n) for n, one in enumerate(texts, first)]

    def _text(self, name: str, text: str, n: int) -> bytes:
        seq = self._n_frames[name]
        self._n_frames[name] += 1
        fields: Object = {"seq": seq, "text": text}
        if name == "token":
            fields["tokens_out"] = n + 1
        if self._has_attention:
            fields["attention"] = f"/generate/{self._named['request_id']}/attention/{n}"
        return frame(name, fields | self._named)

    def _end_reasoning(self) -> None:
        if self._reasoned_s is None and self._parts["reasoning"]:
            self._reasoned_s = time.monotonic()

    def _reasoning(self) -> list[bytes]:
        """The whole reasoning, once."""
        if self._drops or self._streams or self._is_reasoning_sent or not self.reasoning:
            return []
        self._is_reasoning_sent = True
        return [frame("reasoning", self._named | {"reasoning": self.reasoning})]

    # ---- what came

    @property
    def answer(self) -> str:
        """Text of the answer so far."""
        return "".join(self._parts["content"])

    @property
    def reasoning(self) -> str:
        """Text of the reasoning so far."""
        return "".join(self._parts["reasoning"])

    @property
    def buffer_latency_ms(self) -> float | None:
        """Milliseconds since the reasoning ended, None without any."""
        return None if self._reasoned_s is None else (time.monotonic() - self._reasoned_s) * 1000

    @property
    def n_reasoning(self) -> int:
        """Tokens of reasoning so far."""
        return self._n_of["reasoning"]

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


def figures_of(used: Usage, elapsed_s: float, n_reasoning: int) -> Object:
    """The figures of a ``usage``: *n_reasoning* of the generated tokens are no part of the answer.

    ``decode_tps`` is ``output_tokens`` by ``latency_ms``, which begins when the request was
    admitted.
    """
    n_out = used.completion_tokens
    n_reasoning = min(n_reasoning, n_out)
    latency_ms = max(1, round(elapsed_s * 1000))
    return {
        "prompt_tokens": used.prompt_tokens,
        "output_tokens": n_out,
        "latency_ms": latency_ms,
        "decode_tps": n_out / (latency_ms / 1000),
        "reasoning_tokens": n_reasoning,
        "final_tokens": n_out - n_reasoning,
        "reasoning_ratio": n_reasoning / n_out if n_out else 0.0,
    }


def _joined(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """Kind and text of *pieces*, adjacent ones of one kind as one; calls count as reasoning."""
    whole: list[tuple[str, str]] = []
    for piece in pieces:
        kind = "content" if piece.kind == "content" else "reasoning"
        if not piece.text:
            continue
        if whole and whole[-1][0] == kind:
            whole[-1] = kind, whole[-1][1] + piece.text
        else:
            whole.append((kind, piece.text))
    return whole
