"""What a WebSocket of this dialect sends: the seed's events, as JSON text or as MessagePack.

Pure. A frame is one message. An event whose attention has ``"encoding": "binary"`` and no ``data``
is followed by one binary frame with the values; in MessagePack they are in the event.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from kqview.errors import RequestError
from kqview.server.api.attention_objects import (
    attention_frame,
    attention_object,
    event_pieces,
)
from kqview.server.api.dream import schema
from kqview.server.api.dream.convert import Plan, error_body
from kqview.server.api.dream.pruning import mean_row, reduced
from kqview.server.attention import Dense, shaped
from kqview.server.errors import Answer
from kqview.server.run import Run, Step
from kqview.server.streaming import Frames
from kqview.server.wire import Encoder, check_values, joined_text
from kqview.types import PromptBlock, Token
from kqview.types.token import Attention

Object = dict[str, Any]
TokenText = Callable[[int], str]


def packed(event: Object, *, packs: bool) -> bytes | str:
    """An event without values of its own as one frame."""
    if packs:
        return msgspec.msgpack.encode(event)
    return msgspec.json.encode(event).decode()


def attention_parts(
    plan: Plan, rows: Attention, encoder: Encoder, *, packs: bool
) -> tuple[Object, bytes | None, bytes | None]:
    """The ``attention`` object of *rows*.

    Args:
        plan: Of the request; it shows attention.
        rows: As captured, of a token or of a block of the prompt.
        encoder: Of the run.
        packs: Whether the object goes into MessagePack, which holds bytes as they are.

    Returns:
        The object; the base64 that belongs at its `DATA_HERE`, if any; the values for a frame of
        their own, if any.
    """
    assert plan.shown is not None
    assert plan.request.attention is not None
    values = shaped(plan.shown, reduced(plan.shown, plan.request.attention, rows))
    if isinstance(values, Dense) and (packs or plan.encoding == "binary"):
        fields, frame = attention_frame(values, encoder, layers=plan.layers)
        return ({**fields, "data": frame}, None, None) if packs else (fields, None, frame)
    as_list = plan.encoding is None
    fields, data = attention_object(values, encoder, as_list=as_list, layers=plan.layers)
    return fields, data, None


def token_fields(token: Token, token_text: TokenText) -> Object:
    """A token's fields: id and text, its logprob and the most probable ones where captured.

    ``top_logprobs`` is there where more than the token's own was asked for.
    """
    fields: Object = {"token_id": token.id, "text": token.text}
    if token.logprob is not None:
        fields["logprob"] = token.logprob
    if token.top_logprobs:
        fields["top_logprobs"] = [
            {"token_id": id_, "text": token_text(id_), "logprob": logprob}
            for id_, logprob in token.top_logprobs
        ]
    return fields


def watch(plan: Plan, token: Token) -> None:
    """Let the sentences' scores see *token*."""
    if plan.scores is not None and token.attention is not None:
        assert plan.request.attention is not None
        plan.scores.add(mean_row(plan.request.attention, token.attention))


class EventRenderer:
    """Frames of one run, for `streaming.pump`."""

    def __init__(
        self,
        plan: Plan,
        token_text: TokenText,
        answer: Callable[[BaseException], Answer],
        *,
        packs: bool,
    ) -> None:
        """Render *plan*.

        Args:
            plan: Of the request.
            token_text: Text of a token by its id.
            answer: What to tell about an error, figures included.
            packs: MessagePack in place of JSON.
        """
        self._plan = plan
        self._answer = answer
        self._token_text = token_text
        self._packs = packs
        self._n_samples = plan.request.n_samples
        self._n_by_sample = [0] * self._n_samples

    def prompt(self, run: Run, block: PromptBlock) -> Frames:
        """Rows of the prompt."""
        assert block.rows is not None
        event = {**self._head("prompt_attention"), "start": block.start, "rows": block.n_rows}
        return self._with_attention(event, block.rows, run.encoder)

    def token(self, run: Run, step: Step) -> Frames:
        """One token."""
        token = step.token
        watch(self._plan, token)
        self._n_by_sample[step.sample] += 1
        event = {**self._head("token"), "token": token_fields(token, self._token_text)}
        if self._n_samples > 1:
            event["sample"] = step.sample
        if self._plan.shown is None or token.attention is None:
            return [packed(event, packs=self._packs)]
        return self._with_attention(event, token.attention, run.encoder)

    def done(self, run: Run) -> Frames:
        """The end; before it what could be pruned, where that was asked for."""
        event = {
            **self._head("done"),
            "finish_reason": run.finish_reason,
            "total_tokens": run.n_tokens,
            "generation_time_ms": round(run.elapsed_s * 1000),
        }
        if self._n_samples > 1:
            event["samples"] = [
                {"sample": i, "finish_reason": one.finish_reason, "total_tokens": n_tokens}
                for i, (one, n_tokens) in enumerate(
                    zip(run.generations, self._n_by_sample, strict=True)
                )
            ]
        events = [event]
        if self._plan.scores is not None:
            found = self._plan.scores.prunable()
            events.insert(0, {**self._head("pruning_suggestion"), "prunable_sentences": found})
        return [packed(one, packs=self._packs) for one in events]

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong; with the figures that only the run's own error has."""
        if run is not None and run.error is not None:
            answer = self._answer(run.error)
        return [error_frame(answer, self._plan.request.request_id, packs=self._packs)]

    def _head(self, kind: str) -> Object:
        return {"type": kind, "request_id": self._plan.request.request_id}

    def _with_attention(self, event: Object, rows: Attention, encoder: Encoder) -> Frames:
        attention, data, frame = attention_parts(self._plan, rows, encoder, packs=self._packs)
        event["attention"] = attention
        if self._packs:
            return [msgspec.msgpack.encode(event)]
        text = joined_text(event_pieces(event, data))
        return [text] if frame is None else [text, frame]


def error_frame(answer: Answer, request_id: str | None, *, packs: bool) -> bytes | str:
    """The error event; it names the request where that is known."""
    body = error_body(answer)
    if request_id is not None:
        body = {"type": body.pop("type"), "request_id": request_id, **body}
    return packed(body, packs=packs)


# ---- messages of the client

_JSON = msgspec.json.Decoder(schema.Message)
_PACK = msgspec.msgpack.Decoder(schema.Message)


def message_of(raw: bytes | str, *, packs: bool) -> schema.Message:
    """The typed message in a frame; text is JSON whatever the subprotocol.

    Raises:
        RequestError: It is none; the text names the field.
        TooLarge: It has too many values.
    """
    check_values(raw, packs=packs and isinstance(raw, bytes))
    try:
        if isinstance(raw, bytes) and packs:
            return _PACK.decode(raw)
        return _JSON.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"request.decode: {error}; correct the message") from None


def name_in(raw: bytes | str, *, packs: bool) -> str | None:
    """The ``request_id`` of a message that could not be read, None where that cannot be either."""
    try:
        if isinstance(raw, bytes) and packs:
            named = msgspec.msgpack.decode(raw, type=schema.Named)
        else:
            named = msgspec.json.decode(raw, type=schema.Named)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return named.request_id if isinstance(named.request_id, str) else None
