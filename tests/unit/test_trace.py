"""Traces: recorded, bounded, written as JSON, read back, replayed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kqview import Capture
from kqview.trace import Trace, TraceRecorder, TraceRequest, final_ids
from kqview.trace.attention import top_columns
from kqview.types import Usage
from tests.support.traces import read_trace

# The example of the format's description.
SAMPLE = Path(__file__).parents[1] / "ingest" / "sample_payload.json"
EXAMPLE: dict[str, Any] = json.loads(SAMPLE.read_text(encoding="utf-8"))


def recorder(**limits: int) -> TraceRecorder:
    return TraceRecorder(TraceRequest(request_id="r"), text_of=lambda one: f"<{one}>", **limits)


def copy_of(value: Any) -> Any:
    return json.loads(json.dumps(value))


# ---- JSON


def test_example_of_the_format_is_read_and_written_back_key_for_key():
    assert read_trace(copy_of(EXAMPLE)).to_payload() == EXAMPLE
    assert json.loads(read_trace(json.dumps(EXAMPLE)).to_json()) == EXAMPLE


def test_trace_survives_json_unchanged():
    notes = recorder()
    event = notes.prefilled(prompt_length=2, max_steps=9)
    notes.set_prompt([1, 2], "<1><2>")
    call = notes.call(event, "mod")
    notes.action(call, "AdjustedPrefill", tokens=[1, 2], new_prompt="<1><2>", new_length=2)
    notes.end_call(call, time_ms=1.5, error="ValueError: no", traceback="Traceback ...")
    notes.log(call, "hello", "WARNING")
    passed = notes.forward_pass(
        1, n_generated=0, input_text="x" * 99, top_tokens=[(5, -0.25)], entropy=1.5,
        attention={"positions": [1], "weights": [0.5], "rest": 0.5, "n_columns": 2},
    )  # fmt: skip
    assert passed == 1
    notes.sampled(1, 5, n_generated=0)
    notes.added(1, [5], n_generated=0, forced=False)
    notes.finish("stop", ids=[5], text="<5>", usage=Usage(2, 0, 1, 0.5, 0.25))
    trace = notes.trace
    assert read_trace(trace.to_json()) == trace
    payload = trace.to_payload()
    assert [one["sequence_order"] for one in payload["events"]] == [0, 1, 2, 3]
    assert payload["events"][0]["details"] == {"tokens_as_text": ["<1>", "<2>"]}
    assert payload["events"][1]["input_text"] == "x" * 70
    [top] = payload["events"][1]["top_tokens"]
    assert top == {"token": 5, "token_str": "<5>", "logprob": -0.25, "prob": math.exp(-0.25)}
    [action] = payload["actions"]
    assert action["tokens_as_text"] == ["<1>", "<2>"]
    assert action["tokens_preview"] == "<1><2>"
    assert action["details"] == {"tokens": [1, 2], "tokens_as_text": ["<1>", "<2>"]}
    assert payload["request"]["inference_stats"]["completion_tokens"] == 1


def test_what_json_and_databases_cannot_hold_is_replaced():
    notes = TraceRecorder(TraceRequest(request_id="r" * 300), text_of=lambda one: "\0" * 200)
    event = notes.forward_pass(
        1, n_generated=0, input_text="a\0b\ud800", top_tokens=[(1, -math.inf), (2, 0.0)]
    )
    notes.sampled(1, 1, n_generated=0)
    call = notes.call(event, "m" * 300)
    loop: dict[Any, Any] = {"nan": math.nan, "inf": math.inf, "row": np.float32(0.5), 1: object()}
    loop["self"] = loop
    notes.action(call, "ToolCalls", tool_calls=loop, has_tool_calls=True)
    text = notes.trace.to_json()
    payload = json.loads(text, parse_constant=pytest.fail)
    assert "\\u0000" not in text
    assert "\\ud800" not in text
    assert payload["events"][0]["input_text"] == "a\u2400b\ufffd"
    assert payload["events"][0]["top_tokens"][0]["logprob"] == -9999.0
    assert payload["events"][0]["top_tokens"][0]["prob"] == 0.0
    assert len(payload["events"][1]["token_text"]) == 100
    assert len(payload["request"]["request_id"]) == 255
    assert len(payload["mod_calls"][0]["mod_name"]) == 255
    calls = payload["actions"][0]["tool_calls"]
    assert (calls["nan"], calls["inf"], calls["row"]) == (None, None, 0.5)
    assert "object" in calls["1"]


def test_missing_lists_are_empty_and_unknown_keys_are_ignored():
    payload: Any = {"request": {"request_id": "r", "later": 1}, "more": []}
    assert read_trace(payload) == Trace(TraceRequest(request_id="r"))


def test_whoever_wants_the_trace_gets_it_when_it_is_whole():
    got: list[Trace] = []
    notes = TraceRecorder(TraceRequest(request_id="r"), text_of=str, on_finish=got.append)
    notes.prefilled(prompt_length=1, max_steps=1)
    assert got == []
    notes.finish("cancelled", ids=[], text="", error="ClosedError: closed")
    assert got == [notes.trace]
    assert got[0].request.completed_at is not None
    assert got[0].to_payload()["request"]["inference_stats"]["error"] == "ClosedError: closed"


def test_failing_reader_of_traces_does_not_fail_the_request(caplog: pytest.LogCaptureFixture):
    def fail(trace: Trace) -> None:
        raise OSError("no")

    notes = TraceRecorder(TraceRequest(request_id="r"), text_of=str, on_finish=fail)
    notes.finish("stop", ids=[], text="")
    assert "cannot be passed on" in caplog.text


# ---- limits


def test_full_trace_keeps_what_it_has_and_says_that_it_was_cut():
    notes = recorder(max_events=2)
    first = notes.sampled(1, 5, n_generated=0)
    assert notes.added(1, [5], n_generated=0, forced=False) == 1
    assert not notes.trace.is_cut
    assert notes.sampled(2, 6, n_generated=1) is None
    assert notes.call(None, "mod") is None
    notes.end_call(None, time_ms=1.0)
    notes.log(None, "lost")
    assert notes.action(None, "Noop") is None
    notes.finish("length", ids=[5, 6], text="")
    assert notes.trace.is_cut
    assert len(notes.trace.events) == 2
    stats = notes.trace.to_payload()["request"]["inference_stats"]
    assert stats["trace"]["n_cut_events"] == 1
    assert stats["trace"]["n_cut_logs"] == 1
    assert stats["finish_reason"] == "length"
    assert first == 0
    assert read_trace(notes.trace.to_json()).is_cut


def test_bytes_of_a_trace_are_bounded_whatever_mods_print():
    notes = recorder(max_bytes=20_000)
    event = notes.prefilled(prompt_length=1, max_steps=1)
    call = notes.call(event, "mod")
    for _ in range(1000):
        notes.log(call, "x" * 1000)
    assert notes.trace.is_cut
    assert len(notes.trace.to_json()) < 30_000
    notes.set_prompt(list(range(10_000)), "long")
    assert notes.trace.request.user_prompt_token_ids is None


# ---- replay


def test_replay_follows_every_kind_of_action():
    notes = recorder()
    notes.added(1, [1, 2], n_generated=0, forced=False)
    added = notes.added(2, [3], n_generated=2, forced=False)
    call = notes.call(added, "mod")
    notes.action(call, "Backtrack", backtrack_steps=2, tokens=[7, 8])
    assert final_ids(notes.trace) == [1, 7, 8]
    forced = notes.action(call, "ForceTokens", tokens=[9, 9])
    assert forced is not None
    forced.details["n_kept"] = 1  # type: ignore[index]
    notes.action(call, "ForceTokens", tokens=[4], is_applied=False)
    assert final_ids(notes.trace) == [1, 7, 8, 9]
    before = notes.call(notes.sampled(3, 5, n_generated=4), "mod")
    notes.action(before, "Backtrack", backtrack_steps=1, tokens=[6])
    notes.added(3, [6], n_generated=4, forced=True)
    assert final_ids(notes.trace) == [1, 7, 8, 9, 6]
    end = notes.added(4, [0], n_generated=5, forced=False)
    notes.trace.events[-1].details["n_kept"] = 0  # type: ignore[index]
    assert final_ids(notes.trace) == [1, 7, 8, 9, 6]
    last = notes.call(end, "mod")
    notes.action(last, "Backtrack", backtrack_steps=99)
    assert final_ids(notes.trace) == []
    notes.action(last, "ForceOutput", tokens=[2, 2])
    assert final_ids(notes.trace) == [2, 2]


@pytest.mark.parametrize("kind", ["ToolCalls", "EmitError"])
def test_replay_of_an_end_without_tokens_is_empty(kind: Any):
    notes = recorder()
    call = notes.call(notes.added(1, [1], n_generated=0, forced=False), "mod")
    notes.action(call, kind)
    assert final_ids(notes.trace) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 9), max_size=3))))
def test_replay_equals_a_list_that_the_same_backtracks_changed(steps: list[tuple[int, list[int]]]):
    notes, ids = recorder(), list[int]()
    for i, (n_back, tokens) in enumerate(steps):
        added = notes.added(i, tokens, n_generated=len(ids), forced=True)
        ids += tokens
        notes.action(notes.call(added, "m"), "Backtrack", backtrack_steps=n_back, tokens=[i])
        ids = [*ids[: max(0, len(ids) - n_back)], i]
    assert final_ids(read_trace(notes.trace.to_json())) == ids


# ---- attention


def softmax(rows: np.ndarray) -> np.ndarray:
    shifted = np.exp(rows - rows.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("kind", ["probs", "scores", "logits"])
def test_top_columns_are_the_mean_over_layers_and_heads(kind: Any):
    raw = np.random.default_rng(1).normal(size=(2, 3, 50)).astype(np.float32)
    scale = 0.25
    given = {"probs": softmax(raw), "scores": raw, "logits": raw}[kind]
    expected = softmax(raw * scale if kind == "logits" else raw).mean(axis=(0, 1))
    found = top_columns(given.astype(np.float32), Capture(kind), scale=scale, k=8)
    assert found is not None
    best = np.argsort(-expected)[:8]
    assert found["positions"] == best.tolist()
    assert found["weights"] == pytest.approx(expected[best], abs=1e-5)
    assert found["rest"] == pytest.approx(1 - expected[best].sum(), abs=1e-4)
    assert found["n_columns"] == 50


def test_top_columns_of_layers_that_differ_and_of_captured_positions():
    uneven = (np.full((2, 4), 0.25, np.float32), np.full((1, 4), 0.25, np.float32))
    found = top_columns(uneven, Capture("probs"), k=99)
    assert found is not None
    assert found["weights"] == [0.25] * 4
    picked = np.array([[0.6, 0.2], [0.5, 0.3]], np.float32)
    at = np.array([[3, 1], [1, 3]], np.int32)
    found = top_columns(picked, Capture("probs", top_k=2), positions=at, n_columns=9, k=2)
    assert found == {"positions": [3, 1], "weights": [0.45, 0.35], "rest": 0.2, "n_columns": 9}
    assert top_columns((), Capture("probs", layers=(), hidden=[0])) is None
