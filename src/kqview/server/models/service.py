"""Service: admits a dialect's neutral request as a `Run` of the engine; knows no protocol.

Belongs to one event loop. Owns every run until that ends, and the models (`Pool`). Work that would
block the loop goes to `Workers`.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from starlette.datastructures import QueryParams

from kqview._core import StopFlag
from kqview.engine import Engine
from kqview.errors import ClosedError, PromptTooLong, QueueFull, RequestError
from kqview.generation.stream import Generation
from kqview.machine import physical_memory_bytes
from kqview.mods.events import conversation_of
from kqview.mods.failures import logging_failures
from kqview.server.errors import model_changed, renamed, too_late
from kqview.server.live_config import LiveConfig
from kqview.server.models.events_bus import Bus
from kqview.server.models.mod_runs import ModRuns
from kqview.server.models.model_entry import ModelEntry, resolved
from kqview.server.models.phrases import PhraseBan, Phrases
from kqview.server.models.pool import Pool
from kqview.server.models.row_cache import RowCache
from kqview.server.models.run import GenerateRequest, LastRun, Run
from kqview.server.models.sessions import Sessions, StateFiles
from kqview.server.models.texts import OFFLOAD_ITEMS, room_of, truncated
from kqview.server.settings import Settings
from kqview.server.web import endpoint
from kqview.server.web.access import ANYONE, Caller
from kqview.server.web.budget import Budget, Reservation, Workers, uncounted
from kqview.server.web.endpoint import DECODED_TIMES, Operation
from kqview.submission import owned_by
from kqview.types import Score

_T = TypeVar("_T")
_Raw = TypeVar("_Raw", bound=Sized)

_log: Final = logging.getLogger("kqview.server")

# Below this, a hop to another thread takes longer than the work itself.
OFFLOAD_BYTES: Final = 256 * 1024
_OFFLOAD_BODY: Final = 32 * 1024  # bytes of JSON: less than that to decode
_OFFLOAD_FIELDS: Final = 4 * 1024  # bytes of lists whose elements are checked
_N_WORKERS: Final = 4
_CANCEL_S: Final = 0.05  # until the next prompt of a request that is over is cancelled as well
LEAST_CLOSE_S: Final = 1.0
"""For an engine to end, however little of the grace is left."""
_SCORE_BYTES: Final = 384  # a logprob with its id and text, as a value and as JSON


class Service(endpoint.Host):
    """What every dialect calls, from the event loop that serves."""

    def __init__(self, engine: Engine | None, settings: Settings | LiveConfig) -> None:
        """Serve *engine*, which stays the caller's; with None, `open` opens what is configured."""
        self.live = LiveConfig.of(settings)
        """The configuration; it may change between two looks."""
        settings = self.live.settings
        memory_bytes = settings.memory_budget_bytes
        self.budget = Budget(physical_memory_bytes() // 4 if memory_bytes is None else memory_bytes)
        self.kept = RowCache(self.budget, settings.kept_attention_bytes)
        self.bus = Bus()
        self.runs: dict[tuple[str, str], Run] = {}
        """Runs by owner and request_id."""
        self.started_s = time.monotonic()
        self._n_runs_of: Counter[str] = Counter()
        self._last: dict[str, LastRun] = {}  # by owner; the run that ended last is the last entry
        self.pool = Pool(self.live, engine)
        self.pool.listeners.add(self.bus.publish)
        self.sessions = Sessions(self.live)
        self.mod_runs = ModRuns(self.live)
        self.files = StateFiles(self.live)
        self._leave_by_s: float | None = None  # when the grace is over
        self._ending: set[asyncio.Task[None]] = set()  # kept, or they would be collected
        # Rows on their way to clients, requests to read and build: neither waits for the other.
        self._workers = ThreadPoolExecutor(_N_WORKERS, thread_name_prefix="kqview-rows")
        self._builders = Workers(_N_WORKERS, "requests")
        self._starting: dict[tuple[str, str], ModelEntry] = {}
        # Of the runs that have ended, for metrics.
        self.n_ended: Counter[str] = Counter()  # by finish reason
        self.n_cached_tokens = self.n_longest_tokens = 0
        self.observe_seconds: Callable[[float], object] = lambda seconds: None
        self.on_drain: set[Callable[[], Awaitable[None]]] = set()

    @property
    def settings(self) -> Settings:
        """The settings in effect."""
        return self.live.settings

    @property
    def is_closing(self) -> bool:
        """Whether the server ends."""
        return self.pool.is_closing

    @contextlib.asynccontextmanager
    async def entered(
        self, operation: Operation, args: tuple[Any, ...], query: QueryParams
    ) -> AsyncGenerator[tuple[ModelEntry | None, tuple[Any, ...]]]:
        """The model that a request uses, which stays loaded until its reply was sent."""
        if operation.model == "none":
            yield None, args
            return
        named = [*(getattr(one, "model", None) for one in args), query.get("model")]
        name = next((one for one in named if one), None) if operation.model == "named" else None
        async with self.pool.using(name) as served:
            if not served.is_only or self.settings.mods_dir is not None:
                args = tuple(resolved(one, served) for one in args)
            yield served, args

    # ---- life

    async def open(self) -> None:
        """Load the models that are loaded at the start, if `load` did not.

        Raises:
            KqviewError: As the constructor of Engine.
        """
        await asyncio.to_thread(self.load)

    def load(self, progress: Callable[[float], object] | None = None) -> None:
        """Like `open`, but blocking, before the event loop runs; `open` then finds it done.

        Args:
            progress: Called with the loaded fraction, 0..1.
        """
        self.pool.load(progress)
        self.mod_runs.open()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, end the running ones, and wait until their clients were told.

        WebSockets without a generation are closed with code 1001.
        """
        self.pool.begin_close()
        if self._leave_by_s is None:  # the first call sets the limit
            self._leave_by_s = time.monotonic() + grace_s
        # A client that reads nothing cannot be told; the grace ends the wait for it.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace_left_s):
                await self.pool.idle()
                await asyncio.gather(self.bus.close(), *(leave() for leave in list(self.on_drain)))

    async def close(self) -> None:
        """End everything, including the engines that are ours."""
        await self.drain(self.settings.shutdown_grace_s)
        await self.pool.close(max(LEAST_CLOSE_S, self.grace_left_s))
        await asyncio.to_thread(self.mod_runs.close, max(LEAST_CLOSE_S, self.grace_left_s))
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._builders.shutdown()

    @property
    def grace_left_s(self) -> float:
        """Seconds left for clients and engine since `drain` began; the whole grace before."""
        if self._leave_by_s is None:
            return self.settings.shutdown_grace_s
        return max(0.0, self._leave_by_s - time.monotonic())

    # ---- generation

    async def start(
        self,
        request: GenerateRequest,
        caller: Caller = ANYONE,
        hold: Reservation | None = None,
        *,
        model: ModelEntry | None = None,
    ) -> Run:
        """Admit *request*; what cannot work raises here, before anything is sent.

        Args:
            request: What to generate.
            caller: Owner of the run.
            hold: Counts the memory that the run keeps; without one nothing does.
            model: On what it runs, None for the default one.

        Raises:
            RequestError: The request cannot work; the message names the client's field.
            QueueFull: Too many requests run or wait.
            NoModel: There is no model.
            ModelChanged: The model was switched meanwhile.
        """
        settings, model = self.settings, model or self.pool.default
        loop = asyncio.get_running_loop()
        started_s, hold = loop.time(), hold or uncounted()
        limit_s = settings.request_timeout_s
        limit = asyncio.timeout(limit_s or None)
        name = label = request.request_id
        try:
            self._check_limits(request, model, caller)
            if request.mods:
                self.mod_runs.check(request.mods)
            while (caller.owner, name) in self.runs or (caller.owner, name) in self._starting:
                # Another owner's name is free: refusing it would reveal that it is in use.
                if not request.shares_name:
                    raise RequestError(f"request_id {name!r} is in use; send another one")
                # Others of one owner may be called so, but have names of their own here.
                name = f"{label}-{uuid.uuid4().hex[:8]}"
            if name != label:
                request = replace(request, request_id=name)
            self._check_room(model, caller)
            with_mods: Callable[[], dict[str, Any]] | None = None
            if request.mods or settings.trace_url is not None:
                with_mods = partial(
                    self.mod_runs.options, request.mods, owner=caller.owner, model=model.name
                )
            self._starting[caller.owner, name] = model
            try:
                async with limit:
                    generations, n_truncated = await self._begun(
                        model, request, caller, hold, with_mods
                    )
            finally:
                del self._starting[caller.owner, name]
        except TimeoutError:
            raise (too_late(limit_s) if limit.expired() else TimeoutError) from None
        except RequestError as error:
            raise renamed(error, request.names) from None
        run = Run(
            request, generations, hold.part(), on_close=partial(self._ended, model),
            owner=caller.owner, label=label, n_truncated=n_truncated,
            token_bytes=model.engine.token_bytes,
            traces_stored=self.mod_runs.stored if with_mods else None,
        )  # fmt: skip
        self.runs[caller.owner, name] = model.work.runs[caller.owner, name] = run
        self._n_runs_of[caller.owner] += 1
        if limit_s:
            run.deadline = loop.call_at(started_s + limit_s, lambda: run.end(too_late(limit_s)))
        return run

    async def scores(
        self,
        request: GenerateRequest,
        caller: Caller,
        *,
        top_logprobs: int,
        hold: Reservation,
        model: ModelEntry,
    ) -> list[Score]:
        """How *model* judges each prompt of *request*; `start` finds them in the cache then.

        Raises:
            RequestError: As `start`, like the other errors.
        """
        try:
            self._check_limits(request, model, caller)
            self._check_room(model, caller)
            ids = [
                await _ids_of(model, one, hold) if isinstance(one, str) else one
                for one in (request.prompt, *request.more_prompts)
            ]
            _check_prompts(ids, request, model.max_context)
            hold.take((1 + top_logprobs) * _SCORE_BYTES * sum(map(len, ids)))
            edits = None
            if request.edits is not None:
                edits = await self._builders.run(hold.client, request.edits)
            async with self.working(model, caller) as engine:
                return await engine.ascore(
                    ids, top_logprobs=top_logprobs, lora=request.lora, edits=edits
                )
        except RequestError as error:
            raise renamed(error, {"texts": "prompt", **request.names}) from None

    async def _begun(
        self,
        model: ModelEntry,
        request: GenerateRequest,
        caller: Caller,
        hold: Reservation,
        with_mods: Callable[[], dict[str, Any]] | None,
    ) -> tuple[list[Generation], int]:
        """Begin the generations of *request*; large requests are built in another thread.

        Returns them, and how many tokens of its prompt were left out.
        """
        engine, n_truncated = model.engine, 0
        try:
            prompts = [
                await _ids_of(model, one, hold) if isinstance(one, str) else one
                for one in (request.prompt, *request.more_prompts)
            ]
            if engine is not model.loaded:
                raise model_changed()
            if request.truncates and isinstance(request.prompt, str):
                n_whole = len(prompts[0])
                prompts[0] = await self._truncated(model, request, prompts[0], hold)
                n_truncated = n_whole - len(prompts[0])
            _check_prompts(prompts, request, model.max_context_of(engine))
            build = partial(self._build, engine, request, prompts, caller.owner, with_mods)
            sampling, is_gone = request.sampling, StopFlag()
            lists = (sampling.logit_bias, sampling.banned_tokens, sampling.stop_tokens)
            n_items = sum(map(len, lists)) * len(prompts) + sum(map(len, prompts))
            n_items *= request.n_samples
            given = (sampling.grammar, sampling.json_schema, sampling.regex)
            # Mods are loaded first, and see the prompt; edits may be files.
            has_work = bool(request.mods) or request.edits is not None
            if n_items < OFFLOAD_ITEMS and not has_work and all(one is None for one in given):
                return build(is_gone), n_truncated  # which takes about a millisecond
            try:
                generations = await self._builders.run(hold.client, build, is_gone)
            except BaseException:
                is_gone.set()
                raise
        except ClosedError:
            if engine is not model.loaded:
                raise model_changed() from None
            raise
        if engine is not model.loaded or self.pool.is_closing:
            for generation in generations:
                generation.cancel()
            _ = model.engine  # says why there is none
            raise model_changed()
        return generations, n_truncated

    async def _truncated(
        self, model: ModelEntry, request: GenerateRequest, ids: Sequence[int], hold: Reservation
    ) -> Sequence[int]:
        """The ids of a text whose front may be left out, as far as they fit."""
        limit = model.max_context
        if request.max_context:
            limit = min(limit, request.max_context)
        room = room_of(limit, min(request.max_tokens, self.settings.max_tokens))
        if len(ids) <= room:  # the memory's ids are not needed
            return ids
        with hold.part() as part:
            memory = await model.texts.ids(request.memory, add_special=False, hold=part)
        n_first = int(ids[:1] == [model.engine.model.bos_token_id])
        return truncated(ids, memory, n_first=n_first, room=room)

    def _build(
        self,
        engine: Engine,
        request: GenerateRequest,
        prompts: Sequence[Sequence[int]],
        owner: str,
        with_mods: Callable[[], dict[str, Any]] | None,
        is_gone: StopFlag,
    ) -> list[Generation]:
        """Any thread; once *is_gone* is set, nobody waits for the result any more."""
        wanted = request.attention
        capture = wanted.capture(engine.model) if wanted is not None else request.capture
        generations: list[Generation] = []
        edits = None if request.edits is None else request.edits()
        try:
            for i in range(len(prompts) * request.n_samples):
                if is_gone.is_set():
                    break
                i_prompt, i_sample = divmod(i, request.n_samples)
                # One prompt's rows are enough.
                rows = replace(capture, prompt=False) if capture and i else capture
                forcing = None if request.forcing is None else request.forcing(engine)
                sampling = request.sampling
                if i_sample and sampling.seed is not None:
                    sampling = replace(sampling, seed=(sampling.seed + i_sample) % (2**32 - 1))
                options: dict[str, Any] = {"trace": False} if with_mods is None else with_mods()
                if request.context_shift:
                    options |= {"context_shift": True, "n_keep": request.n_keep}
                    options["n_discard"] = request.n_discard
                if request.n_reuse_min:
                    options |= {"reuse": "shift", "reuse_min_tokens": request.n_reuse_min}
                elif request.slot is not None:
                    # Who names a slot goes on from what it holds, however it came there.
                    options["reuse"] = "prefix"
                if request.banned_phrases:
                    engine.token_bytes(0)  # a model without a vocabulary is refused here
                    phrases = PhraseBan(Phrases(request.banned_phrases), engine.token_bytes)
                    options["mods"] = [*options.get("mods", ()), phrases]
                with contextlib.ExitStack() as begun:
                    if "mods" in options:  # they see the chat, and their failures are logged
                        begun.enter_context(conversation_of(request.dialogue))
                        begun.enter_context(logging_failures())
                    begun.enter_context(owned_by(owner, is_gone))
                    generation = engine.generate(
                        prompts[i_prompt],
                        max_tokens=min(request.max_tokens, self.settings.max_tokens),
                        sampling=sampling,
                        capture=rows,
                        slot=request.slot if i == 0 else None,
                        cache_prompt=request.cache_prompt or i_sample > 0,
                        lora=request.lora,
                        edits=edits,
                        forcing=forcing,
                        request_id=request.request_id if i == 0 else f"{request.request_id}/{i}",
                        **request.drafting,
                        **options,
                    )
                for ban in generation.mods if request.banned_phrases else ():
                    if isinstance(ban, PhraseBan):
                        ban.watch(generation)
                generations.append(generation)
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise
        if is_gone.is_set():
            for generation in generations:
                generation.cancel()
        return generations

    def _check_limits(self, request: GenerateRequest, model: ModelEntry, caller: Caller) -> None:
        settings = self.settings
        if request.edits is not None:
            caller.check_edits(settings)
        if not 1 <= request.n_samples <= settings.max_samples:
            raise RequestError(
                f"n_samples is {request.n_samples}, allowed are 1 to {settings.max_samples}",
                parameter="n_samples",
            )
        n_most = max(settings.max_samples, len(model.engine.slots) + settings.max_queued)
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

    def _check_room(self, model: ModelEntry, caller: Caller) -> None:
        """Refuse a request where too many run or wait, on *model* or on all together.

        An owner with less than its share of the places is let in though others have taken them; so
        one alone may have all of them. Streams that nobody reads are no part of *model*'s queue.
        """
        n_places = len(model.engine.slots) + self.settings.max_queued
        most, starting = self.settings.max_running, self._starting
        n_others = sum(len(one.work.others) for one in self.pool.all)
        if len(model.work.runs) + len(starting) + n_others < n_places and (
            len(self.runs) + len(starting) + n_others < most
        ):
            return
        here = model.work.owners(has_parked=False)
        here.update(owner for (owner, _), one in starting.items() if one is model)
        everywhere = self.pool.busy_owners()
        everywhere.update(owner for owner, _ in starting)
        for busy, limit, name in (
            (here, n_places, "slots + max_queued"),
            (everywhere, most, "max_running"),
        ):
            n_own = busy[caller.owner]
            share = max(1, limit // len(busy.keys() | {caller.owner}))
            if busy.total() >= limit and n_own >= share:
                raise QueueFull(
                    f"{n_own} of your requests run or wait, your share of {limit} ({name}) is "
                    f"{share} now; let one of them end and try again"
                )

    def _ended(self, model: ModelEntry, run: Run) -> None:
        self.runs.pop((run.owner, run.request_id), None)
        model.work.ended(run)
        reason, usages = run.finish_reason, [one.usage for one in run.generations]
        self._last.pop(run.owner, None)
        self._last[run.owner] = LastRun(
            usages[0], reason, run.request.sampling.seed, run.ended_s, run.request.key,
            tuple(run.logprobs), model.id,
        )  # fmt: skip
        self.n_ended[reason] += 1
        for usage in usages:
            n_tokens = usage.prompt_tokens + usage.completion_tokens
            self.n_longest_tokens = max(self.n_longest_tokens, n_tokens)
            self.n_cached_tokens += usage.cached_tokens
        self.observe_seconds(time.monotonic() - run.started_s)
        self.pool.note_idle()

    @contextlib.asynccontextmanager
    async def working(self, model: ModelEntry, caller: Caller) -> AsyncGenerator[Engine]:
        """*model*'s engine, for a request of *caller* that generates nothing, such as an embedding.

        The limits of a run apply to it, and what ends runs ends it.

        Raises:
            QueueFull: Too many requests run or wait.
            NoModel: The model is not loaded.
            ModelChanged: The model was switched meanwhile.
            TimedOut: It took longer than ``request_timeout_s``.
        """
        self._check_room(model, caller)
        engine, limit_s = model.engine, self.settings.request_timeout_s
        limit, others = asyncio.timeout(limit_s or None), model.work.others
        try:
            async with limit:
                others[limit] = caller.owner, None
                with owned_by(caller.owner):
                    yield engine
        except TimeoutError:
            raise (
                others[limit][1] or too_late(limit_s) if limit.expired() else TimeoutError
            ) from None
        except ClosedError:
            if engine is not model.engine:
                raise model_changed() from None
            raise
        finally:
            others.pop(limit, None)
            self.pool.note_idle()

    def find(
        self, caller: Caller = ANYONE, *, key: str = "", request_id: str | None = None
    ) -> list[Run]:
        """Runs with this ``genkey``, or that their clients call so, in the order of their start.

        Only those that *caller* may see: another owner's run looks as if it did not exist. An admin
        without a run of that name gets everybody's.
        """
        found = [
            run
            for run in self.runs.values()
            if caller.may_see(run.owner)
            and (run.request.key == key if request_id is None else run.label == request_id)
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
        return self._n_runs_of.total() if caller.is_admin else self._n_runs_of[caller.owner]

    # ---- other threads

    async def decoded(self, decode: Callable[[_Raw], _T], raw: _Raw, hold: Reservation) -> _T:
        """*decode* of *raw*, counted in *hold*; the result may live as long as that."""
        hold.take((DECODED_TIMES - 1) * len(raw))
        if len(raw) < _OFFLOAD_BODY:
            return decode(raw)
        return await self._builders.run(hold.client, decode, raw)

    async def converted(
        self,
        n_bytes: int,
        hold: Reservation,
        convert: Callable[..., _T],
        *args: Any,
        **options: Any,
    ) -> _T:
        """*convert* of a body of *n_bytes*; checking long lists takes time."""
        work = partial(convert, *args, **options)
        return work() if n_bytes < _OFFLOAD_FIELDS else await self._builders.run(hold.client, work)

    async def offload(self, n_bytes: int, work: Callable[..., _T], *args: Any) -> _T:
        """Do *work* here, or in another thread if *n_bytes* would hold up the event loop."""
        if n_bytes < OFFLOAD_BYTES:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._workers, work, *args)

    async def prompting(self, engine: Engine, name: str, work: Callable[..., _T], *args: Any) -> _T:
        """Do *work* in a thread, which waits for prompts of *engine* with the request id *name*.

        They are cancelled if the caller's request ends first.
        """
        working = asyncio.ensure_future(asyncio.to_thread(work, *args))
        try:
            return await asyncio.shield(working)
        finally:
            if not working.done():
                ending = asyncio.create_task(_end(engine, name, working))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)


async def _end(engine: Engine, name: str, working: asyncio.Future[Any]) -> None:
    """End the thread of a request that is over: cancel its prompts, each as it begins."""
    while not working.done():
        for one in engine.generations:
            if one.request_id == name:
                one.cancel()
        await asyncio.wait([working], timeout=_CANCEL_S)
    working.exception()  # nobody else takes it


async def _ids_of(model: ModelEntry, text: str, hold: Reservation) -> Sequence[int]:
    """The ids of a text."""
    with hold.part() as ids:  # a prompt that fits is small
        return await model.texts.ids(text, add_special=True, hold=ids)


def _check_prompts(
    prompts: Sequence[Sequence[int]], request: GenerateRequest, max_context: int
) -> None:
    limit = min(max_context, request.max_context or max_context)
    for ids in prompts:
        if len(ids) > limit:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, the limit is {limit}; shorten it",
                parameter="prompt",
                n_tokens=len(ids),
                n_max=limit,
            )


Call: TypeAlias = endpoint.Call[Service, ModelEntry]
"""A request to an operation of the models."""
