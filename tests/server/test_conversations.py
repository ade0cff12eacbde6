"""Conversations: turns of a session one after another, their names, prompts and memory."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from kqview.errors import BusyError, RequestError
from kqview.server.apps.conversation_store import ConversationStore, History, Key, TurnMessage
from kqview.server.apps.conversations import Conversations, ConversationTurn, checked_id
from kqview.server.errors import NotFound, RateLimited, ShuttingDown, StorageFull, TooLarge
from kqview.server.web.budget import Budget, uncounted
from tests.support.conversing import WITHIN_S, config_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from pathlib import Path


@contextlib.asynccontextmanager
async def opened(
    budget: Budget | None = None, *, busy_wait_s: float = WITHIN_S, store: Any = None, **limits: Any
) -> AsyncGenerator[tuple[Conversations, Budget]]:
    budget = budget or Budget(10**9)
    made = {} if store is None else {"store": store}
    conversations = Conversations(config_of(**limits), budget, busy_wait_s=busy_wait_s, **made)
    try:
        async with asyncio.timeout(WITHIN_S):
            yield conversations, budget
    finally:
        await conversations.close()


async def say(
    conversations: Conversations, budget: Budget, n: int, owner: str = "o", session: str = "s"
) -> Sequence[TurnMessage]:
    """ConversationTurn *n*; returns what was stored before it."""
    with budget.hold(owner) as hold:
        async with conversations.turn(owner, session, hold) as turn:
            await turn.append(f"prompt {n}", f"answer {n}", model="m")
            return turn.messages


# ---- turns


async def test_turn_sees_those_before_it():
    async with opened() as (conversations, budget):
        for n in range(3):
            assert len(await say(conversations, budget, n)) == 2 * n
        with budget.hold("o") as hold:
            info, (messages, *_) = await conversations.get("o", "s", hold)
            assert hold.n_bytes > 0
        assert info.n_messages == len(messages) == 6
        assert messages[-1] == TurnMessage("assistant", "answer 2")


async def test_second_request_of_a_session_waits_for_the_first():
    async with opened() as (conversations, budget):
        hold = budget.hold("o")
        async with conversations.turn("o", "s", hold) as first:
            second = asyncio.create_task(say(conversations, budget, 2))
            third = asyncio.create_task(say(conversations, budget, 3))
            await say(conversations, budget, 0, session="other")
            assert not second.done()
            await first.append("prompt 1", "answer 1", model="m")
        assert len(await say(conversations, budget, 4)) == 6  # waits behind those that came before
        assert len(await second) == 2
        assert len(await third) == 4


async def test_second_request_is_refused_where_the_first_takes_long():
    async with opened(busy_wait_s=0.0) as (conversations, budget):
        hold = budget.hold("o")
        async with conversations.turn("o", "s", hold) as turn:
            for use in (
                lambda: say(conversations, budget, 1),
                lambda: conversations.delete("o", "s"),
            ):
                with pytest.raises(BusyError, match="'s' is in use by another request"):
                    await use()
            await say(conversations, budget, 1, owner="another")
            await turn.append("prompt 0", "answer 0", model="m")
        assert len(await say(conversations, budget, 1)) == 2


async def test_request_that_gave_up_waiting_leaves_nothing_behind():
    async with opened() as (conversations, budget):
        hold = budget.hold("o")
        async with conversations.turn("o", "s", hold):
            waiting = asyncio.create_task(say(conversations, budget, 1))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert await say(conversations, budget, 2) == ()


async def test_turn_that_failed_stores_nothing_and_frees_the_session():
    async with opened() as (conversations, budget):
        with pytest.raises(ZeroDivisionError):
            async with conversations.turn("o", "s", budget.hold("o")):
                raise ZeroDivisionError
        assert await say(conversations, budget, 1) == ()


async def test_answer_is_stored_although_its_client_left_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
):
    async with opened() as (conversations, budget):
        await conversations.list("o")
        loop, begun, goes_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        real = ConversationStore.append

        def slow(*args: Any, **options: Any) -> Any:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(WITHIN_S)
            return real(*args, **options)

        monkeypatch.setattr(ConversationStore, "append", slow)
        leaving = asyncio.create_task(say(conversations, budget, 1))
        await begun.wait()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        goes_on.set()
        assert len(await conversations_messages(conversations)) == 2


async def conversations_messages(conversations: Conversations) -> Sequence[TurnMessage]:
    return (await conversations.get("o", "s", uncounted()))[1].messages


async def test_closing_waits_for_turns_that_are_ending(tmp_path: Path):
    path = str(tmp_path / "db")
    async with opened(database=path) as (conversations, budget):
        is_closing, goes_on = asyncio.Event(), asyncio.Event()

        async def turn() -> None:
            async with conversations.turn("o", "s", budget.hold("o")) as turn:
                is_closing.set()
                await goes_on.wait()
                await turn.append("prompt", "answer", model="m")

        running = asyncio.create_task(turn())
        await is_closing.wait()
        closing = asyncio.create_task(conversations.close(WITHIN_S))
        await asyncio.sleep(0)
        goes_on.set()
        await running
        await closing
        with pytest.raises(ShuttingDown):
            await conversations.list("o")
    async with opened(database=path) as (conversations, _):
        assert len(await conversations_messages(conversations)) == 2


async def test_closing_does_not_wait_for_ever():
    async with opened() as (conversations, budget):
        async with conversations.turn("o", "s", budget.hold("o")):
            await conversations.close(0.01)


# ---- names


@pytest.mark.parametrize(
    "name", ["a", "../../etc", "a/b\\c", "İ 🙂", "👩‍👩‍👧", "x" * 256, "é" * 128, "%00", "'; DROP"]
)
def test_text_that_can_name_a_session(name: str):
    assert checked_id(name) == name


@pytest.mark.parametrize(
    "name", ["", "x" * 257, "é" * 129, "a\x00b", "a\nb", "\x7f", "\ud800", "x" * 10**7]
)
def test_text_that_cannot_name_a_session_is_refused_by_its_field(name: str):
    with pytest.raises(RequestError, match="cannot name a session") as caught:
        checked_id(name)
    assert caught.value.parameter == "session_id"
    assert len(str(caught.value)) < 300


async def test_session_of_another_owner_does_not_exist():
    async with opened() as (conversations, budget):
        await say(conversations, budget, 1, owner="a")
        assert await conversations.list("b") == []
        for use in (conversations.get("b", "s", budget.hold("b")), conversations.delete("b", "s")):
            with pytest.raises(NotFound, match="there is no session 's'"):
                await use
        await conversations.delete("a", "s")
        assert await conversations.list("a") == []


# ---- memory


async def test_sessions_in_memory_are_counted_and_those_in_a_file_are_not(tmp_path: Path):
    async with opened() as (conversations, budget):
        await say(conversations, budget, 1)
        assert budget.used_bytes > len("prompt 1answer 1")
        await conversations.delete("o", "s")
        assert budget.used_bytes == 0
    async with opened(database=str(tmp_path / "db")) as (conversations, budget):
        await say(conversations, budget, 1)
        assert budget.used_bytes == 0


async def test_sessions_leave_where_memory_is_short():
    async with opened(Budget(200_000)) as (conversations, budget):
        for n in range(30):
            with budget.hold("o") as hold:
                async with conversations.turn("o", f"{n}", hold) as turn:
                    await turn.append("x" * 5000, "y", model="m")
        names = [one.session_id for one in await conversations.list("o")]
        assert names == [f"{n}" for n in range(29, 29 - len(names), -1)]
        assert 5 < len(names) < 20
        assert budget.used_bytes <= 100_000
        async with conversations.turn("o", "large", budget.hold("o")) as turn:
            with pytest.raises(StorageFull):
                await turn.append("x" * 150_000, "y", model="m")
        assert [one.session_id for one in await conversations.list("o")] == names


async def test_history_that_is_read_is_counted_for_its_client(tmp_path: Path):
    async with opened(Budget(500_000), database=str(tmp_path / "db")) as (conversations, budget):

        async def fill() -> None:
            for _ in range(30):
                async with conversations.turn("o", "s", budget.hold("o")) as turn:
                    await turn.append("x" * 20_000, "y", model="m")

        with pytest.raises((RateLimited, TooLarge)):
            await fill()
        assert budget.used_bytes == 0
        await conversations.delete("o", "s")
        assert await say(conversations, budget, 1) == ()


async def test_old_sessions_are_forgotten_and_configured_anew():
    now_s = 1000.0
    seen: list[float] = []

    def store(*args: Any, **options: Any) -> ConversationStore:
        def clock() -> float:
            seen.append(now_s)
            return now_s

        return ConversationStore(*args, clock=clock, **options)

    async with opened(store=store, ttl_s=100) as (conversations, budget):
        await say(conversations, budget, 1, session="old")
        async with conversations.turn("o", "old", budget.hold("o")):
            now_s = 1101.0
            await say(conversations, budget, 1, session="new")
            assert await conversations.sweep() == 0  # a request uses it
        assert await conversations.sweep() == 1
        assert [one.session_id for one in await conversations.list("o")] == ["new"]
    assert seen


# ---- the prompt


def turn_of(n_turns: int, n_skipped: int = 0) -> ConversationTurn:
    messages = [
        TurnMessage("user" if i % 2 == 0 else "assistant", f"{i}") for i in range(2 * n_turns)
    ]
    nobody: Any = None
    return ConversationTurn(nobody, Key("o", "s"), History(messages, n_skipped), [])


@given(
    sizes=st.lists(st.integers(1, 50), max_size=40),
    n_most=st.integers(1, 600),
    skipped=st.integers(0, 20),
)
def test_prompt_has_the_end_of_the_history_that_fits(sizes: list[int], n_most: int, skipped: int):
    skipped = min(skipped, len(sizes))
    turn = turn_of(len(sizes), 2 * skipped)
    n_counts = 0

    def count(messages: Sequence[TurnMessage]) -> int:
        nonlocal n_counts
        n_counts += 1
        return sum(sizes[int(message.content) // 2] for message in messages[::2])

    kept = turn.fit(count, n_most)
    assert list(kept) == list(turn.messages[turn.n_left_out :])
    assert turn.n_left_out % 2 == 0
    assert turn.n_left_out >= 2 * skipped
    n_all = sum(sizes[skipped:])
    if n_all <= n_most:
        assert turn.n_left_out == 2 * skipped
    else:
        assert count(kept) <= n_most * 3 // 4
        one_more = turn.messages[turn.n_left_out - 2 :]
        assert count(one_more) > n_most * 3 // 4
    assert n_counts <= 10  # a template may take long


@pytest.mark.parametrize(("n_replaced", "n_left_out"), [(2, 6), (4, 0), (6, 0), (100, 0)])
def test_replacing_all_turns_of_a_prompt_brings_back_those_that_were_left_out(
    n_replaced: int, n_left_out: int
):
    turn = turn_of(5, 6)
    turn.replace(n_replaced)
    assert turn.n_left_out == n_left_out
