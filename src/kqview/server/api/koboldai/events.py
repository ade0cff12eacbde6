"""What the KoboldAI API sends of a run: events, each encoded as it is, or one reply. Pure.

Four streams have events: typed ones and KoboldAI's plain ones over SSE, the frames of kobold's
WebSocket, and those of dream's. Their renderers keep nothing but counts, and the text of a plain
stream that may still turn out to be a stop sequence. Of a reply each token's attention is encoded
when the token arrives, so that the engine gets its memory back; the pieces are joined at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, cast

import msgspec
from msgspec import UNSET, Struct

from kqview.generation.stream import Generation
from kqview.server.api.koboldai.failures import (
    KoboldFailure,
    ReplyTooLarge,
    error_body,
    kobold_error_body,
)
from kqview.server.api.koboldai.pruning import mean_row, reduced
from kqview.server.api.koboldai.request import KoboldGenerateBody, KoboldPlan
from kqview.server.api.koboldai.schema import (
    AttentionEntry,
    Details,
    GenerateReply,
    KoboldDoneEvent,
    KoboldPromptEvent,
    KoboldRemovedEvent,
    KoboldToken,
    KoboldTokenEvent,
    KoboldTokenFrame,
    LikelyToken,
    PlainEvent,
    PromptEntry,
    PruningEvent,
    SampleEnd,
    SampleResult,
    StartEvent,
)
from kqview.server.api.wire.attention import ReplyLists, event_pieces, joined_text
from kqview.server.api.wire.event_parts import ROW, AttentionObject, Removed, sent
from kqview.server.api.wire.fields import first
from kqview.server.api.wire.logprobs import TextLogprobs, logprobs_of, of_token
from kqview.server.api.wire.mods_field import removed, tool_calls_of
from kqview.server.errors import Answer
from kqview.server.models.run import Removal, Run, Step
from kqview.server.web.budget import Reservation
from kqview.server.web.endpoint import NEXT_EVENT, Frames, Sample
from kqview.stop_strings import ShownText
from kqview.types import ModelInfo, PromptBlock, Token
from kqview.types.token import Attention


def left_out(run: Run, ignored: Sequence[str]) -> dict[str, Any]:
    """`KoboldLeftOut` of a run; *ignored* are the names of what had no effect."""
    return {"truncated_tokens": run.n_truncated or UNSET, "ignored": ignored or UNSET}


def details_of(run: Run, ignored: Sequence[str]) -> dict[str, Any]:
    """What the end of a reply tells of a run, whatever the reply."""
    usage = run.usage
    return {
        "seed": run.request.sampling.seed,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "queue_ms": round(1000 * usage.queue_s, 3),
        "prompt_ms": round(1000 * usage.prefill_s, 3),
        "generation_ms": round(1000 * usage.decode_s, 3),
        **left_out(run, ignored),
    }


# ---- what streams have, for the description


_NAMED: Final[dict[str, Any]] = {"request_id": "r1"}
_PROMPT: Final = sent(KoboldPromptEvent, **_NAMED, attention={**ROW, "shape": [4, 8, 7, 7]})
_START: Final = sent(StartEvent)
_TOKEN: Final = sent(KoboldTokenEvent, attention=ROW)
_REMOVED: Final = sent(KoboldRemovedEvent, **_NAMED)
_DONE: Final = sent(KoboldDoneEvent, **_NAMED)
_FAILED: Final = sent(KoboldFailure, about="A failure, in place of the end", type="error", **_NAMED)
EVENTS: Final = (_START, _PROMPT, _TOKEN, _REMOVED, _DONE, _FAILED, sent(PlainEvent))
"""Over SSE."""
FRAMES: Final = (
    _START, sent(KoboldPromptEvent),
    Sample("server", "Their values", "float32 values, layers × heads × rows × tokens"),
    sent(KoboldTokenFrame),
    Sample("server", "Its row", "float32 values, layers × heads × tokens before it"),
    sent(KoboldRemovedEvent), sent(KoboldDoneEvent), _FAILED,
)  # fmt: skip
"""Over kobold's WebSocket."""
MESSAGES: Final = (
    _START, _PROMPT,
    Sample("server", "Their values, if encoding is binary", "values in C order, little-endian"),
    _TOKEN,
    Sample("server", "Its row, if encoding is binary", "values in C order, little-endian"),
    _REMOVED, sent(PruningEvent), _DONE, _FAILED,
)  # fmt: skip
"""Over dream's WebSocket."""


# ---- renderers


def kobold_reason(reason: str) -> str:
    """ "stop" or "length": KoboldAI's clients know no other good end."""
    return "length" if reason == "length" else "stop"


def likely_tokens(plan: KoboldPlan, token: Token) -> list[LikelyToken]:
    """The most probable tokens at the place of *token*."""
    return [
        LikelyToken(id_, plan.token_bytes(id_).decode("utf-8", "replace"), logprob)
        for id_, logprob in token.top_logprobs or ()
    ]


class KoboldEvents:
    """Typed events over SSE; rows are base64 in the JSON. The other streams differ in few parts."""

    def __init__(self, plan: KoboldPlan) -> None:
        """Write what *plan* shows."""
        self._plan = plan
        self._has_start = plan.has_start
        self._n_shown = 0  # characters
        self._n_tokens = [0] * plan.request.n_samples

    separator: ClassVar[Sequence[bytes]] = (NEXT_EVENT,)
    """Stands between two events of one call."""
    names_request: ClassVar[bool] = True

    def prompt(self, run: Run, block: PromptBlock) -> Frames:
        """Rows of the prompt's tokens from ``start`` on: an axis of rows before the columns."""
        event = KoboldPromptEvent(start=block.start, rows=block.n_rows)
        if self.names_request:
            event.request_id = run.label
        return self._first(run, self._with_rows(run, event, block.rows))

    def token(self, run: Run, step: Step) -> Frames:
        """One id with its row."""
        self._n_shown += len(step.token.text)
        self._n_tokens[step.sample] += 1
        return self._first(run, self._with_rows(run, self._event(run, step), step.token.attention))

    def removed(self, run: Run, removal: Removal) -> Frames:
        """What a client is to drop: so many of the last ids and characters."""
        self._n_shown -= removal.n_characters
        self._n_tokens[removal.sample] -= removal.n_tokens
        event = KoboldRemovedEvent(tokens=removal.n_tokens, characters=removal.n_characters)
        if self.names_request:
            event.request_id = run.label
        if len(self._n_tokens) > 1:
            event.sample = removal.sample
        return [self._encoded(event)]

    def done(self, run: Run) -> Frames:
        """The end; the model may be used again when it is sent."""
        event = KoboldDoneEvent(
            finish_reason=run.finish_reason,
            total_tokens=run.n_tokens,
            request_id=run.label if self.names_request else UNSET,
            tool_calls=tool_calls_of(run.generations[0]),
            **details_of(run, self._plan.ignored),
        )
        return self._first(run, self._end(run, event))

    def _first(self, run: Run, frames: Frames) -> Frames:
        """*frames* with the start event before them, if it is wanted and they are the first."""
        if not self._has_start:
            return frames
        self._has_start = False
        rows = self._plan.rows
        start = StartEvent(
            request_id=run.label,
            prompt_tokens=run.usage.prompt_tokens,
            cached_tokens=run.usage.cached_tokens,
            prompt_ids=run.generations[0].prompt_ids,
            seed=cast("int", run.request.sampling.seed),
            attention=UNSET if rows is None else rows.described(),
            **left_out(run, self._plan.ignored),
        )
        return [self._encoded(start), *self.separator, *frames]

    # ---- what differs

    def _event(self, run: Run, step: Step) -> Any:
        """The event of a token."""
        token = step.token
        shown = KoboldToken(token_id=token.id, text=token.text)
        if token.logprob is not None:
            shown.logprob = token.logprob
            shown.top_logprobs = likely_tokens(self._plan, token)
        return KoboldTokenEvent(request_id=run.label, token=shown)

    def _with_rows(self, run: Run, event: Any, rows: Attention | None) -> Frames:
        """*event* with *rows* as its attention."""
        event.attention, data = None, None
        if rows is not None and self._plan.rows is not None:
            event.attention, data = self._plan.rows.write(rows, run.count_copied)
        return event_pieces(event, data)

    def _end(self, run: Run, event: KoboldDoneEvent) -> Frames:
        """The last event, with what this stream adds."""
        event.finish_reason = kobold_reason(run.finish_reason)
        event.reason = run.finish_reason
        event.text = run.text[self._n_shown :] or UNSET
        return [self._encoded(event)]

    def _encoded(self, event: Struct) -> bytes | str:
        return msgspec.json.encode(event)

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong."""
        return [self._encoded(kobold_error_body(answer, run))]


class KoboldFrames(KoboldEvents):
    """For each id a text frame and a binary frame with its row; the binary one is never left out.

    Rows are float32 of shape ``(num_layers, num_attention_heads, n_context)``, as the seed's client
    expects. If the request or the model makes them anything else, the text frame describes them in
    ``attention``; formats that are not arrays are there completely.
    """

    separator = ()
    names_request = False

    def _event(self, run: Run, step: Step) -> Any:
        return KoboldTokenFrame(token_id=step.token.id, text=step.token.text)

    def _with_rows(self, run: Run, event: Any, rows: Attention | None) -> Frames:
        writer, data = self._plan.rows, b""
        if rows is not None and writer is not None:
            is_token = isinstance(event, KoboldTokenFrame)
            if is_token and writer.is_plain and not isinstance(rows, tuple):
                data = rows.tobytes()
                run.count_copied(len(data))
            else:
                event.attention, found = writer.write(rows, run.count_copied, data="binary")
                data = found or b""
        return [self._encoded(event), data]

    def _encoded(self, event: Struct) -> bytes | str:
        return msgspec.json.encode(event).decode()


class DreamEvents(KoboldEvents):
    """Events of dream's WebSocket: JSON texts, or MessagePack.

    An event whose attention has ``"encoding": "binary"`` and no ``data`` is followed by a binary
    frame with the values; in MessagePack the values are inside the event.
    """

    separator = ()

    def __init__(
        self,
        plan: KoboldPlan,
        answer: Callable[[BaseException], Answer],
        *,
        packs: bool,
    ) -> None:
        """Render *plan*.

        Args:
            plan: The request's.
            answer: What to tell about an error, with its figures.
            packs: MessagePack instead of JSON.
        """
        super().__init__(plan)
        self._answer = answer
        self._packs = packs

    def _event(self, run: Run, step: Step) -> Any:
        watch(self._plan, step.token)
        event = KoboldTokenEvent(request_id=run.label, token=dream_token(self._plan, step.token))
        if len(self._n_tokens) > 1:
            event.sample = step.sample
        return event

    def _with_rows(self, run: Run, event: Any, rows: Attention | None) -> Frames:
        if rows is None or self._plan.rows is None:
            return [self._encoded(event)]
        event.attention, data = dream_rows(self._plan, rows, run.count_copied, packs=self._packs)
        if data is None:
            return [self._encoded(event)]
        if event.attention.encoding == "binary":
            return [self._encoded(event), data]
        return [joined_text(event_pieces(event, data))]

    def _end(self, run: Run, event: KoboldDoneEvent) -> Frames:
        event.generation_time_ms = round(run.elapsed_s * 1000)
        if len(self._n_tokens) > 1:
            event.samples = [
                SampleEnd(sample=i, finish_reason=one.finish_reason, total_tokens=n)
                for i, (one, n) in enumerate(zip(run.generations, self._n_tokens, strict=True))
            ]
        if self._plan.scores is None:
            return [self._encoded(event)]
        found = self._plan.scores.prunable()
        pruning = PruningEvent(request_id=run.label, prunable_sentences=found)
        return [self._encoded(pruning), self._encoded(event)]

    def _encoded(self, event: Struct) -> bytes | str:
        return packed(event, packs=self._packs)

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong, with the figures that only the run's own error has."""
        if run is not None and run.error is not None:
            answer = self._answer(run.error)
        return [self._encoded(error_body(answer, self._plan.request.request_id))]


def dream_token(plan: KoboldPlan, token: Token, **more: Any) -> KoboldToken:
    """A token; ``top_logprobs`` is there if more than its own logprob was asked for."""
    return KoboldToken(
        token_id=token.id,
        text=token.text,
        logprob=UNSET if token.logprob is None else token.logprob,
        top_logprobs=likely_tokens(plan, token) if token.top_logprobs else UNSET,
        **more,
    )


def dream_rows(
    plan: KoboldPlan, rows: Attention, count_copied: Callable[[int], None], *, packs: bool
) -> tuple[AttentionObject, bytes | None]:
    """The attention object of *rows*, and their values if they are not in it.

    They are in it with *packs*; otherwise they are base64 for `DATA_HERE`, or for a frame of their
    own if the object says that they are binary.
    """
    assert plan.rows is not None
    assert plan.request.attention is not None
    shown = rows
    if plan.scores is not None:
        shown = reduced(plan.rows.wanted, plan.request.attention, rows)
    is_binary = packs or plan.encoding == "binary"
    data = "binary" if is_binary else "base64" if plan.encoding == "base64" else "list"
    attention, values = plan.rows.write(shown, count_copied, data=data)
    if packs and values is not None:
        attention.data = cast("Any", values)
        return attention, None
    return attention, values


def watch(plan: KoboldPlan, token: Token) -> None:
    """Add *token* to the sentences' scores."""
    if plan.scores is not None and token.attention is not None:
        assert plan.request.attention is not None
        plan.scores.add(mean_row(plan.request.attention, token.attention))


def packed(event: Struct, *, packs: bool) -> bytes | str:
    """*event* as a frame: MessagePack, or a text of JSON."""
    return msgspec.msgpack.encode(event) if packs else msgspec.json.encode(event).decode()


class PlainEvents:
    """``{"token": text, "finish_reason": null}``, and the reason in an event of its own at the end.

    Text that may begin a stop sequence is held back until that is clear: nothing behind the
    sequence is shown, even within its last token. The last event also says what the server left out
    of the request.
    """

    def __init__(self, stops: Sequence[str], ignored: Sequence[str] = (), *, trims: bool) -> None:
        """End before *stops* if *trims*, else behind them. The end tells of *ignored*."""
        self._shown = ShownText(stops)
        self._ignored = ignored
        self._trims = trims

    def prompt(self, run: Run, block: PromptBlock) -> Frames:
        """Nothing."""
        return []

    def token(self, run: Run, step: Step) -> Frames:
        """The text that is clear now; nothing if there is none."""
        text = self._shown.feed(step.token.text)
        return event_pieces(PlainEvent(token=text, finish_reason=None)) if text else []

    def removed(self, run: Run, removal: Removal) -> Frames:
        """What a client is to drop, beside an empty text."""
        lost = Removed(**removed(removal, self._shown.take_back(removal.text)))
        return event_pieces(PlainEvent(token="", finish_reason=None, removed=lost))

    def done(self, run: Run) -> Frames:
        """What was held back, then the reason."""
        last = PlainEvent(
            token="",
            finish_reason=kobold_reason(run.finish_reason),
            tool_calls=tool_calls_of(run.generations[0]),
            **left_out(run, self._ignored),
        )
        ended = run.generations[0]
        rest = self._shown.rest(ended.text + ("" if self._trims else ended.stop_match or ""))
        held = PlainEvent(token=rest, finish_reason=None)
        return (
            [*event_pieces(held), NEXT_EVENT, *event_pieces(last)] if rest else event_pieces(last)
        )

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong."""
        return event_pieces(kobold_error_body(answer, run))


# ---- everything in one reply

_NUMBER_BYTES: Final = 26  # the longest float in JSON, with its comma
_ENTRY_BYTES: Final = 512  # names, shape and text of a token
_LOGPROB_BYTES: Final = 192  # one of top_logprobs, in all lists together


def check_size(
    plan: KoboldPlan,
    model: ModelInfo,
    limit_bytes: int,
    *,
    n_prompt: int,
    n_ctx: int,
    packs: bool,
) -> int:
    """Most bytes that the reply to *plan* may have.

    Args:
        plan: The request's.
        model: The model that answers.
        limit_bytes: The most that are allowed.
        n_prompt: Tokens in the prompt.
        n_ctx: Tokens that a slot holds.
        packs: MessagePack instead of JSON.

    Raises:
        ReplyTooLarge: They are more than *limit_bytes*.
    """
    n_tokens = max(1, min(plan.request.max_tokens, n_ctx - n_prompt + 1))
    total = (_ENTRY_BYTES + (plan.request.sampling.top_logprobs or 0) * _LOGPROB_BYTES) * n_tokens
    if plan.rows is not None:
        # Linear in the columns, so the mean of the first and last row is the mean of all.
        ends = [
            _row_bytes(plan, model, n, packs=packs) for n in (n_prompt, n_prompt + n_tokens - 1)
        ]
        total += n_tokens * sum(ends) // 2
    total *= plan.request.n_samples
    if plan.rows is not None and plan.rows.wanted.prompt:
        total += n_prompt * (_row_bytes(plan, model, n_prompt, packs=packs) + _ENTRY_BYTES)
    if total > limit_bytes:
        raise ReplyTooLarge(
            f"the reply may have {total} bytes, the limit is {limit_bytes}; generate "
            "fewer tokens, ask for less attention (attention_format, attention_layers, dtype), or "
            "use the WebSocket /api/v1/generate/stream",
            reply_bytes=total,
            limit_bytes=limit_bytes,
            prompt_tokens=n_prompt,
        )
    return total


def _row_bytes(plan: KoboldPlan, model: ModelInfo, n_context: int, *, packs: bool) -> int:
    assert plan.rows is not None
    shown = plan.rows.wanted
    n_layers, n_heads = plan.rows.n_layers, plan.rows.n_heads
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


class ReplyBuilder:
    """Builds the reply's body from what a run yields; one thread at a time."""

    def __init__(
        self,
        plan: KoboldPlan,
        body: KoboldGenerateBody,
        hold: Reservation,
        *,
        packs: bool,
    ) -> None:
        """Answer *plan*.

        Args:
            plan: The request's.
            body: The request.
            hold: Counts the memory of the reply while it is built.
            packs: MessagePack instead of JSON.
        """
        # A body has no separate frames.
        self._plan = plan if plan.encoding != "binary" else replace(plan, encoding="base64")
        self._hold = hold
        self._packs = packs
        shows = first(body.return_attention, body.output_attentions)
        # Dream's own fields follow the results of those who know either field.
        self._has_tokens = shows is not None
        # With attention the text keeps its stop sequence, as its tokens do.
        self._trims_stop = first(body.trim_stop, not shows)
        self._lists = ReplyLists(hold, packs=packs)
        self._offsets = [0] * plan.request.n_samples  # characters, for logprobs

    @property
    def n_bytes(self) -> int:
        """Bytes encoded so far."""
        return self._lists.n_bytes

    def prompt(self, run: Run, block: PromptBlock) -> None:
        """Rows of the prompt."""
        assert block.rows is not None
        rows, data = dream_rows(self._plan, block.rows, run.count_copied, packs=self._packs)
        entry = PromptEntry(start=block.start, rows=block.n_rows, attention=rows)
        self._lists.add(0, "prompt_attention", entry, data)

    def token(self, run: Run, step: Step) -> None:
        """One token."""
        token, sample = step.token, step.sample
        number = sample if len(self._offsets) > 1 else UNSET
        watch(self._plan, token)
        if (one := of_token(token)) is not None:
            found = logprobs_of([one], self._plan.token_bytes, self._offsets[sample])
            self._offsets[sample] += len(token.text)
            self._lists.add_each(sample, "logprobs", found)
        if self._has_tokens:
            shown = dream_token(self._plan, token, sample=number)
            self._lists.add(sample, "generated_tokens", shown)
        if self._plan.rows is not None and token.attention is not None:
            rows, data = dream_rows(
                self._plan, token.attention, run.count_copied, packs=self._packs
            )
            entry = AttentionEntry(token.id, token.text, rows, number)
            self._lists.add(sample, "attention_data", entry, data)

    def body(self, run: Run) -> bytes:
        """The whole reply of a run that is over."""
        plan = self._plan
        results = [self._result(one, i) for i, one in enumerate(run.generations)]
        details = Details(reason=run.finish_reason, **details_of(run, plan.ignored))
        parts: dict[str, Any] = {}
        if plan.scores is not None:
            parts["prunable_sentences"] = plan.scores.prunable()
        if self._has_tokens:
            parts["generated_text"] = results[0].text
            parts["finish_reason"] = run.finish_reason
            parts["tool_calls"] = tool_calls_of(run.generations[0])
            parts["generated_tokens"] = []
        if plan.rows is not None:
            if plan.rows.wanted.prompt:
                parts["prompt_attention"] = []
            parts["attention_data"] = []
        for sample in range(len(self._offsets)):
            for name, elements in self._lists.of(sample).items():
                parts[name] += elements
        self._hold.take(self.n_bytes)  # the pieces and the whole at the same time
        encode = msgspec.msgpack.encode if self._packs else msgspec.json.encode
        whole = encode(GenerateReply(results=results, details=details, **parts))
        self._hold.take(-2 * self.n_bytes)  # the pieces go with the builder
        return whole

    def _result(self, generation: Generation, sample: int) -> SampleResult:
        stop = "" if self._trims_stop else generation.stop_match or ""
        logprobs: Any = UNSET
        if self._plan.request.sampling.top_logprobs is not None:
            lists = self._lists.of(sample, "logprobs")
            logprobs = TextLogprobs(**cast("Any", lists)) if lists else None
        return SampleResult(
            generation.text + stop,
            kobold_reason(generation.finish_reason or "cancelled"),
            generation.usage.prompt_tokens,
            generation.usage.completion_tokens,
            logprobs,
        )
