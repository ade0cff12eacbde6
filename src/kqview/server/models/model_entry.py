"""ModelEntry: one model of the server: its engine while it is loaded, and what uses it.

Opening, closing and switching the engine is here; when that happens is for `Pool` to say. Belongs
to one event loop. It owns the engine that it opened itself, not one that it was given.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from kqview.chat.named_templates import TEMPLATES
from kqview.demo import MODEL_PATH
from kqview.engine import Engine, check_opening
from kqview.errors import KqviewError
from kqview.machine import physical_memory_bytes
from kqview.server.config import UNNAMED, ModelConfig
from kqview.server.errors import ModelChanged, NoModel, ShuttingDown, model_changed, shutting_down
from kqview.server.live_config import LiveConfig
from kqview.server.models.slots import Slots
from kqview.server.models.texts import ModelTexts
from kqview.server.settings import DEMO_CONTEXT
from kqview.server.web.budget import Workers
from kqview.types import EngineStats

if TYPE_CHECKING:
    from kqview.server.models.run import Run

Options = Mapping[str, int | None]
"""``n_ctx``, ``n_slots`` or ``n_gpu_layers`` that an administrator asked for; None for no wish."""
State = Literal["unloaded", "loading", "loaded", "failed"]

_log: Final = logging.getLogger("kqview.server")
_FLASH_ATTN: Final[Mapping[str, Literal["auto"] | bool]] = {
    "auto": "auto",
    "on": True,
    "off": False,
}


class ModelWork:
    """The register of what uses one model.

    Attributes:
        n_uses: Requests that use it or wait for it.
        last_used_s: When a request used it last, by ``time.monotonic``; 0.0 before the first.
        runs: Its runs by owner and request_id.
        others: What uses the engine without a run, by the limit of its time: its owner, and why it
            ended early.
        slot_owners: Whose contents a slot holds; the slot used last is the last entry.
        slot_users: Who left contents in a slot since work on it began.
        n_processed: Prompt tokens that the last generation on a slot evaluated.
        slot_freed: Set, and replaced, when a run leaves its slots.
    """

    def __init__(self, on_idle: Callable[[], None]) -> None:
        """*on_idle* is called when a request no longer uses it."""
        self.n_uses = 0
        self.last_used_s = 0.0
        self.runs: dict[tuple[str, str], Run] = {}
        self.others: dict[asyncio.Timeout, tuple[str, KqviewError | None]] = {}
        self.slot_owners: dict[int, str] = {}
        self.slot_users: defaultdict[int, set[str]] = defaultdict(set)
        self.n_processed: dict[int, int] = {}
        self.slot_freed = asyncio.Event()
        self._on_idle = on_idle

    @property
    def n_busy(self) -> int:
        """Requests that run, or wait for a slot."""
        return len(self.runs) + len(self.others)

    @property
    def is_used(self) -> bool:
        """Whether a request uses the model, or waits for it."""
        return bool(self.n_uses or self.n_busy)

    @contextlib.contextmanager
    def used(self) -> Generator[None]:
        """Count a request that uses the model, or waits for it."""
        self.n_uses += 1
        try:
            yield
        finally:
            self.n_uses -= 1
            self.last_used_s = time.monotonic()
            self._on_idle()

    def owners(self, *, has_parked: bool) -> Counter[str]:
        """Number of each owner's requests of `n_busy`, with or without parked runs."""
        runs = (run.owner for run in self.runs.values() if has_parked or not run.is_parked)
        return Counter(chain(runs, (owner for owner, _ in self.others.values())))

    def ended(self, run: "Run") -> None:
        """*run* is over: what it leaves in its slots is its owner's."""
        self.runs.pop((run.owner, run.request_id), None)
        for one in run.generations:
            if (slot_id := one.slot) is not None:
                usage = one.usage
                self.note_slot(slot_id, run.owner, usage.prompt_tokens - usage.cached_tokens)
        self.slot_freed.set()
        self.slot_freed = asyncio.Event()

    def note_slot(self, slot_id: int, owner: str, n_processed: int) -> None:
        """The slot holds contents of *owner* from now on."""
        self.slot_owners.pop(slot_id, None)
        self.slot_owners[slot_id] = owner
        self.slot_users[slot_id].add(owner)
        self.n_processed[slot_id] = n_processed

    def end(self, error: ModelChanged | ShuttingDown) -> None:
        """End every run and other work on the engine, and tell its client *error*."""
        for run in list(self.runs.values()):
            run.end(error)
        for limit in self.others:
            if not limit.expired():
                self.others[limit] = self.others[limit][0], error
                limit.reschedule(asyncio.get_running_loop().time())


class ModelEntry:
    """A model that is configured, loaded or not.

    Attributes:
        id: Its name in the configuration.
        config: Its part of the configuration.
        path: Its file, None for the demo model and for an engine that was given.
        loaded: The engine; None while there is none.
        state: Whether it is loaded.
        error: Why it could not be loaded, None unless *state* is "failed".
        progress: Loaded fraction, 0..1.
        is_only: Whether the server has no other model: it may have aliases then, and is called by
            its file if the configuration gives it no name.
        is_switching: Whether it is being replaced by another file.
        estimated_bytes: Memory that it needs, as far as its file says; None before the first load.
        measured_bytes: Memory that it took when it was loaded; None before that.
        held_bytes: Memory that it takes, or that is kept for it while it is loaded; 0 without.
        work: What uses it.
        texts: Ids of texts and texts of ids.
        slots: Its slots.
        pinned: Whether it is never unloaded to make room.
        n_loads: How often it was loaded.
    """

    def __init__(
        self,
        id_: str,
        config: ModelConfig,
        live: LiveConfig,
        *,
        engine: Engine | None,
        texts: Workers,
        on_idle: Callable[[], None],
    ) -> None:
        """Serve *engine*, which stays the caller's; with None, `open` opens the configured file.

        Args:
            id_: Name in the configuration.
            config: Its part of the configuration.
            live: Of the server; options that *config* leaves open are from its settings.
            engine: An engine to serve, or None.
            texts: Where long texts are tokenized.
            on_idle: Called when a request, run or other work on it has ended.
        """
        self.id = id_
        self.config = config
        self.loaded = engine
        self.state: State = "unloaded" if engine is None else "loaded"
        self.error: str | None = None
        self.progress = 0.0 if engine is None else 1.0
        self.work = ModelWork(on_idle)
        self.texts = ModelTexts(lambda: self.engine, texts)
        self.slots = Slots(live, self.work, lambda: self.engine)
        self.pinned = config.pinned
        self.n_loads = 0 if engine is None else 1
        self.is_closing = False
        self.is_only = True
        self.is_switching = False
        self.estimated_bytes: int | None = None
        self.measured_bytes = None if engine is None else engine.memory_bytes
        self.held_bytes = self.measured_bytes or 0
        self._absence = "no model is loaded"
        self._live = live
        self._owns_engine = False
        self.path: str | None = config.path
        self._given: Options = {}  # they override the others
        self._switching = asyncio.Lock()
        # Of engines that were closed: all but the last one together, and the last one.
        self._past: list[EngineStats] = []

    # ---- what it is

    @property
    def engine(self) -> Engine:
        """The engine that serves.

        Raises:
            NoModel: None is loaded: it is being switched, or could not be opened.
            ShuttingDown: The server is about to end.
        """
        if self.is_closing:
            raise shutting_down()
        if self.loaded is None:
            raise NoModel(f"{self._absence}; load one with /api/v1/model/load")
        return self.loaded

    @property
    def name(self) -> str:
        """What clients see: its id; for the only model, an alias or what its file says is used.

        Raises:
            NoModel: It is called as its file says, and not loaded.
        """
        if not self.is_only:
            return self.id
        if aliases := self._live.settings.aliases:
            return aliases[0]
        if self.id != UNNAMED:
            return self.id
        engine = self.engine
        if self._owns_engine and self.path is None:
            return "demo"  # as the option that serves it
        return engine.model.name or (Path(self.path).stem if self.path else "demo")

    def mod_in(self, name: str) -> str:
        """The mod in *name*, ``id/mod``, by which a request asks for this model; "" for none.

        Where there is one model, only names such as ``org/model/mod`` have one, and only on servers
        with mods: it answers to any name.
        """
        if not self.is_only:
            return name.removeprefix(self.id).removeprefix("/")
        settings = self._live.settings
        if settings.mods_dir is None or name.count("/") < 2:
            return ""
        is_own = name in (self.id, self.name, *settings.aliases)
        return "" if is_own else name.rpartition("/")[2]

    @property
    def max_context(self) -> int:
        """Longest prompt in tokens."""
        return self.max_context_of(self.engine)

    def max_context_of(self, engine: Engine) -> int:
        """Longest prompt in tokens if *engine* serves."""
        limit = self._live.settings.max_context
        return engine.n_ctx if limit is None else min(limit, engine.n_ctx)

    def stats(self) -> list[EngineStats]:
        """Counters of all engines that it had, the current one last."""
        return [*self._past, *([self.loaded.stats()] if self.loaded else [])]

    # ---- its engine

    @property
    def is_ours(self) -> bool:
        """Whether the engine is opened here, so that it may be closed and opened again."""
        return self.loaded is None or self._owns_engine

    def configure(self, config: ModelConfig) -> None:
        """Take *config* from the next load on."""
        if config.path != self.config.path:
            self.path, self._given = config.path, {}
        if config.pinned != self.config.pinned:
            self.pinned = config.pinned
        self.config = config

    def take(self, options: Options) -> bool:
        """Take *options* from the next load on; whether it is loaded with others."""
        is_other = self.loaded is not None and dict(options) != dict(self._given)
        self._given = options
        return is_other

    def estimate(self) -> int:
        """Bytes that it will need; blocks. Raises as `check_opening`."""
        path = MODEL_PATH if self.path is None else self.path
        needs = check_opening(path, **self._options(self.path, self._given))
        n_bytes = sum(one.needed_bytes for one in needs)
        self.estimated_bytes = n_bytes + sum(os.path.getsize(file) for file, _ in self._adapters())
        return self.estimated_bytes

    def open(self, progress: Callable[[float], object] | None = None) -> None:
        """Open the engine if there is none; blocks, before the event loop runs.

        Args:
            progress: Called with the loaded fraction, 0..1.

        Raises:
            KqviewError: As the constructor of Engine.
        """
        if self.loaded is None:
            self._opened(self._new(self.path, self._given, progress))

    def _opened(self, engine: Engine) -> None:
        self.loaded = engine
        self._owns_engine = True
        self.state, self.error, self.progress = "loaded", None, 1.0
        self.measured_bytes = engine.memory_bytes
        # llama.cpp allocates some of what is estimated only when it computes.
        self.held_bytes = max(self.measured_bytes, self.estimated_bytes or 0)
        self.n_loads += 1

    async def load(self, progress: Callable[[float], object]) -> None:
        """Open the engine if there is none.

        Args:
            progress: Called with the loaded fraction, 0..1, in another thread.

        Raises:
            ShuttingDown: The server is about to end.
            KqviewError: As the constructor of Engine.
        """
        async with self._switching:
            if self.loaded is None:
                self._check_stays()
                self._opened(await self._open(self.path, self._given, progress))

    def failed(self, error: BaseException) -> None:
        """Note that it could not be loaded."""
        self.state, self.error, self.progress = "failed", str(error), 0.0
        self._absence = f"the model {self.id!r} could not be loaded"

    async def unload(self, *, only_idle: bool = False) -> bool:
        """Close the engine; what runs on it ends with ModelChanged.

        Args:
            only_idle: Whether to leave it if a request uses it.

        Returns:
            Whether there was one, and it was closed.
        """
        async with self._switching:
            old = self.loaded
            if old is None or (only_idle and self.work.is_used):
                return False
            self.loaded, self.state, self.progress = None, "unloaded", 0.0
            self._absence = f"the model {self.id!r} is not loaded"
            self._leaves()
            await self._close(old)
            if self.state == "unloaded":  # else it is being loaded again
                self.held_bytes = 0
            return True

    async def close(self, limit_s: float) -> None:
        """Close the engine if it is ours, after a switch that runs."""
        self.slots.shutdown()
        async with self._switching:
            if self._owns_engine and self.loaded is not None:
                await asyncio.to_thread(self.loaded.close, timeout_s=limit_s)

    def _new(
        self,
        path: str | None,
        given: Options,
        progress: Callable[[float], object] | None,
    ) -> Engine:
        s, own = self._live.settings, self.config
        # Adapters and template are of one file, the one that they were configured with.
        is_own = path == own.path
        template = s.chat_template if own.chat_template is None else own.chat_template
        rows_bytes = s.attention_budget_bytes
        if rows_bytes is None and not self.is_only:  # by default each would have a quarter
            rows_bytes = physical_memory_bytes() // 4 // len(self._live.config.models)
        return Engine(
            MODEL_PATH if path is None else path,
            progress=progress,
            attention_budget_bytes=rows_bytes,
            pinned_bytes=s.pinned_bytes,
            checkpoint_bytes=s.checkpoint_bytes,
            draft=s.draft,
            lora=self._adapters() if is_own else None,
            chat_template=TEMPLATES.get(template, template) if template and is_own else None,
            template_options=s.template_variables,
            **self._options(path, given),
        )

    def _adapters(self) -> list[tuple[str, float]]:
        lora = self._live.settings.lora if self.config.lora is None else self.config.lora
        return [_adapter(one) for one in lora]

    def _options(self, path: str | None, given: Options) -> dict[str, Any]:
        """Those options of Engine for the file *path* that `check_opening` takes as well."""
        settings, own = self._live.settings, self.config
        flash_attn = settings.flash_attn if own.flash_attn is None else own.flash_attn
        options: dict[str, Any] = {
            "n_ubatch": settings.ubatch_size,
            "flash_attn": _FLASH_ATTN[flash_attn],
        }
        for name in (
            "n_ctx", "n_slots", "n_threads", "n_gpu_layers", "attention_kernel", "kv_type",
            "pooling",
        ):  # fmt: skip
            values = given.get(name), getattr(own, name), getattr(settings, name)
            options[name] = next((one for one in values if one is not None), None)
        if path is None and options["n_ctx"] is None:
            options["n_ctx"] = DEMO_CONTEXT
        return options

    async def _open(
        self, path: str | None, given: Options, progress: Callable[[float], object] | None = None
    ) -> Engine:
        def note(fraction: float) -> None:
            self.progress = fraction
            if progress is not None:
                progress(fraction)
            self._check_stays()  # a server that ends does not wait for a load: it asks now and then

        return await asyncio.to_thread(self._new, path, given, note)

    def _leaves(self) -> None:
        self.slots.forget()
        self.work.end(model_changed())

    async def _close(self, old: Engine) -> None:
        # A model may come and go for months.
        self._past = [*([_together(self._past)] if self._past else []), old.stats()]
        if self._owns_engine:
            await asyncio.to_thread(old.close)
        self._past[-1] = old.stats()  # with its last steps

    def _check_stays(self) -> None:
        if self.is_closing:
            raise ShuttingDown("the server is shutting down; no model is loaded any more")

    # ---- switching it for another file

    async def switch(self, name: str, path: str, options: Options) -> Engine:
        """Serve the file *path*, called *name*, instead; as `Pool.switch`."""
        async with self._switching:
            self._check_stays()
            # What shows without the weights is refused before anything changes.
            await asyncio.to_thread(check_opening, path, **self._options(path, options))
            self._check_stays()
            self.is_switching = True
            try:
                old, self.loaded = self.loaded, None
                self._absence, self.state = f"{name!r} is being loaded", "loading"
                self._leaves()
                if old is not None:
                    await self._close(old)
                try:
                    engine = await self._open(path, options)
                except BaseException as error:
                    self.failed(error)
                    self._absence = f"no model is loaded, {name!r} failed"
                    if not self.is_closing and old is not None:
                        await self._take_back(old)
                    raise
                self._opened(engine)
                self.path, self._given = path, options
                return engine
            finally:
                self.is_switching = False

    async def _take_back(self, old: Engine) -> None:
        """Serve the old model again."""
        if not self._owns_engine:  # it was not closed
            self._past.pop()
            self.loaded, self.state, self.error, self.progress = old, "loaded", None, 1.0
            return
        try:
            self._opened(await self._open(self.path, self._given))
        except KqviewError as error:
            _log.error("the old model cannot be opened again: %s", error)


def resolved(body: Any, served: ModelEntry) -> Any:
    """*body* with the id of *served* in place of the name that it has for it.

    A mod in that name becomes the first of its mods. Where there is one model, which answers to any
    name, that name stays.
    """
    name = getattr(body, "model", None)
    if not isinstance(name, str) or name == served.id:
        return body
    changes: dict[str, Any] = {} if served.is_only else {"model": served.id}
    if "/" in name and hasattr(body, "mods") and (mod := served.mod_in(name)):
        changes["mods"] = [mod, *(body.mods or ())]
    return msgspec.structs.replace(body, **changes) if changes else body


def _together(readings: Sequence[EngineStats]) -> EngineStats:
    """The counters of *readings* added up, without values of the moment."""
    names = [spec.name for spec in fields(EngineStats) if isinstance(spec.default, int | float)]
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in readings) for name in names}
    return EngineStats(**sums)


def _adapter(text: str) -> tuple[str, float]:
    """File and scale of ``FILE`` or ``FILE:SCALE``."""
    path, colon, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0
