"""Routes of the dream dialect: glue between endpoints, the service and the pure parts.

A WebSocket runs one generation at a time, and any number one after another. One task reads messages
all the time, so that a cancel is heard while tokens are sent; another sends the generation's
events. Both end with the socket.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from kqview.engine import Engine
from kqview.errors import BusyError, KqviewError, RequestError
from kqview.server.api.dream import schema, stream_schema
from kqview.server.api.dream.convert import (
    Plan,
    asks_for_tokens,
    context_limit,
    error_body,
    figures_of,
    load_options,
    memory_figures,
    model_info_of,
    plan_of,
    shared_error_body,
    trims_stop,
)
from kqview.server.api.dream.events import (
    EventRenderer,
    ReplyBuilder,
    check_reply,
    error_frame,
    message_of,
    name_in,
    reply_bytes,
)
from kqview.server.api.wire.attention_protocol import control_token_of, random_seed
from kqview.server.api.wire.event_parts import StartEvent
from kqview.server.errors import Answer, answer_of
from kqview.server.models.model_entry import ModelEntry, resolved
from kqview.server.models.model_files import name_in as name_of_file
from kqview.server.models.run import Run
from kqview.server.models.service import Call, Service
from kqview.server.models.stream import send_run
from kqview.server.settings import Settings
from kqview.server.web.access import ANYONE, Caller
from kqview.server.web.budget import Reservation, uncounted
from kqview.server.web.endpoint import HttpReply, Operation, Sample, error_reply
from kqview.server.web.sockets import Socket


def plan_for(
    model: ModelEntry,
    settings: Settings,
    body: schema.DreamFields,
    request_id: str,
    unknown: Sequence[str],
    *,
    always_logprob: bool = False,
) -> Plan:
    """`plan_of` for *model*, with the names in *body* that this dialect does not have.

    Raises:
        NoModel: It is being switched.
        RequestError: Or one of its kinds, as `plan_of`.
    """
    engine = model.engine
    return plan_of(
        body,
        request_id=request_id,
        model=engine.model,
        max_context=model.max_context,
        settings=settings,
        control_token=control_token_of(engine),
        seed=random_seed(),
        unknown=unknown,
        always_logprob=always_logprob,
    )


def info_of(model: ModelEntry, engine: Engine, name: str) -> schema.ModelInfoReply:
    """What ``GET /api/v1/model/info`` says if *engine* is *model*'s and is called *name*."""
    return model_info_of(
        engine.model,
        name=name,
        max_context=model.max_context_of(engine),
        control_token=control_token_of(engine),
    )


def token_bytes_of(engine: Engine) -> Callable[[int], bytes]:
    """A function for the bytes of an id of *engine*, b"" once it is closed; any thread."""

    @cache  # of a vocabulary's size at most
    def token_bytes(id_: int) -> bytes:
        try:
            return engine.token_bytes(id_)
        except KqviewError:
            return b""

    return token_bytes


def answer_for(
    model: ModelEntry | None,
    error: BaseException,
    body: schema.DreamFields | None = None,
    *,
    n_prompt: int | None = None,
) -> Answer:
    """What to tell the client about *error*, with figures of *model*.

    Args:
        model: Whose limits and memory they are; None if the request has none.
        error: What went wrong.
        body: The request, None if it could not be read.
        n_prompt: Tokens of its prompt; None counts its ``input_ids``, if there are any.
    """
    engine = None if model is None or model.is_closing else model.loaded
    if model is None or engine is None:
        return answer_of(error)
    max_context = model.max_context_of(engine)
    if body is not None:
        max_context = context_limit(body, max_context)
        if n_prompt is None and body.input_ids is not None:
            n_prompt = len(body.input_ids)

    def memory() -> dict[str, int]:
        return memory_figures(engine.stats().pool, engine.system_info()["devices"])

    figures = figures_of(
        error,
        max_context=max_context,
        n_vocab=engine.model.n_vocab,
        n_prompt=n_prompt,
        memory=memory,
    )
    return answer_of(error, **figures)


_BUSY: Final = (
    "a generation runs on this socket; wait for its done event, cancel it, or open another socket"
)


@dataclass(frozen=True, slots=True)
class _Running:
    run: Run
    sending: "asyncio.Task[None]"


class Session:
    """Serves one socket; belongs to the event loop."""

    def __init__(
        self,
        service: Service,
        socket: Socket,
        caller: Caller = ANYONE,
        hold: Reservation | None = None,
    ) -> None:
        """Serve *caller*'s *socket*; messages are MessagePack if its subprotocol says so.

        The memory that runs keep is counted in *hold*.
        """
        self._service = service
        self._socket = socket
        self._caller = caller
        self._hold = hold or uncounted()
        self._packs = socket.subprotocol == schema.SUBPROTOCOL
        self._running: _Running | None = None
        self._last_id: str | None = None

    async def serve(self) -> None:
        """Return if the socket was closed because a generation failed.

        Raises:
            ClientGone: The client is gone, or has stopped reading.
            TimeoutError: It is idle.
            KqviewError: A message was refused and ends the socket: too large, too many.
        """
        reading = asyncio.ensure_future(self._socket.receive())
        try:
            while not self._socket.is_closed:
                await self._wait(reading)
                if self._running is not None and self._running.sending.done():
                    await self._end_running()
                elif reading.done():
                    raw = reading.result()
                    reading = asyncio.ensure_future(self._socket.receive())
                    await self._take(raw)
        finally:
            for task in self._tasks(reading):
                task.cancel()
            await asyncio.gather(*self._tasks(reading), return_exceptions=True)

    def _tasks(self, reading: "asyncio.Future[Any]") -> "list[asyncio.Future[Any]]":
        return [reading] if self._running is None else [reading, self._running.sending]

    async def _wait(self, reading: "asyncio.Future[Any]") -> None:
        """Wait for a message, or for the end of the generation."""
        idle_s = None if self._running else self._service.settings.idle_timeout_s
        done, _ = await asyncio.wait(
            self._tasks(reading), timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise TimeoutError

    async def _end_running(self) -> None:
        """Wait until its last event is sent; then the socket is free, or closed if it failed."""
        assert self._running is not None
        await self._running.sending
        self._running = None

    # ---- messages

    async def _take(self, raw: bytes | str) -> None:
        """Handle a message."""
        try:
            message, unknown = await self._converted(raw, message_of, raw, packs=self._packs)
        except RequestError as error:
            name = await self._converted(raw, name_in, raw, packs=self._packs)
            await self._refuse(error, name)
            return
        if isinstance(message, schema.Cancel):
            await self._cancel(message)
            return
        # A client told of the end may ask again, even if the task that told it has a step left.
        if self._running is not None and self._running.run.is_over:
            await self._end_running()
        if not self._socket.is_closed:
            await self._generate(message, raw, unknown)

    async def _converted(
        self, raw: bytes | str, convert: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        return await self._service.converted(len(raw), self._hold, convert, *args, **options)

    async def _cancel(self, message: schema.Cancel) -> None:
        running, wanted = self._running, message.request_id
        if running is not None and wanted in (None, running.run.label):
            running.run.end()
        elif wanted is None or wanted != self._last_id:  # its end and this message may have crossed
            error = RequestError(
                "no generation with this request_id runs on this socket; name one that does"
            )
            await self._refuse(error, wanted)

    async def _generate(
        self, message: schema.Generate, raw: bytes | str, unknown: Sequence[str]
    ) -> None:
        request_id = message.request_id or uuid.uuid4().hex
        if self._running is not None:
            await self._refuse(BusyError(_BUSY), request_id)
            return
        service = self._service
        model: ModelEntry | None = None
        async with contextlib.AsyncExitStack() as use:
            try:
                model = await use.enter_async_context(service.pool.using(message.model))
                message = resolved(message, model)
                plan = await self._converted(
                    raw, plan_for, model, service.settings, message, request_id, unknown,
                    always_logprob=True,
                )  # fmt: skip
                token_bytes = token_bytes_of(model.engine)
                run = await service.start(plan.request, self._caller, self._hold, model=model)
            except KqviewError as error:
                await self._refuse(error, request_id, message, model)
                return
            renderer = EventRenderer(
                plan,
                lambda id_: token_bytes(id_).decode("utf-8", "replace"),
                lambda error: answer_for(model, error, message, n_prompt=run.usage.prompt_tokens),
                packs=self._packs,
            )
            self._last_id = request_id
            sending = asyncio.ensure_future(self._send(run, renderer, use.pop_all()))
            self._running = _Running(run, sending)

    async def _send(
        self, run: Run, renderer: EventRenderer, use: contextlib.AsyncExitStack
    ) -> None:
        async with use:
            await send_run(self._socket, run, renderer)

    async def _refuse(
        self,
        error: KqviewError,
        request_id: str | None,
        body: schema.Generate | None = None,
        model: ModelEntry | None = None,
    ) -> None:
        """Send an error event; the socket stays usable."""
        answer = answer_for(model or self._service.pool.default, error, body)
        await self._socket.send([error_frame(answer, request_id, packs=self._packs)])


_TAG: Final = "dream"
_PACK_TYPES: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")


async def show_model_info(call: Call) -> schema.ModelInfoReply:
    """``GET /api/v1/model/info``."""
    return info_of(call.model, call.model.engine, call.model.name)


async def generate(call: Call, body: schema.GenerateBody) -> HttpReply:
    """``POST /api/v1/generate``."""
    try:
        return await _generate(call, body)
    except KqviewError as error:
        answer = answer_for(call.model, error, body)
        if not answer.figures:
            raise
        return error_reply(answer, shared_error_body)


async def _generate(call: Call, body: schema.GenerateBody) -> HttpReply:
    service = call.service
    packs = _takes_packs(call)
    plan = await service.converted(
        call.n_body_bytes, call.hold, plan_for, call.model, service.settings, body,
        call.request_id, call.unknown,
    )  # fmt: skip
    engine = call.model.engine
    token_bytes = token_bytes_of(engine)
    run = await service.start(plan.request, call.caller, call.hold, model=call.model)
    async with run:
        n_prompt = run.usage.prompt_tokens
        most = reply_bytes(plan, engine.model, n_prompt=n_prompt, n_ctx=engine.n_ctx, packs=packs)
        check_reply(most, service.settings.max_reply_bytes, n_prompt=n_prompt)
        builder = ReplyBuilder(
            plan,
            token_bytes,
            call.hold,
            packs=packs,
            has_tokens=asks_for_tokens(body),
            has_logprobs=plan.request.sampling.top_logprobs is not None,
            trims_stop=trims_stop(body),
        )
        async for block in run.prompt_blocks():
            await service.offload(most, builder.prompt, run, block)
            del block  # the pool wants its memory back
        async for step in run.final_steps():
            await service.offload(step.n_bytes, builder.token, run, step)
            del step
    data = await service.offload(builder.n_bytes, builder.body, run)
    media_type = _PACK_TYPES[0] if packs else "application/json"
    return HttpReply(data, media_type, gzips=body.compression == "gzip", headers={"vary": "Accept"})


def _takes_packs(call: Call) -> bool:
    """Whether the client asks for MessagePack by name; ``*/*`` is JSON."""
    accepted = call.headers.get("accept", "").lower()
    kinds = (part.partition(";")[0].strip() for part in accepted.split(","))
    return any(kind in _PACK_TYPES for kind in kinds)


async def stream(call: Call, socket: Socket) -> None:
    """``WS /api/v1/generate/stream``."""
    await Session(call.service, socket, call.caller, call.hold).serve()


async def list_models(call: Call) -> schema.ModelsReply:
    """``GET /api/v1/models``."""
    pool = call.service.pool
    names = await call.service.models()
    if pool.has_several:
        names = [*(one.id for one in pool), *names]
    if pool.default.loaded is None:
        return schema.ModelsReply(list(dict.fromkeys(names)), None, None)
    name = pool.default.name
    folder, path = call.service.settings.models_dir, pool.default.path
    file = None if pool.has_several else await asyncio.to_thread(name_of_file, folder, path)
    return schema.ModelsReply(list(dict.fromkeys(names)), file or name, name)


async def load_model(call: Call, body: schema.LoadBody) -> schema.ModelInfoReply:
    """``POST /api/v1/model/load``."""
    pool = call.service.pool
    engine = await pool.switch(body.model, load_options(body))
    name = engine.model.name or Path(body.model).stem
    return info_of(pool.default, engine, pool.default.id if pool.has_several else name)


_EXAMPLE: Final[dict[str, Any]] = {"prompt": "Anna is a", "max_new_tokens": 2, "temperature": 0}
_ROW: Final[dict[str, Any]] = {
    "format": "per_layer", "shape": [4, 8, 7], "context_length": 7, "encoding": "binary",
    "dtype": "float32", "values": "probs",
}  # fmt: skip
_MESSAGES: Final = (
    Sample(
        "client", "A request; another one may follow its end",
        {"type": "generate", **_EXAMPLE, "return_attention": True, "encoding": "binary"},
        type=schema.Generate,
    ),
    Sample(
        "server", "With start_event: what follows",
        {
            "type": "start", "request_id": "…", "prompt_tokens": 7, "cached_tokens": 0,
            "prompt_ids": [0, 35, 444, 67, 268, 67, 258], "seed": 2531011, "attention": {
                "format": "per_layer", "values": "probs", "row_sum": "1", "dtype": "float32",
                "shape": [4, 8, None], "columns": "the prompt, then the tokens before this one",
            },
        },
        type=StartEvent,
    ),
    Sample(
        "server", "Rows of the prompt, with prompt_attention",
        {"type": "prompt_attention", "request_id": "…", "start": 0, "rows": 7, "attention": {
            **_ROW, "shape": [4, 8, 7, 7],
        }},
        type=stream_schema.PromptEvent,
    ),
    Sample("server", "Their values, as encoding is binary", "values in C order, little-endian"),
    Sample(
        "server", "Each token",
        {
            "type": "token", "request_id": "…",
            "token": {"token_id": 354, "text": " teac", "logprob": -0.61}, "attention": _ROW,
        },
        type=stream_schema.TokenEvent,
    ),
    Sample("server", "Its row, as encoding is binary", "values in C order, little-endian"),
    Sample(
        "server", "Tokens that a mod took back",
        {"type": "removed", "request_id": "…", "tokens": 1, "characters": 5},
        type=stream_schema.RemovedEvent,
    ),
    Sample(
        "client", "Ends the request early", {"type": "cancel", "request_id": "…"},
        type=schema.Cancel,
    ),
    Sample(
        "server", "With sentences: those that got little attention",
        {"type": "pruning_suggestion", "request_id": "…", "prunable_sentences": [
            {"turn_id": 1, "sentence_id": 2, "max_attention": 0.004},
        ]},
        type=stream_schema.PruningEvent,
    ),
    Sample(
        "server", "The end",
        {
            "type": "done", "request_id": "…", "finish_reason": "length", "total_tokens": 2,
            "generation_time_ms": 6, "seed": 2531011, "prompt_tokens": 7, "cached_tokens": 0,
            "queue_ms": 0.1, "prompt_ms": 4.2, "generation_ms": 1.7,
        },
        type=stream_schema.DoneEvent,
    ),
    Sample(
        "server", "A failure, in place of the end",
        {
            "type": "error", "request_id": "…",
            "error": "the model was switched; send the request again",
            "error_code": "MODEL_CHANGED",
        },
        type=stream_schema.ErrorEvent,
    ),
)  # fmt: skip

OPERATIONS: Final[list[Operation]] = [
    Operation(
        method="GET", path="/api/v1/model/info", also=("/api/latest/model/info",),
        handler=show_model_info, tag=_TAG, error_body=error_body, failure=stream_schema.Failure,
        reply=schema.ModelInfoReply,
        model="named",
        summary="Architecture, sizes, special tokens and chat template of the model.",
    ),
    Operation(
        method="POST", path="/api/v1/generate", also=("/api/latest/generate",),
        handler=generate, model="named", tag=_TAG, error_body=shared_error_body,
        failure=stream_schema.SharedFailure,
        body=schema.GenerateBody, reply=schema.GenerateReply, is_lenient=True,
        summary="Text in one reply, with the attention of every token if asked for.",
        example={**_EXAMPLE, "return_attention": True},
    ),
    Operation(
        method="WS", path="/api/v1/generate/stream", also=("/api/latest/generate/stream",),
        handler=stream, tag=_TAG, error_body=error_body, failure=stream_schema.Failure,
        subprotocols=(schema.SUBPROTOCOL,),
        summary="Text token by token with its attention; JSON, or MessagePack as subprotocol.",
        samples=_MESSAGES,
    ),
    Operation(
        method="GET", path="/api/v1/models", handler=list_models, tag=_TAG,
        error_body=error_body, failure=stream_schema.Failure, reply=schema.ModelsReply,
        summary="Models that may be loaded, and the one that is.",
    ),
    Operation(
        method="POST", path="/api/v1/model/load", handler=load_model, tag=_TAG,
        error_body=error_body, failure=stream_schema.Failure,
        body=schema.LoadBody, reply=schema.ModelInfoReply, access="admin",
        summary="Unload the model and load another one; running requests end with MODEL_CHANGED.",
    ),
]  # fmt: skip
"""Rows of the route table."""
