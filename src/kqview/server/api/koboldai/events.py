"""Events of the KoboldAI API: what is sent of a run, each encoded as it is. Pure.

Four streams have them: typed events and KoboldAI's plain ones over SSE, the frames of kobold's
WebSocket, and those of dream's. Their renderers keep nothing but counts, and the text of a plain
stream that may still turn out to be a stop sequence.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Final, cast

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kqview.engine import Engine
from kqview.errors import KqviewError
from kqview.server.api.koboldai.failures import (
    KoboldFailure,
    error_body,
    kobold_error_body,
)
from kqview.server.api.koboldai.pruning import PrunableSentence, mean_row, reduced
from kqview.server.api.koboldai.request import KoboldPlan
from kqview.server.api.wire.attention import event_pieces, joined_text
from kqview.server.api.wire.event_parts import (
    ROW,
    AttentionObject,
    ModCall,
    Removed,
    RowsDescribed,
)
from kqview.server.api.wire.mods_field import calls_of, removed
from kqview.server.errors import Answer
from kqview.server.models.run import Removal, Run, Step
from kqview.server.web.described import about
from kqview.server.web.endpoint import NEXT_EVENT, Frames, Sample
from kqview.stop_strings import ShownText
from kqview.types import PromptBlock, Token
from kqview.types.token import Attention


class KoboldLeftOut(Struct, kw_only=True):
    """What the server left out of a request."""

    truncated_tokens: Annotated[
        int | UnsetType, about("Tokens at the front of a text that was too long.", 120)
    ] = UNSET
    ignored: Annotated[
        Sequence[str] | UnsetType, about("Names in the request that had no effect.", ["max_lenght"])
    ] = UNSET


class StartEvent(KoboldLeftOut, kw_only=True, tag_field="type", tag="start"):
    """What follows, with ``start_event``."""

    request_id: Annotated[str, about("Label of the request.", "r1")]
    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 7)]
    cached_tokens: Annotated[
        int, about("Those of them that were in a cache; the others were evaluated.", 0)
    ]
    prompt_ids: Annotated[Sequence[int], about("Their ids, as they are evaluated.", [0, 35, 444])]
    seed: Annotated[int, about("The seed that is used, also if the request gave none.", 2531011)]
    attention: Annotated[
        RowsDescribed | UnsetType, about("What the rows are, if some were asked for.")
    ] = UNSET


class LikelyToken(Struct):
    """One of the most probable tokens at a place."""

    token_id: Annotated[int, about("Its id.", 354)]
    text: Annotated[str, about("Its text.", " the")]
    logprob: Annotated[float, about("Its logprob before bias, grammar and samplers.", -1.5)]


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


class KoboldToken(Struct, kw_only=True):
    """A token that was generated."""

    token_id: Annotated[int, about("Its id.", 354)]
    text: Annotated[
        str, about('The text that it completes; "" inside a character of several ids.', " teac")
    ]
    logprob: Annotated[
        float | UnsetType,
        about("Its logprob before bias, grammar and samplers, if asked for.", -0.6),
    ] = UNSET
    top_logprobs: Annotated[
        list[LikelyToken] | UnsetType, about("The most probable tokens at its place, if asked for.")
    ] = UNSET
    sample: Annotated[
        int | UnsetType,
        about("In a reply that is not streamed: index of the sample, if there are several.", 0),
    ] = UNSET


class KoboldTokenEvent(Struct, kw_only=True, tag_field="type", tag="token"):
    """A token, with its attention."""

    token: Annotated[KoboldToken, about("The token.")]
    request_id: Annotated[str, about("Name of the request.", "r1")]
    sample: Annotated[int | UnsetType, about("Index of the sample, if there are several.", 0)] = (
        UNSET
    )
    attention: Annotated[
        AttentionObject | UnsetType | None,
        about(
            "Its attention; null over SSE and absent over the WebSocket if none was asked for.", ROW
        ),
    ] = UNSET


class KoboldTokenFrame(Struct, kw_only=True, tag_field="type", tag="token"):
    """A token; a binary frame with its row follows."""

    token_id: Annotated[int, about("Its id.", 354)]
    text: Annotated[str, about("The text that it completes.", " teac")]
    attention: Annotated[
        AttentionObject | UnsetType | None,
        about(
            "What the row is, if it is anything but float32 of all layers and heads; formats "
            "that are not arrays are here completely."
        ),
    ] = UNSET


class KoboldPromptEvent(Struct, kw_only=True, tag_field="type", tag="prompt_attention"):
    """Rows of the prompt, with ``prompt_attention``."""

    request_id: Annotated[
        str | UnsetType, about("Name of the request; absent in kobold's frames.", "r1")
    ] = UNSET
    start: Annotated[int, about("Position of their first token.", 0)]
    rows: Annotated[int, about("How many tokens they are of.", 7)]
    attention: Annotated[
        AttentionObject | UnsetType | None,
        about("Their attention.", {**ROW, "shape": [4, 8, 7, 7]}),
    ] = UNSET


class KoboldRemovedEvent(Removed, kw_only=True, tag_field="type", tag="removed"):
    """What mods took back, which a client drops; no binary frame follows."""

    request_id: Annotated[
        str | UnsetType, about("Name of the request; absent in kobold's frames.", "r1")
    ] = UNSET
    sample: Annotated[int | UnsetType, about("Index of the sample, if there are several.", 0)] = (
        UNSET
    )


class PruningEvent(Struct, kw_only=True, tag_field="type", tag="pruning_suggestion"):
    """Sentences that got little attention, before the end, if there were ``sentences``."""

    request_id: Annotated[str, about("Name of the request.", "r1")]
    prunable_sentences: Annotated[
        list[PrunableSentence], about("The sentences, the one with the least attention first.")
    ]


class SampleEnd(Struct, kw_only=True):
    """The end of a sample."""

    sample: Annotated[int, about("Its index.", 0)]
    finish_reason: Annotated[str | None, about("Why it ended.", "length")]
    total_tokens: Annotated[int, about("Tokens that were generated.", 2)]


class KoboldDoneEvent(Struct, kw_only=True, tag_field="type", tag="done"):
    """The end, with the figures of the request; times and counts are of its first sample."""

    finish_reason: Annotated[
        str,
        about('Why it ended: of kobold "stop" or "length", of dream the exact reason.', "length"),
    ]
    total_tokens: Annotated[int, about("Tokens that were generated.", 2)]
    request_id: Annotated[
        str | UnsetType, about("Name of the request; absent in kobold's frames.", "r1")
    ] = UNSET
    reason: Annotated[
        str | UnsetType,
        about(
            'Of kobold, why it ended exactly: "stop" if the model ended the text, "stop_token", '
            '"stop_sequence", "length", "cancelled" or "tool_calls".',
            "length",
        ),
    ] = UNSET
    generation_time_ms: Annotated[
        int | UnsetType, about("Of dream, milliseconds from admission to the end.", 4)
    ] = UNSET
    seed: Annotated[int, about("The seed that was used, also if the request gave none.", 2531011)]
    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 7)]
    cached_tokens: Annotated[
        int, about("Those of them that were in a cache; the others were evaluated.", 0)
    ]
    queue_ms: Annotated[float, about("Milliseconds that it waited for a slot.", 0.1)]
    prompt_ms: Annotated[float, about("Milliseconds from then to the first token.", 4.2)]
    generation_ms: Annotated[float, about("Milliseconds from the first token to the last.", 1.7)]
    truncated_tokens: Annotated[
        int | UnsetType, about("Tokens at the front of a text that was too long.", 120)
    ] = UNSET
    ignored: Annotated[
        Sequence[str] | UnsetType, about("Names in the request that had no effect.", ["max_lenght"])
    ] = UNSET
    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET
    samples: Annotated[
        list[SampleEnd] | UnsetType,
        about("Of dream, the end of each sample, if there are several."),
    ] = UNSET
    text: Annotated[
        str | UnsetType,
        about(
            "Of kobold, text that no token completed, if the model ended inside a character.", "�"
        ),
    ] = UNSET


class PlainEvent(KoboldLeftOut, kw_only=True):
    """Text in KoboldAI's form, for requests without attention and ``request_id``."""

    token: Annotated[str, about("Text that is new.", " t")]
    finish_reason: Annotated[
        str | None, about('Why it ended: "length" or "stop"; null before the end.', None)
    ]
    removed: Annotated[Removed | UnsetType, about("What mods took back.")] = UNSET
    tool_calls: Annotated[list[ModCall] | UnsetType, about("Calls that a mod made.")] = UNSET


# ---- what streams have, for the description


def _sent(kind: type[Struct], about: str = "", **shown: Any) -> Sample:
    return Sample("server", about or (kind.__doc__ or "").removesuffix("."), shown, type=kind)


_NAMED: Final[dict[str, Any]] = {"request_id": "r1"}
_PROMPT: Final = _sent(KoboldPromptEvent, **_NAMED, attention={**ROW, "shape": [4, 8, 7, 7]})
_START: Final = _sent(StartEvent)
_TOKEN: Final = _sent(KoboldTokenEvent, attention=ROW)
_REMOVED: Final = _sent(KoboldRemovedEvent, **_NAMED)
_DONE: Final = _sent(KoboldDoneEvent, **_NAMED)
_FAILED: Final = _sent(KoboldFailure, "A failure, in place of the end", type="error", **_NAMED)
EVENTS: Final = (_START, _PROMPT, _TOKEN, _REMOVED, _DONE, _FAILED, _sent(PlainEvent))
"""Over SSE."""
FRAMES: Final = (
    _START, _sent(KoboldPromptEvent),
    Sample("server", "Their values", "float32 values, layers × heads × rows × tokens"),
    _sent(KoboldTokenFrame),
    Sample("server", "Its row", "float32 values, layers × heads × tokens before it"),
    _sent(KoboldRemovedEvent), _sent(KoboldDoneEvent), _FAILED,
)  # fmt: skip
"""Over kobold's WebSocket."""
MESSAGES: Final = (
    _START, _PROMPT,
    Sample("server", "Their values, if encoding is binary", "values in C order, little-endian"),
    _TOKEN,
    Sample("server", "Its row, if encoding is binary", "values in C order, little-endian"),
    _REMOVED, _sent(PruningEvent), _DONE, _FAILED,
)  # fmt: skip
"""Over dream's WebSocket."""


# ---- renderers


def token_bytes_of(engine: Engine) -> Callable[[int], bytes]:
    """A function for the bytes of an id of *engine*, b"" once it is closed; any thread."""

    @cache  # of a vocabulary's size at most
    def token_bytes(id_: int) -> bytes:
        try:
            return engine.token_bytes(id_)
        except KqviewError:
            return b""

    return token_bytes


def kobold_reason(reason: str) -> str:
    """ "stop" or "length": KoboldAI's clients know no other good end."""
    return "length" if reason == "length" else "stop"


def likely_tokens(token: Token, token_bytes: Callable[[int], bytes]) -> list[LikelyToken]:
    """The most probable tokens at the place of *token*."""
    return [
        LikelyToken(id_, token_bytes(id_).decode("utf-8", "replace"), logprob)
        for id_, logprob in token.top_logprobs or ()
    ]


class TypedEvents:
    """What the three streams of typed events do alike."""

    def __init__(self, plan: KoboldPlan, token_bytes: Callable[[int], bytes]) -> None:
        """Write what *plan* shows; *token_bytes* gives the bytes of an id, for logprobs."""
        self._plan = plan
        self._token_bytes = token_bytes
        self._has_start = plan.has_start
        self._n_shown = 0  # characters
        self._n_tokens = [0] * plan.request.n_samples

    separator: ClassVar[Sequence[bytes]] = ()
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
            **details_of(run, self._plan.ignored),
        )
        if run.generations[0].tool_calls is not None:
            event.tool_calls = calls_of(run.generations[0].tool_calls)
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
        raise NotImplementedError

    def _with_rows(self, run: Run, event: Any, rows: Attention | None) -> Frames:
        """*event* with *rows* as its attention."""
        raise NotImplementedError

    def _end(self, run: Run, event: KoboldDoneEvent) -> Frames:
        """The last event, with what this stream adds."""
        raise NotImplementedError

    def _encoded(self, event: Struct) -> bytes | str:
        """*event*, which has no rows, as a frame."""
        raise NotImplementedError


class KoboldEvents(TypedEvents):
    """Typed events over SSE; rows are base64 in the JSON."""

    separator = (NEXT_EVENT,)

    def _event(self, run: Run, step: Step) -> Any:
        token = step.token
        shown = KoboldToken(token_id=token.id, text=token.text)
        if token.logprob is not None:
            shown.logprob = token.logprob
            shown.top_logprobs = likely_tokens(token, self._token_bytes)
        return KoboldTokenEvent(request_id=run.label, token=shown)

    def _with_rows(self, run: Run, event: Any, rows: Attention | None) -> Frames:
        event.attention, data = None, None
        if rows is not None and self._plan.rows is not None:
            event.attention, data = self._plan.rows.write(rows, run.count_copied)
        return event_pieces(event, data)

    def _end(self, run: Run, event: KoboldDoneEvent) -> Frames:
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


class DreamEvents(TypedEvents):
    """Events of dream's WebSocket: JSON texts, or MessagePack.

    An event whose attention has ``"encoding": "binary"`` and no ``data`` is followed by a binary
    frame with the values; in MessagePack the values are inside the event.
    """

    def __init__(
        self,
        plan: KoboldPlan,
        token_bytes: Callable[[int], bytes],
        answer: Callable[[BaseException], Answer],
        *,
        packs: bool,
    ) -> None:
        """Render *plan*.

        Args:
            plan: The request's.
            token_bytes: As in `TypedEvents`.
            answer: What to tell about an error, with its figures.
            packs: MessagePack instead of JSON.
        """
        super().__init__(plan, token_bytes)
        self._answer = answer
        self._packs = packs

    def _event(self, run: Run, step: Step) -> Any:
        watch(self._plan, step.token)
        event = KoboldTokenEvent(
            request_id=run.label, token=dream_token(step.token, self._token_bytes)
        )
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


def dream_token(token: Token, token_bytes: Callable[[int], bytes], **more: Any) -> KoboldToken:
    """A token; ``top_logprobs`` is there if more than its own logprob was asked for."""
    return KoboldToken(
        token_id=token.id,
        text=token.text,
        logprob=UNSET if token.logprob is None else token.logprob,
        top_logprobs=likely_tokens(token, token_bytes) if token.top_logprobs else UNSET,
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

    Text that may begin a stop sequence is held back until that is clear, because the stop sequence
    itself is not shown. The last event also says what the server left out of the request.
    """

    def __init__(self, stops: Sequence[str], ignored: Sequence[str] = (), *, trims: bool) -> None:
        """Hold back *stops* if *trims*; otherwise they are shown. The end tells of *ignored*."""
        self._shown = ShownText(stops if trims else ())
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
            **left_out(run, self._ignored),
        )
        if run.generations[0].tool_calls is not None:
            last.tool_calls = calls_of(run.generations[0].tool_calls)
        rest = self._shown.rest(run.generations[0].text if self._trims else run.text)
        held = PlainEvent(token=rest, finish_reason=None)
        return (
            [*event_pieces(held), NEXT_EVENT, *event_pieces(last)] if rest else event_pieces(last)
        )

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong."""
        return event_pieces(kobold_error_body(answer, run))
