"""ModRuns: the mods that requests name and the traces that are posted, as the server sees them.

Mods come only from the folder ``mods_dir``. Their calls run on threads with a time limit, so
that a mod that hangs holds up neither the event loop nor, for long, its request.
"""

import asyncio
import contextlib
import hashlib
import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from kqview.errors import RequestError
from kqview.mods.folder import ModFolder, ModInfo
from kqview.server.live_config import LiveConfig
from kqview.server.models.run import ModWanted
from kqview.server.settings import Settings
from kqview.trace import Trace
from kqview.trace.post import Poster, PosterStats

_log: Final = logging.getLogger("kqview.server")
_MOST_QUEUED: Final = 64  # traces of long requests take tens of megabytes
_STORED_S: Final = 10.0  # for the spool's disk to take a trace before its client hears the end
_OWNER_CHARACTERS: Final = 16  # of the digest of a key
_LONGEST_ID: Final = 128  # with the digest it is well below what receivers take


class ModRuns:
    """The mods and the poster of a server; any thread, but `stored` for an event loop."""

    def __init__(self, settings: Settings | LiveConfig) -> None:
        """Use what *settings* name.

        Raises:
            RequestError: There is no such folder.
        """
        self._live = LiveConfig.of(settings)
        self._folder = self._live.derived(
            lambda config: config.settings.mods_dir,
            lambda path: None if path is None else ModFolder(path),
        )
        self._poster: Poster | None = None

    def open(self) -> None:
        """Begin to post traces if the settings name a receiver; idempotent.

        Raises:
            RequestError: The URL cannot be posted to.
            OSError: The spool cannot be made.
        """
        settings = self._live.settings
        if self._poster is None and settings.trace_url is not None:
            key = settings.trace_key
            self._poster = Poster(
                settings.trace_url,
                spool=settings.trace_spool,
                # With a spool requests wait for it, and hold the memory of their traces meanwhile.
                max_queued=_MOST_QUEUED if settings.trace_spool is None else sys.maxsize,
                headers={} if key is None else {"authorization": f"Bearer {key}", "x-api-key": key},
            )

    def list(self) -> list[ModInfo]:
        """The mods that requests may name; loads files that are new or have changed."""
        folder = self._folder.value
        return [] if folder is None else folder.list()

    def check(self, wanted: Sequence[ModWanted]) -> None:
        """Refuse mods that no request may have.

        Raises:
            RequestError: There is no folder of mods, or there are too many.
        """
        if wanted and self._folder.value is None:
            raise RequestError(
                f"mods has {wanted[0].name[:80]!r}, but this server has no mods; start it with "
                "--mods-dir, or leave mods out",
                parameter="mods",
            )
        most = self._live.settings.max_mods
        if len(wanted) > most:
            raise RequestError(
                f"mods has {len(wanted)} mods, the limit is {most}; send fewer",
                parameter="mods",
            )

    def options(self, wanted: Sequence[ModWanted], *, owner: str, model: str) -> dict[str, Any]:
        """Options of `Engine.generate` for one text of a request; loads mods, so it may take time.

        Args:
            wanted: Its mods, which have passed `check`.
            owner: Digest of the key of whoever sent it, "" without one.
            model: Name of the model, for the trace.

        Raises:
            RequestError: There is no such mod, or it does not take these options.
            ModFileError: A mod's file is broken.
        """
        options: dict[str, Any] = {"trace": False}
        settings, folder = self._live.settings, self._folder.value
        if wanted and folder is not None:
            options["mods"] = [folder.get(one.name, one.options) for one in wanted]
            options["mod_time_limit_s"] = settings.mod_time_limit_s
            options["mods_strict"] = settings.mods_strict
        if self._poster is not None and (wanted or settings.trace == "all"):
            options["trace"] = partial(self._ended, self._poster, owner, model)
        return options

    def _ended(self, poster: Poster, owner: str, model: str, trace: Trace) -> None:
        """A request that was traced has ended; any thread."""
        trace.request.model = model
        if owner:
            # A receiver replaces traces of one id: nobody may replace those of another key.
            digest = owner[:_OWNER_CHARACTERS]
            if len(trace.request.request_id) > _LONGEST_ID:  # else the end, the key's, is cut off
                named = trace.request.request_id.encode("utf-8", "replace")
                trace.request.request_id = hashlib.sha256(named).hexdigest()
            trace.request.user_api_key = f"sha256:{owner}"  # `kqview ingest` shows it to its owner
            trace.request.request_id = f"{trace.request.request_id}@{digest}"
        poster.post(trace)

    async def stored(self) -> None:
        """Wait until the spool has the traces of what has ended; at once without a spool.

        Clients hear of the end of a request only then, so that a crash loses no trace of one that a
        client has seen to its end.
        """
        if self._poster is None or self._live.settings.trace_spool is None:
            return
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done.set)

        self._poster.when_stored(tell)
        try:
            async with asyncio.timeout(_STORED_S):
                await done.wait()
        except TimeoutError:
            _log.warning(
                "the trace spool took no trace for %g s; a crash now may lose some", _STORED_S
            )

    def trace_stats(self) -> PosterStats | None:
        """What became of traces; None if none are posted."""
        return None if self._poster is None else self._poster.stats()

    def close(self, limit_s: float) -> None:
        """Send what waits for at most *limit_s*; blocks."""
        if self._poster is not None:
            self._poster.close(limit_s)
