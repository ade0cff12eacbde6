"""The message of an answer, whole and as its events: pure, with a run made up for it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kqview.chat.turn import Reading
from kqview.server.api.anthropic.events import MessageWriter, error_body
from kqview.server.api.wire.chat import ChatWork
from kqview.server.errors import Answer
from kqview.server.web.endpoint import NAMED_HEAD
from kqview.types import Usage

NO_ATTENTION: Any = SimpleNamespace(token=lambda run, step: (None, None))
PIECES = ["<think>Hm", "m.</think>", "It is", " noon."]


def writer_of(reading: Reading | None = None) -> MessageWriter:
    request = cast("Any", SimpleNamespace(request_id="msg_1"))
    writer = MessageWriter(None, "demo", ChatWork(request, reading or Reading()), lambda id_: b"")
    writer.attention = NO_ATTENTION
    return writer


def run_of(text: str, reason: str = "stop", stop_match: str | None = None) -> Any:
    usage = Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=len(PIECES))
    generation = SimpleNamespace(text=text, stop_match=stop_match, tool_calls=None)
    return SimpleNamespace(generations=(generation,), usage=usage, finish_reason=reason)


def step_of(text: str) -> Any:
    return SimpleNamespace(token=SimpleNamespace(text=text), sample=0)


def read(frames: list[bytes]) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of the events in *frames*."""
    stream = b"".join(frames)
    if not stream:
        return []
    events = (NAMED_HEAD + stream).decode().split("\n\n")
    lines = [event.split("\n") for event in events]
    return [(name.removeprefix("event: "), json.loads(data[6:])) for name, data in lines]


def test_stream_has_anthropics_events_in_anthropics_order() -> None:
    run = run_of("".join(PIECES))
    stream = writer_of()
    frames = [frame for text in PIECES for frame in [stream.token(run, step_of(text))]]
    events = [event for each in [*frames, stream.done(run)] for event in read(each)]
    assert [name for name, _ in events] == [data["type"] for _, data in events]
    assert [name for name, _ in events] == [
        "message_start",
        *("content_block_start", *["content_block_delta"] * 3, "content_block_stop"),
        *("content_block_start", *["content_block_delta"] * 2, "content_block_stop"),
        "message_delta", "message_stop",
    ]  # fmt: skip
    start, end = events[0][1]["message"], events[-2][1]
    assert (start["id"], start["content"], start["stop_reason"]) == ("msg_1", [], None)
    assert start["usage"]["input_tokens"] == 5
    assert start["usage"]["cache_read_input_tokens"] == 4
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 4
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert deltas[2] == {"type": "signature_delta", "signature": ""}
    assert "".join(one["thinking"] for one in deltas[:2]) == "Hmm."
    assert "".join(one["text"] for one in deltas[3:]) == "It is noon."


@pytest.mark.parametrize(
    ("reason", "stop_reason"),
    [
        ("stop", "end_turn"), ("stop_token", "end_turn"), ("cancelled", "end_turn"),
        ("length", "max_tokens"), ("stop_sequence", "stop_sequence"),
    ],
)  # fmt: skip
def test_reason_of_the_end_is_named_as_anthropic_does(reason: str, stop_reason: str) -> None:
    run = run_of("It is", reason, stop_match=" noon" if reason == "stop_sequence" else None)
    writer = writer_of()
    writer.finish(run)
    message = writer.message(run)
    assert (message.stop_reason, message.stop_sequence) == (
        stop_reason,
        " noon" if reason == "stop_sequence" else None,
    )


@pytest.mark.parametrize(
    ("reason", "stop_reason"), [("stop", "tool_use"), ("length", "max_tokens")]
)
def test_answer_with_calls_ends_with_tool_use(reason: str, stop_reason: str) -> None:
    text = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    run = run_of(text, reason)
    writer = writer_of(Reading(calls="hermes"))
    writer.finish(run)
    message = writer.message(run)
    assert message.stop_reason == stop_reason
    assert [(block.name, block.input) for block in message.content] == [("clock", {"zone": "UTC"})]


def test_failure_is_an_error_event() -> None:
    stream = writer_of()
    ((name, data),) = read(stream.error(None, Answer(503, "BUSY", "full; try again later")))
    assert name == "error"
    assert data["error"] == {"type": "overloaded_error", "message": "full; try again later"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "not_found_error"), (405, "invalid_request_error"), (413, "request_too_large"),
        (429, "rate_limit_error"), (500, "api_error"), (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)  # fmt: skip
def test_error_has_anthropics_form(status: int, kind: str) -> None:
    assert msgspec.to_builtins(error_body(Answer(status, "CODE", "what was wrong"))) == {
        "type": "error",
        "error": {"type": kind, "message": "what was wrong"},
    }


def test_each_block_is_opened_filled_and_closed_in_order() -> None:
    text = "<think>Hmm.</think>It is noon." + "".join(
        f'<tool_call>\n{{"name": "clock", "arguments": {arguments}}}\n</tool_call>'
        for arguments in ('{"zone": "UTC"}', "{}")
    )
    writer, run = writer_of(Reading(calls="hermes")), run_of(text)
    events = [event for _, event in read(writer.done(run))]
    kinds = [event["type"].removeprefix("content_block_") for event in events]
    assert kinds == [
        "message_start",
        *("start", "delta", "delta", "stop"),  # with the signature
        *("start", "delta", "stop"),
        *("start", "delta", "stop"),
        *("start", "delta", "stop"),
        "message_delta", "message_stop",
    ]  # fmt: skip
    blocks = [event for event in events if "index" in event]
    assert [event["index"] for event in blocks] == [0] * 4 + [1] * 3 + [2] * 3 + [3] * 3
    assert blocks[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    begun = blocks[7]["content_block"]
    assert (begun["type"], begun["name"], begun["input"]) == ("tool_use", "clock", {})
    thought, said, first, second = msgspec.to_builtins(writer.message(run).content)
    assert thought == {"type": "thinking", "thinking": "Hmm.", "signature": ""}
    assert said == {"type": "text", "text": "It is noon."}
    assert (first["input"], second["input"]) == ({"zone": "UTC"}, {})


def test_arguments_that_were_cut_off_are_none() -> None:
    run = run_of('<tool_call>\n{"name": "clock", "arguments": {"zone": "U', "length")
    writer = writer_of(Reading(calls="hermes"))
    writer.finish(run)
    assert [block.input for block in writer.message(run).content] == [{}]
