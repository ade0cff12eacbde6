"""What the dream dialect sends: WebSocket events, and the reply of ``POST /api/v1/generate``.

Pure, apart from the reply under construction. A WebSocket frame is one message, JSON text or
MessagePack. An event whose attention has ``"encoding": "binary"`` and no ``data`` is followed by a
binary frame with the values; in MessagePack the values are inside the event.

The POST reply encodes each token's attention when the token arrives, so that the engine gets its
memory back; the encoded pieces are joined once, at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import msgspec

from kqview._core import count_values
from kqview.errors import RequestError
from kqview.generation.stream import Generation
from kqview.json_input import DEPTH_MAX
from kqview.server.api.dream import schema
from kqview.server.api.dream.convert import Plan, ReplyTooLarge, error_body, kobold_reason
from kqview.server.api.dream.pruning import mean_row, reduced
from kqview.server.api.wire.attention_protocol import (
    Logprobs,
    LogprobsWriter,
    Object,
    attention_frame,
    attention_object,
    details_of,
    event_pieces,
    start_event,
    with_lists,
)
from kqview.server.api.wire.mods_field import removed, tool_calls_of
from kqview.server.api.wire.rows import Dense, Encoder, joined_text, shaped
from kqview.server.errors import Answer
from kqview.server.models.request import AttentionWanted
from kqview.server.models.run import Removal, Run, Step, TokenLogprobs
from kqview.server.web.budget import Reservation
from kqview.server.web.endpoint import Frames, check_values
from kqview.server.web.lenient import LenientDecoder
from kqview.types import ModelInfo, PromptBlock, Token
from kqview.types.token import Attention


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
        rows: As captured, of a token or a block of the prompt.
        encoder: The run's.
        packs: Whether the object goes into MessagePack, which holds bytes as they are.

    Returns:
        The object; the base64 that belongs at its `DATA_HERE`, if any; the values for a separate
        frame, if any.
    """
    assert plan.facts is not None
    assert plan.shown is not None
    assert plan.request.attention is not None
    values = shaped(plan.shown, reduced(plan.shown, plan.request.attention, rows))
    if isinstance(values, Dense) and (packs or plan.encoding == "binary"):
        fields, frame = attention_frame(values, encoder, facts=plan.facts)
        return ({**fields, "data": frame}, None, None) if packs else (fields, None, frame)
    as_list = plan.encoding is None
    fields, data = attention_object(values, encoder, as_list=as_list, facts=plan.facts)
    return fields, data, None


def token_fields(token: Token, token_text: Callable[[int], str]) -> Object:
    """A token's fields: id and text, and its logprob and the most probable tokens if captured.

    ``top_logprobs`` is there if more than the token's own was asked for.
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
    """Add *token* to the sentences' scores."""
    if plan.scores is not None and token.attention is not None:
        assert plan.request.attention is not None
        plan.scores.add(mean_row(plan.request.attention, token.attention))


class EventRenderer:
    """Frames of one run, for `endpoint.pump`."""

    def __init__(
        self,
        plan: Plan,
        token_text: Callable[[int], str],
        answer: Callable[[BaseException], Answer],
        *,
        packs: bool,
    ) -> None:
        """Render *plan*.

        Args:
            plan: The request's.
            token_text: Text of a token by its id.
            answer: What to tell about an error, with its figures.
            packs: MessagePack instead of JSON.
        """
        self._plan = plan
        self._answer = answer
        self._token_text = token_text
        self._packs = packs
        self._n_samples = plan.request.n_samples
        self._n_by_sample = [0] * self._n_samples
        self._has_started = False

    def prompt(self, run: Run, block: PromptBlock) -> Frames:
        """Rows of the prompt."""
        assert block.rows is not None
        event = {**self._head("prompt_attention"), "start": block.start, "rows": block.n_rows}
        return [
            *self._start(run),
            *self._with_attention(event, block.rows, Encoder(run.count_copied)),
        ]

    def _start(self, run: Run) -> Frames:
        """The event that precedes the first one, if it is wanted and this is that."""
        if self._has_started or not self._plan.has_start:
            return []
        self._has_started = True
        event = start_event(run, self._plan.facts, self._plan.ignored)
        return [packed(event, packs=self._packs)]

    def token(self, run: Run, step: Step) -> Frames:
        """One token."""
        token = step.token
        watch(self._plan, token)
        self._n_by_sample[step.sample] += 1
        event = {**self._head("token"), "token": token_fields(token, self._token_text)}
        if self._n_samples > 1:
            event["sample"] = step.sample
        if self._plan.shown is None or token.attention is None:
            return [*self._start(run), packed(event, packs=self._packs)]
        frames = self._with_attention(event, token.attention, Encoder(run.count_copied))
        return [*self._start(run), *frames]

    def removed(self, run: Run, removal: Removal) -> Frames:
        """What a client is to drop: so many of the last ids and characters."""
        self._n_by_sample[removal.sample] -= removal.n_tokens
        event = {**self._head("removed"), **removed(removal)}
        if self._n_samples > 1:
            event["sample"] = removal.sample
        return [packed(event, packs=self._packs)]

    def done(self, run: Run) -> Frames:
        """The end; before it the prunable sentences, if asked for."""
        event = {
            **self._head("done"),
            "finish_reason": run.finish_reason,
            "total_tokens": run.n_tokens,
            "generation_time_ms": round(run.elapsed_s * 1000),
            **details_of(run, self._plan.ignored),
            **tool_calls_of(run.generations[0]),
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
        return [*self._start(run), *(packed(one, packs=self._packs) for one in events)]

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong, with the figures that only the run's own error has."""
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
    """The error event; it names the request if that is known."""
    body = error_body(answer)
    if request_id is not None:
        body = {"type": body.pop("type"), "request_id": request_id, **body}
    return packed(body, packs=packs)


# ---- messages of the client

_JSON = LenientDecoder(schema.ClientMessage)
_PACK = LenientDecoder(schema.ClientMessage, packs=True)


def message_of(raw: bytes | str, *, packs: bool) -> tuple[schema.ClientMessage, Sequence[str]]:
    """The typed message in a frame; text is JSON whatever the subprotocol.

    Returns it, and the names in it that its type does not have.

    Raises:
        RequestError: It cannot be read; the message names the field.
        TooLarge: It has too many values.
    """
    check_values(raw, packs=packs and isinstance(raw, bytes))
    decoder = _PACK if isinstance(raw, bytes) and packs else _JSON
    try:
        message = decoder.decode(raw)
        return message, decoder.unknown(raw, message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the message cannot be read: {error}; correct it") from None


def name_in(raw: bytes | str, *, packs: bool) -> str | None:
    """The ``request_id`` of an invalid message, None if not even that can be read."""
    is_packed = packs and isinstance(raw, bytes)
    data = raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass")
    if count_values(data, is_packed).depth > DEPTH_MAX:
        return None
    try:
        if is_packed:
            named = msgspec.msgpack.decode(data, type=schema.Named)
        else:
            named = msgspec.json.decode(raw, type=schema.Named)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return named.request_id if isinstance(named.request_id, str) else None


_NUMBER_BYTES: Final = 26  # the longest float in JSON, with its comma
_ENTRY_BYTES: Final = 512  # names, shape and text of a token
_LOGPROB_BYTES: Final = 192  # one of top_logprobs, in all lists together


def reply_bytes(plan: Plan, model: ModelInfo, *, n_prompt: int, n_ctx: int, packs: bool) -> int:
    """Most bytes that the reply to *plan* may have.

    Args:
        plan: The request's.
        model: The model that answers.
        n_prompt: Tokens in the prompt.
        n_ctx: Tokens that a slot holds.
        packs: MessagePack instead of JSON.
    """
    n_tokens = max(1, min(plan.request.max_tokens, n_ctx - n_prompt + 1))
    entry = _ENTRY_BYTES + (plan.request.sampling.top_logprobs or 0) * _LOGPROB_BYTES
    total = entry * n_tokens
    shown = plan.shown
    if shown is not None:
        n_last = n_prompt + n_tokens - 1
        # Linear in the columns, so the mean of the first and last row is the mean of all.
        ends = [_row_bytes(plan, shown, model, n, packs=packs) for n in (n_prompt, n_last)]
        total += n_tokens * sum(ends) // 2
    total *= plan.request.n_samples
    if shown is not None and shown.prompt:
        total += n_prompt * (_row_bytes(plan, shown, model, n_prompt, packs=packs) + _ENTRY_BYTES)
    return total


def _row_bytes(
    plan: Plan, shown: AttentionWanted, model: ModelInfo, n_context: int, *, packs: bool
) -> int:
    n_layers = len(model.attention_layers if shown.layers is None else shown.layers)
    n_heads = model.n_head if shown.heads is None else len(shown.heads)
    if shown.format == "viz":
        return 2 * n_layers * _NUMBER_BYTES
    if shown.format == "sparse":
        return min(shown.top_k, n_context) * (n_layers + 2) * _NUMBER_BYTES
    n_columns = n_context if shown.spans is None else len(shown.spans)
    n_values = n_columns * (n_layers * n_heads if shown.format == "per_layer" else 1)
    if shown.format == "aggregated" and plan.encoding is None and not packs:
        return n_values * _NUMBER_BYTES
    n_bytes = n_values * (2 if shown.dtype == "float16" else 4)
    return n_bytes if packs else -(-n_bytes // 3) * 4


def check_reply(n_bytes: int, limit_bytes: int, *, n_prompt: int) -> None:
    """Refuse a reply of more than *limit_bytes*.

    Raises:
        ReplyTooLarge: It may be larger.
    """
    if n_bytes > limit_bytes:
        raise ReplyTooLarge(
            f"the reply may have {n_bytes} bytes, the limit is {limit_bytes}; generate "
            "fewer tokens, ask for less attention (attention_format, attention_layers, dtype), or "
            "use the WebSocket /api/v1/generate/stream",
            reply_bytes=n_bytes,
            limit_bytes=limit_bytes,
            prompt_tokens=n_prompt,
        )


@dataclass(slots=True)
class _Sample:
    logprobs: LogprobsWriter
    tokens: list[bytes] = field(default_factory=list[bytes])
    entries: list[bytes] = field(default_factory=list[bytes])


class ReplyBuilder:
    """Builds the reply's body from what a run yields; one thread at a time."""

    def __init__(
        self,
        plan: Plan,
        token_bytes: Callable[[int], bytes],
        hold: Reservation,
        *,
        packs: bool,
        has_tokens: bool,
        has_logprobs: bool,
        trims_stop: bool,
    ) -> None:
        """Answer *plan*.

        Args:
            plan: The request's.
            token_bytes: Bytes of a token by its id.
            hold: Counts the memory of the reply while it is built.
            packs: MessagePack instead of JSON.
            has_tokens: Send this dialect's own fields after the results.
            has_logprobs: Send logprobs with the results.
            trims_stop: Leave the stop sequence out of the text.
        """
        # A body has no separate frames.
        self._plan = plan if plan.encoding != "binary" else replace(plan, encoding="base64")
        self._token_bytes = token_bytes
        self._hold = hold
        self._packs = packs
        self._has_tokens = has_tokens
        self._has_logprobs = has_logprobs
        self._trims_stop = trims_stop
        self._samples = [
            _Sample(LogprobsWriter(packs=packs)) for _ in range(plan.request.n_samples)
        ]
        self._blocks: list[bytes] = []
        self.n_bytes = 0
        """Bytes encoded so far."""

    def prompt(self, run: Run, block: PromptBlock) -> None:
        """Rows of the prompt."""
        assert block.rows is not None
        entry = {"start": block.start, "rows": block.n_rows}
        self._blocks.append(self._with_attention(run, entry, block.rows))

    def token(self, run: Run, step: Step) -> None:
        """One token."""
        token, sample = step.token, self._samples[step.sample]
        watch(self._plan, token)
        number = {"sample": step.sample} if len(self._samples) > 1 else {}
        if self._has_logprobs and token.logprob is not None:
            top = tuple(token.top_logprobs or ())
            one = TokenLogprobs(token.id, token.logprob, top)
            self._count(sample.logprobs.add(one, self._token_bytes))
        if self._has_tokens:
            fields = token_fields(token, self._text_of)
            sample.tokens.append(self._encoded({**fields, **number}))
            self._count(len(sample.tokens[-1]))
        if self._plan.shown is not None and token.attention is not None:
            entry = {"token_id": token.id, "text": token.text, **number}
            sample.entries.append(self._with_attention(run, entry, token.attention))

    def body(self, run: Run) -> bytes:
        """The whole reply of a run that is over."""
        ends = list(zip(run.generations, self._samples, strict=True))
        head: Object = {"results": [self._result(one, sample) for one, sample in ends]}
        head["details"] = {
            "reason": run.finish_reason, **details_of(run, self._plan.ignored),
        }  # fmt: skip
        if self._plan.scores is not None:
            head["prunable_sentences"] = self._plan.scores.prunable()
        lists: list[tuple[str, Sequence[bytes]]] = []
        if self._has_tokens:
            head["generated_text"] = self._text(run.generations[0])
            head["finish_reason"] = run.finish_reason
            head |= tool_calls_of(run.generations[0])
            lists.append(("generated_tokens", [t for one in self._samples for t in one.tokens]))
        if self._plan.shown is not None:
            if self._plan.shown.prompt:
                lists.append(("prompt_attention", self._blocks))
            lists.append(("attention_data", [e for one in self._samples for e in one.entries]))
        self._hold.take(self.n_bytes)  # the pieces and the whole at the same time
        whole = with_lists(head, lists, packs=self._packs)
        self._samples, self._blocks = [], []
        self._hold.take(-2 * self.n_bytes)
        return whole

    def _result(self, generation: Generation, sample: _Sample) -> schema.SampleResult:
        usage = generation.usage
        result = schema.SampleResult(
            self._text(generation),
            kobold_reason(generation.finish_reason or "cancelled"),
            usage.prompt_tokens,
            usage.completion_tokens,
        )
        if self._has_logprobs:
            # Already encoded; the field has the type of what it encodes.
            result.logprobs = cast("Logprobs | None", sample.logprobs.whole())
        return result

    def _text_of(self, id_: int) -> str:
        return self._token_bytes(id_).decode("utf-8", "replace")

    def _text(self, generation: Generation) -> str:
        stop = "" if self._trims_stop else generation.stop_match or ""
        return generation.text + stop

    def _with_attention(self, run: Run, entry: Object, rows: Any) -> bytes:
        attention, data, _ = attention_parts(
            self._plan, rows, Encoder(run.count_copied), packs=self._packs
        )
        entry["attention"] = attention
        if self._packs:
            encoded = msgspec.msgpack.encode(entry)
        else:
            encoded = b"".join(event_pieces(entry, data))
        self._count(len(encoded))
        return encoded

    def _count(self, n_bytes: int) -> None:
        self._hold.take(n_bytes)
        self.n_bytes += n_bytes

    def _encoded(self, value: Object) -> bytes:
        encode = msgspec.msgpack.encode if self._packs else msgspec.json.encode
        return encode(value)
