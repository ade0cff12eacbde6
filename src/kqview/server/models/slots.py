"""Slots: what callers may do with the engine's slots, and whose contents these hold.

What a slot holds belongs to the key whose request used it last. To other keys it does not exist:
they cannot read, save or change it, but may take the slot for contents of their own, as any
generation does.

Belongs to one event loop. Work on a slot runs in another thread, between two steps of the engine.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable
from hashlib import sha256
from typing import Any, Final, Protocol, TypeVar

from kqview.engine import Engine
from kqview.errors import BusyError, UnknownSlot
from kqview.server.errors import NotFound
from kqview.server.live_config import LiveConfig
from kqview.server.models.run import Run
from kqview.server.web.access import Caller
from kqview.server.web.budget import Workers
from kqview.slot import Slot
from kqview.state.files import NO_MARKS, SlotMarks, check_trailer, split

_T = TypeVar("_T")
_N_WORKERS: Final = 4
_MOST_KNOWN: Final = 4096  # blobs


class SlotRegister(Protocol):
    """The part of `kqview.server.models.model_entry.ModelWork` that is needed here."""

    runs: dict[tuple[str, str], Run]
    slot_owners: dict[int, str]
    slot_users: defaultdict[int, set[str]]
    n_processed: dict[int, int]
    slot_freed: asyncio.Event

    def note_slot(self, slot_id: int, owner: str, n_processed: int) -> None: ...


class Slots:
    """The slots of one server."""

    def __init__(self, live: LiveConfig, work: SlotRegister, engine: Callable[[], Engine]) -> None:
        """Guard the slots of the *engine* that serves; *work* knows who uses them."""
        self._live = live
        self._work = work
        self._engine = engine
        self._workers = Workers(_N_WORKERS, "slots")
        self._locks: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._known: OrderedDict[bytes, SlotMarks] = OrderedDict()

    # ---- who holds what

    def get(self, slot_id: int) -> Slot:
        """The slot of this index.

        Raises:
            UnknownSlot: There is none.
        """
        slots = self._engine().slots
        if not 0 <= slot_id < len(slots):
            raise UnknownSlot(
                f"there is no slot {slot_id}; the server has slots 0 to {len(slots) - 1}",
                parameter="id_slot",
            )
        return slots[slot_id]

    def free(self) -> list[Slot]:
        """Slots that no generation uses at the moment, the least recently used first."""
        places = {slot_id: i for i, slot_id in enumerate(self._work.slot_owners)}
        free = [slot for slot in self._engine().slots if not slot.is_busy]
        return sorted(free, key=lambda slot: places.get(slot.id, -1))

    def check(self, caller: Caller, slot_id: int) -> None:
        """Raise NotFound if the slot holds what *caller* may not see."""
        runs = self._work.runs.values()  # one that ended may not be settled yet
        using = (run.owner for run in runs if any(one.slot == slot_id for one in run.generations))
        owner = next(using, self._work.slot_owners.get(slot_id))
        if owner is not None and not caller.may_see(owner):
            raise NotFound(f"slot {slot_id} holds nothing of yours; generate or restore into it")

    # ---- work on a slot

    async def use(
        self,
        caller: Caller,
        slot_id: int,
        work: Callable[[Slot], _T],
        *,
        fills: bool = False,
        wait_s: float | None = None,
    ) -> _T:
        """Do *work* with a slot when no generation uses it.

        Work that has begun is finished even if its client leaves.

        Args:
            caller: Who asks.
            slot_id: Index of the slot.
            work: What to do, in another thread.
            fills: Whether *work* replaces what the slot holds, which is the caller's afterwards.
            wait_s: How long to wait for a slot that is busy; None: ``slot_wait_s``.

        Raises:
            UnknownSlot: There is no such slot.
            NotFound: It holds contents of another key.
            BusyError: It stays busy for that long.
        """
        slot = self.get(slot_id)
        is_gone = asyncio.Event()
        if wait_s is None:
            wait_s = self._live.settings.slot_wait_s
        using = asyncio.ensure_future(self._use(caller, slot, work, is_gone, wait_s, fills=fills))
        try:
            return await asyncio.shield(using)
        except asyncio.CancelledError:
            is_gone.set()
            using.add_done_callback(lambda one: one.cancelled() or one.exception())
            raise

    async def _use(
        self,
        caller: Caller,
        slot: Slot,
        work: Callable[[Slot], _T],
        is_gone: asyncio.Event,
        wait_s: float,
        *,
        fills: bool,
    ) -> _T:
        end_s = asyncio.get_running_loop().time() + wait_s
        # Whoever reads a slot does so before or after the others, never in between.
        await self._until(end_s, slot, self._locks[slot.id].acquire())
        try:
            while not is_gone.is_set():
                freed, users = self._work.slot_freed, self._work.slot_users[slot.id]
                users.clear()
                if not fills:
                    self.check(caller, slot.id)
                try:
                    done = await self._workers.run(caller.name, work, slot)
                except BusyError:
                    await self._until(end_s, slot, freed.wait())
                    continue
                if fills:
                    if slot is self.get(slot.id):  # and not of a model that was replaced
                        self._work.note_slot(slot.id, caller.owner, 0)
                    return done
                self.check(caller, slot.id)
                # It may be of what any of these left; a generation that has just ended is settled
                # while the work goes on.
                if not all(map(caller.may_see, users)):
                    raise self._busy(slot)
                return done
            raise asyncio.CancelledError
        finally:
            self._locks[slot.id].release()

    async def _until(self, end_s: float, slot: Slot, event: Awaitable[Any]) -> None:
        try:
            async with asyncio.timeout_at(end_s):
                await event
        except TimeoutError:
            raise self._busy(slot) from None

    def _busy(self, slot: Slot) -> BusyError:
        wait_s = self._live.settings.slot_wait_s
        return BusyError(
            f"slot {slot.id} is in use and was not free within {wait_s:g} s "
            "(slot_wait_s); try again when its generation has ended"
        )

    def forget(self) -> None:
        """Forget whose the contents are: the slots are those of another engine."""
        self._work.slot_owners.clear()
        self._work.n_processed.clear()
        self._known.clear()

    def shutdown(self) -> None:
        """Begin no more work."""
        self._workers.shutdown()

    # ---- blobs that clients keep

    def save(self, slot: Slot) -> bytes:
        """The slot as a blob, which `restore` will know again; any thread."""
        blob, marks = slot.save_marked(checkpoints=False)
        self._known[sha256(blob).digest()] = marks
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return blob

    def restore(self, slot: Slot, blob: bytes) -> int:
        """Restore *blob* and return its size; any thread.

        A client could have put anything into the cache of a blob that is not one of `save`. What
        such a blob restores is therefore reused only by requests that name the slot.

        Raises:
            StateError: It is not sound, or not of this model and its settings.
        """
        data, trailer = split(blob)
        if trailer:  # of a state file: it names the model
            check_trailer(data, trailer, slot.state_facts())
        return slot.restore_marked(data, self._known.get(sha256(data).digest(), NO_MARKS))
