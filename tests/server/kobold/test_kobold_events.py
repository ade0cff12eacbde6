"""Events and frames of the kobold dialect, made of tokens without an engine."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from kqview.server.api.koboldai.events import KoboldEvents, KoboldFrames, PlainEvents
from kqview.server.api.koboldai.request import KoboldPlan
from kqview.server.api.wire.attention import RowWriter
from kqview.server.models.run import AttentionWanted, Step
from kqview.server.web.endpoint import EVENT_HEAD, EVENT_TAIL, NEXT_EVENT
from kqview.stop_strings import ShownText, TextStream
from kqview.types import Token, Usage
from tests.support.kobold import golden

if TYPE_CHECKING:
    from collections.abc import Sequence

LOGITS = AttentionWanted("logits")
ROWS = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def ended(text: str = "", stop: str | None = None, reason: str = "length", **facts: Any) -> Any:
    """What renderers see of a run."""
    return SimpleNamespace(
        label=facts.get("request_id", "r"),
        n_tokens=facts.get("n_tokens", 0),
        finish_reason=reason,
        count_copied=lambda n_bytes: None,
        generations=(
            SimpleNamespace(text=text, stop_match=stop, tool_calls=None, prompt_ids=[5, 6]),
        ),
        usage=Usage(2, 1, 3, 0.25, 0.5, 0.125),
        request=SimpleNamespace(sampling=SimpleNamespace(seed=7)),
        n_truncated=facts.get("n_truncated", 0),
        text=text + (stop or ""),
    )


def step(id_: int = 7, text: str = "x", rows: Any = None, **more: Any) -> Step:
    return Step(0, Token(id_, text, 0, attention=rows, **more))


def facts_of(wanted: AttentionWanted | None = LOGITS, layers: Any = None) -> RowWriter | None:
    return None if wanted is None else RowWriter(wanted, layers, 2, 3, has_sinks=False)


def typed(
    wanted: AttentionWanted | None = LOGITS, layers: Any = None, *more: Any, **options: Any
) -> KoboldEvents:
    return KoboldEvents(plan_of(facts_of(wanted, layers), *more, **options))


def plan_of(rows: RowWriter | None, ignored: Sequence[str] = (), **options: Any) -> KoboldPlan:
    request: Any = SimpleNamespace(n_samples=1)
    named = b"<%d>".__mod__
    return KoboldPlan(request=request, rows=rows, ignored=ignored, token_bytes=named, **options)


def frames_of(rows: RowWriter | None, **options: Any) -> KoboldFrames:
    return KoboldFrames(plan_of(rows, **options))


def joined(pieces: Any) -> Any:
    return msgspec.json.decode(b"".join(pieces))


# ---- typed events


def test_typed_events_are_the_documents():
    case = golden("typed_events")
    run = ended(reason=case["finish_reason"], n_tokens=case["n_tokens"], request_id="test-123")
    rows = np.array(case["rows"], np.float32)
    event = joined(typed().token(run, step(case["token"]["id"], case["token"]["text"], rows)))
    added = golden("additions")
    assert event == case["token_event"] | {
        "attention": case["token_event"]["attention"] | added["attention"]
    }
    assert joined(typed().done(run)) == case["done_event"] | added["done"]


def test_large_base64_stays_one_piece():
    pieces = typed().token(ended(), step(rows=ROWS))
    assert base64.b64decode(pieces[1]) == ROWS.tobytes()
    assert len(pieces) == 3


def test_event_is_one_line_of_data():
    text = 'line\nbreak \r and "quotes" \x00 é'
    pieces = typed().token(ended(request_id=text), step(text=text, rows=ROWS))
    assert not {b"\n", b"\r"} & {bytes([byte]) for byte in b"".join(pieces)}
    assert joined(pieces)["token"]["text"] == joined(pieces)["request_id"] == text


def test_token_without_attention_says_null():
    event = joined(typed(None).token(ended(), step()))
    assert event["attention"] is None


def test_logprobs_stand_in_the_token_where_asked_for():
    token = step(rows=None, logprob=-0.25, top_logprobs=[(7, -0.25), (9, -1.5)])
    event = joined(typed(None).token(ended(), token))
    assert event["token"]["logprob"] == -0.25
    assert event["token"]["top_logprobs"][1] == {"token_id": 9, "text": "<9>", "logprob": -1.5}


def start_of(pieces: Sequence[bytes]) -> tuple[Any, Any]:
    """The start event, and the one that follows it."""
    first, _, second = b"".join(pieces).partition(NEXT_EVENT)
    return msgspec.json.decode(first), msgspec.json.decode(second)


def test_start_event_precedes_the_first_one_if_asked_for():
    run = ended(request_id="test-123", n_truncated=9)
    events = typed(LOGITS, None, ["max_lenght"], has_start=True)
    start, token = start_of(events.token(run, step(rows=ROWS)))
    assert start == golden("additions")["start"]
    assert token["type"] == "token"
    assert joined(events.token(run, step(rows=ROWS)))["type"] == "token"


def test_start_event_of_a_stream_without_tokens_precedes_its_end():
    start, done = start_of(typed(None, has_start=True).done(ended()))
    assert (start["type"], done["type"]) == ("start", "done")
    assert "attention" not in start


def test_start_frame_has_no_binary_one():
    frames = frames_of(facts_of(), has_start=True)
    start, token, binary = frames.token(ended(), step(rows=ROWS))
    assert isinstance(binary, bytes)
    assert msgspec.json.decode(start)["type"] == "start"
    assert msgspec.json.decode(token)["type"] == "token"
    assert len(frames.token(ended(), step(rows=ROWS))) == 2


@pytest.mark.parametrize(
    ("wanted", "has_sinks", "says"),
    [
        (AttentionWanted("probs"), False, {"values": "probs", "row_sum": "1"}),
        (AttentionWanted("scores"), False, {"values": "scores", "row_sum": None}),
        (AttentionWanted("probs"), True, {"sinks": True}),
        (AttentionWanted("probs", "aggregated"), False, {"shape": [None]}),
        (AttentionWanted("probs", "sparse"), False, {"format": "sparse"}),
        (AttentionWanted(spans=((0, 2), (2, None))), False, {"shape": [2, 3, 2]}),
    ],
)
def test_start_event_says_what_the_rows_are(
    wanted: AttentionWanted, has_sinks: bool, says: dict[str, Any]
):
    described = RowWriter(wanted, None, 2, 3, has_sinks).described()
    described = msgspec.to_builtins(described)
    assert {name: described[name] for name in says} == says
    assert ("shape" in described) is (wanted.format in ("per_layer", "aggregated"))


def test_rows_of_a_model_with_sinks_say_so():
    facts = RowWriter(AttentionWanted("probs"), None, 2, 3, has_sinks=True)
    event = joined(KoboldEvents(plan_of(facts)).token(ended(), step(rows=ROWS)))
    assert event["attention"]["sinks"] is True
    row_sum = facts.described().row_sum
    assert row_sum is not None
    assert row_sum.startswith("less than 1")


def test_end_tells_the_true_reason_and_what_was_left_out():
    run = ended(reason="stop_sequence", n_truncated=9)
    done = joined(typed(None, None, ["max_lenght"]).done(run))
    assert (done["finish_reason"], done["reason"]) == ("stop", "stop_sequence")
    assert (done["truncated_tokens"], done["ignored"]) == (9, ["max_lenght"])
    plain = joined(PlainEvents((), ["max_lenght"], trims=True).done(run))
    assert plain == {
        "token": "", "finish_reason": "stop", "truncated_tokens": 9, "ignored": ["max_lenght"]
    }  # fmt: skip


# ---- plain events


def plain_events(stream: PlainEvents, texts: list[str], run: Any) -> list[dict[str, Any]]:
    """What a client reads of these tokens and the end."""
    sent: list[bytes] = []
    for text in texts:
        frames = stream.token(run, step(text=text))
        sent += [EVENT_HEAD, *frames, EVENT_TAIL] if frames else []
    raw = b"".join([*sent, EVENT_HEAD, *stream.done(run), EVENT_TAIL])
    lines = raw.decode().split("\n")
    assert set(lines[0::3]) == {"event: message", ""}
    assert set(lines[2::3]) == {""}
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines[1::3]]


def test_plain_events_are_the_documents():
    case = golden("plain_events")
    run = ended("".join(case["texts"]), reason=case["finish_reason"])
    assert plain_events(PlainEvents((), trims=True), case["texts"], run) == case["events"]


def test_what_only_looked_like_a_stop_sequence_comes_at_the_end():
    run = ended("a </to", reason="stop")
    events = plain_events(PlainEvents(["</tool>"], trims=True), ["a ", "</to"], run)
    assert [(e["token"], e["finish_reason"]) for e in events] == [
        ("a ", None), ("</to", None), ("", "stop"),
    ]  # fmt: skip


@given(st.text("ab<", max_size=24), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3),
       st.lists(st.integers(1, 5), max_size=24))  # fmt: skip
def test_shown_text_is_all_but_what_stops(text: str, stops: list[str], lengths: list[int]):
    engine, held, shown = TextStream(stops), ShownText(stops), ""
    pieces, at = [], 0
    for length in [*lengths, len(text)]:
        pieces.append(text[at : at + length])
        at += length
    for piece in pieces:
        engine.feed(piece.encode())
        shown += held.feed(piece)
        # Never more than what is before the stop sequence, and no less than is certain.
        assert engine.text_before_stop.startswith(shown)
        if engine.stop_match is not None:
            break
        rest = engine.text[len(shown) :]
        assert rest == "" or any(stop.startswith(rest) for stop in stops)


# ---- frames


def test_frames_are_the_documents():
    case = golden("socket_frames")
    run = ended(reason=case["finish_reason"], n_tokens=case["n_tokens"])
    rows = np.array(case["rows"], np.float32)
    token = step(case["token"]["id"], case["token"]["text"], rows)
    text, binary = frames_of(facts_of(LOGITS, None)).token(run, token)
    assert msgspec.json.decode(text) == case["text_frame"]
    assert binary == bytes.fromhex(case["binary_frame_hex"])
    (done,) = frames_of(facts_of(LOGITS, None)).done(run)
    assert msgspec.json.decode(done) == case["final_frame"] | golden("additions")["done"]


def test_token_without_attention_has_an_empty_binary_frame():
    text, binary = frames_of(facts_of(None, None)).token(ended(), step())
    assert msgspec.json.decode(text) == {"type": "token", "token_id": 7, "text": "x"}
    assert binary == b""


@pytest.mark.parametrize(
    ("wanted", "layers", "rows", "says"),
    [
        (AttentionWanted(format="aggregated"), None, ROWS[0, 0], {"format": "aggregated"}),
        (AttentionWanted(dtype="float16"), None, ROWS.astype("<f2"), {"dtype": "float16"}),
        (AttentionWanted(heads=(0, 1, 2)), None, ROWS, {"shape": [2, 3, 4]}),
        (AttentionWanted(spans=((0, None),)), None, ROWS[..., :1], {"spans": [[0, None]]}),
        (AttentionWanted(), (1, 3), ROWS, {"layers": [1, 3], "shape": [2, 3, 4]}),
        (AttentionWanted(), None, (ROWS[0], ROWS[1, :2]), {"heads_by_layer": [3, 2]}),
    ],
)
def test_unusual_rows_say_what_they_are(
    wanted: AttentionWanted, layers: Any, rows: Any, says: dict[str, Any]
):
    text, binary = frames_of(facts_of(wanted, layers)).token(ended(), step(rows=rows))
    attention = msgspec.json.decode(text)["attention"]
    assert {name: attention[name] for name in says} == says
    assert "data" not in attention
    assert isinstance(binary, bytes)
    assert len(binary) == np.prod(attention["shape"]) * np.dtype(attention["dtype"]).itemsize


def test_format_without_an_array_stands_in_the_text_frame():
    wanted = AttentionWanted("probs", "viz")
    text, binary = frames_of(facts_of(wanted, None)).token(ended(), step(rows=ROWS))
    assert len(msgspec.json.decode(text)["attention"]["mean_by_layer"]) == 2
    assert binary == b""
