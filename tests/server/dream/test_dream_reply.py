"""The reply of a POST: put together in pieces, bounded before it begins; without a server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kqview.server.api.dream import schema
from kqview.server.api.dream.convert import ReplyTooLarge
from kqview.server.api.dream.events import (
    ReplyBuilder,
    check_reply,
    reply_bytes,
)
from kqview.server.budget import Budget
from kqview.server.run import Run, Step
from kqview.server.wire import Encoder, with_lists
from kqview.types import Token, Usage
from tests.support.dream import QWEN, decoded, golden, plan_from

TOKENS = ((40, "I"), (2846, "'m"), (3291, " doing"))


def run_of(**known: Any) -> Run:
    """As much of a Run as the builder reads."""
    generation = SimpleNamespace(
        text="I'm doing", stop_match=known.get("stop_match"), finish_reason="stop_token",
        usage=Usage(prompt_tokens=267, completion_tokens=3),
    )  # fmt: skip
    facts = {
        "encoder": Encoder(lambda n: None), "generations": [generation] * known.get("n", 1),
        "finish_reason": "stop_token",
    }  # fmt: skip
    return cast("Run", SimpleNamespace(**facts))


def built(run: Run, *, rows: list[np.ndarray] | None = None, **options: Any) -> bytes:
    fields = options.pop("fields", golden("generate_request"))
    plan = plan_from(fields)
    options = {"packs": False, "has_tokens": True, "has_logprobs": False, "trims_stop": False,
               **options}  # fmt: skip
    builder = ReplyBuilder(plan, lambda id_: b"%d" % id_, Budget(2**30).hold(""), **options)
    for sample in range(plan.request.n_samples):
        for i, (id_, text) in enumerate(TOKENS):
            row = rows[i] if rows is not None else None
            logprob = -0.5 if options["has_logprobs"] else None
            top = [(id_, -0.5)] if options["has_logprobs"] else None
            builder.token(run, Step(sample, Token(id_, text, i, logprob, top, row)))
    return builder.body(run)


def rows_of(*shape: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    *front, n = shape
    return [rng.random((*front, n + i), np.float32) for i in range(len(TOKENS))]


def test_reply_is_the_seeds_behind_the_results():
    rows = rows_of(28, 28, 267)
    reply = json.loads(built(run_of(), rows=rows))
    assert reply.pop("results") == [
        {"text": "I'm doing", "finish_reason": "stop", "prompt_tokens": 267,
         "completion_tokens": 3}
    ]  # fmt: skip
    expected = golden("generate_reply")
    for entry, like, row in zip(
        reply["attention_data"], expected["attention_data"], rows, strict=True
    ):
        np.testing.assert_array_equal(decoded(entry["attention"]), row)
        kept = entry["attention"]
        assert kept.pop("context_length") == row.shape[-1]
        assert (kept.pop("encoding"), kept.pop("dtype")) == ("base64", "float32")
        kept["data"] = like["attention"]["data"]
    assert reply == expected


@pytest.mark.parametrize("packs", [False, True])
def test_reply_fits_its_description(packs: bool):
    raw = built(run_of(), rows=rows_of(2, 3, 4), packs=packs, has_logprobs=True)
    decode = msgspec.msgpack.decode if packs else msgspec.json.decode
    reply = decode(raw, type=schema.GenerateReply)
    assert isinstance(reply.attention_data, list)
    assert isinstance(reply.generated_tokens, list)
    assert len(reply.attention_data) == len(reply.generated_tokens) == len(TOKENS)


def test_reply_in_messagepack_is_the_same_object_with_raw_bytes():
    rows = rows_of(2, 3, 4)
    from_json = json.loads(built(run_of(), rows=rows))
    packed = msgspec.msgpack.decode(built(run_of(), rows=rows, packs=True))
    for one, other, row in zip(
        from_json["attention_data"], packed["attention_data"], rows, strict=True
    ):
        assert other["attention"]["data"] == row.tobytes()
        np.testing.assert_array_equal(decoded(one["attention"]), decoded(other["attention"]))
        for entry in (one, other):
            del entry["attention"]["data"], entry["attention"]["encoding"]
    assert packed == from_json


def test_plain_reply_has_results_alone_and_no_stop_text():
    fields = {"input_ids": [1, 2], "stop_sequence": ["END"]}
    run = run_of(stop_match="END")
    plain = {"fields": fields, "has_tokens": False}
    trimmed = json.loads(built(run, **plain, trims_stop=True))
    assert trimmed.keys() == {"results"}
    assert trimmed["results"][0]["text"] == "I'm doing"
    whole = json.loads(built(run, **plain, trims_stop=False))
    assert whole["results"][0]["text"] == "I'm doingEND"


def test_binary_frames_have_no_place_in_a_reply_so_values_are_base64():
    fields = {**golden("generate_request"), "encoding": "binary"}
    rows = rows_of(2, 3, 4)
    reply = json.loads(built(run_of(), rows=rows, fields=fields))
    np.testing.assert_array_equal(decoded(reply["attention_data"][0]["attention"]), rows[0])


def test_samples_have_a_result_each_and_entries_with_their_number():
    fields = {**golden("generate_request"), "num_samples": 2}
    reply = json.loads(built(run_of(n=2), rows=rows_of(2, 2, 3), fields=fields))
    assert len(reply["results"]) == 2
    for name in ("generated_tokens", "attention_data"):
        assert [entry["sample"] for entry in reply[name]] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("n", [0, 1, 15, 16, 70_000])
def test_lists_of_encoded_elements_become_one_object(n: int):
    values = [{"i": i, "text": 'a"b'} for i in range(n)]
    for packs, module in ((False, msgspec.json), (True, msgspec.msgpack)):
        elements = [module.encode(value) for value in values]
        raw = with_lists(
            {"x": 1, "y": [2]}, [("first", elements), ("second", elements[:1])], packs=packs
        )
        assert module.decode(raw) == {
            "x": 1, "y": [2], "first": values, "second": values[:1]
        }  # fmt: skip


# ---- the bound


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "float16"},
        {"attention_layers": [0, 3], "attention_heads": [5]},
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
    shown = plan.shown
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
            rng.random((*front, 267 + i)).astype(dtype if shown.dtype == "float16" else np.float32)
            for i in range(len(TOKENS))
        ]
    n_samples = plan.request.n_samples
    actual = len(built(run_of(n=n_samples), rows=rows, fields=fields, packs=packs))
    most = reply_bytes(plan, QWEN, n_prompt=267, n_ctx=4096, packs=packs)
    assert actual <= most
    assert most <= 4 * actual + 4096


def test_bound_counts_no_more_tokens_than_the_slot_holds():
    plan = plan_from({**golden("generate_request"), "max_new_tokens": 10**9})
    few = reply_bytes(plan, QWEN, n_prompt=100, n_ctx=110, packs=False)
    assert few < 12 * (28 * 28 * 111 * 16 // 3 + 1024)


def test_bound_counts_the_rows_of_the_prompt():
    asks = golden("generate_request")
    plain, with_prompt = (
        reply_bytes(plan_from({**asks, **more}), QWEN, n_prompt=300, n_ctx=4096, packs=True)
        for more in ({}, {"prompt_attention": True})
    )
    assert with_prompt - plain >= 28 * 28 * 300 * 300 * 4


def test_reply_above_the_limit_is_refused_with_both_numbers():
    check_reply(10, 10, n_prompt=3)
    with pytest.raises(ReplyTooLarge) as caught:
        check_reply(11, 10, n_prompt=3)
    assert caught.value.figures == {"reply_bytes": 11, "limit_bytes": 10, "prompt_tokens": 3}
    assert "attention_format" in str(caught.value)
