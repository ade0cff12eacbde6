"""Conversations: the chats that the server remembers, and the turns that go on in them.

A conversation answers one request at a time. A second one for the same conversation waits a little,
because the first may just be ending (its client left), and is then refused with BusyError (409).

What is stored is in `conversation_store`: prompts and answers, neither system prompts and personas
nor reasoning that is dropped. The KV cache is saved beside it (`conversation_states`).

Belongs to one event loop. The database works in one thread of its own.
"""

import asyncio
import contextlib
import logging
import unicodedata
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from kqview.engine import Engine
from kqview.errors import BusyError, CapacityError, KqviewError, RequestError
from kqview.server.apps.conversation_states import ConversationStates, Seat
from kqview.server.apps.conversation_store import (
    ConversationInfo,
    ConversationStore,
    History,
    Key,
    TurnMessage,
)
from kqview.server.apps.mia4.persona import PersonaFile
from kqview.server.config import Config
from kqview.server.errors import NotFound, RateLimited, ShuttingDown, TooLarge
from kqview.server.live_config import LiveConfig
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.run import Cancelling
from kqview.server.models.service import LEAST_CLOSE_S, Service
from kqview.server.settings import Settings
from kqview.server.web import endpoint
from kqview.server.web.access import Caller
from kqview.server.web.budget import Budget, Reservation

_T = TypeVar("_T")
_log: Final = logging.getLogger("kqview.server")

_ID_BYTES: Final = 256
_CLIENT: Final = "sessions"
_READ_TIMES: Final = 4  # bytes of a history in memory, as text and as messages, per byte of text
_SWEEP_S: Final = 60.0


class ConversationTurn:
    """One request of a conversation, which no other one uses meanwhile; see `Conversations.turn`.

    Attributes:
        key: The conversation.
        messages: What is stored, oldest first: prompts and answers in turn.
        n_left_out: How many of `messages`, from the start, the prompt leaves out.
    """

    def __init__(
        self,
        owner: "Conversations",
        key: Key,
        history: History,
        copies: "list[asyncio.Task[None]]",
    ) -> None:
        self.key = key
        self.messages = history.messages
        self.n_left_out = history.n_skipped
        self._n_replaced = 0
        self._copies = copies
        self._owner = owner

    def replace(self, n: int) -> None:
        """Leave the last *n* messages out, or all; `append` removes them.

        Raises:
            RequestError: They are no whole turns.
        """
        if n % 2:
            raise RequestError(
                f"replaces is {n}; send an even number, as a turn is two messages",
                parameter="replaces",
            )
        self._n_replaced = n
        self.messages = self.messages[: max(0, len(self.messages) - n)]
        if self.n_left_out >= len(self.messages):  # prompts begin with the oldest turn again
            self.n_left_out = 0

    def fit(
        self, count: Callable[[Sequence[TurnMessage]], int], n_most: int
    ) -> Sequence[TurnMessage]:
        """The messages for the prompt: all of `messages`, or those at their end that fit.

        If they do not fit, the oldest turns leave the prompt until it has three quarters of
        *n_most*: the prompts of the next turns then begin alike and reuse the cache. They stay
        stored. Of the conversations that go on, the prompt begins where that of the last turn did.
        Any thread, because *count* renders a template.

        Args:
            count: Tokens of the prompt made of these messages and the new one.
            n_most: Most tokens of a prompt.

        Returns:
            At least (): whether the new message alone fits is for the caller to check.
        """
        messages, n_out = self.messages, self.n_left_out
        if n_out < len(messages) and count(messages[n_out:]) > n_most:
            low, high = n_out // 2 + 1, len(messages) // 2  # turns to leave out
            while low < high:
                middle = (low + high) // 2
                if count(messages[2 * middle :]) > n_most * 3 // 4:
                    low = middle + 1
                else:
                    high = middle
            self.n_left_out = n_out = 2 * low
        return messages[n_out:]

    def seat(
        self, model: ModelEntry, caller: Caller, ids: Sequence[int]
    ) -> AbstractAsyncContextManager[Seat]:
        """A seat for the run of this turn, whose slot is saved afterwards: `ConversationStates`."""
        return self._owner.states.seat(model, caller, self.key, ids, self._copies.append)

    async def append(self, prompt: str, answer: str, *, model: str) -> None:
        """Store this turn; where there is a database, it is on the disk when this returns.

        For a turn with an answer, one that was cancelled or failed midway included. It is stored
        even if the waiting task is cancelled.

        Args:
            prompt: The user's message, without system prompt and persona.
            answer: What was produced, without dropped reasoning.
            model: Id of the model.

        Raises:
            StorageFull: There is no room; the conversation stays as it was.
            StorageFailed: The database cannot be written.
        """
        appending = self._owner.change(
            lambda store, in_use: store.append(
                self.key,
                prompt,
                answer,
                model=model,
                n_skipped=self.n_left_out,
                n_replaced=self._n_replaced,
                in_use=in_use,
            )
        )
        # Work that waits for its thread is dropped with the task that waits for it.
        await asyncio.shield(asyncio.ensure_future(appending))


class Conversations:
    """The conversations of one server."""

    def __init__(
        self,
        settings: LiveConfig | Config,
        budget: Budget,
        *,
        store: Callable[..., ConversationStore] = ConversationStore,
        busy_wait_s: float = 5.0,
    ) -> None:
        """Nothing is opened yet.

        Args:
            settings: The configuration; table ``[sessions]`` counts here.
            budget: Counts the conversations that memory holds.
            store: Makes the store.
            busy_wait_s: How long a request waits for another one of its conversation.
        """
        self._live = LiveConfig.of(settings)
        self.states = ConversationStates(self._live, budget)
        self._hold = budget.hold(_CLIENT)
        self._new_store = store
        self._busy_wait_s = busy_wait_s
        self._store: ConversationStore | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kqview-sessions")
        self._sweeping: asyncio.Task[None] | None = None
        self._turns: dict[Key, asyncio.Lock] = {}  # conversations of which a request runs
        # Those that requests wait for, too; a lock lets them in as they came.
        self._in_use = WeakValueDictionary[Key, asyncio.Lock]()
        self._freed = asyncio.Event()  # set, and replaced, when one has ended
        self._is_closed = False

    # ---- life

    async def open(self) -> None:
        """Open the database, and begin to forget what is too old; idempotent.

        Without it the first use does so.

        Raises:
            RequestError: As `ConversationStore`.
        """
        if self._store is None:
            await self._in_thread(self._open)
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep_often())

    def _open(self) -> None:
        """The database's thread, which goes on if the request that wanted it has left."""
        if self._store is not None:
            return
        store = self._new_store(lambda: self._live.config.sessions, fits=self._fits)
        try:
            self.states.open(store.keys())
        except BaseException:
            store.close()
            raise
        self._store = store

    async def close(self, limit_s: float = 1.0) -> None:
        """Wait up to *limit_s* for turns that are ending, and close the database; idempotent."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._turns:
                    await self._freed.wait()
        self._is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.to_thread(self.states.close)
        if self._store is not None:
            await self._in_thread(self._store.close)
            self._store = None
        self._thread.shutdown(wait=False)
        self._hold.close()

    # ---- a turn

    @contextlib.asynccontextmanager
    async def turn(
        self, owner: str, session_id: str, hold: Reservation
    ) -> AsyncGenerator[ConversationTurn]:
        """One request of a conversation, which is new if nothing is stored of it.

        Args:
            owner: `Caller.owner` of who asks; conversations of others are other conversations.
            session_id: The client's name for it.
            hold: Counts the history.

        Raises:
            RequestError: *session_id* cannot name a conversation.
            BusyError: Another request of this conversation runs.
            StorageFailed: The database cannot be read.
        """
        key = Key(owner, checked_id(session_id))
        copies: list[asyncio.Task[None]] = []
        await self._enter(key)
        try:
            in_use = set(self._in_use) - {key}

            def begun(store: ConversationStore) -> History:
                self.states.forget(store.sweep(in_use))
                return store.read(key)

            history = await self._run(begun)
            with hold.part() as read:
                read.take(_READ_TIMES * history.n_bytes)
                yield ConversationTurn(self, key, history, copies)
        finally:
            self._leave(key, copies)

    async def _enter(self, key: Key) -> None:
        lock = self._in_use.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(self._busy_wait_s):
                await lock.acquire()
        except TimeoutError:
            raise BusyError(
                f"session {key.session_id[:80]!r} is in use by another request; wait until "
                "that has ended, or cancel it"
            ) from None
        self._turns[key] = lock

    def _leave(self, key: Key, copies: Sequence["asyncio.Task[None]"] = ()) -> None:
        """Let the next request in, once the slot has been copied."""
        copies = [copy for copy in copies if not copy.done()]
        if copies:
            copies[0].add_done_callback(lambda _: self._leave(key, copies))
            return
        self._turns.pop(key).release()
        self._freed.set()
        self._freed = asyncio.Event()

    async def change(self, work: Callable[[ConversationStore, Collection[Key]], set[Key]]) -> int:
        """*work* of the store, given those in use; returns how many conversations left by it.

        What is saved of those is removed.
        """
        in_use = list(self._in_use)

        def changed(store: ConversationStore) -> int:
            gone = work(store, in_use)
            self.states.forget(gone)
            return len(gone)

        return await self._run(changed)

    # ---- conversations

    async def list(self, owner: str) -> list[ConversationInfo]:
        """Sessions of *owner*, the one used last first; raises StorageFailed."""
        return await self._run(lambda store: store.list(owner))

    async def get(
        self, owner: str, session_id: str, hold: Reservation
    ) -> tuple[ConversationInfo, History]:
        """A conversation with its history, which is counted in *hold*.

        Raises:
            NotFound: *owner* has no such conversation.
            StorageFailed: The database cannot be read.
        """
        key = Key(owner, session_id)
        info, history = await self._run(lambda store: (store.info(key), store.read(key)))
        if info is None:
            raise _no_session(key)
        hold.take(_READ_TIMES * history.n_bytes)
        return info, history

    async def delete(self, owner: str, session_id: str) -> None:
        """Forget a conversation.

        Raises:
            NotFound: *owner* has no such conversation.
            BusyError: A request of it runs.
            StorageFailed: The database cannot be written.
        """
        key = Key(owner, session_id)
        await self._enter(key)
        try:
            if not await self.change(lambda store, in_use: store.delete(key)):
                raise _no_session(key)
        finally:
            self._leave(key)

    async def sweep(self) -> int:
        """Forget the conversations that nobody used for ``ttl_s``; returns how many."""
        return await self.change(ConversationStore.sweep)

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(min(_SWEEP_S, max(1.0, self._live.config.sessions.ttl_s / 4)))
            try:
                await self.sweep()
            except KqviewError as error:
                _log.warning("sessions that are too old stay for now: %s", error)

    # ---- the database's thread

    def _fits(self, n_bytes: int) -> bool:
        try:
            self._hold.set(n_bytes)
        except (CapacityError, RateLimited, TooLarge):
            return False
        return True

    async def _run(self, work: Callable[[ConversationStore], _T]) -> _T:
        if self._is_closed:
            raise ShuttingDown("the server is shutting down; try again later")
        if self._store is None:
            await self.open()
        assert self._store is not None  # `open` has made it
        return await self._in_thread(work, self._store)

    async def _in_thread(self, work: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)


def checked_id(session_id: str) -> str:
    """*session_id* if it can name a conversation; names of files are digests, so most text can.

    Raises:
        RequestError: It is empty, longer than 256 bytes, or has control characters.
    """
    start = session_id[: _ID_BYTES + 1]
    is_text = not any(unicodedata.category(c) in ("Cc", "Cs") for c in start)
    if not is_text or not 0 < len(start.encode()) <= _ID_BYTES:
        raise RequestError(
            f"session_id {session_id[:40]!r} cannot name a session; use 1 to {_ID_BYTES} bytes "
            "without control characters",
            parameter="session_id",
        )
    return session_id


def _no_session(key: Key) -> NotFound:
    return NotFound(f"there is no session {key.session_id[:80]!r}")


# ---- with models


class ChatService(Service):
    """What `create_app` serves: a `Service`, and what its apps keep."""

    def __init__(self, engine: Engine | None, settings: Settings | LiveConfig) -> None:
        super().__init__(engine, settings)
        self.conversations = Conversations(self.live, self.budget)
        self.cancelling = Cancelling()
        self.persona = self.live.derived(
            lambda config: config.persona.file,
            lambda file: None if file is None else PersonaFile(file),
        )
        self.observe_reasoning_ms: Callable[[float], object] = lambda ms: None
        """Gets the latency of each answer with reasoning, as `GenerationCompleted` tells it."""

    async def open(self) -> None:
        """As of `Service`; opens the database of the conversations."""
        await super().open()
        await self.conversations.open()

    async def close(self) -> None:
        """As of `Service`; what the conversations have to write is written before."""
        await self.drain(self.settings.shutdown_grace_s)
        await self.conversations.close(max(LEAST_CLOSE_S, self.grace_left_s))
        await super().close()


Call: TypeAlias = endpoint.Call[ChatService, ModelEntry]
"""A request to an operation of an app."""
