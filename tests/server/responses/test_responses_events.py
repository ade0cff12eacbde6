"""The response of an answer, whole and as its events: pure, with a run made up for it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kqview.chat.turn import Reading
from kqview.server.api.responses import schema
from kqview.server.api.responses.events import ResponseWriter
from kqview.server.api.wire.chat import ChatWork
from kqview.server.errors import Answer
from kqview.server.web.budget import uncounted
from kqview.server.web.endpoint import NAMED_HEAD
from kqview.types import Usage

NO_ATTENTION: Any = SimpleNamespace(token=lambda run, step: (None, None))
PIECES = ["<think>Hm", "m.</think>", "It is", " noon."]


def writer_of(**fields: Any) -> ResponseWriter:
    body = msgspec.convert({"input": "Time?", **fields}, schema.ResponsesBody)
    work = ChatWork(cast("Any", SimpleNamespace(request_id="resp_1")), Reading(calls="hermes"))
    writer = ResponseWriter(body, "demo", work, lambda id_: b"%d" % id_)
    writer.attention = NO_ATTENTION
    return writer


def run_of(text: str, reason: str = "stop") -> Any:
    usage = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=len(PIECES))
    generation = SimpleNamespace(text=text, usage=usage, tool_calls=None)
    hold = uncounted()
    return SimpleNamespace(
        generations=(generation,), usage=usage, finish_reason=reason, hold=hold, is_over=True
    )


def step_of(text: str, id_: int = 0, logprob: float | None = None) -> Any:
    top = None if logprob is None else [(id_, logprob)]
    token = SimpleNamespace(text=text, id=id_, logprob=logprob, top_logprobs=top)
    return SimpleNamespace(token=token, sample=0)


def read(frames: list[bytes]) -> list[dict[str, Any]]:
    """Data of the events in *frames*."""
    stream = b"".join(frames)
    if not stream:
        return []
    lines = [event.split("\n") for event in (NAMED_HEAD + stream).decode().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in lines]
    assert [name.removeprefix("event: ") for name, _ in lines] == [one["type"] for one in events]
    return events


def test_stream_has_reasoning_then_text_in_numbered_events() -> None:
    run = run_of("".join(PIECES))
    stream = writer_of()
    frames = [stream.token(run, step_of(text)) for text in PIECES]
    events = [event for each in [*frames, stream.done(run)] for event in read(each)]
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", *["reasoning_text.delta"] * 2,
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", *["output_text.delta"] * 2,
        "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    created, final = events[0]["response"], events[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert final["id"] == created["id"] == "resp_1"
    assert [item["content"][0]["text"] for item in final["output"]] == ["Hmm.", "It is noon."]
    usage = final["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (9, 4)
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2
    assert usage["total_tokens"] == 13


def test_events_have_timings_and_progress_if_asked_for() -> None:
    run = run_of("It is noon.")
    stream = writer_of(timings_per_token=True, return_progress=True)
    events = read(stream.token(run, step_of("It is noon."))) + read(stream.done(run))
    progress = [one["prompt_progress"] for one in events if "prompt_progress" in one]
    assert [(one["cache"], one["processed"], one["total"]) for one in progress] == [
        (4, 4, 9), (4, 9, 9),
    ]  # fmt: skip
    timed = [one["type"] for one in events if "timings" in one]
    assert timed == ["response.output_text.delta", "response.completed"]


def test_logprobs_of_text_are_its_tokens_own() -> None:
    run = run_of("".join(PIECES))
    writer = writer_of(top_logprobs=1)
    for i, text in enumerate(PIECES):
        writer.feed(run, step_of(text, i, -float(i)).token)
    writer.finish(run)
    _, message = msgspec.to_builtins(writer.message(run))["output"]
    found = [(one["token"], one["logprob"]) for one in message["content"][0]["logprobs"]]
    assert found == [("2", -2.0), ("3", -3.0)]
    top = message["content"][0]["logprobs"][0]["top_logprobs"]
    assert top == [{"token": "2", "bytes": [50], "logprob": -2.0}]


def test_response_that_is_cut_off_is_incomplete() -> None:
    run = run_of("It is", "length")
    stream = writer_of(max_output_tokens=4)
    *_, item, last = read(stream.done(run))
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert item["item"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_prompt"), (429, "rate_limit_exceeded"), (503, "server_error")],
)
def test_failure_ends_the_stream_with_its_reason(status: int, code: str) -> None:
    stream = writer_of()
    created, _, failed = read(stream.error(None, Answer(status, "CODE", "what was wrong")))
    assert created["type"] == "response.created"
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": "what was wrong"}


def test_response_repeats_what_was_asked() -> None:
    tool = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
    writer = writer_of(
        instructions="Be brief.", temperature=0.5, tools=[tool], tool_choice="required",
        parallel_tool_calls=False, metadata={"a": "b"}, reasoning={"effort": "low"},
    )  # fmt: skip
    run = run_of("It is noon.")
    writer.finish(run)
    whole = msgspec.to_builtins(writer.message(run))
    assert whole["instructions"] == "Be brief."
    assert whole["temperature"] == 0.5
    assert whole["tools"][0]["name"] == "clock"
    assert whole["tool_choice"] == "required"
    assert whole["parallel_tool_calls"] is False
    assert whole["metadata"] == {"a": "b"}
    assert whole["reasoning"]["effort"] == "low"
    assert whole["text"]["format"]["type"] == "text"
    assert whole["store"] is False
    assert "attention" not in whole
