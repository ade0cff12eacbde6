"""Models: the model that serves, and switching it for another file of the folder of models.

Belongs to one event loop. It owns the engine that it opened itself, not one that it was given.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from kqview.chat import CHATML
from kqview.demo import MODEL_PATH
from kqview.engine import Engine, check_opening
from kqview.errors import KqviewError
from kqview.server.errors import Forbidden, NotFound, ShuttingDown
from kqview.server.live import Live
from kqview.types import EngineStats

_log: Final = logging.getLogger("kqview.server")
_SUFFIX: Final = ".gguf"
_FLASH_ATTN: Final[Mapping[str, Literal["auto"] | bool]] = {
    "auto": "auto",
    "on": True,
    "off": False,
}


class Models:
    """Opens the model that serves, and switches it.

    Attributes:
        engine: The engine that serves; None while a switch runs, or after one that failed.
        absence: Why there is no engine.
        is_closing: Whether no model is opened any more.
    """

    def __init__(self, engine: Engine | None, live: Live, *, on_switch: Callable[[], None]) -> None:
        """Serve *engine*, which stays the caller's; with None, `load` opens the settings' model.

        *on_switch* ends what runs on the old engine.
        """
        self.engine = engine
        self.absence = "no model is loaded"
        self.is_closing = False
        self._live = live
        self._on_switch = on_switch
        self._owns_engine = False
        self._path = live.settings.model
        self._given: dict[str, int | None] = {}  # options of the model that override the settings
        self._switching = asyncio.Lock()
        self._switches: set[asyncio.Task[Engine]] = set()
        self._past: list[EngineStats] = []  # of engines that were replaced

    def load(self, progress: Callable[[float], object] | None = None) -> None:
        """Open the settings' model if there is no engine; blocks, in any thread.

        Args:
            progress: Called with the loaded fraction, 0..1.

        Raises:
            KqviewError: As the constructor of Engine.
        """
        if self.engine is None:
            self.engine = self._opened(self._path, self._given, progress)
            self._owns_engine = True

    def _opened(
        self,
        path: str | None,
        given: dict[str, int | None],
        progress: Callable[[float], object] | None,
    ) -> Engine:
        s = self._live.settings
        return Engine(
            MODEL_PATH if path is None else path,
            progress=progress,
            attention_budget_bytes=s.attention_budget_bytes,
            n_ubatch=s.ubatch_size,
            flash_attn=_FLASH_ATTN[s.flash_attn],
            # These are of one model, the one that the settings name with them.
            lora=[_adapter(one) for one in s.lora] if path == s.model else None,
            chat_template=_template(s.chat_template) if path == s.model else None,
            **self._options(given),
        )

    def _options(self, given: dict[str, int | None]) -> dict[str, Any]:
        s = self._live.settings
        return {
            "n_ctx": s.n_ctx,
            "n_slots": s.n_slots,
            "n_threads": s.n_threads,
            "n_gpu_layers": s.n_gpu_layers,
            "kv_type": s.kv_type,
            "pooling": s.pooling,
            **{name: value for name, value in given.items() if value is not None},
        }

    async def close(self, limit_s: float) -> None:
        """Close the engine if it is ours, after a switch that runs."""
        async with self._switching:
            if self._owns_engine and self.engine is not None:
                await asyncio.to_thread(self.engine.close, timeout_s=limit_s)

    def name_of(self, engine: Engine) -> str:
        """The model's name, from its metadata or else its file."""
        if self._owns_engine and self._path is None:
            return "demo"  # as the option that serves it
        return engine.model.name or (Path(self._path).stem if self._path else "demo")

    def stats(self) -> list[EngineStats]:
        """Counters of every engine that served, the current one last."""
        return [*self._past, *([self.engine.stats()] if self.engine else [])]

    # ---- switching

    async def switch(self, name: str, options: dict[str, int | None]) -> Engine:
        """As `Service.switch_model`."""
        path = model_file(self._live.settings.models_dir, name)
        switch = asyncio.ensure_future(self._switch(name, path, options))
        self._switches.add(switch)
        switch.add_done_callback(self._switched)
        return await asyncio.shield(switch)

    async def _switch(self, name: str, path: Path, options: dict[str, int | None]) -> Engine:
        async with self._switching:
            self._check_stays()
            # What shows without the weights is refused before anything changes.
            await asyncio.to_thread(check_opening, str(path), **self._options(options))
            self._check_stays()
            old, self.engine = self.engine, None
            self.absence = f"{name!r} is being loaded"
            self._on_switch()
            if old is not None:
                self._past.append(old.stats())
                if self._owns_engine:
                    await asyncio.to_thread(old.close)
                self._past[-1] = old.stats()  # with its last steps
            try:
                engine = await self._open(str(path), options)
            except BaseException:
                self.absence = f"no model is loaded, {name!r} failed"
                if not self.is_closing and old is not None:
                    await self._take_back(old)
                raise
            self.engine = engine
            self._owns_engine, self._path, self._given = True, str(path), options
            return engine

    async def _take_back(self, old: Engine) -> None:
        """Serve the old model again."""
        if not self._owns_engine:  # it was not closed
            self._past.pop()
            self.engine = old
            return
        try:
            self.engine = await self._open(self._path, self._given)
        except KqviewError as error:
            _log.error("the old model cannot be opened again: %s", error)

    async def _open(self, path: str | None, given: dict[str, int | None]) -> Engine:
        # A server that ends does not wait for a load: it asks now and then.
        return await asyncio.to_thread(self._opened, path, given, lambda _: self._check_stays())

    def _check_stays(self) -> None:
        if self.is_closing:
            raise ShuttingDown("the server is shutting down; no model is loaded any more")

    def _switched(self, switch: "asyncio.Task[Engine]") -> None:
        self._switches.discard(switch)
        if not switch.cancelled() and (error := switch.exception()) is not None:
            _log.warning("the model was not switched: %s", error)


# ---- the folder of models


def model_file(folder: str | None, name: str) -> Path:
    """The file of the model *name*, which an administrator may load.

    Args:
        folder: The setting ``models_dir``.
        name: As `model_names` lists it; a path in the folder and no other.

    Raises:
        Forbidden: There is no folder, or *name* leads out of it, be it through a link.
        NotFound: There is no such file.
    """
    if folder is None:
        raise Forbidden("the server has no models_dir (--models-dir); start it with one")
    try:
        root = Path(folder).resolve()
        path = (root / name).resolve()
        is_inside, is_model = path.is_relative_to(root), _is_model(root / name)
    except (OSError, ValueError):  # a name that no file can have
        raise NotFound(f"model {name[:80]!r} is not the name of a file") from None
    if not is_inside:
        raise Forbidden(f"model {name!r} is outside models_dir; name a file in it")
    if not is_model:
        raise NotFound(f"model {name!r} is not a GGUF file of models_dir; see /api/v1/models")
    return path


def _template(text: str | None) -> str | None:
    return CHATML if text == "chatml" else text


def _adapter(text: str) -> tuple[str, float]:
    """File and scale of ``FILE`` or ``FILE:SCALE``."""
    path, colon, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0


def model_names(folder: str | None) -> list[str]:
    """Sorted names of the GGUF files in *folder* and below, without links that lead out of it."""
    if folder is None:
        return []
    root = Path(folder).resolve()
    found = (path for path in root.rglob(f"*{_SUFFIX}") if path.resolve().is_relative_to(root))
    return sorted(str(path.relative_to(root)) for path in found if _is_model(path))


def _is_model(path: Path) -> bool:
    return path.suffix == _SUFFIX and path.is_file()
