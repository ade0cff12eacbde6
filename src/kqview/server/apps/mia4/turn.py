"""A turn of a conversation, from the body of its request to the last frame of its answer.

A frame is ``event: NAME`` and ``data: JSON``. Each stream ends with exactly one ``end``.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, Final, cast

import msgspec
from msgspec import UNSET, Struct

from kqview.chat.reasoning import Piece, TokenCounter
from kqview.chat.turn import Reading
from kqview.errors import KqviewError
from kqview.server.api.wire.attention import AttentionWriter
from kqview.server.api.wire.chat import LARGE
from kqview.server.api.wire.citations import Cited, Citing
from kqview.server.apps.conversations import Call, ChatService, ConversationTurn
from kqview.server.apps.mia4 import request, schema
from kqview.server.apps.mia4.schema import (
    AnalysisFrame,
    CitationFrame,
    EndFrame,
    ErrorFrame,
    ReasoningFrame,
    RemovedFrame,
    StopReason,
    TokenFrame,
    UsageFrame,
)
from kqview.server.config import UNNAMED, ModelConfig
from kqview.server.errors import Answer, answer_of, too_late
from kqview.server.models.events_bus import (
    GenerationCompleted,
    GenerationStarted,
    ReasoningPresetApplied,
)
from kqview.server.models.model_entry import ModelEntry, resolved
from kqview.server.models.run import Removal, Run, Step
from kqview.server.models.service import OFFLOAD_BYTES
from kqview.server.models.stream import failure_of
from kqview.server.models.texts import ID_BYTES
from kqview.server.web.endpoint import EVENT_TAIL, Feed, Frames
from kqview.stop_strings import ShownText
from kqview.types import Token, Usage

_TOKEN_BYTES: Final = 128  # of a token's text in a list

_STOP_REASONS: Final = {"stop_token": "stop", "tool_calls": "stop"}
_ERROR_TYPES: Final = {
    401: "unauthorized", 403: "forbidden", 404: "not_found", 408: "timeout", 409: "conflict",
    413: "too_large", 429: "rate_limited", 501: "not_supported", 503: "unavailable",
    504: "timeout", 507: "out_of_space",
}  # fmt: skip


async def generate(call: Call, body: schema.GenerateBody) -> Feed:
    """A turn of a conversation; errors before its stream begins are those of HTTP."""
    # A name in a path has no slash, which the header may have.
    request_id = body.request_id or call.request_id.replace("/", "-")
    named = call.service.pool.find(body.model)
    body = resolved(body, named)
    limit_s = call.service.settings.request_timeout_s
    limit = asyncio.timeout(limit_s or None)
    async with contextlib.AsyncExitStack() as resources:
        known = call.service.cancelling.known(call.caller.owner, request_id, limit)
        work = resources.enter_context(known)
        try:
            async with limit:
                turn = await _begun(call, body, request_id, resources)
        except TimeoutError:
            if work.is_cancelled and limit.expired():
                return Feed(_of_nothing(request_id, model_id_of(named)))
            raise (too_late(limit_s) if limit.expired() else TimeoutError) from None
        work.run = turn.run
        if work.is_cancelled:  # just when it began
            turn.run.end()
        frames = _streamed(call.service, turn, resources.pop_all())
        return Feed(frames, turn.run.request.headers)


async def _begun(
    call: Call,
    body: schema.GenerateBody,
    request_id: str,
    resources: contextlib.AsyncExitStack,
) -> "StreamedTurn":
    service, caller = call.service, call.caller
    given, talk = service.live.config, None
    if body.session_id is not None:
        talk = await resources.enter_async_context(
            service.conversations.turn(caller.owner, body.session_id, call.hold)
        )
        if body.replaces:
            talk.replace(body.replaces)
    model = await resources.enter_async_context(service.pool.using(body.model))
    persona, file = None, service.persona.value
    if file is not None:
        persona = file.current
        if file.is_due:
            persona = await service.converted(LARGE, call.hold, file.refresh)
    with call.hold.part() as ids:  # a prompt that fits is small
        ids.take(ID_BYTES * call.n_body_bytes)
        plan = await service.converted(
            LARGE, call.hold, request.plan_of, body, request_id=request_id, engine=model.engine,
            settings=given.settings, llm=given.llm, model=configured(call, model),
            max_context=model.max_context, persona=persona,
            fit=None if talk is None else talk.fit,
        )  # fmt: skip
        seat = None
        if talk is not None:
            seat = await resources.enter_async_context(talk.seat(model, caller, plan.ids))
        run = await service.start(plan.request, caller, call.hold, model=model)
    resources.push_async_callback(run.aclose)
    if seat is not None:
        seat.run = run
    return StreamedTurn(call, run, plan, body, model, talk)


def model_id_of(model: ModelEntry) -> str:
    """What clients call a model: its id, or its own name where the configuration gives it none."""
    return model.name if model.id == UNNAMED and model.loaded is not None else model.id


def configured(call: Call, model: ModelEntry) -> ModelConfig:
    """What the configuration says of a model; its passport may have changed since it was loaded."""
    return call.service.live.config.models.get(model.id, model.config)


# ---- its stream


async def _of_nothing(request_id: str, model_id: str) -> AsyncGenerator[Frames]:
    """The stream of a request that was cancelled before it was admitted."""
    usage = usage_of(request_id, model_id, Usage(), 0.0, TokenCounter())
    yield (encoded(usage, end_of(request_id, "cancelled")),)


async def _streamed(
    service: ChatService, turn: "StreamedTurn", resources: contextlib.AsyncExitStack
) -> AsyncGenerator[Frames]:
    """Every frame of *turn*, the last one ``end``; holds *resources* meanwhile."""
    run = turn.run
    failure: KqviewError | None = None
    async with resources:
        try:
            yield ()  # the client hears that it was admitted
            async for step in run:
                sent = await _written(service, turn.n_bytes_of(step), turn.token, step)
                del step  # the pool wants its memory back while the client reads
                if sent:
                    yield (EVENT_TAIL.join(sent),)
            if sent := await _written(service, turn.n_bytes_of(), turn.finish):
                yield (EVENT_TAIL.join(sent),)
        except Exception as error:
            failure = failure_of(run, error)
        finally:
            # Also if the client left: the slot is freed, and what was produced is stored.
            try:
                await run.aclose()
                await _written(service, turn.n_bytes_of(), turn.finish)
                await turn.store()
            except Exception as error:
                failure = failure or failure_of(run, error)
            last = turn.end(failure)
    # What the turn held is free before the client hears that it ended.
    yield last


async def _written(
    service: ChatService, n_bytes: int, write: Callable[..., list[bytes]], *args: Any
) -> list[bytes]:
    """*write*, of *n_bytes*; in another thread if that is much.

    That thread is done before a cancellation goes on: the end of the turn writes as well.
    """
    if n_bytes < OFFLOAD_BYTES:
        return write(*args)
    writing = asyncio.ensure_future(service.offload(n_bytes, write, *args))
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing])
        writing.exception()  # nobody is left to hear it
        raise


class StreamedTurn:
    """A request that was admitted: frames for its client, events for the bus."""

    def __init__(
        self,
        call: Call,
        run: Run,
        plan: request.TurnPlan,
        body: schema.GenerateBody,
        model: ModelEntry,
        talk: ConversationTurn | None,
    ) -> None:
        """Begin to write *run*, which is what *plan* asks for; *talk* is its conversation."""
        request_id, model_id = plan.request.request_id, model_id_of(model)
        self.run = run
        self._plan = plan
        self._talk = talk
        self._prompt = body.prompt
        self._publish = partial(call.service.bus.publish, owner=call.caller.owner)
        self._observe_reasoning_ms = call.service.observe_reasoning_ms
        self._is_finished = False
        self._names: Final[dict[str, Any]] = {
            "request_id": request_id, "session_id": body.session_id, "model_id": model_id,
        }  # fmt: skip
        hidden = set[int]()
        self._attention: AttentionWriter | None = None
        if plan.request.attention is not None:
            self._attention = AttentionWriter(
                run, model.engine.model, call.service.kept, plan.prompt_text, hidden
            )
        self._writer = FrameWriter(
            request_id, model_id, plan.reading, drops_reasoning=plan.drops_reasoning,
            has_attention=self._attention is not None, hidden=hidden,
        )  # fmt: skip
        if plan.sources is not None:
            self._writer.citing = Citing(plan.sources)
        if plan.preset is not None:
            most = plan.merged.reasoning_max_tokens
            self._publish(
                ReasoningPresetApplied(
                    request_id=request_id, model_id=model_id, preset=plan.preset,
                    reasoning_max_tokens=most,
                )
            )  # fmt: skip
        self._publish(
            GenerationStarted(
                **self._names, prompt_tokens=len(plan.ids), sampling=plan.merged.as_object(),
                sampling_origin=plan.merged.origin, **plan.identity,
            )
        )  # fmt: skip

    async def store(self) -> None:
        """Append the answer to its conversation, if there are both."""
        if self._talk is not None and (answer := self._writer.answer):
            await self._talk.append(self._prompt, answer, model=self._names["model_id"])

    def n_bytes_of(self, step: Step | None = None) -> int:
        """About what is to be written at once: *step*, and tokens that wait for a mark."""
        n_tokens, n_bytes = self._writer.tokens.n_waiting, 0
        if step is not None:
            n_bytes = step.n_bytes
            n_tokens += 0 if step.removal is None else len(step.removal.texts)
        return n_bytes + _TOKEN_BYTES * n_tokens

    def token(self, step: Step) -> list[bytes]:
        """Frames of the next token; any thread, because its row may be large."""
        self.run.hold.take(_TOKEN_BYTES)
        sent = [] if step.removal is None else self._take_back(step.removal)
        if self._writer.citing is not None:
            self.run.hold.take(self._writer.citing.bytes_per_token)
        sent += self._writer.feed(step.token.text, step.token.index, step.token)
        if self._attention is not None:  # only then, so that `hidden` knows the token
            self._attention.token(self.run, step)
        return sent

    def _take_back(self, removal: Removal) -> list[bytes]:
        if self._attention is not None:
            self._attention.removed(self.run, removal)
        self._writer, sent = self._writer.take_back(removal)
        return sent

    def finish(self) -> list[bytes]:
        """Frames of what was held back, once no token comes any more; none if they were given."""
        if self._is_finished:
            return []
        self._is_finished = True
        sent = [one for removal in self.run.last_removals() for one in self._take_back(removal)]
        return sent + self._writer.finish(self.run.generations[0].text)

    def end(self, error: KqviewError | None) -> Frames:
        """The last frames, once the run is over; publishes the end. Call it once.

        Args:
            error: What went wrong, None if nothing did.
        """
        run, writer = self.run, self._writer
        failure = None if error is None else answer_of(error)
        end = end_of(writer.request_id, run.finish_reason if failure is None else "error")
        n_left_out = 0 if self._talk is None else self._talk.n_left_out
        usage = usage_of(
            writer.request_id, writer.model_id, run.usage, run.elapsed_s, writer.tokens, n_left_out
        )
        if (latency_ms := writer.buffer_latency_ms) is not None:
            self._observe_reasoning_ms(latency_ms)
        figures = msgspec.to_builtins(usage)
        del figures["request_id"], figures["model_id"]
        self._publish(
            GenerationCompleted(
                **self._names,
                status=end.status,
                stop_reason=end.stop_reason,
                code=None if failure is None else failure.code,
                result_summary={"sampling": self._plan.merged.as_object(), **figures},
                reasoning_buffer_latency_ms=latency_ms,
            )
        )
        return (encoded(usage if failure is None else writer.error(failure), end),)


# ---- frames


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


def encoded(*events: Struct) -> bytes:
    """Events with an empty line between two, each named by its ``event`` or else its class."""
    return EVENT_TAIL.join(
        b"event: %s\ndata: %s"
        % (getattr(one, "event", type(one).__name__).encode(), msgspec.json.encode(one))
        for one in events
    )


def end_of(request_id: str, reason: str) -> EndFrame:
    """The last frame, from the reason why the generation ended, or "error"."""
    stop_reason = cast("StopReason", _STOP_REASONS.get(reason, reason))
    status = "error" if stop_reason == "error" else "ok"
    return EndFrame(request_id=request_id, status=status, stop_reason=stop_reason)


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
        self._names: Final[dict[str, Any]] = {"request_id": request_id, "model_id": model_id}
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
        self.citing: Citing | None = None
        """Tells what sentences are from; None if nobody asks."""
        self.tokens = TokenCounter()
        """How many tokens of each kind there are, whole after `finish`."""

    # ---- while it comes

    def feed(self, text: str, index: int, token: Token | None = None) -> list[bytes]:
        """Frames of the next token, and of those before it whose text is certain now.

        Args:
            text: Its text.
            index: Its place.
            token: It itself, for `citing`.
        """
        self._n_tokens += 1
        self.tokens.add(text)
        if self._waiting is not None:
            self._waiting.append(_Waiting(index, len(text)))
            if self._drops:
                self._hidden.add(index)
        pieces = self._splitter.feed(self._shown.feed(text))
        if self.citing is not None and token is not None:
            n_new = sum(len(one.text) for one in pieces if one.kind == "content")
            self.citing.add(token, len(self.answer) + n_new)
        return self._frames(pieces)

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
        if self.citing is not None:
            left.citing = self.citing
            left.citing.take_back(removal.n_left)
            deque(left.citing.feed(left.answer), maxlen=0)  # which the client has
        n_reasoning = len(self._reasoned) - len(left._reasoned)
        is_told = n_reasoning and self._streams and not self._drops
        lost = RemovedFrame(
            tokens=removal.n_tokens,
            characters=len(self.answer) - len(left.answer),
            reasoning_characters=n_reasoning if is_told else UNSET,
            **self._names,
        )
        return left, [encoded(lost)]

    def finish(self, text: str) -> list[bytes]:
        """Frames of what was held back; *text* is the whole without its stop sequence."""
        rest = self._splitter.feed(self._shown.rest(text))
        frames = self._frames([*rest, *self._splitter.flush()])
        self.tokens.end()
        for token in self._waiting or ():  # such as those of a stop sequence
            self._show(token)
        if self.citing is not None and (cited := self.citing.finish()) is not None:
            frames.append(self._citation(cited))
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
                frames += self._reasoning()
            if not is_reasoning and self.citing is not None:
                for text, cited in self.citing.feed(piece.text):
                    frames += self._written([(text, None)] if text else (), is_reasoning=False)
                    if cited is not None:
                        frames.append(self._citation(cited))
            elif not is_reasoning or (self._streams and not self._drops):
                frames += self._written(texts, is_reasoning=is_reasoning)
        return frames

    def _citation(self, cited: Cited) -> bytes:
        return encoded(cited.facts(CitationFrame, **self._names))

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

    def _written(
        self, texts: Sequence[tuple[str, int | None]], *, is_reasoning: bool
    ) -> list[bytes]:
        frames: list[bytes] = []
        for text, index in texts:
            fields: dict[str, Any] = {**self._names, "text": text}
            if index is not None:
                fields["attention"] = f"/generate/{self.request_id}/attention/{index}"
            if is_reasoning:
                one = AnalysisFrame(seq=self._n_analysis, **fields)
                self._n_analysis += 1
            else:
                n_tokens = self._n_tokens if index is None else index + 1
                one = TokenFrame(seq=self._n_answer, tokens_out=n_tokens, **fields)
                self._n_answer += 1
            frames.append(encoded(one))
        return frames

    def _reasoning(self) -> list[bytes]:
        """The whole reasoning, once, unless it was streamed."""
        if self._drops or self._streams or self._is_reasoning_sent or not (whole := self._reasoned):
            return []
        self._is_reasoning_sent = True
        return [encoded(ReasoningFrame(reasoning=whole, **self._names))]

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
        kind = _error_type_of(answer)
        return ErrorFrame(code=answer.code, error_type=kind, message=answer.message, **self._names)


def usage_of(
    request_id: str,
    model_id: str,
    used: Usage,
    elapsed_s: float,
    tokens: TokenCounter,
    n_left_out: int = 0,
) -> UsageFrame:
    """What an answer took since it was admitted, *elapsed_s* ago."""
    n_out = used.completion_tokens
    latency_ms = max(1, round(elapsed_s * 1000))
    return UsageFrame(
        request_id=request_id,
        model_id=model_id,
        prompt_tokens=used.prompt_tokens,
        output_tokens=n_out,
        latency_ms=latency_ms,
        decode_tps=n_out / (latency_ms / 1000),
        reasoning_tokens=tokens.n_reasoning,
        final_tokens=tokens.n_final,
        reasoning_ratio=tokens.n_reasoning / n_out if n_out else 0.0,
        messages_left_out=n_left_out or UNSET,
    )


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """*pieces* with adjacent ones of a kind as one, without empty ones."""
    kinds = groupby((one for one in pieces if one.text), key=attrgetter("kind"))
    return [Piece(kind, "".join(one.text for one in some)) for kind, some in kinds]
