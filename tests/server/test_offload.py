"""Work that takes its time is done beside the event loop, and nobody has all the threads for it."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kqview import Engine
from kqview.cli import serving as cli_serving
from kqview.server import Settings, create_app
from kqview.server.errors import TimedOut, TooLarge
from kqview.server.models.run import GenerateRequest
from kqview.server.models.service import OFFLOAD_BYTES, Service
from kqview.server.web.budget import Workers
from kqview.server.web.endpoint import check_values, json_in_slices
from kqview.stop_strings import ShownText
from kqview.types import Sampling
from tests.server.toy_dialect import serving_toy
from tests.support.hostile_grammars import GRAMMARS
from tests.support.serving import serving
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

pytestmark = pytest.mark.full

WITHIN_S = 30.0


def request(request_id: str = "one", **fields: Any) -> GenerateRequest:
    fields = {"prompt": [1, 2, 3], "max_tokens": 2, "sampling": Sampling(), **fields}
    return GenerateRequest(request_id=request_id, **fields)


class Gate:
    """Stands for a function that takes long: waits in whichever thread calls it."""

    def __init__(self, work: Any) -> None:
        self.threads: list[int] = []
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self._work = work

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.threads.append(threading.get_ident())
        self.entered.release()
        assert self.opened.wait(WITHIN_S)
        return self._work(*args, **options)

    async def wait_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=WITHIN_S)


LARGE = {
    "a grammar": {"sampling": Sampling(grammar='root ::= "a"')},
    "many biases": {"sampling": Sampling(logit_bias={i % 700: 0.0 for i in range(700)}),
                    "n_samples": 8},
    "many bans": {"sampling": Sampling(banned_tokens=[5] * 5000)},
    "many stops": {"sampling": Sampling(stop_tokens=[5] * 5000)},
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
async def test_large_request_is_begun_in_another_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, name: str
):
    service = Service(engine, Settings())
    gate = Gate(engine.generate)
    gate.opened.set()
    monkeypatch.setattr(engine, "generate", gate)
    async with await service.start(request(**LARGE[name])) as run:
        async for _ in run:
            pass
    assert gate.threads
    assert threading.get_ident() not in gate.threads


async def test_small_request_is_begun_here(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    service = Service(engine, Settings())
    gate = Gate(engine.generate)
    gate.opened.set()
    monkeypatch.setattr(engine, "generate", gate)
    async with await service.start(request()):
        pass
    assert gate.threads == [threading.get_ident()]


async def test_request_whose_client_leaves_while_it_is_begun_is_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    service = Service(engine, Settings())
    made: list[Any] = []

    def generate(*args: Any, **options: Any) -> Any:
        made.append(Engine.generate(engine, *args, **options))
        return made[-1]

    gate = Gate(generate)
    monkeypatch.setattr(engine, "generate", gate)
    sampling = Sampling(grammar='root ::= "a"')
    starting = asyncio.ensure_future(service.start(request(sampling=sampling, n_samples=4)))
    await gate.wait_entered()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not service.runs
    gate.opened.set()
    await asyncio.to_thread(wait_until, lambda: made and made[0].finish_reason)
    assert [one.finish_reason for one in made] == ["cancelled"]


async def test_time_in_which_a_request_is_begun_counts(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    service = Service(engine, Settings(request_timeout_s=0.2))
    gate = Gate(engine.generate)
    monkeypatch.setattr(engine, "generate", gate)
    with pytest.raises(TimedOut):
        await service.start(request(sampling=Sampling(grammar='root ::= "a"')))
    gate.opened.set()


async def test_texts_that_take_long_hold_up_neither_rows_nor_other_clients(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    service = Service(engine, Settings())
    gate = Gate(engine.tokenize)
    monkeypatch.setattr(engine, "tokenize", gate)
    leaver = service.budget.hold("leaver")
    texts = [
        asyncio.ensure_future(
            service.pool.default.texts.ids("word " * 10_000, add_special=False, hold=leaver)
        )
        for _ in range(8)
    ]
    await gate.wait_entered()
    await gate.wait_entered()
    assert len(gate.threads) == 2  # of four
    for text in texts:
        text.cancel()
    async with asyncio.timeout(WITHIN_S):
        assert await service.offload(OFFLOAD_BYTES, lambda: 5) == 5
        other = asyncio.ensure_future(
            service.pool.default.texts.ids(
                "word " * 10_000, add_special=False, hold=service.budget.hold("other")
            )
        )
        await gate.wait_entered()  # it has a thread although the leaver's texts are not done
        gate.opened.set()
        assert len(await other) > 10_000
    assert len(gate.threads) == 3  # those that were cancelled in the queue never began


async def test_place_of_one_who_left_goes_to_the_next():
    workers = Workers(2, "test")
    gate = Gate(lambda: None)
    running = asyncio.ensure_future(workers.run("a", gate))
    await gate.wait_entered()
    left, waits = (asyncio.ensure_future(workers.run("a", lambda: 5)) for _ in range(2))
    await asyncio.sleep(0)
    left.cancel()
    gate.opened.set()
    async with asyncio.timeout(WITHIN_S):
        assert await waits == 5
        await running
    async with asyncio.timeout(WITHIN_S):
        assert await workers.run("a", lambda: 6) == 6
    del left  # its error has the frames
    assert not workers._places
    workers.shutdown()


# ---- bodies


def test_body_is_read_in_another_thread_where_it_is_large(monkeypatch: pytest.MonkeyPatch):
    from kqview.server.web import endpoint

    names: list[str] = []
    decoded = endpoint.decoded_with_unknown

    def note(*args: Any) -> Any:
        names.append(threading.current_thread().name)
        return decoded(*args)

    monkeypatch.setattr(endpoint, "decoded_with_unknown", note)
    with serving_toy() as served, served.client() as client:
        for n in (10, 100_000):
            assert client.post("/toy/tokenize", json={"text": "a " * n}).status_code == 200
    assert "kqview-requests" not in names[0]
    assert "kqview-requests" in names[1]


@pytest.mark.parametrize(
    "value",
    [[0] * (2**20 + 1), {str(i): 0 for i in range(2**18 + 1)}, [[[]]] * (2**19)],
    ids=["list", "object", "lists"],
)
def test_body_of_too_many_values_is_refused_before_it_is_decoded(value: object):
    with pytest.raises(TooLarge, match="1048576 and 262144"):
        check_values(json.dumps({"x": value}).encode())
    with pytest.raises(TooLarge):
        check_values(msgspec.msgpack.encode({"x": value}), packs=True)


def test_text_may_have_any_characters_and_any_length():
    text = ',:[{"\\' * 2**18
    for raw in (json.dumps({"text": text}), json.dumps({"text": text}).encode()):
        check_values(raw)
    check_values(msgspec.msgpack.encode({"text": text, "data": b"\xdf" * 2**21}), packs=True)


def test_list_that_would_stop_others_gets_413_and_names_the_limit():
    with serving_toy() as served, served.client() as client:
        reply = client.post(
            "/api/v1/detokenize", content=b'{"token_ids":[' + b"1," * 2**20 + b"1]}"
        )
        assert reply.status_code == 413
        assert "1048576" in reply.json()["error"]


def test_list_in_slices_is_the_same_json():
    class Value(msgspec.Struct):
        n: int
        ids: list[int]
        none: list[int]

    for n in (0, 1, 4096, 4097, 10_000):
        value = Value(n, list(range(n)), [])
        expected = msgspec.json.encode(value)
        assert json_in_slices(value) == expected
        assert value.ids == []  # not left to the event loop to free


# ---- the loop's own time

HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("/api/v1/tokenize", {"text": "Tom found a ball. " * 80_000}),
    "biases": ("/api/v1/generate", {"logit_bias": {str(i): 1.0 for i in range(30_000)}}),
    "strings": ("/api/v1/generate", {"banned_tokens": [f"w{i}" for i in range(30_000)]}),
    "alternates": ("/api/v1/generate", {"grammar": GRAMMARS["many alternates"]}),
    "literal": ("/api/v1/generate", {"grammar": GRAMMARS["long literal"]}),
    "states": ("/api/v1/generate", {"grammar": GRAMMARS["all inside all"]}),
    "prompts": ("/completion", {"prompt": ["a"] * 20_000}),
    "parts": ("/tokenize", {"content": ["a"] * 50_000}),
    "names": ("/completion", {"response_fields": ["a/" * 4_000_000]}),
    "repeated": (
        "/v1/responses",
        {"input": "Tom", "stream": True, "metadata": {"a": "x\n" * 5_000_000}},
    ),
    "echoed": (
        "/v1/completions",
        {"prompt": ["Tom found a ball. " * 30] * 8, "echo": True, "logprobs": 20, "stream": True},
    ),
    "samples": ("/api/v1/generate", {"num_samples": 8, "top_logprobs": 700, "max_length": 16}),
}


@pytest.fixture(scope="module")
def ticking() -> Iterator[tuple[Served, list[float]]]:
    """A server, and the most processor time that its event loop has spent at a stretch."""
    longest_s = [0.0]
    # A server does not have the tests' objects, which one collection on its event loop would visit.
    gc.collect()
    gc.freeze()
    with serving(Settings()) as served, served.client() as client:
        loops: list[asyncio.AbstractEventLoop] = []
        with served.noting_ends(lambda run: loops.append(asyncio.get_running_loop())):
            client.post("/api/v1/generate", json={"prompt": "Tom", "max_length": 1})
            served.wait_until(lambda: loops)
        is_over = threading.Event()

        async def tick() -> None:
            while not is_over.is_set():
                started_s = time.thread_time()
                await asyncio.sleep(0.001)
                longest_s[0] = max(longest_s[0], time.thread_time() - started_s)

        ticks = asyncio.run_coroutine_threadsafe(tick(), loops[0])
        yield served, longest_s
        is_over.set()
        ticks.result(WITHIN_S)
    gc.unfreeze()


def reference_s() -> float:
    """Processor time of something that takes 2 ms on a machine of 2024, at its best of ten."""

    def once() -> float:
        started_s = time.thread_time()
        sum(i * i for i in range(60_000))
        return time.thread_time() - started_s

    return min(once() for _ in range(10))


@pytest.mark.parametrize("name", HOSTILE)
def test_large_request_leaves_the_event_loop_to_others(
    ticking: tuple[Served, list[float]], name: str
):
    served, longest_s = ticking
    path, body = HOSTILE[name]
    content = json.dumps({"prompt": "Tom", "max_length": 4, **body})
    with served.client() as client:
        longest_s[0] = 0.0
        reply = client.post(path, content=content)
    assert reply.status_code in (200, 400)
    assert longest_s[0] < 8 * reference_s()


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/completion", {"prompt": "Tom", "n_predict": 20, "n_probs": 100}),
        ("/v1/responses", {**LOGPROBS, "input": "Tom", "max_output_tokens": 60}),
        ("/v1/responses", {**LOGPROBS, "input": "Tom", "max_output_tokens": 300, "stream": True}),
    ],
)
def test_reply_with_many_logprobs_is_written_in_another_thread(
    monkeypatch: pytest.MonkeyPatch, path: str, options: dict[str, Any]
):
    sizes: list[int] = []
    offload = Service.offload

    async def note(service: Service, n_bytes: int, *args: Any) -> Any:
        sizes.append(n_bytes)
        return await offload(service, n_bytes, *args)

    monkeypatch.setattr(Service, "offload", note)
    with serving(Settings()) as served, served.client() as client:
        reply = client.post(path, json={**options, "ignore_eos": True})
        assert reply.status_code == 200, reply.text
    assert sizes[-1] > OFFLOAD_BYTES


def test_stop_sequences_are_looked_for_in_little_time():
    held = ShownText(["a" * 999 + "b", *(f"{i:03}{'a' * 997}" for i in range(255))])
    assert held.feed("a" * 999) == ""
    started_s = time.thread_time()
    assert held.feed("c") == "a" * 999 + "c"
    assert time.thread_time() - started_s < 8 * reference_s()


def test_event_loop_waits_for_no_worker_longer_than_half_a_millisecond(
    monkeypatch: pytest.MonkeyPatch,
):
    seen: list[float] = []
    monkeypatch.setattr(
        cli_serving._Server, "run", lambda *_, **__: seen.append(sys.getswitchinterval())
    )
    before_s = sys.getswitchinterval()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            settings = Settings(demo=True)
            cli_serving.run(create_app(settings), settings, listener)
    finally:
        sys.setswitchinterval(before_s)
    assert seen == [pytest.approx(0.0005)]
