"""``GET /events``: who hears of what, and subscribers that are slow or leave."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kqview.errors import QueueFull
from kqview.server import Settings
from kqview.server.apps.mia4 import routes
from kqview.server.models import events_bus
from kqview.server.models.events_bus import Bus, Dropped, GenerationCompleted, Subscription
from tests.support import mia4

if TYPE_CHECKING:
    from tests.server.conftest import Serve

GENERATION = ["GenerationStarted", "GenerationCompleted"]


def completed(request_id: str = "r", session_id: str | None = None) -> GenerationCompleted:
    return GenerationCompleted(
        request_id=request_id, session_id=session_id, model_id="demo", status="ok",
        stop_reason="stop", code=None, result_summary={},
    )  # fmt: skip


async def taken(subscription: Subscription, n: int) -> list[str]:
    """Requests of the next *n* events."""
    events = [await anext(subscription) for _ in range(n)]
    return [one.request_id for one in events if isinstance(one, GenerationCompleted)]


# ---- the bus


def test_slow_subscriber_loses_the_oldest_and_hears_how_many():
    async def run() -> None:
        bus = Bus()
        async with bus.subscribed(limit=3) as slow, bus.subscribed(limit=100) as fast:
            for i in range(10):
                bus.publish(completed(str(i)))
            first = await anext(slow)
            assert isinstance(first, Dropped)
            assert first.n == 7
            assert await taken(slow, 3) == ["7", "8", "9"]
            bus.publish(completed("10"))
            assert await taken(slow, 1) == ["10"]  # nothing was lost since
            assert await taken(fast, 11) == list(map(str, range(11)))

    asyncio.run(run())


def test_events_belong_to_their_owner_and_those_of_nobody_to_all():
    async def run() -> None:
        bus = Bus()
        async with bus.subscribed(sees=lambda owner: owner == "a") as own, bus.subscribed() as all_:
            bus.publish(completed("1"), "a")
            bus.publish(completed("2"), "b")
            bus.publish(completed("3"))
            await bus.close()
            assert await taken(own, 2) == ["1", "3"]
            assert await taken(all_, 3) == ["1", "2", "3"]
            assert await anext(own, None) is None

    asyncio.run(run())


def test_bus_that_is_closed_ends_every_subscription_at_once():
    async def run() -> None:
        bus = Bus()
        async with bus.subscribed() as waiting:
            task = asyncio.ensure_future(anext(waiting, None))
            await asyncio.sleep(0)
            await bus.close()
            assert await task is None
        async with bus.subscribed() as late:
            assert [one async for one in late] == []
        assert len(bus.subscriptions) == 0

    asyncio.run(run())


def test_subscribers_have_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events_bus, "_MOST_SUBSCRIBERS", 1)

    async def run() -> None:
        bus = Bus()
        async with bus.subscribed():
            with pytest.raises(QueueFull, match="1 clients are listening"):
                async with bus.subscribed():
                    pass
        async with bus.subscribed():
            pass

    asyncio.run(run())


# ---- over HTTP


def test_each_key_hears_of_its_own_requests_and_admins_of_all(serve: Serve):
    served = serve(Settings(api_keys=("one", "two"), admin_keys=("root",)))
    with (
        mia4.listening(served, key="one") as own,
        mia4.listening(served, key="two") as foreign,
        mia4.listening(served, key="root") as every,
    ):
        mia4.generate(served, key="one", request_id="first")
        mia4.generate(served, key="two", request_id="second")
        heard = {
            "one": [next(own) for _ in GENERATION],
            "two": [next(foreign) for _ in GENERATION],
            "root": [next(every) for _ in 2 * GENERATION],
        }
    requests = {key: [data["request_id"] for _, data in found] for key, found in heard.items()}
    assert requests == {
        "one": ["first"] * 2, "two": ["second"] * 2, "root": ["first"] * 2 + ["second"] * 2,
    }  # fmt: skip
    assert [name for name, _ in heard["one"]] == GENERATION


def test_model_that_is_loaded_for_a_request_is_told_to_all_and_listed(serve: Serve):
    settings = {"api_keys": ("one", "two")}
    served = serve(mia4.config({"first": {}, "second": {"n_ctx": 256}}, settings=settings))

    def states() -> list[tuple[str, int | None]]:
        with served.client(headers=mia4.headers("one")) as client:
            models = client.get("/models").json()["models"]
        return [(one["state"], one["context_length"]) for one in models]

    assert states() == [("unloaded", None), ("unloaded", 256)]
    with mia4.listening(served, key="two") as events:
        mia4.generate(served, key="one", model="second")
        heard: list[mia4.Frame] = []
        while not heard or heard[-1][0] == "ModelLoading":
            heard.append(next(events))
    assert heard[0][0] == "ModelLoading"
    assert heard[-1][0] == "ModelLoaded"
    assert {data["model_id"] for _, data in heard} == {"second"}
    assert states() == [("unloaded", None), ("loaded", 256)]


def test_subscriber_that_leaves_is_forgotten(serve: Serve):
    served = serve()
    bus = served.service.bus
    for _ in range(3):
        with mia4.listening(served) as events:
            mia4.generate(served)
            assert next(events)[0] == "GenerationStarted"
            assert len(bus.subscriptions) == 1
        served.wait_until(lambda: len(bus.subscriptions) == 0)
    mia4.generate(served)


def test_subscriber_that_does_not_read_costs_a_bounded_number_of_events(serve: Serve):
    """What sockets do not hold stays in the bus, which keeps the newest."""
    served = serve()
    bus, n, size = served.service.bus, 600, 64 * 1024

    def flood() -> None:
        for i in range(n):
            bus.publish(completed(str(i), "x" * size))

    with mia4.listening(served) as events:
        with mia4.on_cancel(flood):
            mia4.cancel(served, "x")
        mia4.generate(served, request_id="last")  # others are served meanwhile
        found: list[mia4.Frame] = []
        while not found or found[-1][1].get("request_id") != "last":
            found.append(next(events))
    [dropped] = mia4.named(found, "Dropped")
    assert dropped["n"] >= n - events_bus.N_KEPT - 100
    heard = [int(one["request_id"]) for _, one in found if one.get("session_id")]
    assert len(heard) + dropped["n"] == n
    assert heard[-1] == n - 1


def test_quiet_stream_is_kept_alive(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(routes, "_KEEP_ALIVE_S", 0.05)
    served = serve()
    with served.client() as client, client.stream("GET", "/events") as reply:
        lines = reply.iter_lines()
        assert next(line for line in lines if line).startswith(":")
        mia4.generate(served)
        frames = mia4.frames_of(lines)
        assert [next(frames)[0] for _ in GENERATION] == GENERATION


def test_sampling_has_the_limit_of_tokens_that_counts(serve: Serve):
    served = serve(Settings(max_tokens=2))
    with mia4.listening(served) as events:
        for given in ({}, {"max_output_tokens": 100}):
            mia4.generate(served, overrides=given)
            name, started = next(events)
            assert name == "GenerationStarted"
            assert started["sampling"]["max_tokens"] == 2
            assert next(events)[1]["stop_reason"] in ("length", "stop")
