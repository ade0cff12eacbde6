"""``POST /generate``: the frames of its stream, and what is said before a stream begins."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np
import pytest

from kqview.errors import DecodeError, OutOfMemory
from kqview.server import Settings
from kqview.server.apps.conversations import ConversationTurn
from kqview.server.apps.mia4 import turn
from kqview.server.apps.mia4.turn import StreamedTurn
from kqview.server.errors import ModelChanged, StorageFailed, TooLarge, too_late
from kqview.server.models import service
from kqview.server.models.run import Run
from kqview.server.web.budget import Reservation
from tests.support import mia4
from tests.support.mia4 import Gate, gated, saying

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kqview.server.models.run import Step
    from tests.server.conftest import Serve
    from tests.support.serving import Served

GOLDENS = Path(__file__).with_name("goldens")
SHOWN = {"reasoning": {"drop_from_history": False}}
PRESETS = {"fast": {"temperature": 0.0, "reasoning_max_tokens": 64}, "high": {"top_k": 7}}
MARKED = "Tom asks.\n===FINAL===\nAnna is a painter."
TAGGED = "<analysis>Tom asks.</analysis><final>Anna is a painter.</final>"


@pytest.fixture(scope="module")
def chat() -> Iterator[Served]:
    """A server whose one model has everything that a configuration can say of it."""
    from tests.support.serving import serving

    model = {
        "role": "primary",
        "capabilities": ["chat", "judge", "plan", "long_context"],
        "passport": {"version": 3, "sampling": {"top_p": 0.5, "top_k": 9}},
        "system_prompt": {"text": "You tell stories.", "version": 2},
    }
    llm = {"reasoning_presets": PRESETS, "stop": ["Tom"]}
    with serving(mia4.config({"demo": model}, llm=llm)) as served:
        yield served


def golden(name: str) -> Any:
    return json.loads((GOLDENS / f"{name}.json").read_text("utf-8"))


def settled(value: Any) -> Any:
    """*value* with what differs from run to run checked and replaced."""
    if isinstance(value, list):
        return [settled(one) for one in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    found: dict[str, Any] = {}
    for name, one in cast("dict[str, Any]", value).items():
        if name == "hash" or name.endswith("_hash"):
            assert re.fullmatch(r"sha256:[0-9a-f]{64}", one)
            one = "sha256:..."
        elif name in ("at_s", "created", "created_s", "used_s", "latency_ms", "decode_tps"):
            assert one > 0
            one = 0
        elif name == "reasoning_buffer_latency_ms" and one is not None:
            assert one >= 0
            one = 0
        found[name] = settled(one)
    return found


# ---- objects and frames, field for field


@pytest.mark.parametrize("path", ["config", "models"])
def test_object_is_the_golden(chat: Served, path: str):
    with chat.client() as client:
        assert settled(client.get(f"/{path}").json()) == golden(path)


def test_health_says_ok(chat: Served):
    with chat.client() as client:
        assert client.get("/health").json()["status"] == "ok"


def test_events_are_the_golden(chat: Served):
    with mia4.listening(chat) as events:
        mia4.generate(
            chat, request_id="golden", session_id="s",
            overrides={"reasoning_preset": "fast", "min_p": 0.1, "max_output_tokens": 2, "foo": 1},
        )  # fmt: skip
        found = [next(events) for _ in range(3)]
    assert [[name, settled(data)] for name, data in found] == golden("events")


# ---- what is sent


@pytest.mark.full
@pytest.mark.parametrize(
    ("llm", "text", "thought", "answer"),
    [
        ({}, "Anna.", [], "Anna."),
        ({"postproc": SHOWN}, MARKED, [], MARKED),  # nobody told the model of a marker
        ({"postproc": {"reasoning": {"marker": "===FINAL===", "drop_from_history": False}}},
         MARKED, ["reasoning", "Tom asks."], "Anna is a painter."),
        ({"postproc": {"reasoning": {"marker": "===FINAL==="}}}, MARKED, [], "Anna is a painter."),
        ({"postproc": {"reasoning": {"marker": "===FINAL==="}}}, "Anna.", [], "Anna."),
        ({"prompt": {"harmony": {"enabled": True}}, "postproc": SHOWN}, TAGGED,
         ["analysis", "Tom asks."], "Anna is a painter."),
        ({"prompt": {"harmony": {"enabled": True}}}, TAGGED, [], "Anna is a painter."),
        ({"prompt": {"harmony": {"enabled": True}}, "postproc": SHOWN}, MARKED,
         ["analysis", "Tom asks."], "Anna is a painter."),
        ({"postproc": SHOWN}, "<think>Tom asks.</think>Anna.", ["analysis", "Tom asks."], "Anna."),
    ],
)  # fmt: skip
def test_reasoning_is_sent_apart_or_not_at_all(
    serve: Serve, llm: dict[str, Any], text: str, thought: list[str], answer: str
):
    served = serve(mia4.config(llm=llm))
    with saying(text):
        frames = mia4.generate(served, overrides={"temperature": 0})
    assert mia4.text_of(frames) == answer
    parts = {
        "analysis": mia4.text_of(frames, "analysis"),
        "reasoning": "".join(one["reasoning"] for one in mia4.named(frames, "reasoning")),
    }
    assert [one for name, found in parts.items() if found for one in (name, found)] == thought
    [usage] = mia4.named(frames, "usage")
    is_split = answer != text
    assert (usage["reasoning_tokens"] > 0) == is_split
    n_marks = usage["output_tokens"] - usage["reasoning_tokens"] - usage["final_tokens"]
    assert (n_marks > 0) == is_split
    with served.client() as client:
        metrics = client.get("/metrics").text
    assert ("reasoning_buffer_latency_ms_count 1.0" in metrics) == is_split


def test_prompt_tokens_are_those_of_the_template(chat: Served):
    [usage] = mia4.named(mia4.generate(chat), "usage")
    messages = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": mia4.QUESTION["prompt"]},
    ]
    assert usage["prompt_tokens"] == len(chat.engine.apply_chat_template(messages))
    assert usage["decode_tps"] == usage["output_tokens"] / (usage["latency_ms"] / 1000)


def test_stop_sequence_ends_the_answer_and_is_cut_off(chat: Served):
    with saying("Anna saw Tom and Mia."):
        frames = mia4.generate(chat, overrides={"temperature": 0})
    assert mia4.text_of(frames) == "Anna saw "
    assert mia4.check_end(frames)["stop_reason"] == "stop_sequence"


def test_conversation_goes_on_without_what_was_thought(serve: Serve):
    served = serve(mia4.config())
    with saying("<think>Hm.</think>A painter."):
        mia4.generate(served, session_id="s", overrides={})
    frames = mia4.generate(served, session_id="s", prompt="Who?")
    said = [
        {"role": "user", "content": mia4.QUESTION["prompt"]},
        {"role": "assistant", "content": "A painter."},
        {"role": "user", "content": "Who?"},
    ]
    [usage] = mia4.named(frames, "usage")
    assert usage["prompt_tokens"] == len(served.engine.apply_chat_template(said))
    with served.client() as client:
        [listed] = client.get("/chat/sessions").json()["sessions"]
        assert (listed["session_id"], listed["n_messages"]) == ("s", 4)
        messages = client.get("/chat/sessions/s").json()["messages"]
        assert messages[:3] == said
        assert client.delete("/chat/sessions/s").status_code == 204
        assert client.get("/chat/sessions/s").status_code == 404
        assert client.get("/chat/sessions").json() == {"sessions": []}


def test_conversation_longer_than_the_context_goes_on(serve: Serve):
    served = serve(mia4.config(settings={"n_ctx": 128}))
    overrides = {"temperature": 0, "max_output_tokens": 8}
    n_prompt: list[int] = []
    for _ in range(12):
        frames = mia4.generate(served, session_id="s", overrides=overrides)
        assert mia4.check_end(frames)["status"] == "ok"
        n_prompt += [one["prompt_tokens"] for one in mia4.named(frames, "usage")]
    assert max(n_prompt) <= 128 - 8
    assert sum(n > before for before, n in pairwise(n_prompt)) >= 6  # the history is in it
    with served.client() as client:
        assert client.get("/chat/sessions/s").json()["n_messages"] == 24


@contextlib.contextmanager
def published(served: Served) -> Iterator[list[Any]]:
    """Events that are published meanwhile, whosever they are."""
    bus, events = served.service.bus, list[Any]()
    publish = bus.publish

    def noted(event: Any, owner: str | None = None) -> None:
        events.append(event)
        publish(event, owner)

    with mock.patch.object(bus, "publish", noted):
        yield events


def test_persona_follows_the_system_prompt_and_its_file(serve: Serve, tmp_path: Path):
    file = tmp_path / "persona.md"
    file.write_text("version: 4\nYou are kind.")
    model = {"system_prompt": {"text": "You tell stories."}}
    served = serve(mia4.config({"demo": model}, persona={"file": str(file)}))
    with published(served) as events:
        mia4.generate(served)
    [started] = [one for one in events if type(one).__name__ == "GenerationStarted"]
    said = [
        {"role": "system", "content": "You tell stories.\n\nYou are kind."},
        {"role": "user", "content": mia4.QUESTION["prompt"]},
    ]
    assert started.prompt_tokens == len(served.engine.apply_chat_template(said))
    assert started.app_persona_version == 4
    assert started.app_persona_hash.startswith("sha256:")


# ---- attention


def test_each_token_has_the_path_of_its_row(chat: Served):
    wanted = {"temperature": 0, "attention": {"reduce": "mean"}}
    with saying("<think>Hm</think>Yes <end"):
        frames = mia4.generate(chat, prompt="Änna? 日本 🙂", request_id="rows", overrides=wanted)
    tokens = mia4.named(frames, "token")
    [usage] = mia4.named(frames, "usage")
    assert mia4.text_of(frames) == "Yes <end"
    indices = [int(one["attention"].rpartition("/")[2]) for one in tokens]
    assert indices == sorted(indices)
    assert len(set(indices)) == usage["final_tokens"]
    with chat.client() as client:
        prompt = client.get("/generate/rows/prompt").json()
        assert "".join(prompt["texts"]) == chat.engine.detokenize(prompt["ids"])
        assert "Änna? 日本 🙂" in "".join(prompt["texts"])
        assert len(prompt["ids"]) == len(prompt["texts"]) == usage["prompt_tokens"]
        for one, index in zip(tokens, indices, strict=True):
            reply = client.get(one["attention"])
            row = np.frombuffer(reply.content, np.float32)
            assert reply.headers["x-attention-shape"] == str(len(row))
            assert len(row) == usage["prompt_tokens"] + index
            assert row.sum() == pytest.approx(1, abs=1e-3)
        kept = client.get("/generate/rows/attention").json()["rows"]
        assert set(indices) <= {one["seq"] for one in kept}
        missing = client.get("/generate/rows/attention/999")
        assert (missing.status_code, missing.json()["error_type"]) == (404, "not_found")


def test_spans_are_kept_as_sums_of_rows(chat: Served):
    spans = [[0, 3], [3, None]]
    rows: dict[str, list[np.ndarray]] = {}
    for name, more in (("whole", {}), ("sums", {"spans": spans})):
        overrides = {"temperature": 0, "max_output_tokens": 4, "attention": more or True}
        mia4.generate(chat, request_id=f"spans-{name}", overrides=overrides)
        with chat.client() as client:
            kept = client.get(f"/generate/spans-{name}/attention").json()["rows"]
            rows[name] = [
                np.frombuffer(
                    client.get(f"/generate/spans-{name}/attention/{one['seq']}").content, np.float32
                ).reshape(one["shape"])
                for one in kept
            ]
    assert rows["sums"]
    for whole, sums in zip(rows["whole"], rows["sums"], strict=True):
        expected = np.stack([whole[..., start:end].sum(-1) for start, end in spans], axis=-1)
        # Two runs, the second with its prompt in the cache, which may move the last bits.
        np.testing.assert_allclose(sums, expected, atol=2e-3)


def test_rows_and_prompts_belong_to_the_key_that_asked(serve: Serve):
    served = serve(Settings(api_keys=("one", "two")))
    mia4.generate(served, key="one", request_id="r", overrides={"attention": {"reduce": "mean"}})
    for path in ("attention", "attention/0", "prompt"):
        for key, status in (("one", 200), ("two", 404)):
            with served.client(headers=mia4.headers(key)) as client:
                assert client.get(f"/generate/r/{path}").status_code == status, path
    mia4.generate(served, key="one", request_id="plain")
    with served.client(headers=mia4.headers("one")) as client:
        assert client.get("/generate/plain/prompt").status_code == 404


@pytest.mark.parametrize("drops", [True, False])
def test_no_row_of_a_token_of_dropped_reasoning_is_given(serve: Serve, drops: bool):
    postproc = {"reasoning": {"drop_from_history": drops}}
    served = serve(mia4.config(llm={"postproc": postproc}))
    wanted = {"attention": {"reduce": "mean"}}
    answers = {"Who?": "<think>Hm, Tom</think>Yes", "Write ===FINAL===": "Hm, Tom===FINAL===Yes"}
    for prompt, said in answers.items():
        with saying(said):
            mia4.generate(served, request_id="dropped", prompt=prompt, overrides=wanted)
        with served.client() as client:
            own = client.get("/generate/dropped/attention").json()["rows"]
            of_openai = client.get("/v1/attention/dropped").json()["choices"][0]["rows"]
        assert [one["seq"] for one in own] == [one["n"] for one in of_openai]
        text = "".join(one["text"] for one in own)
        assert "Yes" in text
        assert ("Tom" in text) is not drops
        listed = {one["seq"] for one in own}
        with served.client() as client:
            for n in range(max(listed) + 1):
                for path in (f"/generate/dropped/attention/{n}", f"/v1/attention/dropped/{n}"):
                    assert client.get(path).status_code == (200 if n in listed else 404), path


def test_rows_of_another_apis_reply_are_not_kept_here(chat: Served):
    body = {
        "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1, "n": 2,
        "attention": {"reduce": "mean", "delivery": "id"},
    }  # fmt: skip
    with chat.client() as client:
        name = client.post("/v1/chat/completions", json=body).json()["id"]
        assert client.get(f"/v1/attention/{name}").status_code == 200
        for path in ("attention", "attention/0", "prompt"):
            assert client.get(f"/generate/{name}/{path}").status_code == 404, path


@pytest.mark.parametrize("said", ["Anna is.", MARKED, TAGGED])
def test_what_is_held_for_long_is_written_in_another_thread(
    demo: Served, monkeypatch: pytest.MonkeyPatch, said: str
):
    def frames() -> list[mia4.Frame]:
        overrides = {"temperature": 0, "attention": True}
        with saying(said):
            sent = mia4.generate(
                demo, session_id="held", prompt="Write ===FINAL===", overrides=overrides,
                request_id="held",
            )  # fmt: skip
        with demo.client() as client:
            stored.append(client.get("/chat/sessions/held").json()["messages"])
            client.delete("/chat/sessions/held")
        return [one for one in sent if one[0] != "usage"]

    stored: list[Any] = []
    threads: set[str] = set()
    finish = StreamedTurn.finish

    def noted(self: StreamedTurn) -> list[bytes]:
        threads.add(threading.current_thread().name[:11])
        return finish(self)

    here = frames()
    for module in (service, turn):
        monkeypatch.setattr(module, "OFFLOAD_BYTES", 0)
    monkeypatch.setattr(StreamedTurn, "finish", noted)
    assert frames() == here
    assert threads == {"kqview-rows"}
    assert stored[0] == stored[1]


def test_name_that_is_used_again_replaces_its_rows(chat: Served):
    wanted = {"attention": {"reduce": "mean"}, "max_output_tokens": 2}
    mia4.generate(chat, request_id="again", overrides=wanted)
    n_bytes = chat.service.kept.n_bytes
    mia4.generate(chat, request_id="again", overrides=wanted)
    assert chat.service.kept.n_bytes == n_bytes


# ---- what is refused before a stream begins


DEEP = '{"prompt": "x", "overrides": ' + '{"a": ' * 5000 + "1" + "}" * 5001


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, "prompt"),
        (b"{", 400, None),
        (b'{"prompt": 1}', 400, "prompt"),
        (b'{"prompt": null}', 400, "prompt"),
        (b'{"prompt": NaN}', 400, None),
        (b'{"prompt": "\xff"}', 400, None),
        (b'{"prompt": "\\ud800"}', 400, None),
        (DEEP.encode(), 400, None),
        (b"[" * 100_000, 400, None),
        (b'{"prompt": "x", "session_id": ""}', 400, "session_id"),
        (b'{"prompt": "x", "session_id": "a\\u0000b"}', 400, "session_id"),
        (b'{"prompt": "x", "session_id": 7}', 400, "session_id"),
        (b'{"prompt": "x", "request_id": "a/b"}', 400, "request_id"),
        (b'{"prompt": "x", "request_id": "' + b"a" * 65 + b'"}', 400, "request_id"),
        (b'{"prompt": "x", "model": ""}', 400, "model"),
        (b'{"prompt": "x", "overrides": []}', 400, "overrides"),
        (b'{"prompt": "x", "overrides": {"temperature": 1e999}}', 400, "overrides"),
        (b'{"prompt": "x", "overrides": {"temperature": -1}}', 422, "overrides.temperature"),
        (b'{"prompt": "x", "overrides": {"temperature": "hot"}}', 422, "overrides.temperature"),
        (b'{"prompt": "x", "overrides": {"top_p": 1.5}}', 422, "overrides.top_p"),
        (b'{"prompt": "x", "overrides": {"seed": 1e30}}', 422, "overrides.seed"),
        (b'{"prompt": "x", "overrides": {"max_output_tokens": 0}}', 422,
         "overrides.max_output_tokens"),
        (b'{"prompt": "x", "overrides": {"reasoning_preset": "none"}}', 422,
         "overrides.reasoning_preset"),
        (b'{"prompt": "x", "overrides": {"reasoning_preset": {}}}', 422,
         "overrides.reasoning_preset"),
        (b'{"prompt": "x", "overrides": {"attention": 7}}', 422, "overrides.attention"),
        (b'{"prompt": "x", "overrides": {"attention": {"top_k": 0}}}', 422,
         "overrides.attention.top_k"),
        (b'{"prompt": "x", "overrides": {"attention": {"prompt": true}}}', 422,
         "overrides.attention"),
        (b'{"prompt": "x", "overrides": {"attention": {"layers": [99]}}}', 400,
         "overrides.attention"),
        (b'{"prompt": "' + b"word " * 10_000 + b'"}', 400, "prompt"),
    ],
)  # fmt: skip
def test_hostile_body_is_refused_and_the_field_named(
    chat: Served, body: bytes, status: int, field: str | None
):
    with chat.client() as client:
        reply = client.post("/generate", content=body)
    found = reply.json()
    assert (reply.status_code, found.get("field")) == (status, field)
    assert {"code", "error_type", "message"} <= set(found)
    assert found["error_type"] == "invalid_request"


def test_unknown_model_is_404(serve: Serve):
    served = serve(mia4.config({"one": {}, "two": {}}))
    reply = mia4.post(served, model="three")
    assert (reply.status_code, reply.json()["error_type"]) == (404, "model_not_found")
    frames = mia4.generate(served, model="two")
    assert {data["model_id"] for name, data in frames if name != "end"} == {"two"}


def test_request_id_in_use_is_refused(serve: Serve):
    served = serve(mia4.config())
    with gated(1) as gate, mia4.streaming(served, request_id="twin"):
        assert gate.is_reached.wait(60)
        reply = mia4.post(served, request_id="twin")
        assert (reply.status_code, reply.json()["field"]) == (400, "request_id")
    served.wait_idle()


# ---- exactly one end


def fails(gate: Gate, error: Exception) -> Any:
    """`Run.__anext__` that raises *error* before the token at which the gate stands."""
    following = Run.__anext__

    async def step(self: Run) -> Step:
        if self.n_tokens == gate.at:
            raise error
        return await following(self)

    return mock.patch.object(Run, "__anext__", step)


FAULTS: dict[str, tuple[Callable[[int], Any], str]] = {
    "engine": (lambda at: fails(Gate(at), DecodeError("the device is gone")), "INTERNAL"),
    "engine memory": (lambda at: fails(Gate(at), OutOfMemory("no memory")), "OOM"),
    "bug": (lambda at: fails(Gate(at), ZeroDivisionError("/secret")), "INTERNAL"),
    "model change": (lambda at: ends(at, ModelChanged("switched")), "MODEL_CHANGED"),
    "budget": (
        lambda at: mock.patch.object(Reservation, "take", limited(at)), "INVALID_REQUEST"
    ),
    "storage": (
        lambda at: mock.patch.object(
            ConversationTurn, "append", side_effect=StorageFailed("the disk is gone")
        ),
        "INTERNAL",
    ),
}  # fmt: skip


def ends(at: int, error: Any) -> Any:
    """Something else ends the run with *error* before its token *at*."""
    following = Run.__anext__

    async def step(self: Run) -> Step:
        if self.n_tokens == at:
            self.end(error)
        return await following(self)

    return mock.patch.object(Run, "__anext__", step)


def limited(at: int) -> Any:
    """`Reservation.take` without room for the text of the token after *at* others."""
    take, taken = Reservation.take, [0]

    def limited_take(self: Reservation, n_bytes: int) -> None:
        if n_bytes == 128:  # of each token's text
            taken[0] += 1
            if taken[0] > at:
                raise TooLarge("no room")
        take(self, n_bytes)

    return limited_take


@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_stream_that_fails_has_one_error_and_then_one_end(chat: Served, fault: str, at: int):
    make, code = FAULTS[fault]
    with published(chat) as events, make(at):
        frames = mia4.generate(chat, session_id=f"{fault} {at}")
    end = mia4.check_end(frames)
    assert (end["status"], end["stop_reason"]) == ("error", "error")
    [error] = mia4.named(frames, "error")
    assert error["code"] == code
    assert "secret" not in error["message"]
    assert [name for name, _ in frames][-2:] == ["error", "end"]
    names = [type(one).__name__ for one in events]
    assert names == ["GenerationStarted", "GenerationCompleted"]
    assert (events[1].status, events[1].code) == ("error", code)
    chat.wait_idle()


def test_request_that_takes_too_long_ends_with_an_error_and_one_end(serve: Serve):
    served = serve(mia4.config())
    with gated(2) as gate, mia4.streaming(served) as frames:
        assert gate.is_reached.wait(60)
        [run] = served.runs
        assert run.deadline is not None
        with mia4.on_cancel(lambda: run.end(too_late(3600))):  # as the deadline does
            mia4.cancel(served, "x")
        gate.open()
        found = list(frames)
    assert mia4.check_end(found)["status"] == "error"
    assert [one["code"] for one in mia4.named(found, "error")] == ["TIMEOUT"]


def test_request_that_waits_too_long_for_its_model_is_refused(serve: Serve):
    served = serve(mia4.config({"one": {}, "two": {}}, settings={"request_timeout_s": 0.5}))
    with mia4.loading() as gate:
        reply = mia4.post(served, model="two")
        assert gate.is_reached.is_set()
    assert (reply.status_code, reply.json()["code"]) == (504, "TIMEOUT")


def test_shutdown_ends_streams_with_an_error_and_one_end(serve: Serve):
    served = serve(mia4.config())
    drains: list[asyncio.Task[None]] = []

    def drain() -> None:
        drains.append(asyncio.get_running_loop().create_task(served.service.drain(60)))

    with gated(2) as gate, mia4.streaming(served) as frames, mia4.listening(served) as events:
        assert gate.is_reached.wait(60)
        with mia4.on_cancel(drain):
            mia4.cancel(served, "x")
        gate.open()
        found = list(frames)
        assert [name for name, _ in events] == ["GenerationCompleted"]  # and then its end
    assert mia4.check_end(found)["status"] == "error"
    assert len(mia4.named(found, "error")) == 1
    assert mia4.post(served).status_code == 503
