"""``POST /cancel/{request_id}`` in every phase of a request, and many conversations at a time."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from tests.support import mia4
from tests.support.mia4 import gated, saying

if TYPE_CHECKING:
    from tests.server.conftest import Serve
    from tests.support.serving import Served

THOUGHT = "<think>One two three four.</think>Five six seven."
NAME = "r-1"


def check_cancelled(frames: list[mia4.Frame]) -> dict[str, Any]:
    """The usage of a stream that a cancellation ended."""
    end = mia4.check_end(frames)
    assert (end["status"], end["stop_reason"]) == ("ok", "cancelled")
    assert mia4.named(frames, "error") == []
    [usage] = mia4.named(frames, "usage")
    return usage


def cancelled(served: Served) -> None:
    reply = mia4.cancel(served, NAME)
    assert (reply.status_code, reply.json()) == (202, {"request_id": NAME, "state": "cancelling"})


# ---- in every phase


@pytest.mark.parametrize("at", [0, 2, 12])  # before the first token, in reasoning, in the answer
def test_running_request_ends_with_what_it_produced(serve: Serve, at: int):
    llm = {"postproc": {"reasoning": {"drop_from_history": False}}}
    served = serve(mia4.config(llm=llm))
    overrides = {"temperature": 0}
    with (
        saying(THOUGHT),
        gated(at) as gate,
        mia4.streaming(served, request_id=NAME, session_id="s", overrides=overrides) as frames,
    ):
        assert gate.is_reached.wait(60)
        cancelled(served)
        gate.open()
        found = list(frames)
    usage = check_cancelled(found)
    # What was generated ahead may still be sent, no more.
    assert at <= usage["output_tokens"] <= at + 9
    assert THOUGHT.endswith(mia4.text_of(found)) or mia4.text_of(found) in THOUGHT
    served.wait_idle()
    with served.client() as client:
        kept = client.get("/chat/sessions/s")
    if mia4.text_of(found):
        assert kept.json()["messages"][1]["content"] == mia4.text_of(found)
    else:
        assert kept.status_code == 404


def test_request_that_waits_for_its_model_ends(serve: Serve):
    served = serve(mia4.config({"one": {}, "two": {}}))
    with mia4.loading() as gate, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(mia4.generate, served, request_id=NAME, model="two")
        assert gate.is_reached.wait(60)
        cancelled(served)
        assert check_cancelled(waiting.result(60))["output_tokens"] == 0
    # Somebody else gets the model all the same.
    mia4.check_end(mia4.generate(served, model="two"))


def test_request_that_waits_for_its_conversation_ends(serve: Serve):
    served = serve(mia4.config())
    with gated(1) as gate, mia4.streaming(served, session_id="s") as first:
        assert gate.is_reached.wait(60)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(mia4.generate, served, request_id=NAME, session_id="s")
            key = "", NAME
            served.wait_until(lambda: key in served.service.cancelling._running)
            cancelled(served)
            assert check_cancelled(second.result(60))["output_tokens"] == 0
        gate.open()
        assert mia4.check_end(list(first))["stop_reason"] == "length"


def test_cancelling_after_the_end_or_twice_is_no_error(serve: Serve):
    served = serve(mia4.config())
    with gated(1) as gate, mia4.streaming(served, request_id=NAME) as frames:
        assert gate.is_reached.wait(60)
        cancelled(served)
        cancelled(served)
        gate.open()
        check_cancelled(list(frames))
    for _ in range(2):
        reply = mia4.cancel(served, NAME)
        assert (reply.status_code, reply.json()["state"]) == (202, "ended")


def test_unknown_request_is_404(demo: Served):
    reply = mia4.cancel(demo, "nobody")
    assert (reply.status_code, reply.json()["error_type"]) == (404, "not_found")


# ---- whose it is


def test_keys_cancel_their_own_requests_and_admins_all(serve: Serve):
    served = serve(Settings(api_keys=("one", "two"), admin_keys=("root",), n_slots=2))
    with gated(1) as gate:
        with mia4.streaming(served, key="one", request_id=NAME) as frames:
            assert gate.is_reached.wait(60)
            assert mia4.cancel(served, NAME, key="two").status_code == 404
            assert mia4.cancel(served, NAME, key="root").status_code == 202
            gate.open()
            check_cancelled(list(frames))
    assert mia4.cancel(served, NAME, key="two").status_code == 404
    assert mia4.cancel(served, NAME, key="one").json()["state"] == "ended"
    mia4.generate(served, key="two", request_id=NAME)  # the name is free for others


# ---- many at a time


def test_50_conversations_over_4_slots_with_clients_that_leave(serve: Serve):
    served = serve(mia4.config(settings={"n_slots": 4, "max_queued": 64, "max_running": 128}))
    overrides = {"temperature": 0, "max_output_tokens": 12}
    n_sessions = 50
    failures: list[str] = []
    lock = threading.Lock()

    def talk(i: int) -> None:
        leaves = i % 3 == 0
        with mia4.streaming(served, session_id=f"s{i}", overrides=overrides) as frames:
            if leaves:
                next(frames)
            else:
                mia4.check_end(list(frames))
        if leaves:
            return
        found = mia4.generate(served, session_id=f"s{i}", prompt="Who?", overrides=overrides)
        if mia4.check_end(found)["status"] != "ok":
            with lock:
                failures.append(f"s{i}: {found[-2:]}")

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(talk, range(n_sessions)))
    assert failures == []
    served.wait_idle()
    served.wait_until(lambda: not served.service.cancelling._running)
    with served.client() as client:
        listed = client.get("/chat/sessions").json()["sessions"]
        whole = [one for one in listed if one["n_messages"] == 4]
        assert len(whole) == sum(i % 3 != 0 for i in range(n_sessions))
        # A turn is stored whole or not at all.
        assert {one["n_messages"] for one in listed} <= {2, 4}
    answers: dict[str, str] = {}
    for one in whole:
        with served.client() as client:
            messages = client.get(f"/chat/sessions/{one['session_id']}").json()["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"] * 2
        answers[one["session_id"]] = messages[1]["content"]
    assert len(set(answers.values())) == 1  # they asked the same
