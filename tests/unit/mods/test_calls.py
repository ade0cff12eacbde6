"""Calls of mods: time limits, mods that hang, async mods, end hooks; their threads end."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kqview.mods import RequestEnd, Sampled, mod
from kqview.mods.calls import CallOutcome, EventCall, ModCaller, at_once
from kqview.mods.decorator import BoundMod, begin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVENT = Sampled("r", 1, 3)
TOKENIZER: Any = object()
LIMIT_S = 0.05
WAIT_S = 60.0  # for what must happen


def bound(function: Any, on_end: Any = None) -> BoundMod:
    return begin([mod(on_end=on_end)(function)], "r", TOKENIZER)[0]


def call_of(
    one: BoundMod, log: Callable[[str, str], object] = lambda text, level: None
) -> EventCall:
    return EventCall(one, EVENT, log)


class Gate:
    """A mod that returns when it is released."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.entered = threading.Event()
        self.left = threading.Event()
        self.n_calls = 0

    def __call__(self, event: Any) -> None:
        self.n_calls += 1
        self.entered.set()
        self.release.wait(WAIT_S)
        self.left.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    one = Gate()
    yield one
    one.release.set()


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "kqview mods"]


OLDER: list[threading.Thread] = []
"""Threads in which mods of earlier tests hang."""


@pytest.fixture(autouse=True)
def _older() -> None:  # pyright: ignore[reportUnusedFunction]
    OLDER[:] = threads()


def await_no_threads() -> None:
    for one in set(threads()) - set(OLDER):
        one.join(WAIT_S)
        assert not one.is_alive()


async def run(caller: ModCaller, call: EventCall, *, is_async: bool) -> CallOutcome:
    answer = caller.call(call, is_async=is_async)
    return await answer if is_async else at_once(answer)


BOTH = pytest.mark.parametrize("is_async", [False, True])


@BOTH
async def test_without_a_limit_the_consumers_thread_calls(is_async: bool):
    seen: list[Any] = []

    def function(event: Any, actions: Any, tokenizer: Any) -> str:
        seen.append((threading.get_ident(), event, tokenizer))
        return "answer"

    outcome = await run(ModCaller(TOKENIZER), call_of(bound(function)), is_async=is_async)
    assert (outcome.answer, outcome.error) == ("answer", None)
    assert outcome.time_ms >= 0
    assert seen == [(threading.get_ident(), EVENT, TOKENIZER)]


@BOTH
async def test_with_a_limit_one_thread_calls_them_all(is_async: bool):
    seen: set[int] = set()
    caller = ModCaller(TOKENIZER, time_limit_s=WAIT_S)
    one = bound(lambda event: seen.add(threading.get_ident()))
    for _ in range(3):
        assert (await run(caller, call_of(one), is_async=is_async)).error is None
    assert len(seen) == 1
    assert threading.get_ident() not in seen
    caller.close()
    await_no_threads()


@BOTH
async def test_mod_that_hangs_is_left_alone_until_it_returns(is_async: bool, gate: Gate):
    caller = ModCaller(TOKENIZER, time_limit_s=LIMIT_S)
    hangs, other = bound(gate), bound(lambda event: "other")
    late = await run(caller, call_of(hangs), is_async=is_async)
    assert "took more than the 0.05 s of mod_time_limit_s" in (late.error or "")
    assert late.time_ms == LIMIT_S * 1000
    again = await run(caller, call_of(hangs), is_async=is_async)
    assert "an earlier call of" in (again.error or "")
    assert gate.n_calls == 1
    # Another mod of the request is called meanwhile; a slow machine may need several attempts.
    while (outcome := await run(caller, call_of(other), is_async=is_async)).error:
        assert "TimeoutError" in outcome.error
    assert outcome.answer == "other"
    gate.release.set()
    while (outcome := await run(caller, call_of(hangs), is_async=is_async)).error:
        assert "TimeoutError" in outcome.error
    assert gate.n_calls >= 2
    caller.close()
    await_no_threads()


@BOTH
async def test_end_hook_of_a_mod_that_hangs_waits_for_it(is_async: bool, gate: Gate):
    order: list[str] = []
    ended = threading.Event()

    def on_end(end: RequestEnd) -> None:
        order.append("left" if gate.left.is_set() else "inside")
        ended.set()

    caller = ModCaller(TOKENIZER, time_limit_s=LIMIT_S)
    hangs = bound(gate, on_end)
    assert (await run(caller, call_of(hangs), is_async=is_async)).error
    caller.end(hangs, RequestEnd("r", "stop"))
    caller.close()
    assert not ended.is_set()
    gate.release.set()
    assert ended.wait(WAIT_S)
    assert order == ["left"]
    await_no_threads()


def test_end_hook_runs_behind_the_last_call():
    ends: list[RequestEnd] = []
    ended = threading.Event()

    def on_end(end: RequestEnd) -> None:
        ends.append(end)
        ended.set()

    for caller in (ModCaller(TOKENIZER), ModCaller(TOKENIZER, time_limit_s=WAIT_S)):
        ended.clear()
        one = bound(lambda event: None, on_end)
        at_once(caller.call(call_of(one), is_async=False))
        caller.end(one, RequestEnd("r", "stop"))
        caller.close()
        assert ended.wait(WAIT_S)
    assert [end.finish_reason for end in ends] == ["stop", "stop"]
    await_no_threads()


@BOTH
async def test_exit_in_a_mod_passes_on_the_consumers_thread_and_fails_elsewhere(is_async: bool):
    def leaves(event: Any) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await run(ModCaller(TOKENIZER), call_of(bound(leaves)), is_async=is_async)
    caller = ModCaller(TOKENIZER, time_limit_s=WAIT_S)
    outcome = await run(caller, call_of(bound(leaves)), is_async=is_async)
    assert outcome.error == "SystemExit: 3"
    caller.close()
    await_no_threads()


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()])
async def test_async_mod_that_leaves_ends_no_loop(error: BaseException):
    async def leaves(event: Any) -> None:
        raise error

    caller = ModCaller(TOKENIZER, time_limit_s=WAIT_S)
    outcome = await caller.call(call_of(bound(leaves)), is_async=True)
    assert (outcome.error or "").startswith(type(error).__name__)


async def test_async_mod_is_awaited():
    async def slow(event: Any) -> str:
        print("before")
        await asyncio.sleep(0)
        print("after")
        return "answer"

    lines: list[str] = []
    for limit_s in (None, WAIT_S):
        caller = ModCaller(TOKENIZER, time_limit_s=limit_s)
        call = call_of(bound(slow), lambda text, level: lines.append(text))
        assert (await caller.call(call, is_async=True)).answer == "answer"
    assert lines == ["before", "after"] * 2


async def test_async_mod_beyond_its_limit_is_cancelled():
    cancelled = asyncio.Event()

    async def hangs(event: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    caller = ModCaller(TOKENIZER, time_limit_s=LIMIT_S)
    outcome = await caller.call(call_of(bound(hangs)), is_async=True)
    assert "took more than" in (outcome.error or "")
    await asyncio.wait_for(cancelled.wait(), WAIT_S)


async def test_async_mod_that_does_not_let_itself_be_cancelled_is_left_alone():
    release = asyncio.Event()
    ended = asyncio.Event()

    async def stubborn(event: Any) -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "at last"

    caller = ModCaller(TOKENIZER, time_limit_s=LIMIT_S)
    one = bound(stubborn, lambda end: ended.set())
    assert "took more than" in ((await caller.call(call_of(one), is_async=True)).error or "")
    assert "earlier call" in ((await caller.call(call_of(one), is_async=True)).error or "")
    caller.end(one, RequestEnd("r", "stop"))
    await asyncio.sleep(0)
    assert not ended.is_set()
    release.set()
    await asyncio.wait_for(ended.wait(), WAIT_S)


async def test_cancelled_consumer_leaves_a_running_mod_behind(gate: Gate):
    caller = ModCaller(TOKENIZER, time_limit_s=WAIT_S)
    one = bound(gate)
    task = asyncio.create_task(caller.call(call_of(one), is_async=True))
    assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "earlier call" in (at_once(caller.call(call_of(one), is_async=False)).error or "")
    gate.release.set()
    await_no_threads()


@BOTH
async def test_awaitable_of_a_function_that_is_not_async_is_refused(is_async: bool):
    async def inner() -> None: ...

    outcome = await run(ModCaller(TOKENIZER), call_of(bound(lambda e: inner())), is_async=is_async)
    assert "declare it with async def" in (outcome.error or "")


def test_idle_thread_of_a_request_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kqview.mods.calls._IDLE_S", 0.01)
    caller = ModCaller(TOKENIZER, time_limit_s=WAIT_S)
    seen: list[int] = []
    one = bound(lambda event: seen.append(threading.get_ident()))
    at_once(caller.call(call_of(one), is_async=False))
    await_no_threads()
    assert at_once(caller.call(call_of(one), is_async=False)).error is None
    assert len(seen) == 2
    await_no_threads()
