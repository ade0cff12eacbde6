"""The WebSocket of the dream dialect, from its first message to every kind of end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed

from kqview import Capture, Engine
from kqview.server import Settings
from kqview.server.api.koboldai.stream import DreamSession
from kqview.server.models.service import Service
from kqview.server.web.access import ANYONE
from kqview.server.web.budget import uncounted
from kqview.server.web.sockets import Disconnected, Socket
from tests.support.dream import PROMPT, WITHIN_S, DreamSocket, clear, decoded, reference

if TYPE_CHECKING:
    from tests.support.serving import Serve, Served


N_TOKENS = 6


@pytest.fixture
def ids(demo: Served) -> list[int]:
    clear(demo.engine)
    return demo.engine.tokenize(PROMPT)


# ---- values


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("encoding", ["base64", "binary", "msgpack"])
def test_rows_are_the_engines_to_the_last_bit(
    demo: Served, ids: list[int], encoding: str, dtype: Any
):
    expected = reference(demo.engine, ids, N_TOKENS, Capture("probs", dtype=dtype))
    packs = encoding == "msgpack"
    asked = {} if packs else {"encoding": encoding}
    with DreamSocket(demo.ws_url, packs=packs) as socket:
        assert socket.socket.subprotocol == ("msgpack" if packs else None)
        tokens, done = socket.generate(
            input_ids=ids, max_new_tokens=N_TOKENS, return_attention=True, dtype=dtype, **asked
        )
    assert [one["token"]["token_id"] for one in tokens] == [token.id for token in expected]
    for one, token in zip(tokens, expected, strict=True):
        rows = np.asarray(token.attention)
        got = decoded(one["attention"])
        assert (got.dtype, got.shape) == (rows.dtype, rows.shape)
        assert got.tobytes() == rows.tobytes()
        assert one["attention"]["encoding"] == ("base64" if encoding == "base64" else "binary")
    assert done["finish_reason"] == "length"
    assert done["total_tokens"] == N_TOKENS


def test_rows_are_probabilities_and_grow_by_a_column(demo: Served, ids: list[int]):
    with DreamSocket(demo.ws_url) as socket:
        tokens, _ = socket.generate(
            input_ids=ids, max_new_tokens=N_TOKENS, return_attention=True, request_id="a"
        )
    for i, event in enumerate(tokens):
        assert event["request_id"] == "a"
        rows = decoded(event["attention"])
        assert rows.shape == (4, 8, len(ids) + i)
        assert event["attention"]["context_length"] == len(ids) + i
        assert rows.min() >= 0
        np.testing.assert_allclose(rows.sum(axis=-1), 1, atol=1e-5)


def test_tokens_have_logprobs_and_top_ones_only_where_asked_for(demo: Served, ids: list[int]):
    expected = reference(demo.engine, ids, N_TOKENS, None, top_logprobs=2)
    with DreamSocket(demo.ws_url) as socket:
        plain, _ = socket.generate(input_ids=ids, max_new_tokens=N_TOKENS)
        clear(demo.engine)
        asked, _ = socket.generate(input_ids=ids, max_new_tokens=N_TOKENS, top_logprobs=2)
    for event in plain:
        assert event.keys() == {"type", "request_id", "token"}
        assert event["token"].keys() == {"token_id", "text", "logprob"}
        assert event["token"]["logprob"] <= 0
    for event, token in zip(asked, expected, strict=True):
        assert event["token"]["logprob"] == token.logprob
        assert [(top["token_id"], top["logprob"]) for top in event["token"]["top_logprobs"]] == (
            token.top_logprobs
        )
        assert event["token"]["top_logprobs"][0]["text"] == demo.engine.token_text(
            event["token"]["top_logprobs"][0]["token_id"]
        )


def test_aggregated_rows_are_a_list_unless_an_encoding_is_named(demo: Served, ids: list[int]):
    whole = np.asarray(reference(demo.engine, ids, 1, Capture("probs"))[0].attention)
    asked = {"input_ids": ids, "max_new_tokens": 1, "return_attention": True,
             "attention_format": "aggregated"}  # fmt: skip
    with DreamSocket(demo.ws_url) as socket, DreamSocket(demo.ws_url, packs=True) as packed:
        for client, more, kind in (
            (socket, {}, list), (socket, {"encoding": "base64"}, str),
            (socket, {"encoding": "binary"}, bytes), (packed, {}, bytes),
        ):  # fmt: skip
            clear(demo.engine)
            (event,), _ = client.generate(**asked, **more)
            assert isinstance(event["attention"]["data"], kind)
            row = decoded(event["attention"])
            np.testing.assert_allclose(row, whole.mean(axis=(0, 1)), rtol=1e-5, atol=1e-7)


def test_rows_of_the_prompt_come_before_the_first_token(demo: Served, ids: list[int]):
    for encoding in ("base64", "binary"):
        clear(demo.engine)
        with DreamSocket(demo.ws_url) as socket:
            socket.send(input_ids=ids, max_new_tokens=2, return_attention=True,
                        prompt_attention=True, encoding=encoding)  # fmt: skip
            events = socket.until("done")
        kinds = [event["type"] for event in events]
        n_blocks = kinds.count("prompt_attention")
        assert kinds == ["prompt_attention"] * n_blocks + ["token", "token", "done"]
        assert events[0]["start"] == 0
        rows = np.concatenate([decoded(e["attention"]) for e in events[:n_blocks]], axis=2)
        assert rows.shape == (4, 8, len(ids), len(ids))
        np.testing.assert_allclose(rows.sum(-1), 1, atol=1e-5)
        assert not np.triu(rows[0, 0], 1).any()
        np.testing.assert_array_equal(rows[:, :, -1], decoded(events[n_blocks]["attention"]))


def test_samples_are_told_apart(demo: Served, ids: list[int]):
    with DreamSocket(demo.ws_url) as socket:
        tokens, done = socket.generate(
            input_ids=ids, max_new_tokens=5, temperature=1.5, top_k=0, top_p=1.0, seed=3,
            num_samples=3, return_attention=True,
        )  # fmt: skip
    assert done["total_tokens"] == 15
    assert [one["total_tokens"] for one in done["samples"]] == [5, 5, 5]
    for i in range(3):
        shapes = [t["attention"]["shape"] for t in tokens if t["sample"] == i]
        assert shapes == [[4, 8, len(ids) + k] for k in range(5)]


@pytest.mark.parametrize(
    "shown",
    [
        {},
        {"return_attention": True},
        {"return_attention": True, "attention_format": "aggregated", "aggregation_mode": "max"},
        {"return_attention": True, "attention_format": "sparse"},
    ],
    ids=str,
)
def test_pruning_suggestion_is_that_of_the_whole_rows(
    demo: Served, ids: list[int], shown: dict[str, Any]
):
    rows = [
        np.asarray(token.attention).mean(axis=(0, 1))[: len(ids)]
        for token in reference(demo.engine, ids, N_TOKENS, Capture("probs"))
    ]
    sentences = [
        {"turn_id": 1, "sentence_id": i, "start": start, "end": start + 4}
        for i, start in enumerate(range(0, len(ids), 4))
    ]
    largest = np.max(rows, axis=0).reshape(-1, 4).max(axis=1)
    threshold = float(np.sort(largest)[2:4].mean())
    with DreamSocket(demo.ws_url) as socket:
        socket.send(input_ids=ids, max_new_tokens=N_TOKENS, sentences=sentences,
                    prune_below=threshold, **shown)  # fmt: skip
        *_, suggestion, done = socket.until("done")
    assert (suggestion["type"], done["type"]) == ("pruning_suggestion", "done")
    found = suggestion["prunable_sentences"]
    assert [one["sentence_id"] for one in found] == list(np.argsort(largest)[:3])
    np.testing.assert_allclose(
        [one["max_attention"] for one in found], np.sort(largest)[:3], rtol=1e-4
    )


# ---- one socket, several generations


@pytest.mark.parametrize("packs", [False, True])
def test_generations_follow_each_other_on_one_socket(demo: Served, ids: list[int], packs: bool):
    with DreamSocket(demo.ws_url, packs=packs) as socket:
        for i in range(5):
            tokens, done = socket.generate(
                input_ids=ids, max_new_tokens=i + 1, request_id=f"r{i}", return_attention=i % 2 == 0
            )
            assert done["request_id"] == f"r{i}"
            assert len(tokens) == done["total_tokens"] == i + 1
            assert isinstance(done["generation_time_ms"], int)
            assert all(("attention" in one) == (i % 2 == 0) for one in tokens)
    demo.wait_idle()


LONG = {"max_new_tokens": 400, "return_attention": True}


def test_second_generation_is_refused_and_the_first_goes_on(demo: Served, ids: list[int]):
    with DreamSocket(demo.ws_url) as socket:
        socket.send(input_ids=ids, request_id="first", **LONG)
        assert socket.event()["type"] == "token"
        socket.send(input_ids=ids, request_id="second")
        n_tokens, refused = 1, []
        while (event := socket.event())["type"] != "done":
            if event["type"] == "error":
                refused.append(event)
            else:
                n_tokens += 1
                assert event["request_id"] == "first"
        assert event["request_id"] == "first"
        assert event["total_tokens"] == n_tokens == LONG["max_new_tokens"]
        assert [(e["request_id"], e["error_code"]) for e in refused] == [("second", "BUSY")]


@pytest.mark.parametrize("named", [True, False])
def test_cancel_ends_it_and_the_socket_serves_on(demo: Served, ids: list[int], named: bool):
    with DreamSocket(demo.ws_url) as socket:
        socket.send(input_ids=ids, request_id="a", **LONG)
        assert socket.event()["type"] == "token"
        socket.send("cancel", **({"request_id": "a"} if named else {}))
        done = socket.until("done")[-1]
        assert done["finish_reason"] == "cancelled"
        assert done["total_tokens"] < LONG["max_new_tokens"]
        # A cancel that crossed the end is no mistake, one of a stranger is.
        socket.send("cancel", request_id="a")
        socket.send("cancel", request_id="b")
        error = socket.event()
        assert (error["type"], error["request_id"]) == ("error", "b")
        assert error["error_code"] == "INVALID_REQUEST"
        tokens, done = socket.generate(input_ids=ids, max_new_tokens=3)
        assert len(tokens) == 3


def test_stop_token_is_the_finish_reason_and_no_event(demo: Served, ids: list[int]):
    expected = [token.id for token in reference(demo.engine, ids, 8, None)]
    stop = next(id_ for id_ in expected[2:] if id_ not in expected[:2])
    with DreamSocket(demo.ws_url) as socket:
        tokens, done = socket.generate(
            input_ids=ids, max_new_tokens=8, stop_tokens=[stop], return_attention=True
        )
    assert done["finish_reason"] == "stop_token"
    assert [one["token"]["token_id"] for one in tokens] == expected[: expected.index(stop)]


def test_banned_tokens_never_come(demo: Served, ids: list[int]):
    banned = [token.id for token in reference(demo.engine, ids, 8, None)]
    with DreamSocket(demo.ws_url) as socket:
        tokens, _ = socket.generate(input_ids=ids, max_new_tokens=8, banned_tokens=banned)
    assert not {one["token"]["token_id"] for one in tokens} & set(banned)


def test_sockets_at_once_have_each_their_own_tokens_and_rows(demo: Served, ids: list[int]):
    prompts = [ids[: 5 + i] for i in range(4)]
    expected = [
        [token.id for token in reference(demo.engine, prompt, 30, None)] for prompt in prompts
    ]
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(DreamSocket(demo.ws_url)) for _ in prompts]
        for i, (socket, prompt) in enumerate(zip(sockets, prompts, strict=True)):
            socket.send(
                input_ids=prompt, max_new_tokens=30, return_attention=True, request_id=str(i)
            )
        for i, (socket, prompt) in enumerate(zip(sockets, prompts, strict=True)):
            *tokens, done = socket.until("done")
            assert done["request_id"] == str(i)
            assert [one["token"]["token_id"] for one in tokens] == expected[i]
            assert [one["attention"]["context_length"] for one in tokens] == [
                len(prompt) + k for k in range(30)
            ]


def test_client_may_come_back_any_time(demo: Served, ids: list[int]):
    for i in range(10):
        socket = DreamSocket(demo.ws_url)
        if i % 2:
            socket.send(input_ids=ids, **LONG)
        socket.socket.close()
    with DreamSocket(demo.ws_url) as socket:
        assert len(socket.generate(input_ids=ids, max_new_tokens=3)[0]) == 3
    demo.wait_idle()


def test_thousand_tokens_take_the_memory_of_a_few(serve: Serve):
    served = serve(Settings(n_ctx=1100))
    with DreamSocket(served.ws_url) as socket:
        tokens, done = socket.generate(
            prompt=PROMPT, max_new_tokens=1000, return_attention=True, encoding="binary"
        )
    assert len(tokens) == done["total_tokens"] == 1000
    pool = served.engine.stats().pool
    assert pool.leased_bytes == 0
    largest = len(tokens[-1]["attention"]["data"])
    assert largest == 4 * 8 * 1019 * 4
    assert pool.peak_leased_bytes < 24 * largest


async def test_generation_asked_for_while_done_is_being_sent_is_not_refused():
    with Engine.demo(n_threads=1, n_ctx=128) as engine:
        service = Service(engine, Settings())
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        events: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            events.append(json.loads(message["text"]))
            if events[-1]["type"] != "done":
                return
            n_done = sum(event["type"] == "done" for event in events)
            await messages.put(generate if n_done == 1 else {"type": "websocket.disconnect"})
            for _ in range(5):  # the session reads it before this frame is out
                await asyncio.sleep(0)

        ask = {"type": "generate", "prompt": "Anna", "max_new_tokens": 2, "ban_eos_token": True}
        generate = {"type": "websocket.receive", "text": json.dumps(ask)}
        await messages.put(generate)
        socket = Socket(service, {"state": {}}, messages.get, send)
        call: Any = SimpleNamespace(service=service, caller=ANYONE, hold=uncounted())
        with pytest.raises(Disconnected):
            async with asyncio.timeout(WITHIN_S):
                await DreamSession(call, socket).serve()
        assert [event["type"] for event in events] == ["token", "token", "done"] * 2
        await service.close()


# ---- ends: somebody left, failed, waited or shut down


LONG_ENDS = {"prompt": PROMPT, "max_new_tokens": 400, "return_attention": True}


def close_code(socket: DreamSocket) -> int | None:
    """The code that the server closes with; what it still sends is read."""
    try:
        while True:
            socket.socket.recv(timeout=WITHIN_S)
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else None


def test_rows_without_room_end_with_an_event_that_has_figures(serve: Serve):
    with Engine.demo(n_threads=1, n_ctx=256, attention_budget_bytes=1024) as engine:
        served = serve(Settings(), engine)
        with DreamSocket(served.ws_url) as socket:
            socket.send(prompt=PROMPT, max_new_tokens=4, return_attention=True)
            event = socket.event()
            assert (event["type"], event["error_code"]) == ("error", "OOM")
            assert event["context_length"] == 256
            assert event["prompt_tokens"] == 20
            assert event["attention_budget_mb"] == 0
            assert close_code(socket) == 1011


def test_server_that_ends_tells_running_and_idle_sockets(serve: Serve):
    served = serve(Settings(n_ctx=2048))
    loops: list[asyncio.AbstractEventLoop] = []
    with DreamSocket(served.ws_url) as running, DreamSocket(served.ws_url) as idle:
        with served.noting_ends(lambda run: loops.append(asyncio.get_running_loop())):
            assert len(idle.generate(prompt=PROMPT, max_new_tokens=1)[0]) == 1
            served.wait_until(lambda: loops)
        running.send(prompt=PROMPT, max_new_tokens=2000, return_attention=True, num_samples=4)
        assert running.event()["type"] == "token"
        leaving = asyncio.run_coroutine_threadsafe(served.service.drain(5), loops[0])
        events = [running.event()]
        while events[-1]["type"] == "token":
            events.append(running.event())
        assert events[-1]["type"] == "error"
        assert close_code(running) == 1001
        assert close_code(idle) == 1001
        leaving.result(WITHIN_S)


def test_idle_socket_is_closed_after_a_while(serve: Serve):
    served = serve(Settings(idle_timeout_s=1.0))
    with DreamSocket(served.ws_url) as socket:
        assert len(socket.generate(prompt=PROMPT, max_new_tokens=2)[0]) == 2
        assert close_code(socket) == 1008
