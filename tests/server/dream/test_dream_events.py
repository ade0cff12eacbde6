"""What the dream dialect sends: events of its WebSocket, and the reply of its POST."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kqview.errors import OutOfMemory, RequestError
from kqview.server.api.koboldai.events import DreamEvents, ReplyBuilder, check_size, packed
from kqview.server.api.koboldai.failures import error_body
from kqview.server.api.koboldai.request import Cancel, Generate, KoboldGenerateBody, KoboldPlan
from kqview.server.api.koboldai.stream import message_of, name_in
from kqview.server.errors import Answer, answer_of
from kqview.server.models.run import Run, Step
from kqview.server.web.budget import Budget
from kqview.types import Token, Usage
from tests.support.dream import QWEN, SEED, decoded, golden, plan_from, shown_of

TEXTS = {40: "I", 791: "The"}
copied: list[int] = []


def run_of(**known: Any) -> Run:
    """As much of a Run as a renderer reads."""
    copied.clear()
    generations = [SimpleNamespace(finish_reason=known.get("finish_reason"), tool_calls=None)]
    facts = {
        "error": None,
        "count_copied": copied.append,
        "label": "uuid-1234-5678",
        "generations": generations,
        **ENDED,
    }
    return cast("Run", SimpleNamespace(**{**facts, **known}))


ENDED = {
    "usage": Usage(prompt_tokens=267, completion_tokens=3), "n_truncated": 0,
    "request": SimpleNamespace(sampling=SimpleNamespace(seed=SEED)),
}  # fmt: skip


def renderer_of(*, packs: bool = False, **changes: Any) -> DreamEvents:
    plan = plan_from({**golden("generate_message"), **changes})
    plan = replace(plan, token_bytes=lambda id_: TEXTS[id_].encode())
    return DreamEvents(plan, lambda error: answer_of(error, context_length=8192), packs=packs)


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
    expected["attention"] |= golden("additions")["attention"]
    assert event == expected
    assert base64.b64decode(data, validate=True) == rows.tobytes()
    assert copied == [rows.nbytes]


def test_token_event_without_attention_has_no_such_field():
    (text,) = token_frames(None, return_attention=False)
    expected = golden("token_event")
    del expected["attention"]
    assert json.loads(text) == expected


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
    assert event["attention"] == expected | golden("additions")["attention"]


DONE = {"finish_reason": "stop_token", "n_tokens": 23, "elapsed_s": 1.2341}


def test_done_event_is_the_seeds():
    (text,) = renderer_of().done(run_of(**DONE))
    assert json.loads(text) == golden("done_event") | golden("additions")["details"]


def test_done_event_of_several_samples_says_how_each_ended():
    renderer = renderer_of(num_samples=2, return_attention=False)
    for sample in (0, 1, 1):
        renderer.token(run_of(), Step(sample, token_of(None)))
    ends = [SimpleNamespace(finish_reason=reason, tool_calls=None) for reason in ("length", "stop")]
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
    ignored = {"ignored": ["attention_format"]}  # as there is no attention
    assert json.loads(done) == golden("done_event") | golden("additions")["details"] | ignored


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
    assert json.loads(packed(error_body(answer), packs=False)) == {
        "type": "error", "error": "wrong", "error_code": "INVALID_REQUEST"
    }  # fmt: skip


# ---- messages of the client


def test_message_of_the_seed_is_read_from_json_and_messagepack():
    message = golden("generate_message")
    from_json, unknown = message_of(json.dumps(message | {"toop_k": 1}), packs=False)
    assert isinstance(from_json, Generate)
    assert from_json.input_ids == message["input_ids"]
    assert unknown == ("toop_k",)
    assert message_of(msgspec.msgpack.encode(message), packs=True) == (from_json, ())
    assert message_of(json.dumps(message), packs=True) == (from_json, ())
    cancel, _ = message_of('{"type": "cancel", "request_id": "x"}', packs=False)
    assert cancel == Cancel(request_id="x")


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


# ---- the reply of a POST


TOKENS = ((40, "I"), (2846, "'m"), (3291, " doing"))


def run_of_reply(**known: Any) -> Run:
    """As much of a Run as the builder reads."""
    generation = SimpleNamespace(
        tool_calls=None,
        text="I'm doing", stop_match=known.get("stop_match"), finish_reason="stop_token",
        usage=Usage(prompt_tokens=267, completion_tokens=3),
    )  # fmt: skip
    facts = {
        "count_copied": lambda n: None, "generations": [generation] * known.get("n", 1),
        "finish_reason": "stop_token", **ENDED,
    }  # fmt: skip
    return cast("Run", SimpleNamespace(**facts))


def built(
    run: Run, *, rows: list[np.ndarray] | None = None, packs: bool = False, **changes: Any
) -> bytes:
    fields = {**golden("generate_request"), **changes}
    plan = plan_from(fields)
    has_logprobs = plan.request.sampling.top_logprobs is not None
    body = msgspec.convert(fields, KoboldGenerateBody)
    plan = replace(plan, token_bytes=b"%d".__mod__)
    builder = ReplyBuilder(plan, body, Budget(2**30).hold(""), packs=packs)
    for sample in range(plan.request.n_samples):
        for i, (id_, text) in enumerate(TOKENS):
            row = rows[i] if rows is not None else None
            logprob = -0.5 if has_logprobs else None
            top = [(id_, -0.5)] if has_logprobs else None
            builder.token(run, Step(sample, Token(id_, text, i, logprob, top, row)))
    return builder.body(run)


def rows_of_reply(*shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    *front, n = shape
    return [rng.random((*front, n + i), np.float32) for i in range(len(TOKENS))]


def test_reply_is_the_seeds_behind_the_results():
    rows = rows_of_reply(28, 28, 267)
    reply = json.loads(built(run_of_reply(), rows=rows))
    assert reply.pop("results") == [
        {"text": "I'm doing", "finish_reason": "stop", "prompt_tokens": 267,
         "completion_tokens": 3}
    ]  # fmt: skip
    details = reply.pop("details")
    assert details == {"reason": "stop_token", **golden("additions")["details"]}
    expected = golden("generate_reply")
    for entry, like, row in zip(
        reply["attention_data"], expected["attention_data"], rows, strict=True
    ):
        np.testing.assert_array_equal(decoded(entry["attention"]), row)
        kept = entry["attention"]
        assert kept.pop("context_length") == row.shape[-1]
        assert (kept.pop("encoding"), kept.pop("dtype")) == ("base64", "float32")
        assert kept.pop("values") == "probs"
        kept["data"] = like["attention"]["data"]
    assert reply == expected


def test_binary_frames_have_no_place_in_a_reply_so_values_are_base64():
    rows = rows_of_reply(2, 3, 4)
    reply = json.loads(built(run_of_reply(), rows=rows, encoding="binary"))
    np.testing.assert_array_equal(decoded(reply["attention_data"][0]["attention"]), rows[0])


def test_offsets_of_logprobs_are_those_of_the_text():
    # Texts of single ids are longer here, as those of parts of a character are.
    reply = json.loads(built(run_of_reply(), top_logprobs=1))
    assert reply["results"][0]["logprobs"]["text_offset"] == [0, 1, 3]


# ---- the bound


def bound(plan: KoboldPlan, *, limit: int = 2**50, packs: bool = False, **sizes: int) -> int:
    return check_size(plan, QWEN, limit, packs=packs, **sizes)


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float16"},
        {"attention_layers": [0, 3], "attention_heads": [5]},
        {"attention_spans": [[0, 100], [50, 300], [100, None]]},
        {"attention_format": "aggregated"},
        {"attention_format": "aggregated", "encoding": "base64"},
        {"attention_format": "sparse", "sparse_top_k": 7},
        {"attention_format": "viz"},
        {"num_samples": 2},
        {"return_attention": False},
    ],
    ids=str,
)
def test_bound_is_above_the_reply_and_not_far(changes: dict[str, Any], packs: bool):
    fields = {**golden("generate_request"), "max_new_tokens": len(TOKENS), **changes}
    plan = plan_from(fields)
    rng = np.random.default_rng(0)
    shown = shown_of(plan)
    rows = None
    if shown is not None:
        n_layers = 28 if shown.layers is None else len(shown.layers)
        n_heads = 28 if shown.heads is None else len(shown.heads)
        front = {
            "per_layer": (n_layers, n_heads), "aggregated": (), "sparse": (n_layers,),
            "viz": (n_layers, n_heads),
        }[shown.format]  # fmt: skip
        dtype = np.float16 if shown.format == "per_layer" else np.float32
        rows = [
            rng.random((*front, len(shown.spans or range(267 + i)))).astype(
                dtype if shown.dtype == "float16" else np.float32
            )
            for i in range(len(TOKENS))
        ]
    n_samples = plan.request.n_samples
    actual = len(built(run_of_reply(n=n_samples), rows=rows, packs=packs, **fields))
    most = bound(plan, n_prompt=267, n_ctx=4096, packs=packs)
    assert actual <= most
    assert most <= 4 * actual + 4096


def test_bound_counts_no_more_tokens_than_the_slot_holds():
    plan = plan_from({**golden("generate_request"), "max_new_tokens": 10**9})
    few = bound(plan, n_prompt=100, n_ctx=110)
    assert few < 12 * (28 * 28 * 111 * 16 // 3 + 1024)


def test_bound_counts_the_rows_of_the_prompt():
    asks = golden("generate_request")
    plain, with_prompt = (
        bound(plan_from({**asks, **more}), n_prompt=300, n_ctx=4096, packs=True)
        for more in ({}, {"prompt_attention": True})
    )
    assert with_prompt - plain >= 28 * 28 * 300 * 300 * 4
