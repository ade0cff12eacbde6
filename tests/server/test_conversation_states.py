"""ConversationStates: a session that returns does not evaluate its history again, where it can."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine, durable
from kqview.errors import QueueFull, RequestError
from kqview.server import Settings
from kqview.server.apps import conversation_states
from kqview.server.apps.conversation_states import LEAST_TOKENS
from tests.server.test_run import request
from tests.support.conversing import OWNER, WITHIN_S, Answered, Chats, chats, config_of
from tests.support.sessions import SeenOs
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG = "Tell me more about the baker, the silver key and the old bridge of the village. " * 3
NAME = "session"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_threads=1, n_slots=2, n_ctx=1024) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty_slots(engine: Engine) -> None:
    for slot in engine.slots:
        slot.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def n_waiting(talk: Chats) -> int:
    """Turns that wait for a seat."""
    states, engine = talk.service.conversations.states, talk.service.pool.default.engine
    seats = states._seats.get(engine)
    return 0 if seats is None else len(seats._waiting)


async def begun(talk: Chats, session: str = NAME) -> Answered:
    """A first turn, saved, whose slot then loses it."""
    answered = await talk.turn(session, LONG)
    await talk.saved(session)
    talk.clear()
    return answered


# ---- a session returns


async def test_session_that_returns_evaluates_only_what_is_new(engine: Engine, folder: Path):
    async with chats(engine) as talk:
        texts = [(await talk.turn(NAME, f"{LONG} {n}")).text for n in range(3)]
        talk.clear()
        fresh = await talk.turn("fresh", LONG)
    assert fresh.n_cached == 0
    async with chats(engine, states_dir=str(folder)) as talk:
        talk.clear()
        before = 0
        for n in range(3):
            answered = await talk.turn(NAME, f"{LONG} {n}")
            # All of the last prompt; of the answer what is tokenized as it was generated.
            assert answered.n_cached >= before
            assert answered.text == texts[n]
            before = answered.n_prompt
            await talk.saved(NAME)
            talk.clear()


async def test_session_whose_slot_still_has_it_is_not_restored(engine: Engine, folder: Path):
    async with chats(engine, states_dir=str(folder)) as talk:
        first = await talk.turn(NAME, LONG)
        await talk.saved(NAME)
        (file,) = files(folder)
        os.truncate(file, file.stat().st_size - 1)  # reading it would remove it
        damaged = file.read_bytes()
        second = await talk.turn(NAME, "no")
        assert second.n_cached >= first.n_prompt
        await talk.saved(NAME)
        assert file.read_bytes()[: len(damaged)] != damaged


async def test_slot_unused_for_longest_is_taken_for_a_restored_session(
    engine: Engine, folder: Path
):
    async with chats(engine, states_dir=str(folder)) as talk:
        await begun(talk, "a")
        slots: list[int | None] = []
        for session in ("b", "c"):
            slots.append((await talk.turn(session, f"{session} {LONG}")).slot)
        assert len(set(slots)) == 1, "the engine takes the first of equals"
        other = next(slot.id for slot in engine.slots if slot.id != slots[0])
        assert (await talk.turn("a", "And then?")).slot == other


async def test_restored_contents_are_those_of_the_session_s_owner(engine: Engine, folder: Path):
    async with chats(engine, states_dir=str(folder)) as talk:
        await begun(talk)
        answered = await talk.turn(NAME, LONG, owner="stranger")
        assert (answered.messages, answered.n_cached) == ((), 0)
        await talk.saved(NAME, owner="stranger")
        assert len(files(folder)) == 2
        talk.clear()
        answered = await talk.turn(NAME, "And then?")
        assert answered.n_cached >= LEAST_TOKENS
        assert answered.slot is not None
        assert talk.service.pool.default.work.slot_owners[answered.slot] == OWNER


async def test_short_history_is_not_saved(engine: Engine, folder: Path):
    async with chats(engine, states_dir=str(folder)) as talk:
        await talk.turn(NAME, "Hi")
        await talk.saved(NAME)
        assert files(folder) == []


async def test_session_whose_client_left_is_saved_as_far_as_it_came(engine: Engine, folder: Path):
    async with chats(engine, states_dir=str(folder)) as talk:
        first = await talk.turn(NAME, LONG, n_tokens=200, is_left=True)
        await talk.saved(NAME)
        talk.clear()
        assert (await talk.turn(NAME, "And then?")).n_cached >= first.n_prompt


# ---- the history is longer than the context


async def test_oldest_messages_leave_the_prompt_and_stay_stored(engine: Engine, folder: Path):
    async with chats(engine, states_dir=str(folder), max_messages=100) as talk:
        said: list[Answered] = []
        for n in range(9):
            said.append(await talk.turn(NAME, f"{n} {LONG}", n_most=400))
        assert said[0].n_left_out == 0
        assert said[-1].n_left_out > 0
        assert all(one.n_prompt <= 400 for one in said)
        assert len(said[-1].messages) == 16
        # What is left out stays left out for some turns, which reuse the cache therefore.
        again = [(a, b) for a, b in pairwise(said) if a.n_left_out == b.n_left_out]
        assert len(again) >= 4
        assert all(b.n_cached >= a.n_prompt for a, b in again)


# ---- files that cannot be used


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def without_trailer(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: data.rindex(b'{"kv_type"')])


def written(data: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(data)


def as_link(file: Path) -> None:
    target = file.with_name("elsewhere")
    file.rename(target)
    file.symlink_to(target)


@pytest.mark.parametrize(
    "damage",
    [
        cut, flipped, without_trailer, written(b""), written(b"x" * 1000),
        written(b"SES1\xff\xff\xff\xff" + bytes(100)), as_link, Path.unlink,
    ],
    ids=["cut", "flipped", "no-trailer", "empty", "garbage", "lengths", "link", "gone"],
)  # fmt: skip
async def test_damaged_file_is_removed_and_the_history_evaluated(
    engine: Engine, folder: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
):
    async with chats(engine, states_dir=str(folder)) as talk:
        await begun(talk)
        (file,) = files(folder)
        damage(file)
        is_gone = not file.exists()
        with caplog.at_level(logging.WARNING, "kqview.server"):
            answered = await talk.turn(NAME, "And then?")
        assert answered.n_cached < LEAST_TOKENS
        assert len(answered.messages) == 2
        if not is_gone:
            assert "evaluated, not restored" in caplog.text
        await talk.saved(NAME)
        talk.clear()  # the new file can be used
        again = await talk.turn(NAME, "And then?")
        assert again.n_cached >= answered.n_prompt


async def test_file_of_other_settings_is_not_restored(
    engine: Engine, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    options: dict[str, Any] = {"states_dir": str(folder), "database": str(tmp_path / "db")}
    async with chats(engine, **options) as talk:
        await begun(talk)
    with Engine.demo(n_threads=1, n_slots=2, n_ctx=1024, kv_type="q8_0") as other:
        async with chats(other, **options) as talk:
            with caplog.at_level(logging.WARNING, "kqview.server"):
                answered = await talk.turn(NAME, "And then?")
            assert answered.n_cached == 0
            assert len(answered.messages) == 2
            assert "evaluated, not restored" in caplog.text
            await talk.saved(NAME)
            talk.clear()
            assert (await talk.turn(NAME, "And then?")).n_cached >= answered.n_prompt


async def test_full_disk_costs_the_file_alone(
    engine: Engine,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    def full(moment: str, call: str, *_: object) -> None:
        if call == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with chats(engine, states_dir=str(folder)) as talk:
        await begun(talk)
        before = files(folder)[0].read_bytes()
        monkeypatch.setattr(durable, "os", SeenOs(full))
        with caplog.at_level(logging.WARNING, "kqview.server"):
            await talk.turn(NAME, "And then?")
            await talk.saved(NAME)
            assert talk.service.budget.used_bytes < 10_000
        monkeypatch.undo()
        assert "No space left" in caplog.text
        assert files(folder)[0].read_bytes() == before
        talk.clear()
        answered = await talk.turn(NAME, "And then?")
        assert len(answered.messages) == 4
        assert answered.n_cached >= LEAST_TOKENS  # what the older file has


async def test_copy_for_which_memory_is_short_is_dropped(engine: Engine, folder: Path):
    config = config_of(Settings(memory_budget_bytes=200_000), states_dir=str(folder))
    async with chats(engine, config) as talk:
        await talk.turn(NAME, LONG)
        await talk.saved(NAME)
        assert files(folder) == []
        assert len((await talk.turn(NAME, LONG)).messages) == 2


# ---- what is bounded, and what goes


async def test_oldest_files_leave_for_the_size_limit(engine: Engine, folder: Path):
    async with chats(engine, states_dir=str(folder)) as talk:
        await begun(talk)
        (file,) = files(folder)
        n_bytes = file.stat().st_size
    limits: dict[str, Any] = {"states_dir": str(folder), "max_state_bytes": int(2.5 * n_bytes)}
    async with chats(engine, **limits) as talk:
        assert files(folder) == []  # its session was in memory alone
        for session in "abc":
            await begun(talk, session)
        assert len(files(folder)) == 2
        assert talk.service.conversations.states.n_bytes <= limits["max_state_bytes"]
        cached = [(await talk.turn(session, "And then?")).n_cached for session in "cb"]
        assert min(cached) >= LEAST_TOKENS
    async with chats(engine, states_dir=str(folder), max_state_bytes=n_bytes // 2) as talk:
        await begun(talk)
        assert files(folder) == []


async def test_file_goes_with_its_session(engine: Engine, folder: Path):
    async with chats(engine, states_dir=str(folder), max_sessions=2) as talk:
        for session in "abc":
            await begun(talk, session)
        assert len(files(folder)) == 2
        conversations = talk.service.conversations
        await talk.turn("b", LONG)
        await conversations.delete(OWNER, "b")  # its slot may not be copied or written yet
        await conversations.states.written()
        assert len(files(folder)) == 1
        await conversations.delete(OWNER, "c")
        await conversations.states.written()
        assert files(folder) == []
        assert talk.service.budget.used_bytes == 0


async def test_files_without_a_session_go_at_the_start_and_others_stay(
    engine: Engine, tmp_path: Path
):
    others = [tmp_path / "chat-0.ses1", tmp_path / "mine.ses1", tmp_path / "notes.txt"]
    for file in (tmp_path / f"chat-{'0' * 64}.ses1", *others):
        file.write_bytes(b"x")
    async with chats(engine, states_dir=str(tmp_path)):
        assert files(tmp_path) == sorted(others)


async def test_folder_that_another_server_uses_is_refused(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conversation_states, "_OPENS_WITHIN_S", 0.0)
    async with chats(engine, states_dir=str(folder)):
        with pytest.raises(RequestError, match="another process uses it"):
            async with chats(engine, states_dir=str(folder)):
                pass
    with pytest.raises(RequestError, match="states_dir"):
        async with chats(engine, states_dir="/proc/none"):
            pass


async def test_copy_of_a_slot_that_another_request_took_is_dropped(engine: Engine, folder: Path):
    async with chats(engine, states_dir=str(folder)) as talk:
        service = talk.service
        runs: list[Any] = []
        for n in range(4):  # two run, two wait for a slot
            given = request(request_id=f"other {n}", prompt="Tom has", max_tokens=300)
            runs.append(await service.start(given))
        turning = asyncio.create_task(talk.turn(NAME, LONG))
        await until(lambda: any(run.owner == OWNER for run in service.runs.values()))
        more = [await service.start(request(request_id=f"more {n}", max_tokens=300)) for n in "ab"]
        for run in runs:
            await run.aclose()
        assert (await turning).text
        for run in more:
            await run.aclose()
        await talk.saved(NAME)
        assert len((await talk.turn(NAME, LONG)).messages) == 2


async def test_model_stays_until_its_slot_is_copied(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    copying, goes_on = threading.Event(), threading.Event()
    copied = conversation_states.ConversationStates._copy  # pyright: ignore[reportPrivateUsage]

    def slow(*args: Any) -> None:
        copying.set()
        goes_on.wait(WITHIN_S)
        copied(*args)

    monkeypatch.setattr(conversation_states.ConversationStates, "_copy", slow)
    async with chats(engine, states_dir=str(folder)) as talk:
        model = talk.service.pool.default
        await talk.turn(NAME, LONG)
        await until(copying.is_set)
        assert model.work.n_uses == 1
        goes_on.set()
        await until(lambda: not model.work.n_uses)
        await talk.saved(NAME)
        assert files(folder)


async def test_turns_wait_for_a_seat_up_to_a_limit(engine: Engine, folder: Path):
    config = config_of(Settings(max_queued=1), states_dir=str(folder))
    async with chats(engine, config) as talk:
        model = talk.service.pool.default
        conversations, caller = talk.service.conversations, conversation_states.Caller("x")
        ids = [1] * 100
        entered: list[str] = []

        async def sit(name: str, leaves: asyncio.Event) -> None:
            with talk.service.budget.hold(name) as hold:
                async with (
                    conversations.turn("", name, hold) as turn,
                    turn.seat(model, caller, ids),
                ):
                    entered.append(name)
                    await leaves.wait()

        leaves = asyncio.Event()
        sitting: list[asyncio.Task[None]] = []
        for name in "ab":
            sitting.append(asyncio.create_task(sit(name, leaves)))
            await until(lambda: len(entered) == len(sitting))
        waiting = asyncio.create_task(sit("c", leaves))
        await until(lambda: n_waiting(talk) == 1)
        with pytest.raises(QueueFull, match=r"max_queued"):
            await sit("d", leaves)
        leaves.set()
        await asyncio.gather(*sitting, waiting)
        assert entered == ["a", "b", "c"]


async def test_fifty_sessions_share_four_slots_while_clients_leave(folder: Path):
    n_sessions, n_turns = 50, 2
    with Engine.demo(n_threads=1, n_slots=4, n_ctx=512) as engine:
        config = config_of(Settings(max_queued=100, max_running=200), states_dir=str(folder))
        async with chats(engine, config) as talk:
            cached = 0

            async def session(i: int) -> None:
                nonlocal cached
                said: list[str] = []
                for n in range(n_turns):
                    prompt = f"Session {i}, turn {n}. {LONG[: 150 + i]}"
                    is_left = (i + n) % 5 == 0
                    one = await talk.turn(f"{i}", prompt, owner=f"{i % 7}", is_left=is_left)
                    assert [message.content for message in one.messages] == said
                    said += [prompt, one.text]
                    cached += one.n_cached > LEAST_TOKENS

            await asyncio.gather(*(session(i) for i in range(n_sessions)))
            found = [await talk.service.conversations.list(f"{i}") for i in range(7)]
            assert sum(map(len, found)) == n_sessions
            assert {one.n_messages for some in found for one in some} == {2 * n_turns}
            assert cached > 0
            for i in range(n_sessions):
                await talk.saved(f"{i}", owner=f"{i % 7}")
            assert n_waiting(talk) == 0


async def test_owner_without_a_seat_gets_one_where_another_has_all(engine: Engine, folder: Path):
    config = config_of(Settings(max_queued=2), states_dir=str(folder))
    async with chats(engine, config) as talk:
        model = talk.service.pool.default
        conversations = talk.service.conversations
        entered: list[str] = []

        async def sit(owner: str, name: str, leaves: asyncio.Event) -> None:
            caller = conversation_states.Caller("x", owner=owner)
            with talk.service.budget.hold(name) as hold:
                async with (
                    conversations.turn(owner, name, hold) as turn,
                    turn.seat(model, caller, [1] * 100),
                ):
                    entered.append(name)
                    await leaves.wait()

        leaves, other_leaves = asyncio.Event(), asyncio.Event()
        greedy = [asyncio.create_task(sit("greedy", f"{i}", leaves)) for i in range(4)]
        await until(lambda: n_waiting(talk) == 2)
        with pytest.raises(QueueFull, match="2 turns of your sessions"):
            await sit("greedy", "4", leaves)
        other = [asyncio.create_task(sit("other", name, other_leaves)) for name in "ab"]
        await until(lambda: entered == ["0", "1", "a"])
        other_leaves.set()
        await until(lambda: "b" in entered)
        assert len(entered) == 4
        leaves.set()
        await asyncio.gather(*greedy, *other)
        assert sorted(entered) == ["0", "1", "2", "3", "a", "b"]
