"""What the kobold and the dream dialect do alike: whatever KoboldCpp takes, and what they tell."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from websockets.sync.client import connect

from kqview import Engine
from kqview.server import Settings
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.serving import Served

TEXT = "Mirelda found a silver key near the old bridge. Then Mirel"
DETAILS = {"seed", "prompt_tokens", "cached_tokens", "queue_ms", "prompt_ms", "generation_ms"}
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """The demo model with more context than it was trained for."""
    with Engine.demo(n_threads=1, n_ctx=768, n_slots=2) as engine, serving(Settings(), engine) as s:
        yield s


# ---- the four ways to ask


def by_sse(served: Served, body: dict[str, Any]) -> Events:
    with served.client() as client:
        asked = json.dumps({"output_attentions": False, **body})
        reply = client.post("/api/extra/generate/stream", content=asked)
    if reply.status_code != 200:
        return [{"type": "error", **reply.json()}]
    return [json.loads(line[6:]) for line in reply.text.split("\n") if line.startswith("data: ")]


def by_kobold_socket(served: Served, body: dict[str, Any]) -> Events:
    with connect(f"{served.ws_url}/api/extra/generate/stream/ws", max_size=None) as socket:
        socket.send(json.dumps({"output_attentions": False, **body}))
        events: Events = []
        while not events or events[-1]["type"] not in ("done", "error"):
            if isinstance(frame := socket.recv(timeout=60), str):
                events.append(json.loads(frame))
    return events


def by_dream_socket(served: Served, body: dict[str, Any]) -> Events:
    events: Events = []
    with connect(f"{served.ws_url}/api/v1/generate/stream", max_size=None) as socket:
        socket.send(json.dumps({"type": "generate", **body}))
        while not events or events[-1]["type"] not in ("done", "error"):
            events.append(json.loads(socket.recv(timeout=60)))
    return events


def by_post(served: Served, body: dict[str, Any]) -> Events:
    """The reply as the end of a stream."""
    with served.client() as client:
        asked = json.dumps({"return_attention": False, **body})
        reply = client.post("/api/v1/generate", content=asked)
    if reply.status_code != 200:
        return [reply.json()]
    whole = reply.json()
    tokens = [{"type": "token", "token": one} for one in whole["generated_tokens"]]
    return [*tokens, {"type": "done", **whole["details"]}]


STREAMS = (by_sse, by_kobold_socket, by_dream_socket)
ALL = (*STREAMS, by_post)
each = pytest.mark.parametrize("ask", ALL, ids=lambda one: one.__name__)


def ids_of(events: Events) -> list[int]:
    tokens = [one for one in events if one["type"] == "token"]
    return [one["token"]["token_id"] if "token" in one else one["token_id"] for one in tokens]


def text_of(served: Served, events: Events) -> str:
    return served.engine.detokenize(ids_of(events))


# ---- prompts that are too long


@pytest.mark.parametrize("ask", STREAMS, ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("limits", "room"),
    [
        ({"max_length": 20}, 748),
        ({"max_length": 20, "max_context_length": 100}, 80),
        ({"max_length": 20, "max_context_length": 12_288}, 748),
        ({"max_length": 700, "max_context_length": 100}, 50),
    ],
    ids=str,
)
def test_text_loses_its_front_but_keeps_its_memory(
    served: Served, ask: Any, limits: dict[str, int], room: int
):
    memory = "Anna lives here."
    prompt = f"{TEXT}. " * 100
    body = {"memory": memory, "prompt": prompt, "temperature": 0, "start_event": True}
    start, *tokens, done = ask(served, {**body, **limits, "stop_sequence": [" "]})
    tokenize = served.engine.tokenize
    whole, kept = tokenize(memory + prompt), tokenize(memory)
    assert start["type"] == "start"
    assert start["prompt_ids"] == kept + whole[len(whole) - room + len(kept) :]
    assert start["truncated_tokens"] == done["truncated_tokens"] == len(whole) - room
    assert start["prompt_tokens"] == done["prompt_tokens"] == room
    own = served.engine.generate(
        start["prompt_ids"], max_tokens=len(ids_of(tokens)), temperature=0, cache_prompt=False
    )
    assert own.read() == text_of(served, tokens)


def test_lite_gets_its_answer_to_a_long_story(served: Served):
    """KoboldAI Lite's request: a plain stream, with fields that are no concern of ours."""
    body: dict[str, Any] = {
        "n": 1, "max_context_length": 12_288, "max_length": 16, "rep_pen": 1.05,
        "temperature": 0.75, "top_p": 0.92, "top_k": 100, "top_a": 0, "typical": 1, "tfs": 1,
        "rep_pen_range": 360,
        "rep_pen_slope": 0.7, "sampler_order": [6, 0, 1, 3, 4, 2, 5], "memory": "Anna. ",
        "trim_stop": True, "genkey": "KCPP1234", "min_p": 0, "dynatemp_range": 0,
        "dynatemp_exponent": 1, "smoothing_factor": 0, "nsigma": 0, "banned_tokens": [],
        "render_special": False, "logprobs": False, "replace_instruct_placeholders": True,
        "presence_penalty": 0, "logit_bias": {}, "prompt": "Once upon a time. \ud83d" * 500,
        "quiet": True, "stop_sequence": [""], "use_default_badwordsids": False,
        "bypass_eos": False,
    }  # fmt: skip
    with served.client() as client:
        reply = client.post("/api/extra/generate/stream", content=json.dumps(body))
    assert reply.status_code == 200, reply.text
    events = [json.loads(line[6:]) for line in reply.text.split("\n") if line[:6] == "data: "]
    assert events[-1]["finish_reason"] in ("length", "stop")
    assert events[-1]["truncated_tokens"] > 1000
    assert {"n", "tfs", "top_a", "sampler_order", "quiet"} <= set(events[-1]["ignored"])
    assert "".join(event["token"] for event in events)


@each
def test_ids_above_the_context_are_refused(served: Served, ask: Any):
    (error,) = ask(served, {"input_ids": [5] * 769, "max_length": 1})
    assert error["error_code"] == "CONTEXT_TOO_LONG"
    assert "769" in error["error"]
    assert "768" in error["error"]


def test_ids_above_what_the_model_was_trained_for_are_refused_by_dream(served: Served):
    trained = {"input_ids": [5] * 512, "max_length": 1, "ban_eos_token": True}
    beyond = {**trained, "input_ids": [5] * 513}
    for ask in (by_dream_socket, by_post):
        (error,) = ask(served, beyond)
        assert (error["error_code"], error["context_length"]) == ("CONTEXT_TOO_LONG", 512)
        assert "513" in error["error"]
        assert len(ids_of(ask(served, trained))) == 1
    assert len(ids_of(by_sse(served, beyond))) == 1  # where no such limit is told


def test_demo_model_is_served_with_room_for_a_prompt_of_halo_weave():
    with serving(Settings(demo=True, n_threads=1)) as demo, demo.client() as client:
        assert client.get("/api/v1/model").json()["max_context_length"] == 2048
        body = {"input_ids": [5] * 2040, "max_length": 4, "ban_eos_token": True}
        assert len(ids_of(by_sse(demo, body))) == 4


# ---- values as KoboldCpp takes them


@each
@pytest.mark.parametrize(
    "fields",
    [
        {"max_length": 3.0, "top_k": 40.0},
        {"max_length": "3", "temperature": "0"},
        {"stop_sequence": [""]},
        {"stop_sequence": ["", "no such text"], "dry_sequence_breakers": [""]},
        {"top_p": 0, "temperature": 1},
        {"top_k": -1},
        {"sampler_seed": 2**70},
        {"sampler_seed": -1},
        {"seed": 2**32 - 1},
        {"seed": 7.0},
        {"banned_tokens": [""]},
        {"grammar": "", "json_schema": "", "regex": ""},
    ],
    ids=str,
)
def test_value_is_taken(served: Served, ask: Any, fields: dict[str, Any]):
    body = {"prompt": TEXT, "max_length": 3, "temperature": 0, "ban_eos_token": True, **fields}
    events = ask(served, body)
    assert len(ids_of(events)) == 3, events
    assert "ignored" not in events[-1]
    greedy = served.engine.generate(TEXT, max_tokens=3, temperature=0, ignore_eos=True)
    assert ids_of(events) == list(token.id for token in greedy)


@each
def test_half_of_a_character_is_read(served: Served, ask: Any):
    events = ask(served, {"prompt": f"{TEXT} \ud83d", "max_length": 2, "ban_eos_token": True})
    assert len(ids_of(events)) == 2


@each
def test_seed_that_was_used_is_told_and_gives_the_same_text(served: Served, ask: Any):
    body = {"prompt": TEXT, "max_length": 12, "temperature": 1.5, "top_k": 0, "top_p": 1}
    events = ask(served, body)
    seed = events[-1]["seed"]
    assert 0 <= seed < 2**32 - 1
    assert ids_of(ask(served, {**body, "sampler_seed": seed})) == ids_of(events)
    seeds = {seed, *(ask(served, {**body, "max_length": 1})[-1]["seed"] for _ in range(3))}
    assert len(seeds) == 4


@each
@pytest.mark.parametrize("name", ["banned_tokens", "banned_strings"])
def test_banned_phrase_is_neither_sent_nor_taken_back(served: Served, ask: Any, name: str):
    body = {"prompt": TEXT, "max_length": 30, "temperature": 0, "ban_eos_token": True}
    text = text_of(served, ask(served, body))
    phrase = text[8:16]
    events = ask(served, {**body, name: [phrase.upper()]})
    assert {event["type"] for event in events} == {"token", "done"}
    other = text_of(served, events)
    assert phrase.lower() not in other.lower()
    assert other.startswith(text[:4])
    assert len(ids_of(events)) == 30


@each
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"grammar": 'root ::= "yes"'}, "yes"),
        ({"regex": "yes"}, "yes"),
        ({"json_schema": {"enum": ["yes"]}}, '"yes"'),
        ({"json_schema": '{"enum": ["yes"]}'}, '"yes"'),
    ],
    ids=str,
)
def test_text_follows_its_constraint(served: Served, ask: Any, fields: Any, expected: str):
    if "grammar" not in fields:
        pytest.importorskip("llguidance")
    events = ask(served, {"prompt": TEXT, "max_length": 20, **fields})
    assert text_of(served, events) == expected


@each
def test_constraints_cannot_be_combined(served: Served, ask: Any):
    (error,) = ask(served, {"prompt": TEXT, "regex": "a", "grammar": 'root ::= "a"'})
    assert error["error_code"] == "INVALID_REQUEST"
    assert "regex" in error["error"]


# ---- what is told


@each
def test_fields_without_effect_are_named(served: Served, ask: Any):
    body = {"prompt": TEXT, "max_length": 1, "max_new_tokens": 5, "max_lenght": 3, "tfs": 0.5,
            "attention_values": "probs", "attention_spans": [[0, 1]]}  # fmt: skip
    told = ask(served, body)[-1]["ignored"]
    assert told == ["max_lenght", "tfs", "max_new_tokens", "attention_values", "attention_spans"]


@each
def test_fields_of_another_format_are_named(served: Served, ask: Any):
    asked = {"output_attentions": True, "return_attention": True}
    body = {"prompt": TEXT, "max_length": 1, **asked, "aggregation_mode": "max", "dtype": "float16"}
    assert ask(served, body)[-1]["ignored"] == ["aggregation_mode"]
    body = {"input_ids": [1, 2], "prompt": "x", "max_length": 1, "sparse_top_k": 3, **asked}
    assert ask(served, body)[-1]["ignored"] == ["prompt", "sparse_top_k"]


@each
def test_end_has_the_figures_of_the_request(served: Served, ask: Any):
    body = {"prompt": TEXT, "max_length": 4, "temperature": 0, "ban_eos_token": True}
    ask(served, body)
    done = ask(served, body)[-1]
    assert done.keys() >= DETAILS
    assert done["prompt_tokens"] == len(served.engine.tokenize(TEXT))
    assert 0 < done["cached_tokens"] < done["prompt_tokens"]
    assert all(done[name] >= 0 for name in ("queue_ms", "prompt_ms", "generation_ms"))
    assert done.get("reason", done.get("finish_reason")) == "length"


@pytest.mark.parametrize("values", ["logits", "scores", "probs"])
def test_every_attention_object_says_what_its_values_are(served: Served, values: str):
    asked = {"output_attentions": True, "attention_values": values, "start_event": True}
    body = {"prompt": TEXT, "max_length": 2, "ban_eos_token": True, **asked}
    for ask in (by_sse, by_dream_socket):
        start, *tokens, _ = ask(served, body)
        assert start["attention"]["values"] == values
        assert start["attention"]["row_sum"] == ("1" if values == "probs" else None)
        assert [one["attention"]["values"] for one in tokens] == [values] * 2
        for one in tokens:
            rows = np.frombuffer(b64decode(one["attention"]["data"]), np.float32)
            rows = rows.reshape(one["attention"]["shape"])
            assert list(rows.shape[:2]) == start["attention"]["shape"][:2]
            if values == "probs":
                np.testing.assert_allclose(rows.sum(-1), 1, atol=1e-4)


def test_start_event_has_the_tokens_that_the_end_says_were_cached(served: Served):
    body = {"prompt": TEXT, "max_length": 1, "ban_eos_token": True, "start_event": True}
    for ask in STREAMS:
        ask(served, body)
        start, *_, done = ask(served, body)
        assert start["cached_tokens"] == done["cached_tokens"] > 0


def test_two_clients_of_the_dream_socket_may_use_one_name(served: Served):
    path = f"{served.ws_url}/api/v1/generate/stream"
    body = {"type": "generate", "prompt": TEXT, "max_length": 400, "ban_eos_token": True,
            "return_attention": True, "request_id": "same"}  # fmt: skip
    with connect(path, max_size=None) as one, connect(path, max_size=None) as other:
        for socket in (one, other):
            socket.send(json.dumps(body))
            assert json.loads(socket.recv(timeout=60))["request_id"] == "same"
        one.send(json.dumps({"type": "cancel", "request_id": "same"}))
        done = last_of(one)
        assert (done["finish_reason"], done["request_id"]) == ("cancelled", "same")
        # The other one's goes on.
        assert last_of(other)["finish_reason"] == "length"


def last_of(socket: Any) -> dict[str, Any]:
    while (event := json.loads(socket.recv(timeout=60)))["type"] != "done":
        assert event["type"] == "token"
    return event
