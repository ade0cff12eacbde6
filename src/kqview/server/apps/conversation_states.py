"""ConversationStates: the KV cache of conversations, so that a returning one does not evaluate its
history again.

After a turn the slot that answered is copied between two steps of the engine, and a thread writes
the copy to a file (SES1 with a trailer, `kqview.state.files`) named by a digest of the
conversation. A returning conversation is looked for in the slots first; only if a file has more of
its prompt than they, the file is restored into the least recently used slot. What cannot be
restored (damaged, of another model or other adapters) is removed, and the history is evaluated.

How much is reused: the tokens that the cache and the new prompt have in common from the start
(``cached_tokens`` of the run's usage). The history is rendered again for each turn. What the two
have in common ends with the last answer if its text is tokenized in another way than it was
generated, or if the template or the server drops its reasoning: that answer is evaluated again,
what precedes it is not. After another system prompt, or once turns have left the prompt, all that
follows is evaluated. A model whose cache cannot drop its tail (recurrent ones) goes on from the
slot's last checkpoint before the first id that differs; copies and files have them too.

A turn has a seat while it is generated and until its slot has been copied. There are as many seats
as slots, so that turns wait for each other here: of requests that wait in the engine, the next one
would have the slot before it could be copied. Requests of other dialects take no seats and may do
that, and so may a key without a seat where another one has several; the copy is then dropped, as it
is when the disk is behind or memory is short.

Belongs to one event loop; copies, checks and files are the work of other threads.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kqview import system
from kqview.durable import remove, remove_leftovers
from kqview.engine import Engine
from kqview.errors import (
    BusyError,
    KqviewError,
    QueueFull,
    RequestError,
    StateError,
    StateFormatError,
)
from kqview.server.apps.conversation_store import Key
from kqview.server.live_config import LiveConfig
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.run import Run
from kqview.server.web.access import Caller
from kqview.server.web.budget import Budget, Reservation
from kqview.slot import Slot
from kqview.state.files import SlotMarks, check_facts, read_ids, read_marked, write_marked
from kqview.state.ses1 import ids_in

_log: Final = logging.getLogger("kqview.server")

LEAST_TOKENS: Final = 64
"""Fewer are evaluated sooner than their file is written and read."""
_MOST_WAITING: Final = 4  # copies that wait for the disk
_OPENS_WITHIN_S: Final = 5.0  # a process that ends may still have the folder
_CLIENT: Final = "states of sessions"
_NAME: Final = re.compile(r"chat-[0-9a-f]{64}\.ses1")


@dataclass(slots=True)
class Seat:
    """Where one turn is generated.

    Attributes:
        run: Its run, whose slot holds the conversation when it has ended; to be set once it starts.
    """

    run: Run | None = None


@dataclass(slots=True)
class _Copy:
    """A slot that was copied and is not in its file yet; *hold* counts it."""

    slot: Slot
    blob: bytes
    marks: SlotMarks
    hold: Reservation


class ConversationStates:
    """The files of ``states_dir``, and the seats of each engine; does nothing without a folder."""

    def __init__(self, live: LiveConfig, budget: Budget) -> None:
        """Nothing is opened yet."""
        self._live = live
        self._budget = budget
        folder = live.config.sessions.states_dir
        self._folder = None if folder is None else Path(folder)
        self._seats: WeakKeyDictionary[Engine, _Seats] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._copies: OrderedDict[Key, _Copy] = OrderedDict()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # bytes of each file, oldest first
        self._handle: int | None = None
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="kqview-states")
        self._is_closed = False

    def open(self, keys: Iterable[Key]) -> None:
        """Take the folder for this process; remove files of conversations that are none of *keys*.

        Blocks.

        Raises:
            RequestError: It cannot be used.
        """
        if self._folder is None:
            return
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._handle = _locked(self._folder)
            remove_leftovers(self._folder)
            files = [path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
            known = set(map(_name_of, keys))
            for path in sorted(files, key=lambda path: path.stat().st_mtime_ns):
                if path.name in known:
                    self._sizes[path.name] = path.stat().st_size
                else:
                    remove(path)
        except OSError as error:
            raise RequestError(
                f"the sessions' folder of states {str(self._folder)!r} cannot be used: "
                f"{error.strerror or error}; name another one ([sessions] states_dir)"
            ) from None

    def close(self) -> None:
        """Write what was copied, and let go of the folder; blocks, idempotent."""
        self._is_closed = True
        self._disk.shutdown()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    # ---- a turn

    @contextlib.asynccontextmanager
    async def seat(
        self,
        model: ModelEntry,
        caller: Caller,
        key: Key,
        ids: Sequence[int],
        on_copy: Callable[[asyncio.Task[None]], object],
    ) -> AsyncGenerator[Seat]:
        """A seat for a turn, with its history in a slot if that can be restored.

        Args:
            model: What the turn runs on.
            caller: Who asks.
            key: The conversation.
            ids: The whole prompt.
            on_copy: Gets the task that copies the slot afterwards.

        Raises:
            QueueFull: Too many turns wait for a seat.
        """
        seat = Seat()
        if self._folder is None or self._is_closed:
            yield seat
            return
        engine = model.engine
        seats = self._seats.get(engine)
        if seats is None:
            seats = self._seats[engine] = _Seats(len(engine.slots))
        await seats.take(caller.owner, self._live.settings.max_queued)
        try:
            await self._bring(model, caller, key, ids)
            yield seat
        finally:
            # Others that wait for its memory would close it before its slot is copied.
            stays = contextlib.ExitStack()
            stays.callback(seats.put, caller.owner)
            stays.enter_context(model.work.used())
            copy = asyncio.create_task(self._keep(model, caller, key, ids, seat.run))
            copy.add_done_callback(lambda _: stays.close())
            on_copy(copy)

    # ---- before it

    async def _bring(self, model: ModelEntry, caller: Caller, key: Key, ids: Sequence[int]) -> None:
        """Restore the conversation into a free slot if that saves an evaluation."""
        slots = model.slots
        try:
            is_worth = await asyncio.to_thread(self._is_worth_restoring, model.engine, key, ids)
            with self._budget.hold(_CLIENT) as hold:
                hold.take(self._sizes.get(_name_of(key), 0) if is_worth else 0)
                for slot in slots.free() if is_worth else ():
                    with contextlib.suppress(BusyError):  # another request was sooner
                        work = partial(self._restore, key)
                        await slots.use(caller, slot.id, work, fills=True, wait_s=0.0)
                        return
        except (KqviewError, OSError, MemoryError) as error:
            _log.warning("a session's history is evaluated, not restored: %s", error)

    def _is_worth_restoring(self, engine: Engine, key: Key, ids: Sequence[int]) -> bool:
        """Whether what is saved has notably more of the prompt than any slot; another thread."""
        prompt = np.asarray(ids, "<i4")
        n_saved = _n_common(self._saved_ids(key), prompt)
        if n_saved < LEAST_TOKENS:
            return False
        slots = engine.slots
        warm = (np.asarray(slot.tokens[: slot.n_exact], "<i4") for slot in slots)
        return n_saved >= LEAST_TOKENS + max(_n_common(one, prompt) for one in warm)

    def _saved_ids(self, key: Key) -> NDArray[np.int32]:
        """Ids of what is saved of the conversation; none if nothing is."""
        copy = self._copies.get(key)
        if copy is not None:
            return ids_in(copy.blob)
        if _name_of(key) not in self._sizes:
            return np.zeros(0, np.int32)
        try:
            return read_ids(self._path(key), follows=False)
        except (StateError, OSError):
            self.forget([key])
            raise

    def _restore(self, key: Key, slot: Slot) -> None:
        copy = self._copies.get(key)
        facts = slot.state_facts()
        try:
            if copy is None:
                blob, marks = read_marked(self._path(key), facts, follows=False)
            else:
                check_facts(copy.slot.state_facts(), facts)
                blob, marks = copy.blob, copy.marks
            if marks.n_exact is None:
                raise StateFormatError("the file has no trailer that says how exact it is")
            slot.restore_marked(blob, marks)
        except (StateError, OSError):
            self.forget([key])
            raise

    # ---- after it

    async def _keep(
        self, model: ModelEntry, caller: Caller, key: Key, ids: Sequence[int], run: Run | None
    ) -> None:
        """Copy the slot that *run* used, if it still holds the conversation."""
        if run is None or not run.n_tokens or len(ids) < LEAST_TOKENS:
            return
        slot_id = run.generations[0].slot
        if slot_id is None or len(self._copies) >= _MOST_WAITING:
            return
        try:
            await model.slots.use(caller, slot_id, partial(self._copy, key, ids), wait_s=0.0)
        except (KqviewError, OSError, MemoryError, RuntimeError) as error:
            # Most often another request has the slot already, or the server ends.
            _log.debug("the cache of a session is not saved: %s", error)

    def _copy(self, key: Key, ids: Sequence[int], slot: Slot) -> None:
        blob, marks = slot.save_marked()
        if not np.array_equal(ids_in(blob)[: len(ids)], np.asarray(ids, "<i4")):
            return  # of a request that used the slot in between
        hold = self._budget.hold(_CLIENT)
        hold.take(len(blob) + len(marks.checkpoints))
        with self._lock:
            older = self._copies.pop(key, None)
            self._copies[key] = _Copy(slot, blob, marks, hold)
        if older is not None:
            older.hold.close()
        self._disk.submit(self._write, key)

    def _write(self, key: Key) -> None:
        """Write the latest copy of the conversation; the disk's thread."""
        with self._lock:
            copy = self._copies.get(key)
        if copy is None:  # forgotten, or written with an older one
            return
        name = _name_of(key)
        try:
            if self._make_room(name, len(copy.blob) + len(copy.marks.checkpoints)):
                facts = copy.slot.state_facts()
                file = write_marked(self._path(key), copy.blob, facts, copy.marks, follows=False)
                with self._lock:
                    self._sizes[name] = file.n_bytes
                    self._sizes.move_to_end(name)
        except (KqviewError, OSError) as error:
            _log.warning("the cache of a session cannot be saved in states_dir: %s", error)
        finally:
            copy.hold.close()
            with self._lock:
                if self._copies.get(key) is copy:
                    del self._copies[key]

    # ---- files

    def forget(self, keys: Iterable[Key]) -> None:
        """Remove what is saved of these conversations, soon; any thread."""
        for key in keys:
            with self._lock:
                copy = self._copies.pop(key, None)
            if copy is not None:
                copy.hold.close()
            if self._folder is not None:
                with contextlib.suppress(RuntimeError):  # closed: the next start removes it
                    self._disk.submit(self._remove, _name_of(key))

    def _make_room(self, name: str, n_bytes: int) -> bool:
        """Remove the oldest files to have room for one of *n_bytes*; False if there is none."""
        most = self._live.config.sessions.max_state_bytes
        while self.n_bytes - self._sizes.get(name, 0) + n_bytes > most:
            oldest = next((one for one in self._sizes if one != name), None)
            if oldest is None:
                return False
            self._remove(oldest)
        return True

    def _remove(self, name: str) -> None:
        assert self._folder is not None
        with self._lock:
            self._sizes.pop(name, None)
        try:
            remove(self._folder / name)
        except OSError as error:
            _log.warning("a session's file cannot be removed from states_dir: %s", error)

    @property
    def n_bytes(self) -> int:
        """Bytes of all files; any thread."""
        with self._lock:
            return sum(self._sizes.values())

    async def written(self) -> None:
        """Wait until what has been copied is in its files."""
        await asyncio.get_running_loop().run_in_executor(self._disk, lambda: None)

    def _path(self, key: Key) -> Path:
        assert self._folder is not None
        return self._folder / _name_of(key)


class _Seats:
    """How many turns are generated at a time: as many as the engine has slots, or a few more.

    Where one owner has several seats, or all, an owner without one gets a further seat at once, as
    the engine takes a slot from the other for it.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self._held: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    def _may_sit(self, owner: str) -> bool:
        most = max(self._held.values(), default=0)
        has_none = not self._held[owner] and (most > 1 or most == self._n)
        return has_none or self._held.total() < self._n

    async def take(self, owner: str, most_waiting: int) -> None:
        """Wait for a seat; raises QueueFull."""
        if self._may_sit(owner):
            self._held[owner] += 1
            return
        n_own = sum(one == owner for one, _ in self._waiting)
        if n_own >= most_waiting:
            raise QueueFull(
                f"{n_own} turns of your sessions wait, the limit is {most_waiting} "
                "(max_queued); try again later"
            )
        seat = owner, asyncio.get_running_loop().create_future()
        self._waiting.append(seat)
        try:
            await seat[1]
        except asyncio.CancelledError:
            if seat in self._waiting:
                self._waiting.remove(seat)
            else:  # it came too late
                self.put(owner)
            raise

    def put(self, owner: str) -> None:
        """Give a seat back: to who has waited longest of the owners with fewest."""
        self._held -= Counter((owner,))
        while self._waiting:
            seat = min(self._waiting, key=lambda one: self._held[one[0]])
            if not self._may_sit(seat[0]):
                return
            self._waiting.remove(seat)
            self._held[seat[0]] += 1
            if not seat[1].done():
                seat[1].set_result(None)


def _n_common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many ids the two have in common from the start."""
    n = min(len(one), len(other))
    differs = np.flatnonzero(one[:n] != other[:n])
    return int(differs[0]) if len(differs) else n


def _name_of(key: Key) -> str:
    return f"chat-{sha256(f'{key.owner}/{key.session_id}'.encode()).hexdigest()}.ses1"


def _locked(folder: Path) -> int:
    """A handle that keeps other processes out of *folder* as long as it is open."""
    handle = system.open_folder(folder)
    end_s = time.monotonic() + _OPENS_WITHIN_S
    while True:
        try:
            system.lock(handle)
        except BlockingIOError:
            if time.monotonic() < end_s:
                time.sleep(0.05)
                continue
            os.close(handle)
            raise OSError(errno.EBUSY, "another process uses it") from None
        except OSError:
            os.close(handle)
            raise
        return handle
