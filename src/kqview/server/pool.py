"""Pool: the models of a server, which requests use by name. Belongs to one event loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator

from kqview.engine import Engine
from kqview.server.errors import UnknownModel, shutting_down
from kqview.server.live import Live
from kqview.server.models import model_file
from kqview.server.served import Served
from kqview.server.workers import Workers
from kqview.types import EngineStats

_N_WORKERS = 4
_MOST_NAME = 80  # characters of an unknown name that are repeated


class Pool:
    """Every configured model, the default one first.

    Attributes:
        is_closing: Whether no model is loaded any more.
    """

    def __init__(self, live: Live, engine: Engine | None, *, on_idle: Callable[[], None]) -> None:
        """Serve the configured models; *engine* is the default one's, and stays the caller's.

        *on_idle* is called when work on a model without a run has ended.
        """
        self.is_closing = False
        self._live = live
        config = live.config
        self._texts = Workers(_N_WORKERS, "text")
        self._served: dict[str, Served] = {}
        for id_, model in config.models.items():
            self._served[id_] = Served(
                id_, model, live,
                engine=None if self._served else engine,
                texts=self._texts, on_idle=on_idle, is_only=len(config.models) == 1,
            )  # fmt: skip
        self._default = next(iter(self._served))

    def __iter__(self) -> Iterator[Served]:
        return iter(list(self._served.values()))

    @property
    def default(self) -> Served:
        """The model of requests that name none."""
        return self._served[self._default]

    @property
    def has_several(self) -> bool:
        """Whether requests choose."""
        return len(self._served) > 1

    def find(self, name: str | None) -> Served:
        """The model called *name*; the default one for None, or if there is no other.

        Raises:
            UnknownModel: There is none of this name.
        """
        if name is None or not self.has_several:
            return self.default
        found = self._served.get(name) or self._served.get(name.rpartition("/")[0])
        if found is None:
            known = ", ".join(map(repr, self._served))
            raise UnknownModel(f"there is no model {name[:_MOST_NAME]!r}; this server has {known}")
        return found

    @contextlib.asynccontextmanager
    async def using(self, name: str | None = None) -> AsyncGenerator[Served]:
        """The model called *name*, which is loaded if it is not, and stays loaded meanwhile.

        Raises:
            UnknownModel: There is none of this name.
            NoModel: It cannot be loaded.
            ShuttingDown: The server is about to end.
        """
        if self.is_closing:
            raise shutting_down()
        served = self.find(name)
        served.enter()
        try:
            if self.has_several and served.loaded is None:
                await served.load()
            yield served
        finally:
            served.leave()

    # ---- life

    def load(self, progress: Callable[[float], object] | None = None) -> None:
        """Load what is loaded at the start; blocks, before the event loop runs.

        Args:
            progress: Called with the loaded fraction, 0..1.

        Raises:
            KqviewError: As the constructor of Engine.
        """
        for served in self:
            if served.pinned or not self.has_several:
                served.open(progress)

    def begin_close(self) -> None:
        """Load nothing any more, use no model, and end what runs."""
        self.is_closing = True
        for served in self:
            served.is_closing = True
            served.end_runs(shutting_down())

    async def close(self, limit_s: float) -> None:
        """Close the engines that are ours, after the switches that run."""
        self.begin_close()
        await asyncio.gather(*(served.close(limit_s) for served in self))
        self._texts.shutdown()

    # ---- the administrator's part

    async def switch(self, name: str, options: dict[str, int | None]) -> Engine:
        """Unload the default model and load the GGUF file *name* of ``models_dir``.

        What can be checked without the new model's weights (not a model, options out of range, not
        enough memory) is refused before anything changes, and the old model keeps serving.
        Otherwise running requests end with ModelChanged, the old model is closed, because both may
        not fit, and the new one is opened. If that fails after all, the old one is opened again;
        only if that fails too there is no model. Switches run one after another, and one that began
        is finished even if the client that asked for it is gone.

        Args:
            name: As `Service.models` lists it.
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
        path = model_file(self._live.settings.models_dir, name)
        return await self.default.switch(name, path, options)

    # ---- figures

    @property
    def n_busy(self) -> int:
        """Requests that run or wait, on all models."""
        return sum(served.n_busy for served in self)

    @property
    def is_ready(self) -> bool:
        """Whether a request would be taken."""
        return not self.is_closing and (self.has_several or self.default.loaded is not None)

    @property
    def is_engine_lost(self) -> bool:
        """Whether closing an engine gave its thread up."""
        return any(served.is_lost for served in self)

    def stall(self, factor: float = 1.0) -> str | None:
        """Why requests make no progress, None if they do; any thread.

        Args:
            factor: Times the settings' ``stall_timeout_s``.
        """
        limit_s = factor * self._live.settings.stall_timeout_s
        return next((why for served in self if (why := served.stall(limit_s)) is not None), None)

    def stats(self) -> list[EngineStats]:
        """Counters of every engine that served, the default model's current one last."""
        others = [one for served in self if served is not self.default for one in served.stats()]
        return others + self.default.stats()
