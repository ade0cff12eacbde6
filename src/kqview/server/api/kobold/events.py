"""The three streams of this API: typed SSE events, KoboldAI's plain ones, and WebSocket frames.

Renderers of `kqview.server.streaming`. They know nothing of sockets; what they keep is only the
text of a plain stream that may still turn out to be a stop sequence.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kqview.server.api.attention_objects import (
    Object,
    attention_frame,
    attention_object,
    event_pieces,
)
from kqview.server.api.kobold.convert import error_body, finish_reason
from kqview.server.attention import AttentionWanted, Dense, Shaped, shaped
from kqview.server.errors import Answer
from kqview.server.run import Run, Step
from kqview.server.streaming import NEXT_EVENT
from kqview.types import PromptBlock, Token
from kqview.types.token import Attention

Layers = tuple[int, ...] | None


def _shaped(wanted: AttentionWanted | None, rows: Attention | None) -> Shaped | None:
    return None if wanted is None or rows is None else shaped(wanted, rows)


class TypedEvents:
    """``type`` "token", "done", "error", and "prompt_attention" for its rows; base64 in JSON.

    Every id is an event, its text "" inside a character of several; stop sequences stay in. Where
    the model ends its text inside a character, "done" has the U+FFFD that it becomes as ``text``.
    """

    def __init__(
        self, wanted: AttentionWanted | None, layers: Layers, text_of: Callable[[int], str]
    ) -> None:
        """Write rows as *wanted*; *text_of* gives the text of an id for logprobs."""
        self._wanted = wanted
        self._layers = layers
        self._text_of = text_of
        self._n_shown = 0

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Rows of the prompt's tokens from ``start`` on: an axis of rows before the columns."""
        return self._event(run, _prompt(block), _shaped(self._wanted, block.rows))

    def token(self, run: Run, step: Step) -> list[bytes]:
        """One id with its row."""
        token = step.token
        self._n_shown += len(token.text)
        event = {"type": "token", "token": self._token(token)}
        return self._event(run, event, _shaped(self._wanted, token.attention))

    def _token(self, token: Token) -> Object:
        fields: Object = {"token_id": token.id, "text": token.text}
        if token.logprob is not None:
            fields["logprob"] = token.logprob
            fields["top_logprobs"] = [
                {"token_id": id_, "text": self._text_of(id_), "logprob": logprob}
                for id_, logprob in token.top_logprobs or ()
            ]
        return fields

    def _event(self, run: Run, event: Object, rows: Shaped | None) -> list[bytes]:
        event["request_id"] = run.request_id
        if rows is None:
            return event_pieces({**event, "attention": None}, None)
        attention, data = attention_object(rows, run.encoder, layers=self._layers)
        return event_pieces({**event, "attention": attention}, data)

    def done(self, run: Run) -> list[bytes]:
        """The end; the model may be used again when it is sent."""
        return event_pieces({**_done(run, self._n_shown), "request_id": run.request_id}, None)

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return _error(run, answer)


class PlainEvents:
    """``{"token": text, "finish_reason": null}``, and the reason in an event of its own at the end.

    Text that may be the beginning of a stop sequence is held back until it is clear, because the
    stop sequence itself is not shown.
    """

    def __init__(self, stops: Sequence[str], *, trims: bool) -> None:
        """Hold back *stops*, unless they are to be shown: *trims* is off."""
        self._held = HeldText(stops if trims else ())
        self._trims = trims
        self._n_shown = 0

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes]:
        """Nothing."""
        return []

    def token(self, run: Run, step: Step) -> list[bytes]:
        """The text that is clear now; nothing where there is none."""
        text = self._held.feed(step.token.text)
        self._n_shown += len(text)
        return event_pieces(_plain(text, None), None) if text else []

    def done(self, run: Run) -> list[bytes]:
        """What was held back, then the reason."""
        last = msgspec.json.encode(_plain("", finish_reason(run.finish_reason)))
        whole = run.generations[0].text if self._trims else run.text
        rest = whole[self._n_shown :]
        return [msgspec.json.encode(_plain(rest, None)), NEXT_EVENT, last] if rest else [last]

    def error(self, run: Run | None, answer: Answer) -> list[bytes]:
        """What went wrong."""
        return _error(run, answer)


class SocketFrames:
    """For each id a text frame and a binary frame of its row; the binary one is never left out.

    Rows are float32 of shape ``(num_layers, num_attention_heads, n_context)``, as the seed's client
    expects. Where the request or the model makes them anything else the text frame says what they
    are, in ``attention``; formats that are no array stand there whole.
    """

    def __init__(self, wanted: AttentionWanted | None, layers: Layers) -> None:
        """Write rows as *wanted*."""
        self._wanted = wanted
        self._layers = layers
        self._n_shown = 0
        self._is_usual = (
            wanted is not None
            and wanted.format == "per_layer"
            and wanted.dtype == "float32"
            and wanted.heads is None
            and layers is None
        )

    def prompt(self, run: Run, block: PromptBlock) -> list[bytes | str]:
        """Rows of the prompt's tokens from ``start`` on: an axis of rows before the columns."""
        return self._frames(run, _prompt(block), _shaped(self._wanted, block.rows))

    def token(self, run: Run, step: Step) -> list[bytes | str]:
        """One id with its row."""
        token = step.token
        self._n_shown += len(token.text)
        event = {"type": "token", "token_id": token.id, "text": token.text}
        rows = _shaped(self._wanted, token.attention)
        if self._is_usual and isinstance(rows, Dense) and rows.heads_by_layer is None:
            return [_text(event), run.encoder.raw(rows.values)]
        return self._frames(run, event, rows)

    def _frames(self, run: Run, event: Object, rows: Shaped | None) -> list[bytes | str]:
        data = b""
        if rows is not None:
            attention, data = attention_frame(rows, run.encoder, layers=self._layers)
            event = {**event, "attention": attention}
        return [_text(event), data]

    def done(self, run: Run) -> list[bytes | str]:
        """The end; the socket is closed after it."""
        return [_text(_done(run, self._n_shown))]

    def error(self, run: Run | None, answer: Answer) -> list[bytes | str]:
        """What went wrong; the socket is closed after it."""
        return [b"".join(_error(run, answer)).decode()]


class HeldText:
    """Text without what may still become one of some stop sequences."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Watch for *stops*; empty ones are ignored."""
        self._stops = tuple(stop for stop in stops if stop)
        self._n_most = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add *text*; returns what no stop sequence can begin in any more."""
        if not self._stops:
            return text
        whole = self._held + text
        n_clear = self._first(whole)
        self._held = whole[n_clear:]
        return whole[:n_clear]

    def _first(self, whole: str) -> int:
        """Where the first stop sequence begins, or may begin."""
        found = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        end = min(found, default=len(whole))
        for at in range(max(0, len(whole) - self._n_most + 1), end):
            if any(stop.startswith(whole[at:]) for stop in self._stops):
                return at
        return end


def _plain(text: str, reason: str | None) -> Object:
    return {"token": text, "finish_reason": reason}


def _prompt(block: PromptBlock) -> Object:
    return {"type": "prompt_attention", "start": block.start, "rows": block.n_rows}


def _done(run: Run, n_shown: int) -> Object:
    reason = finish_reason(run.finish_reason)
    event: Object = {"type": "done", "finish_reason": reason, "total_tokens": run.n_tokens}
    rest = run.text[n_shown:]
    return {**event, "text": rest} if rest else event


def _error(run: Run | None, answer: Answer) -> list[bytes]:
    named = {} if run is None else {"request_id": run.request_id}
    return event_pieces({"type": "error", **named, **error_body(answer)}, None)


def _text(event: Any) -> str:
    return msgspec.json.encode(event).decode()
