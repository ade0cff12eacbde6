"""Pool: the models of a server. A request uses one by name; using it loads it, which several
requests share.

All loaded models together stay within a budget of memory. What a model needs is estimated from its
file before anything changes, held while it is loaded, and then replaced by what it took. Where
there is no room, models that no request uses leave, the least recently used first; pinned ones
never do. If those are not enough, nothing leaves, and the load waits until requests end. So a
request never ends because another one wants a model; only an administrator, who switches or
unloads, ends requests.

Belongs to one event loop.
"""

import asyncio
import contextlib
import copy
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from kqview.engine import Engine
from kqview.errors import CapacityError, ClosedError, KqviewError, OutOfMemory, QueueFull
from kqview.machine import physical_memory_bytes, system_info
from kqview.server.config import UNNAMED, Config, ModelConfig
from kqview.server.errors import (
    NoModel,
    NotSupported,
    ShuttingDown,
    UnknownModel,
    model_changed,
    shutting_down,
)
from kqview.server.live_config import LiveConfig
from kqview.server.models.events_bus import ModelFailed, ModelLoaded, ModelLoading, ModelUnloaded
from kqview.server.models.model_entry import ModelEntry, Options
from kqview.server.models.model_files import model_file
from kqview.server.web.budget import Workers

_T = TypeVar("_T")

_log: Final = logging.getLogger("kqview.server")
_N_WORKERS: Final = 4
_MOST_NAME: Final = 80  # characters of an unknown name that are repeated
_FIRST_RETRY_S: Final = 1.0  # after a failed load; doubled each time
_LONGEST_RETRY_S: Final = 60.0
_N_PROGRESS: Final = 10  # events of a load
_MIB: Final = 2**20


class Pool:
    """Every configured model, the default one first."""

    def __init__(self, live: LiveConfig, engine: Engine | None) -> None:
        """Serve the configured models; *engine* is the default one's, and stays the caller's."""
        self.is_closing = False
        """Whether no model is loaded any more, and none may be used."""
        self.listeners: set[Callable[[msgspec.Struct], object]] = set()
        """Called with each event of a model (`events_bus.ModelLoading` and the others)."""
        self._live = live
        self._texts = Workers(_N_WORKERS, "text")
        self._served: dict[str, ModelEntry] = {}
        self._removed: set[ModelEntry] = set()  # they leave when no request uses them
        self._loads: dict[ModelEntry, asyncio.Task[KqviewError | None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # that go on though a client leaves
        self._retries: dict[
            ModelEntry, tuple[float, float]
        ] = {}  # when, and after how many seconds
        self._freed = asyncio.Event()
        for id_, model in _models(live.config).items():
            self._served[id_] = self._new(id_, model, None if self._served else engine)
        self._first = next(iter(self._served))  # of the configuration
        self._default = self._first
        self._note_number()

    def _new(self, id_: str, model: ModelConfig, engine: Engine | None = None) -> ModelEntry:
        return ModelEntry(
            id_, model, self._live, engine=engine, texts=self._texts, on_idle=self.note_idle
        )

    def _note_number(self) -> None:
        for served in self:
            served.is_only = not self.has_several

    # ---- which there are

    def __iter__(self) -> Iterator[ModelEntry]:
        """The models that requests may name."""
        return iter(list(self._served.values()))

    @property
    def all(self) -> list[ModelEntry]:
        """Those that leave as well."""
        return [*self._served.values(), *self._removed]

    @property
    def default(self) -> ModelEntry:
        """The model of requests that name none."""
        return self._served[self._default]

    @property
    def has_several(self) -> bool:
        """Whether requests choose."""
        return len(self._served) > 1

    def find(self, name: str | None) -> ModelEntry:
        """The model called *name*, which may have the name of a mod after a slash.

        The default model for None. A server with one model answers to any name.

        Raises:
            UnknownModel: There is none of this name.
        """
        if name is None or len(self._served) == 1:
            return self._served[self._default]
        found = self._served.get(name) or self._served.get(name.rpartition("/")[0])
        if found is None:
            known = ", ".join(map(repr, self._served))
            raise UnknownModel(f"there is no model {name[:_MOST_NAME]!r}; this server has {known}")
        return found

    # ---- using one

    @contextlib.asynccontextmanager
    async def using(self, name: str | None = None) -> AsyncGenerator[ModelEntry]:
        """The model called *name*, loaded if it was not; it stays loaded meanwhile.

        A load that began goes on though the request that asked for it is gone, unless it still
        waits for room.

        Raises:
            UnknownModel: There is none of this name.
            NoModel: It cannot be loaded, could not shortly before, or is being switched.
            CapacityError: It does not fit into the budget, or not beside the models in use.
            QueueFull: Too many requests wait for it.
            ShuttingDown: The server is about to end.
            ModelChanged: The model left meanwhile.
        """
        served = self.find(name)
        with served.work.used():
            if served.loaded is None or self.is_closing:
                await self._ready(served)
            engine = served.loaded
            try:
                yield served
            except ClosedError:  # before it was a run: while its prompt was made
                if self.is_closing:
                    raise shutting_down() from None
                if served.loaded is not engine:
                    raise model_changed() from None
                raise

    async def _ready(self, served: ModelEntry) -> None:
        while served.loaded is None or self.is_closing:
            if self.is_closing or served.is_switching:
                _ = served.engine  # says why there is none
            if served.work.n_uses > (limit := self._live.settings.max_running):
                raise QueueFull(f"{limit} requests wait for this model, the limit; try again later")
            load = self._loads.get(served)
            if load is None:
                at_s, _ = self._retries.get(served, (0.0, 0.0))
                if (left_s := at_s - time.monotonic()) > 0:
                    raise self._failure(served, left_s)
                load = self._loads[served] = asyncio.create_task(self._load(served))
                load.add_done_callback(lambda _: self._loads.pop(served, None))
            error = await asyncio.shield(load)
            if error is not None:
                raise copy.copy(error)

    def _failure(self, served: ModelEntry, retry_s: float) -> NoModel:
        return NoModel(
            f"the model {served.id!r} cannot be loaded: {served.error}; it is tried again in "
            f"{retry_s:.0f} s",
            retry_after_s=max(1, math.ceil(retry_s)),
        )

    # ---- loading

    async def _load(self, served: ModelEntry) -> KqviewError | None:
        """Load it, and return what those that wait for it are told; None if it is loaded."""
        started_s = time.monotonic()
        served.state, served.progress, served.error = "loading", 0.0, None
        self._publish(ModelLoading(model_id=served.id, progress=0.0))
        try:
            await self._make_room(served)
            await served.load(self._progress(served))
        except (CapacityError, ShuttingDown) as error:
            served.held_bytes = 0
            if not isinstance(error, OutOfMemory):  # it is not the model's fault
                served.state = "unloaded"
                self._publish(ModelFailed(model_id=served.id, error=str(error), retry_s=0.0))
                self.note_idle()
                return error
            return self._note_failure(served, error)
        except Exception as error:
            served.held_bytes = 0
            return self._note_failure(served, error)
        self._retries.pop(served, None)
        took_s, n_bytes = time.monotonic() - started_s, served.held_bytes
        self._publish(ModelLoaded(model_id=served.id, memory_bytes=n_bytes, seconds=took_s))
        _log.info("model %s is loaded: %.0f MiB in %.1f s", served.id, n_bytes / _MIB, took_s)
        await self._check_measured(served)
        return None

    def _note_failure(self, served: ModelEntry, error: Exception) -> KqviewError:
        served.failed(error)
        _, before_s = self._retries.get(served, (0.0, 0.0))
        retry_s = min(_LONGEST_RETRY_S, 2 * before_s or _FIRST_RETRY_S)
        self._retries[served] = time.monotonic() + retry_s, retry_s
        _log.error("model %s cannot be loaded: %s", served.id, error)
        self._publish(ModelFailed(model_id=served.id, error=str(error), retry_s=retry_s))
        self.note_idle()
        return self._failure(served, retry_s)

    def _progress(self, served: ModelEntry) -> Callable[[float], object]:
        loop, n_told = asyncio.get_running_loop(), 0

        def note(fraction: float) -> None:  # another thread
            nonlocal n_told
            if (n := int(fraction * _N_PROGRESS)) > n_told:
                n_told = n
                event = ModelLoading(model_id=served.id, progress=fraction)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._publish, event)

        return note

    def _publish(self, event: msgspec.Struct) -> None:
        for listener in tuple(self.listeners):
            listener(event)

    # ---- memory

    @property
    def budget_bytes(self) -> int | None:
        """Most bytes of all loaded models; None for the only one, which may take what there is."""
        settings = self._live.settings
        if settings.models_budget_bytes is not None or not self.has_several:
            return settings.models_budget_bytes
        machine = physical_memory_bytes()
        for given in (settings.memory_budget_bytes, settings.attention_budget_bytes):
            machine -= machine // 4 if given is None else given
        devices = [one for one in system_info()["devices"] if one["type"] != "CPU"]
        return max(0, machine) + sum(one["memory_total_bytes"] or 0 for one in devices)

    @property
    def held_bytes(self) -> int:
        """Bytes of all models that are loaded, being loaded or being closed."""
        return sum(served.held_bytes for served in self.all)

    async def _make_room(self, served: ModelEntry) -> None:
        """Hold what *served* needs; others leave for it where they have to, and may."""
        n_bytes = await self._estimated(served)
        budget = self.budget_bytes
        if budget is None:
            served.held_bytes = n_bytes
            return
        for_ever = sum(one.held_bytes for one in self._others(served) if not _may_leave(one))
        if n_bytes + for_ever > budget:
            pinned = f", and pinned ones take {_size(for_ever)}" if for_ever else ""
            raise CapacityError(
                f"the model {served.id!r} needs {_size(n_bytes)}, but all models may take "
                f"{_size(budget)} (models_budget_bytes){pinned}; raise that, lower n_ctx or "
                "n_slots, or choose a smaller model"
            )
        wait_s = self._live.settings.model_wait_s
        end_s = asyncio.get_running_loop().time() + wait_s
        while (missing := self._missing(served, n_bytes, budget)) > 0:
            if self.is_closing:
                raise shutting_down()
            if not served.work.n_uses:
                raise CapacityError("nobody waits for the model any more")
            freed = self._freed
            if await self._free(served, missing):
                continue
            try:
                async with asyncio.timeout_at(end_s):
                    await freed.wait()
            except TimeoutError:
                in_use = ", ".join(
                    f"{one.id} ({f'{one.work.n_uses} requests' if _may_leave(one) else 'pinned'})"
                    for one in self._others(served)
                    if one.held_bytes
                )
                raise CapacityError(
                    f"the model {served.id!r} needs {_size(n_bytes)} of the {_size(budget)} that "
                    f"all models may take, and for {wait_s:g} s (model_wait_s) others were in use: "
                    f"{in_use}; try again later"
                ) from None
        served.held_bytes = n_bytes

    async def _estimated(self, served: ModelEntry) -> int:
        """What it will need; a device without room for it gets some, if others can leave."""
        has_devices = any(one["type"] != "CPU" for one in system_info()["devices"])
        while True:
            try:
                return await asyncio.to_thread(served.estimate)
            except OutOfMemory:
                # Only a device may have room later: what the host lacks, it always will.
                if not has_devices or not await self._free(served, 1):
                    raise

    def _others(self, served: ModelEntry) -> list[ModelEntry]:
        return [one for one in self.all if one is not served]

    def _missing(self, served: ModelEntry, n_bytes: int, budget: int) -> int:
        return n_bytes + sum(one.held_bytes for one in self._others(served)) - budget

    async def _free(self, served: ModelEntry, n_bytes: int) -> bool:
        """Unload idle models of *n_bytes* or more for *served*; False if there are too few."""
        idle = [one for one in self._others(served) if _may_leave(one) and not one.work.is_used]
        idle = [one for one in idle if one.loaded is not None]
        if sum(one.held_bytes for one in idle) < n_bytes:
            return False
        for one in sorted(idle, key=lambda one: one.work.last_used_s):
            if n_bytes <= 0:
                break
            n_bytes -= one.held_bytes
            await self._unload(one, "memory", only_idle=True)
        return True

    async def _unload(self, served: ModelEntry, reason: str, *, only_idle: bool = False) -> None:
        if await served.unload(only_idle=only_idle):
            _log.info("model %s is unloaded: %s", served.id, reason)
            self._publish(ModelUnloaded(model_id=served.id, reason=reason))
            self.note_idle()

    async def _check_measured(self, served: ModelEntry) -> None:
        """Make room for what a model took beyond its estimate, as far as others are idle."""
        budget = self.budget_bytes
        missing = 0 if budget is None else self._missing(served, served.held_bytes, budget)
        if missing > 0:
            _log.warning(
                "model %s took %s, %s were estimated; all models together are over "
                "models_budget_bytes by %s",
                served.id, _size(served.held_bytes), _size(served.estimated_bytes or 0),
                _size(missing),
            )  # fmt: skip
            await self._free(served, missing)

    def note_idle(self) -> None:
        """A request, run or load has ended: whoever waits for room looks again."""
        self._freed.set()
        self._freed = asyncio.Event()
        if self._removed:
            for served in self._removed:
                if not served.work.is_used and served.loaded is not None and not self.is_closing:
                    self._begin(self._unload(served, "removed", only_idle=True))
            self._removed = {one for one in self._removed if one.work.is_used or one.held_bytes}

    async def idle(self) -> None:
        """Wait until no request runs or waits for a slot, on any model."""
        while self.n_busy:
            await self._freed.wait()

    def _begin(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- the administrator's part

    async def load_now(self, served: ModelEntry) -> None:
        """Load *served*, also where it failed shortly before; raises as `using`."""
        self._retries.pop(served, None)
        with served.work.used():
            await self._ready(served)

    async def unload_now(self, served: ModelEntry) -> None:
        """Unload *served*; running requests end with ModelChanged. The next request loads it.

        Raises:
            NotSupported: Its engine was opened by whoever runs this server.
        """
        if not served.is_ours:
            raise NotSupported(
                f"the model {served.id!r} was opened by the program that serves it, which closes it"
            )
        await self._unload(served, "admin")

    async def switch(self, name: str, options: Options) -> Engine:
        """Make another model the default one.

        With several models, *name* is one of them, or a GGUF file of ``models_dir``, which becomes
        a further one. It is loaded like any other; nothing ends unless it is loaded with other
        *options*.

        The only model is replaced by the file *name* of ``models_dir``. What can be checked without
        the new model's weights (not a model, options out of range, not enough memory) is refused
        before anything changes, and the old model keeps serving. Otherwise running requests end
        with ModelChanged, the old model is closed, because both may not fit, and the new one is
        opened. If that fails after all, the old one is opened again; only if that fails too there
        is no model. Switches run one after another, and one that began is finished even if the
        client that asked for it is gone.

        Args:
            name: As `names` lists it.
            options: ``n_ctx``, ``n_slots`` or ``n_gpu_layers`` of this model; None takes the
                setting.

        Returns:
            The new engine; the next switch may already have begun.

        Raises:
            Forbidden: There is no folder of models, or *name* leads out of it.
            NotFound: There is no such file.
            ShuttingDown: The server is about to end.
            KqviewError: It cannot be loaded, as the constructor of Engine says.
        """
        served = self._served.get(name) if self.has_several else None
        is_new = served is None
        if served is None:
            path = model_file(self._live.settings.models_dir, name)
            if not self.has_several:
                return await asyncio.shield(self._begin(self._replace_only(name, path, options)))
            served = self._served[name] = self._new(name, ModelConfig(path=str(path)))
            served.is_only = False
        if served.take({key: value for key, value in options.items() if value is not None}):
            await self.unload_now(served)
        try:
            await self.load_now(served)
        except KqviewError:
            if is_new:
                self._served.pop(name, None)
            raise
        self._default = served.id
        return served.engine

    async def _replace_only(self, name: str, path: Path, options: Options) -> Engine:
        only, started_s = self.default, time.monotonic()
        self._publish(ModelLoading(model_id=only.id, progress=0.0))
        try:
            engine = await only.switch(name, str(path), options)
        except Exception as error:
            _log.warning("the model was not switched: %s", error)
            if isinstance(error, KqviewError):
                self._publish(ModelFailed(model_id=only.id, error=str(error), retry_s=0.0))
            raise
        took_s = time.monotonic() - started_s
        self._publish(
            ModelLoaded(model_id=only.id, memory_bytes=engine.memory_bytes, seconds=took_s)
        )
        return engine

    def reconfigure(self, config: Config) -> None:
        """Serve the models of *config*; the settings are those of the server's `LiveConfig`.

        New ones appear, and those that are no longer named leave when no request uses them. Other
        options of a model count from its next load on. The first one becomes the default model, but
        for one that an administrator chose while the same one was first.
        """
        before, self._served = self._served, {}
        for id_, model in _models(config).items():
            served = before.pop(id_, None) or self._new(id_, model)
            served.configure(model)
            self._served[id_] = served
        self._removed |= set(before.values())
        first = next(iter(_models(config)))
        if first != self._first or self._default not in self._served:
            self._default = first
        self._first = first
        self._note_number()
        for served in self:
            if served.pinned and served.loaded is None:
                self._begin(self._load_pinned(served))
        self.note_idle()

    async def _load_pinned(self, served: ModelEntry) -> None:
        with contextlib.suppress(KqviewError):  # it is logged, and published
            await self.load_now(served)

    # ---- life

    def load(self, progress: Callable[[float], object] | None = None) -> None:
        """Load what is loaded at the start; blocks, before the event loop runs.

        That is the only model, and the pinned ones of several; of these, one that fails is logged
        and tried again when it is used.

        Args:
            progress: Called with the loaded fraction, 0..1.

        Raises:
            KqviewError: The only model cannot be loaded, as the constructor of Engine.
        """
        for served in self:
            if not self.has_several:
                served.open(progress)
            elif served.pinned:
                try:
                    served.open(progress)
                except KqviewError as error:
                    served.failed(error)
                    _log.error("model %s cannot be loaded: %s", served.id, error)

    def begin_close(self) -> None:
        """Load nothing any more, use no model, and end what runs."""
        self.is_closing = True
        for served in self.all:
            served.is_closing = True
            served.work.end(shutting_down())
        self.note_idle()

    async def close(self, limit_s: float) -> None:
        """Close the engines that are ours, after the loads and switches that run."""
        self.begin_close()
        await asyncio.gather(*self._loads.values(), *self._tasks, return_exceptions=True)
        await asyncio.gather(*(served.close(limit_s) for served in self.all))
        self._texts.shutdown()

    # ---- figures

    @property
    def n_busy(self) -> int:
        """Requests that run or wait for a slot, on all models."""
        return sum(served.work.n_busy for served in self.all)

    def busy_owners(self) -> Counter[str]:
        """Number of each owner's requests of `n_busy`."""
        return sum((one.work.owners(has_parked=True) for one in self.all), Counter[str]())

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken."""
        only = self.default
        is_loadable = self.has_several or only.loaded is not None or only.state == "unloaded"
        return is_loadable and not self.is_closing

    @property
    def is_engine_lost(self) -> bool:
        """Whether closing an engine gave its thread up."""
        return any(one.loaded is not None and one.loaded.health().is_lost for one in self.all)

    def stall(self, factor: float = 1.0) -> str | None:
        """Why requests make no progress, None if they do; any thread.

        Args:
            factor: Times the settings' ``stall_timeout_s``.
        """
        limit_s = factor * self._live.settings.stall_timeout_s
        engines = [engine for one in self.all if limit_s and (engine := one.loaded) is not None]
        return next((why for one in engines if (why := one.health().stall(limit_s))), None)


def _models(config: Config) -> Mapping[str, ModelConfig]:
    return config.models or {UNNAMED: ModelConfig()}  # an engine may be all that is served


def _may_leave(served: ModelEntry) -> bool:
    return not served.pinned and served.is_ours


def _size(n_bytes: int) -> str:
    return f"{n_bytes / _MIB:.1f} MiB"
