"""Service: admits a dialect's neutral request as a `Run` of the engine; knows no protocol.

Belongs to one event loop. Owns every run until that ends, and the engine if it opened it
(`Models`). Work that would block the loop goes to `Workers`.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from kqview.engine import Engine
from kqview.errors import ClosedError, KqviewError, PromptTooLong, QueueFull, RequestError
from kqview.generation.stream import Generation
from kqview.generation.text import TextStream
from kqview.machine import physical_memory_bytes
from kqview.mods.events import conversation_of
from kqview.mods.folder import ModInfo
from kqview.server.budget import Budget, Hold, uncounted
from kqview.server.cancelling import Cancelling
from kqview.server.conversations import Conversations
from kqview.server.errors import ModelChanged, NoModel, ShuttingDown, TimedOut, renamed
from kqview.server.events_bus import Bus
from kqview.server.kept import Kept
from kqview.server.live import Live
from kqview.server.mod_runs import ModRuns
from kqview.server.models import Models, model_names
from kqview.server.run import GenerateRequest, LastRun, Run
from kqview.server.security import ANYONE, Caller
from kqview.server.sessions import Sessions, StateFiles
from kqview.server.settings import Settings
from kqview.server.slots import Slots
from kqview.server.workers import Workers
from kqview.types import EngineStats, Score

_T = TypeVar("_T")
_Raw = TypeVar("_Raw", bound=Sized)

_log: Final = logging.getLogger("kqview.server")

# Below this, a hop to another thread takes longer than the work itself.
OFFLOAD_BYTES: Final = 256 * 1024
_OFFLOAD_TEXT: Final = 32 * 1024  # characters: about a millisecond to tokenize
_OFFLOAD_BODY: Final = 32 * 1024  # bytes of JSON: less than that to decode
_OFFLOAD_FIELDS: Final = 4 * 1024  # bytes of lists whose elements are checked
_OFFLOAD_ITEMS: Final = 4096  # ids and biases
_N_WORKERS: Final = 4
_LEAST_CLOSE_S: Final = 1.0  # for an engine to end, however little of the grace is left
DECODED_TIMES: Final = 17
"""Most bytes that a byte of JSON takes, with what it decodes to."""
# The same for a character and its ids, and for an id with its text.
_ID_BYTES: Final = 40
_PIECE_BYTES: Final = 240
_SCORE_BYTES: Final = 384  # a logprob with its id and text, as a value and as JSON


class Service:
    """What every dialect calls, from the event loop that serves."""

    def __init__(self, engine: Engine | None, settings: Settings | Live) -> None:
        """Serve *engine*, which stays the caller's; with None, `open` opens the settings' model."""
        self.live = Live.of(settings)
        """The configuration; it may change between two looks."""
        settings = self.live.settings
        memory_bytes = settings.memory_budget_bytes
        self.budget = Budget(physical_memory_bytes() // 4 if memory_bytes is None else memory_bytes)
        self.kept = Kept(self.budget, settings.kept_attention_bytes)
        self.bus = Bus()
        self.cancelling = Cancelling()
        self.runs: dict[tuple[str, str], Run] = {}
        """Runs by owner and request_id."""
        self.started_s = time.monotonic()
        self.n_runs = 0
        self._n_runs_of: Counter[str] = Counter()
        self._last: dict[str, LastRun] = {}  # by owner; the run that ended last is the last entry
        self._models = Models(engine, self.live, on_switch=self._model_leaves)
        self.slots = Slots(self.live, self.runs, lambda: self.engine)
        self.sessions = Sessions(self.live)
        self.conversations = Conversations(self.live, self.budget)
        self.mod_runs = ModRuns(self.live)
        self.files = StateFiles(self.live)
        self._leave_by_s: float | None = None  # when the grace is over
        # Rows on their way to clients, texts to tokenize, requests to read and build: none of them
        # waits for another kind.
        self._workers = ThreadPoolExecutor(_N_WORKERS, thread_name_prefix="kqview-rows")
        self._tokenizers = Workers(_N_WORKERS, "text")
        self._builders = Workers(_N_WORKERS, "requests")
        self._starting: set[tuple[str, str]] = set()
        # What uses the engine without a run, by the limit of its time; and why that ended early.
        self._works: dict[asyncio.Timeout, KqviewError | None] = {}
        self._is_idle = asyncio.Event()
        self.on_end: Callable[[Run], None] = lambda run: None
        self.on_drain: set[Callable[[], Awaitable[None]]] = {self.bus.close}

    @property
    def settings(self) -> Settings:
        """The settings that count at the moment."""
        return self.live.settings

    # ---- life

    async def open(self) -> None:
        """Open the settings' model if no engine was given.

        Raises:
            KqviewError: As the constructor of Engine.
        """
        await asyncio.to_thread(self.load)
        await self.conversations.open()

    def load(self, progress: Callable[[float], object] | None = None) -> None:
        """Like `open`, but blocking, before the event loop runs; `open` then finds it done.

        Args:
            progress: Called with the loaded fraction, 0..1.
        """
        self._models.load(progress)
        self.mod_runs.open()

    def _model_leaves(self) -> None:
        self.slots.forget()
        self.end_runs(_model_changed())

    def end_runs(self, error: ModelChanged | ShuttingDown) -> None:
        """End every run and other work on the engine, and tell its client *error*."""
        for run in list(self.runs.values()):
            run.end(error)
        for limit in self._works:
            if not limit.expired():
                self._works[limit] = error
                limit.reschedule(asyncio.get_running_loop().time())

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, end the running ones, and wait until their clients were told.

        WebSockets without a generation are closed with code 1001.
        """
        self._models.is_closing = True
        if self._leave_by_s is None:  # the first call sets the limit
            self._leave_by_s = time.monotonic() + grace_s
        self.end_runs(_shutting_down())
        # A client that reads nothing cannot be told; the grace ends the wait for it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace_left_s):
                if self.runs or self._works:
                    self._is_idle.clear()
                    await self._is_idle.wait()
                await asyncio.gather(*(leave() for leave in list(self.on_drain)))

    async def close(self) -> None:
        """End everything, including the engine if it is ours."""
        await self.drain(self.settings.shutdown_grace_s)
        await self.conversations.close(max(_LEAST_CLOSE_S, self.grace_left_s))
        await self._models.close(max(_LEAST_CLOSE_S, self.grace_left_s))
        await asyncio.to_thread(self.mod_runs.close, max(_LEAST_CLOSE_S, self.grace_left_s))
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._tokenizers.shutdown()
        self._builders.shutdown()
        self.slots.shutdown()

    @property
    def grace_left_s(self) -> float:
        """Seconds left for clients and engine since `drain` began; the whole grace before."""
        if self._leave_by_s is None:
            return self.settings.shutdown_grace_s
        return max(0.0, self._leave_by_s - time.monotonic())

    @property
    def is_engine_lost(self) -> bool:
        """Whether closing the engine gave its thread up."""
        engine = self._models.engine
        return engine is not None and engine.health().is_lost

    def stall(self, factor: float = 1.0) -> str | None:
        """Why requests make no progress, None if they do; any thread.

        Args:
            factor: Times the settings' ``stall_timeout_s``.
        """
        engine, limit_s = self._models.engine, self.settings.stall_timeout_s
        return engine.health().stall(factor * limit_s) if engine and limit_s else None

    # ---- the model

    @property
    def engine(self) -> Engine:
        """The engine that serves now.

        Raises:
            NoModel: None is loaded: it is being switched, or could not be opened.
            ShuttingDown: The server is about to end.
        """
        models = self._models
        if models.is_closing:
            raise _shutting_down()
        if models.engine is None:
            raise NoModel(f"{models.absence}; load one with /api/v1/model/load")
        return models.engine

    @property
    def is_closing(self) -> bool:
        """Whether new requests are refused because the server ends."""
        return self._models.is_closing

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken."""
        return self._models.engine is not None and not self.is_closing

    @property
    def model_name(self) -> str:
        """The model's name: its first alias, or else from its metadata or its file."""
        engine = self.engine
        return self.settings.aliases[0] if self.settings.aliases else self._models.name_of(engine)

    @property
    def max_context(self) -> int:
        """Longest prompt in tokens."""
        return self.max_context_of(self.engine)

    def max_context_of(self, engine: Engine) -> int:
        """Longest prompt in tokens if *engine* serves."""
        limit = self.settings.max_context
        return engine.n_ctx if limit is None else min(limit, engine.n_ctx)

    async def switch_model(self, name: str, **options: int | None) -> Engine:
        """Unload the model and load the GGUF file *name* of ``models_dir``.

        What can be checked without the new model's weights (not a model, options out of range, not
        enough memory) is refused before anything changes, and the old model keeps serving.
        Otherwise running requests end with ModelChanged, the old model is closed, because both may
        not fit, and the new one is opened. If that fails after all, the old one is opened again;
        only if that fails too there is no model. Switches run one after another, and one that began
        is finished even if the client that asked for it is gone.

        Args:
            name: As `models` lists it.
            **options: ``n_ctx``, ``n_slots`` or ``n_gpu_layers`` of this model; None takes the
                setting.

        Returns:
            The new engine; the next switch may already have begun.

        Raises:
            Forbidden: There is no folder of models, or *name* leads out of it.
            NotFound: There is no such file.
            ShuttingDown: The server is about to end.
            KqviewError: It cannot be loaded, as the constructor of Engine says.
        """
        return await self._models.switch(name, options)

    async def models(self) -> list[str]:
        """Names that `switch_model` takes, sorted."""
        return await self._in_thread(model_names, self.settings.models_dir)

    def stats(self) -> list[EngineStats]:
        """Counters of every engine that served, the current one last."""
        return self._models.stats()

    # ---- text

    async def tokenize(
        self, text: str, *, add_special: bool, hold: Hold | None = None
    ) -> list[tuple[int, str]]:
        """Ids of *text*, each with the text that it completes; the texts join to the whole.

        A character spread over several ids is the text of the last one; the others have "". Their
        memory is counted in *hold*.
        """
        hold = hold or uncounted()
        engine = self.engine
        ids = await self.ids(text, add_special=add_special, hold=hold)
        hold.take(_PIECE_BYTES * len(ids))
        if len(ids) < _OFFLOAD_ITEMS:
            return _pieces(engine, ids)
        return await self._tokenizers.run(hold.client, _pieces, engine, ids)

    async def ids(
        self,
        text: str,
        *,
        add_special: bool,
        parse_special: bool = True,
        hold: Hold | None = None,
    ) -> list[int]:
        """Ids of *text*; their memory is counted in *hold*."""
        hold = hold or uncounted()
        hold.take(_ID_BYTES * len(text))
        tokenize = partial(
            self.engine.tokenize, text, add_special=add_special, parse_special=parse_special
        )
        if len(text) < _OFFLOAD_TEXT:
            return tokenize()
        return await self._tokenizers.run(hold.client, tokenize)

    async def ids_of_each(
        self, texts: Sequence[str], *, parse_special: bool, hold: Hold
    ) -> list[list[int]]:
        """Ids of each of *texts* with the special ones around it; counted in *hold*."""
        n_characters = sum(map(len, texts))
        hold.take(_ID_BYTES * (n_characters + 2 * len(texts)))
        tokenize = partial(self.engine.tokenize, add_special=True, parse_special=parse_special)
        if n_characters + 8 * len(texts) < _OFFLOAD_TEXT:
            return list(map(tokenize, texts))
        return await self._tokenizers.run(hold.client, lambda: list(map(tokenize, texts)))

    async def detokenize(self, ids: Sequence[int], *, name: str = "ids", client: str = "") -> str:
        """Text of *ids*, which errors call *name*."""
        engine = self.engine
        try:
            if len(ids) < _OFFLOAD_ITEMS:
                return engine.detokenize(ids)
            return await self._tokenizers.run(client, engine.detokenize, ids)
        except RequestError as error:
            raise renamed(error, {"ids": name}) from None

    # ---- generation

    async def list_mods(self, caller: Caller = ANYONE) -> list[ModInfo]:
        """The mods that requests may name; files that are new or have changed are loaded."""
        return await self._builders.run(caller.name, self.mod_runs.list)

    async def start(
        self, request: GenerateRequest, caller: Caller = ANYONE, hold: Hold | None = None
    ) -> Run:
        """Admit *request*; what cannot work raises here, before anything is sent.

        Args:
            request: What to generate.
            caller: Owner of the run.
            hold: Counts the memory that the run keeps; without one nothing does.

        Raises:
            RequestError: The request cannot work; the message names the client's field.
            QueueFull: Too many requests run or wait.
            NoModel: There is no model.
            ModelChanged: The model was switched meanwhile.
        """
        settings = self.settings
        started_s = asyncio.get_running_loop().time()
        try:
            self._check_limits(request, caller)
            self.mod_runs.check(request.mods)
        except RequestError as error:
            raise renamed(error, request.names) from None
        hold = hold or uncounted()
        limit_s = settings.request_timeout_s
        limit = asyncio.timeout(limit_s or None)
        name = caller.owner, request.request_id
        self._starting.add(name)
        try:
            async with limit:
                generations = await self._generations(self.engine, request, caller, hold)
        except TimeoutError:
            raise (_late(limit_s) if limit.expired() else TimeoutError) from None
        except RequestError as error:
            raise renamed(error, request.names) from None
        finally:
            self._starting.discard(name)
        run = Run(request, generations, hold.part(), on_close=self._ended, owner=caller.owner)
        self.runs[name] = run
        self.n_runs += 1
        self._n_runs_of[caller.owner] += 1
        if limit_s:
            loop = asyncio.get_running_loop()
            run.deadline = loop.call_at(started_s + limit_s, lambda: run.end(_late(limit_s)))
        return run

    async def scores(
        self, request: GenerateRequest, caller: Caller, *, top_logprobs: int, hold: Hold
    ) -> list[Score]:
        """How the model judges each prompt of *request*; `start` finds them in the cache then.

        Raises:
            RequestError: As `start`, like the other errors.
        """
        prompts = (request.prompt, *request.more_prompts)
        try:
            self._check_limits(request, caller)
            ids = [await self._prompt_ids(self.engine, prompt, hold) for prompt in prompts]
            for one in ids:
                self._check_prompt(one, request)
            hold.take((1 + top_logprobs) * _SCORE_BYTES * sum(map(len, ids)))
            async with self.working() as engine:
                return await engine.ascore(ids, top_logprobs=top_logprobs, lora=request.lora)
        except RequestError as error:
            raise renamed(error, {"texts": "prompt", **request.names}) from None

    async def _generations(
        self, engine: Engine, request: GenerateRequest, caller: Caller, hold: Hold
    ) -> list[Generation]:
        """Begin the generations of *request*; large requests are built in another thread."""
        try:
            prompts = [
                await self._prompt_ids(engine, prompt, hold)
                for prompt in (request.prompt, *request.more_prompts)
            ]
            if engine is not self._models.engine:
                raise _model_changed()
            build = partial(self._build, engine, request, caller.owner, prompts)
            is_gone = threading.Event()
            if _is_small(request, prompts):
                return build(is_gone)
            try:
                generations = await self._builders.run(hold.client, build, is_gone)
            except BaseException:
                is_gone.set()
                raise
        except ClosedError:
            if engine is not self._models.engine:
                raise _model_changed() from None
            raise
        if engine is not self._models.engine or self.is_closing:
            for generation in generations:
                generation.cancel()
            _ = self.engine  # says why there is none
            raise _model_changed()
        return generations

    def _build(
        self,
        engine: Engine,
        request: GenerateRequest,
        owner: str,
        prompts: Sequence[Sequence[int]],
        is_gone: threading.Event,
    ) -> list[Generation]:
        """Any thread; once *is_gone* is set, nobody waits for the result any more."""
        for ids in prompts:
            self._check_prompt(ids, request)
        wanted = request.attention
        capture = wanted.capture(engine.model) if wanted is not None else None
        steered = partial(
            self.mod_runs.options, request.mods, owner=owner, model=self._models.name_of(engine)
        )
        generations: list[Generation] = []
        try:
            for i in range(request.n_generations):
                if is_gone.is_set():
                    break
                i_prompt, i_sample = divmod(i, request.n_samples)
                # One prompt's rows are enough.
                rows = replace(capture, prompt=False) if capture and i else capture
                with conversation_of(request.dialogue):
                    generation = engine.generate(
                        prompts[i_prompt],
                        max_tokens=min(request.max_tokens, self.settings.max_tokens),
                        sampling=_for_sample(request, i_sample),
                        capture=rows,
                        slot=request.slot if i == 0 else None,
                        cache_prompt=request.cache_prompt or i_sample > 0,
                        lora=request.lora,
                        request_id=request.request_id if i == 0 else f"{request.request_id}/{i}",
                        **request.shift_options,
                        **steered(),
                    )
                generations.append(generation)
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        if is_gone.is_set():
            for generation in generations:
                generation.cancel()
        return generations

    def _check_prompt(self, ids: Sequence[int], request: GenerateRequest) -> None:
        limit = min(self.max_context, request.max_context or self.max_context)
        if len(ids) > limit:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, the limit is {limit}; shorten it",
                parameter="prompt",
                n_tokens=len(ids),
                n_max=limit,
            )

    async def _prompt_ids(
        self, engine: Engine, prompt: str | Sequence[int], hold: Hold
    ) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        with hold.part() as ids:  # a prompt that fits is small
            return await self.ids(prompt, add_special=True, hold=ids)

    def _check_limits(self, request: GenerateRequest, caller: Caller) -> None:
        settings = self.settings
        if not 1 <= request.n_samples <= settings.max_samples:
            raise RequestError(
                f"n_samples is {request.n_samples}, allowed are 1 to {settings.max_samples}",
                parameter="n_samples",
            )
        n_most = max(settings.max_samples, len(self.engine.slots) + settings.max_queued)
        if request.n_generations > n_most:
            raise RequestError(
                f"prompt asks for {request.n_generations} texts, the limit is {n_most}; "
                "send fewer prompts at a time",
                parameter="prompt",
            )
        if request.max_tokens < 1:
            raise RequestError(
                f"max_tokens is {request.max_tokens}, the least is 1", parameter="max_tokens"
            )
        # Another owner's name is free: refusing it would reveal that it is in use.
        name = caller.owner, request.request_id
        if name in self.runs or name in self._starting:
            raise RequestError(f"request_id {request.request_id!r} is in use; send another one")
        self._check_room()

    def _check_room(self) -> None:
        n_slots = len(self.engine.slots)
        limit = min(self.settings.max_running, n_slots + self.settings.max_queued)
        n_runs = len(self.runs) + len(self._starting) + len(self._works)
        if n_runs >= limit:
            raise QueueFull(f"{n_runs} requests run or wait, the limit is {limit}; try again later")

    def _note_idle(self) -> None:
        if not self.runs and not self._works:
            self._is_idle.set()

    def _ended(self, run: Run) -> None:
        self.runs.pop((run.owner, run.request_id), None)
        self.slots.released(run)
        self._note_idle()
        seed = run.request.sampling.seed
        self._last.pop(run.owner, None)
        self._last[run.owner] = LastRun(
            run.usage, run.finish_reason, seed, run.ended_s, run.request.key, tuple(run.logprobs)
        )
        self.on_end(run)

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncGenerator[Engine]:
        """The engine, for the work of one request that generates nothing, such as an embedding.

        The limits of a run apply to it, and what ends runs ends it.

        Raises:
            QueueFull: Too many requests run or wait.
            NoModel: There is no model.
            ModelChanged: The model was switched meanwhile.
            TimedOut: It took longer than ``request_timeout_s``.
        """
        self._check_room()
        engine, limit_s = self.engine, self.settings.request_timeout_s
        limit = asyncio.timeout(limit_s or None)
        try:
            async with limit:
                self._works[limit] = None
                yield engine
        except TimeoutError:
            raise (
                self._works[limit] or _late(limit_s) if limit.expired() else TimeoutError
            ) from None
        except ClosedError:
            if engine is not self.engine:
                raise _model_changed() from None
            raise
        finally:
            self._works.pop(limit, None)
            self._note_idle()

    def find(
        self, caller: Caller = ANYONE, *, key: str = "", request_id: str | None = None
    ) -> list[Run]:
        """Runs with this ``genkey``, or of this name, in the order of their start.

        Only those that *caller* may see: another owner's run looks as if it did not exist. An admin
        without a run of that name gets everybody's.
        """
        found = [
            run
            for run in self.runs.values()
            if caller.may_see(run.owner)
            and (run.request.key == key if request_id is None else run.request_id == request_id)
        ]
        return [run for run in found if run.owner == caller.owner] or found

    def last_of(self, caller: Caller = ANYONE, *, key: str | None = None) -> LastRun:
        """Figures of *caller*'s run that ended last; for an admin, of anybody's.

        Args:
            caller: Who asks.
            key: Only runs with this ``genkey``; None for any.
        """
        for owner, last in reversed(self._last.items()):
            if caller.may_see(owner) and key in (None, last.key):
                return last
        return LastRun()

    def n_runs_of(self, caller: Caller = ANYONE) -> int:
        """How many runs *caller* started; for an admin, how many there were."""
        return self.n_runs if caller.is_admin else self._n_runs_of[caller.owner]

    # ---- other threads

    async def decoded(self, decode: Callable[[_Raw], _T], raw: _Raw, hold: Hold) -> _T:
        """*decode* of *raw*, counted in *hold*; the result may live as long as that."""
        hold.take((DECODED_TIMES - 1) * len(raw))
        if len(raw) < _OFFLOAD_BODY:
            return decode(raw)
        return await self._builders.run(hold.client, decode, raw)

    async def converted(
        self, n_bytes: int, hold: Hold, convert: Callable[..., _T], *args: Any, **options: Any
    ) -> _T:
        """*convert* of a body of *n_bytes*; checking long lists takes time."""
        work = partial(convert, *args, **options)
        return work() if n_bytes < _OFFLOAD_FIELDS else await self._builders.run(hold.client, work)

    async def offload(self, n_bytes: int, work: Callable[..., _T], *args: Any) -> _T:
        """Do *work* here, or in another thread if *n_bytes* would hold up the event loop."""
        if n_bytes < OFFLOAD_BYTES:
            return work(*args)
        return await self._in_thread(work, *args)

    async def _in_thread(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *args)


def _late(limit_s: float) -> TimedOut:
    return TimedOut(f"the request took more than {limit_s:g} s, the limit of request_timeout_s")


def _shutting_down() -> ShuttingDown:
    return ShuttingDown("the server is shutting down; try again later")


def _model_changed() -> ModelChanged:
    return ModelChanged("the model was switched; send the request again")


def _is_small(request: GenerateRequest, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether building the generations of *request* takes about a millisecond."""
    sampling = request.sampling
    lists = (sampling.logit_bias, sampling.banned_tokens, sampling.stop_tokens)
    n_items = sum(map(len, lists)) * request.n_generations
    n_items += sum(map(len, prompts)) * request.n_samples
    given = (sampling.grammar, sampling.json_schema, sampling.regex)
    # Mods are loaded first, and see the prompt.
    return n_items < _OFFLOAD_ITEMS and not request.mods and all(one is None for one in given)


def _pieces(engine: Engine, ids: Sequence[int]) -> list[tuple[int, str]]:
    stream = TextStream()
    pieces = [(id_, stream.feed(engine.token_bytes(id_))) for id_ in ids]
    rest = stream.flush()
    if rest:
        last, piece = pieces[-1]
        pieces[-1] = last, piece + rest
    return pieces


def _for_sample(request: GenerateRequest, i: int) -> Any:
    sampling = request.sampling
    if i == 0 or sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + i) % (2**32 - 1))
