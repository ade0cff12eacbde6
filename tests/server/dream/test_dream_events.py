"""Events of the WebSocket against the seed's examples; without a server."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kqview.errors import OutOfMemory, RequestError
from kqview.server.api.dream import schema
from kqview.server.api.dream.events import EventRenderer, error_frame, message_of, name_in
from kqview.server.errors import Answer, answer_of
from kqview.server.run import Run, Step
from kqview.server.wire import Encoder
from kqview.types import PromptBlock, Token
from tests.support.dream import golden, plan_from

TEXTS = {40: "I", 791: "The"}
copied: list[int] = []


def run_of(**known: Any) -> Run:
    """As much of a Run as a renderer reads."""
    copied.clear()
    generations = [SimpleNamespace(finish_reason=known.get("finish_reason"))]
    facts = {"error": None, "encoder": Encoder(copied.append), "generations": generations}
    return cast("Run", SimpleNamespace(**{**facts, **known}))


def renderer_of(*, packs: bool = False, **changes: Any) -> EventRenderer:
    plan = plan_from({**golden("generate_message"), **changes}, always_logprob=True)
    return EventRenderer(
        plan, lambda id_: TEXTS[id_], lambda error: answer_of(error, context_length=8192),
        packs=packs,
    )  # fmt: skip


def rows_of(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).random(shape, np.float32)


def token_of(rows: np.ndarray | None) -> Token:
    return Token(40, "I", 0, -0.234, [(40, -0.234), (791, -1.567)], rows)


def token_frames(rows: np.ndarray | None, **changes: Any) -> list[Any]:
    return list(renderer_of(**changes).token(run_of(), Step(0, token_of(rows))))


def test_token_event_is_the_seeds():
    rows = rows_of(28, 28, 267)
    (text,) = token_frames(rows)
    event, expected = json.loads(text), golden("token_event")
    data = event["attention"].pop("data")
    expected["attention"].pop("data")
    assert event == expected
    assert base64.b64decode(data, validate=True) == rows.tobytes()
    assert copied == [rows.nbytes]


def test_token_event_in_two_frames_has_its_values_in_the_second():
    rows = rows_of(2, 3, 5)
    text, frame = token_frames(rows, encoding="binary")
    attention = json.loads(text)["attention"]
    assert attention["encoding"] == "binary"
    assert "data" not in attention
    assert attention["shape"] == [2, 3, 5]
    assert frame == rows.tobytes()


def test_token_event_in_messagepack_has_raw_bytes():
    rows = rows_of(2, 3, 5)
    (frame,) = token_frames(rows, packs=True)
    event = msgspec.msgpack.decode(frame)
    assert event["attention"]["data"] == rows.tobytes()
    assert event["attention"]["encoding"] == "binary"
    assert event["token"] == golden("token_event")["token"]


def test_token_event_without_attention_has_no_such_field():
    (text,) = token_frames(None, return_attention=False)
    expected = golden("token_event")
    del expected["attention"]
    assert json.loads(text) == expected


def test_token_event_says_its_sample_only_where_there_are_several():
    renderer = renderer_of(return_attention=False, num_samples=2)
    (text,) = renderer.token(run_of(), Step(1, token_of(None)))
    assert json.loads(text)["sample"] == 1


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("aggregated", [0.5, 0.25, 0.25]),
        ("sparse", [[0.75, 0.0625, 0.125], [0.25, 0.0625, 0.375]]),
        ("viz", [[[0.25] * 4] * 2] * 2),
    ],
)
@pytest.mark.parametrize("packs", [False, True])
def test_short_formats_are_the_seeds(name: str, rows: Any, packs: bool):
    array = np.array(rows, np.float32)
    (frame,) = token_frames(array, attention_format=name, sparse_top_k=2, packs=packs)
    event = msgspec.msgpack.decode(frame) if packs else json.loads(frame)
    expected = golden("attention_formats")[name]
    if packs and name == "aggregated":
        expected |= {"encoding": "binary", "dtype": "float32", "data": array.tobytes()}
    assert event["attention"] == expected


def test_aggregated_row_is_base64_or_a_frame_where_the_request_says_so():
    row = np.array([0.5, 0.25, 0.25], np.float32)
    (text,) = token_frames(row, attention_format="aggregated", encoding="base64")
    attention = json.loads(text)["attention"]
    assert attention["encoding"] == "base64"
    assert attention["shape"] == [3]
    assert base64.b64decode(attention["data"]) == row.tobytes()
    text, frame = token_frames(row, attention_format="aggregated", encoding="binary")
    assert json.loads(text)["attention"]["encoding"] == "binary"
    assert frame == row.tobytes()


def test_rows_of_the_prompt_name_their_queries():
    rows = rows_of(2, 3, 4, 9)
    renderer = renderer_of(prompt_attention=True)
    (text,) = renderer.prompt(run_of(), PromptBlock(5, 4, rows))
    event = json.loads(text)
    assert (event["type"], event["start"], event["rows"]) == ("prompt_attention", 5, 4)
    assert event["request_id"] == "uuid-1234-5678"
    assert event["attention"]["shape"] == [2, 3, 4, 9]
    assert base64.b64decode(event["attention"]["data"]) == rows.tobytes()


DONE = {"finish_reason": "stop_token", "n_tokens": 23, "elapsed_s": 1.2341}


def test_done_event_is_the_seeds():
    (text,) = renderer_of().done(run_of(**DONE))
    assert json.loads(text) == golden("done_event")


def test_done_event_of_several_samples_says_how_each_ended():
    renderer = renderer_of(num_samples=2, return_attention=False)
    for sample in (0, 1, 1):
        renderer.token(run_of(), Step(sample, token_of(None)))
    ends = [SimpleNamespace(finish_reason=reason) for reason in ("length", "stop")]
    (text,) = renderer.done(run_of(**{**DONE, "generations": ends}))
    assert json.loads(text)["samples"] == [
        {"sample": 0, "finish_reason": "length", "total_tokens": 1},
        {"sample": 1, "finish_reason": "stop", "total_tokens": 2},
    ]


def test_pruning_suggestion_comes_before_done():
    sentences = [
        {"turn_id": 1, "sentence_id": 2, "start": 0, "end": 2},
        {"turn_id": 1, "sentence_id": 3, "start": 2, "end": 4},
    ]
    renderer = renderer_of(sentences=sentences, return_attention=False)
    row = np.array([0.5, 0.375, 0.0625, 0.0625], np.float32)
    renderer.token(run_of(), Step(0, token_of(row)))
    suggestion, done = renderer.done(run_of(**DONE))
    assert json.loads(suggestion) == golden("pruning_suggestion")
    assert json.loads(done) == golden("done_event")


@pytest.mark.parametrize("packs", [False, True])
def test_error_event_names_the_request_and_has_the_figures(packs: bool):
    run = run_of(error=OutOfMemory("CUDA out of memory"))
    (frame,) = renderer_of(packs=packs).error(run, answer_of(OutOfMemory("other")))
    event = msgspec.msgpack.decode(frame) if packs else json.loads(frame)
    expected = golden("error_events")[0]
    assert event == {name: expected[name] for name in event}
    assert event["context_length"] == 8192


def test_error_event_without_a_name_has_none():
    answer = Answer(400, "INVALID_REQUEST", "wrong")
    assert json.loads(error_frame(answer, None, packs=False)) == {
        "type": "error", "error": "wrong", "error_code": "INVALID_REQUEST"
    }  # fmt: skip


# ---- messages of the client


def test_message_of_the_seed_is_read_from_json_and_messagepack():
    message = golden("generate_message")
    from_json = message_of(json.dumps(message), packs=False)
    assert isinstance(from_json, schema.Generate)
    assert from_json.input_ids == message["input_ids"]
    assert message_of(msgspec.msgpack.encode(message), packs=True) == from_json
    assert message_of(json.dumps(message), packs=True) == from_json
    assert message_of('{"type": "cancel", "request_id": "x"}', packs=False) == schema.Cancel(
        request_id="x"
    )


@pytest.mark.parametrize(
    ("raw", "says", "name"),
    [
        ('{"type": "sing", "request_id": "x"}', "$.type", "x"),
        ('{"request_id": "x"}', "type", "x"),
        ('{"type": "generate", "request_id": "x", "top_k": "many"}', "$.top_k", "x"),
        ('{"type": "generate", "request_id": 5}', "$.request_id", None),
        ("[]", "object", None),
        ("{", "cannot be read", None),
        ("", "cannot be read", None),
        ("[" * 100_000, "cannot be read", None),
        (b"\xff\xfe", "cannot be read", None),
    ],
)
def test_message_that_is_none_is_refused_by_field(raw: bytes | str, says: str, name: str | None):
    with pytest.raises(RequestError) as caught:
        message_of(raw, packs=False)
    assert says in str(caught.value)
    assert name_in(raw, packs=False) == name


def test_messagepack_that_is_none_is_refused():
    with pytest.raises(RequestError):
        message_of(b"\xc1", packs=True)
    assert name_in(b"\xc1", packs=True) is None
    assert name_in(msgspec.msgpack.encode({"request_id": "x"}), packs=True) == "x"
