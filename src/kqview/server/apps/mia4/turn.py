"""A turn of a conversation, from the body of its request to the last frame of its answer."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import msgspec

from kqview.errors import InternalError, KqviewError
from kqview.server.api.wire.attention import AttentionWriter
from kqview.server.apps.chat_service import Call, ChatService
from kqview.server.apps.mia4 import request, schema
from kqview.server.apps.mia4.cancelling import Cancelled
from kqview.server.apps.mia4.frames import (
    Frame,
    FrameWriter,
    encoded,
    end_of,
    stop_reason_of,
    usage_of,
)
from kqview.server.apps.mia4.persona import PersonaFile, PersonaText
from kqview.server.config import UNNAMED, Model
from kqview.server.errors import answer_of, too_late
from kqview.server.live_config import LiveConfig
from kqview.server.models.events_bus import (
    GenerationCompleted,
    GenerationStarted,
    ReasoningPresetApplied,
)
from kqview.server.models.model_entry import ModelEntry, resolved
from kqview.server.models.run import Removal, Run, Step
from kqview.server.models.service import OFFLOAD_BYTES
from kqview.server.web.endpoint import EVENT_TAIL, Feed, Frames
from kqview.types import Usage

# Templates may take seconds: their work is large enough for another thread.
_LARGE: Final = 2**20
_ID_BYTES: Final = 40  # of an id of a prompt, of which there are at most as many as bytes
_TOKEN_BYTES: Final = 128  # of a token's text in a list

# The values know nothing of their keys, so a server that nobody has any more is freed.
_personas: Final[WeakKeyDictionary[LiveConfig, tuple[str | None, PersonaFile]]] = (
    WeakKeyDictionary()
)

_log: Final = logging.getLogger("kqview.server")


async def generate(call: Call, body: schema.GenerateBody) -> Feed:
    """A turn of a conversation; errors before its stream begins are those of HTTP."""
    # A name in a path has no slash, which the header may have.
    request_id = body.request_id or call.request_id.replace("/", "-")
    named = call.service.pool.find(body.model)
    body = resolved(body, named)
    async with contextlib.AsyncExitStack() as resources:
        work = resources.enter_context(call.service.cancelling.known(call.caller.owner, request_id))
        limit_s = call.service.settings.request_timeout_s
        limit = asyncio.timeout(limit_s or None)
        try:
            async with work.waiting(), limit:
                turn = await _begun(call, body, request_id, resources)
        except TimeoutError:
            raise (too_late(limit_s) if limit.expired() else TimeoutError) from None
        except Cancelled:
            return Feed(_of_nothing(request_id, model_id_of(named)))
        work.runs(turn.run)
        return Feed(_streamed(call.service, turn, resources.pop_all()))


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
    model = await resources.enter_async_context(service.pool.using(body.model))
    engine, model_id = model.engine, model_id_of(model)
    with call.hold.part() as ids:  # a prompt that fits is small
        ids.take(_ID_BYTES * call.n_body_bytes)
        plan = await service.converted(
            _LARGE, call.hold, request.plan_of, body, request_id=request_id, engine=engine,
            settings=given.settings, llm=given.llm, model=configured(call, model),
            max_context=model.max_context, persona=await _persona(call),
            fit=None if talk is None else talk.fit,
        )  # fmt: skip
        seat = None
        if talk is not None:
            seat = await resources.enter_async_context(talk.seat(model, caller, plan.ids))
        run = await service.start(plan.request, caller, call.hold, model=model)
    resources.push_async_callback(run.aclose)
    if seat is not None:
        seat.run = run
    hidden = set[int]()
    attention = None
    if plan.request.attention is not None:
        attention = AttentionWriter(run, engine.model, service.kept, plan.prompt_text, hidden)
    return StreamedTurn(
        run, plan, model_id=model_id, session_id=body.session_id, attention=attention,
        hidden=hidden, publish=partial(service.bus.publish, owner=caller.owner),
        store=None if talk is None else partial(talk.append, body.prompt, model=model_id),
        n_left_out=0 if talk is None else talk.n_left_out,
    )  # fmt: skip


async def _persona(call: Call) -> PersonaText | None:
    """The persona, from its file if that has changed."""
    live = call.service.live
    file = live.config.persona.file
    if file is None:
        return None
    known = _personas.get(live)
    if known is None or known[0] != file:
        known = _personas[live] = file, PersonaFile(file)
    persona = known[1]
    if persona.is_due:
        return await call.service.converted(_LARGE, call.hold, persona.refresh)
    return persona.current


def model_id_of(model: ModelEntry) -> str:
    """What clients call a model: its id, or its own name where the configuration gives it none."""
    return model.name if model.id == UNNAMED and model.loaded is not None else model.id


def configured(call: Call, model: ModelEntry) -> Model:
    """What the configuration says of a model; its passport may have changed since it was loaded."""
    return call.service.live.config.models.get(model.id, model.config)


# ---- its stream


async def _of_nothing(request_id: str, model_id: str) -> AsyncGenerator[Frames]:
    """The stream of a request that was cancelled before it was admitted."""
    usage = usage_of(request_id, model_id, Usage(), 0.0)
    yield _last(usage, end_of(request_id, "cancelled"))


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
            failure = _failure(turn, error)
        finally:
            # Also if the client left: the slot is freed, and what was produced is stored.
            try:
                await run.aclose()
                await _written(service, turn.n_bytes_of(), turn.finish)
                if turn.store is not None and turn.answer:
                    await turn.store(turn.answer)
            except Exception as error:
                failure = failure or _failure(turn, error)
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


def _failure(turn: "StreamedTurn", error: Exception) -> KqviewError:
    """What the client hears of *error*."""
    if isinstance(error, KqviewError):
        return error
    _log.error("stream of %s failed", turn.run.request_id, exc_info=error)
    return InternalError("the server failed; its log says more")


def _last(*frames: Frame) -> Frames:
    return (EVENT_TAIL.join(encoded(one.event, one) for one in frames),)


class StreamedTurn:
    """A request that was admitted: frames for its client, events for the bus. Pure."""

    def __init__(
        self,
        run: Run,
        plan: request.TurnPlan,
        *,
        model_id: str,
        session_id: str | None,
        publish: Callable[[msgspec.Struct], None],
        attention: AttentionWriter | None,
        hidden: set[int],
        store: Callable[[str], Awaitable[None]] | None,
        n_left_out: int,
    ) -> None:
        """Begin to write *run*, which is what *plan* asks for, and publish so.

        Args:
            run: The run.
            plan: What was asked for.
            model_id: Name of the model in frames and events.
            session_id: That of the conversation.
            publish: Passes an event to whoever may see it.
            attention: Keeps the rows, None without any.
            hidden: As of `FrameWriter`.
            store: Appends an answer to its conversation, None without one.
            n_left_out: How many messages of the conversation are not in the prompt.
        """
        self.run = run
        self.store = store
        self._plan = plan
        self._attention = attention
        self._publish = publish
        self._n_left_out = n_left_out
        self._is_finished = False
        self._names: Final[dict[str, Any]] = {
            "request_id": plan.request.request_id, "session_id": session_id, "model_id": model_id,
        }  # fmt: skip
        self._writer = FrameWriter(
            plan.request.request_id,
            model_id,
            plan.reading,
            drops_reasoning=plan.drops_reasoning,
            has_attention=attention is not None,
            hidden=hidden,
        )
        if plan.preset is not None:
            publish(
                ReasoningPresetApplied(
                    request_id=plan.request.request_id,
                    model_id=model_id,
                    preset=plan.preset,
                    reasoning_max_tokens=plan.merged.reasoning_max_tokens,
                )
            )
        known: dict[str, Any] = {}
        for name, one in (("system_prompt", plan.system_prompt), ("app_persona", plan.persona)):
            if one is not None:
                known |= {f"{name}_hash": one.hash, f"{name}_version": one.version}
        publish(
            GenerationStarted(
                **self._names,
                prompt_tokens=len(plan.ids),
                sampling=plan.merged.as_object(),
                sampling_origin=plan.merged.origin,
                passport_hash=plan.passport.hash,
                passport_version=plan.passport.version,
                **known,
            )
        )

    @property
    def answer(self) -> str:
        """The answer so far, without reasoning."""
        return self._writer.answer

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
        sent += self._writer.feed(step.token.text, step.token.index)
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
        end = end_of(
            writer.request_id,
            "error" if failure is not None else stop_reason_of(run.finish_reason),
        )
        usage = usage_of(
            writer.request_id, writer.model_id, run.usage, run.elapsed_s, writer.tokens,
            self._n_left_out,
        )  # fmt: skip
        figures = msgspec.to_builtins(usage)
        del figures["request_id"], figures["model_id"]
        self._publish(
            GenerationCompleted(
                **self._names,
                status=end.status,
                stop_reason=end.stop_reason,
                code=None if failure is None else failure.code,
                result_summary={"sampling": self._plan.merged.as_object(), **figures},
                reasoning_buffer_latency_ms=writer.buffer_latency_ms,
            )
        )
        return _last(usage if failure is None else writer.error(failure), end)
