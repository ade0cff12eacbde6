"""Frames of an answer, field for field, from tokens that are given: no model is needed."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, strategies as st

from kqview.chat.reasoning import Split
from kqview.chat.turn import Reading
from kqview.server.apps.mia4 import turn
from kqview.server.apps.mia4.turn import FrameWriter
from kqview.server.errors import Answer
from kqview.types import Usage
from tests.support import mia4

if TYPE_CHECKING:
    from collections.abc import Sequence

GOLDENS = Path(__file__).with_name("goldens")
CUT = 4  # characters of a token
MARKED = "Tom asks.\n===FINAL===\nAnna is."
TAGGED = "<analysis>Tom asks.</analysis><final>Anna is.</final>"
MARKER = Split(mode="marker", marker="===FINAL===")
TAGS = Split(mode="tags", marker="===FINAL===")


def written(
    parts: Sequence[str], split: Split, *, stop: str = "", **options: Any
) -> list[mia4.Frame]:
    """Every frame of an answer of these tokens; *stop* was found after them."""
    options = {"drops_reasoning": False, **options}
    reading = Reading(split=split, stops=(stop,) if stop else ())
    writer = FrameWriter("r-1", "demo", reading, **options)
    sent = [one for i, part in enumerate(parts) for one in writer.feed(part, i)]
    whole = "".join(parts)
    sent += writer.finish(whole.partition(stop)[0] if stop else whole)
    used = Usage(prompt_tokens=7, completion_tokens=len(parts))
    usage = turn.usage_of("r-1", "demo", used, 0.5, writer.tokens)
    sent += [turn.encoded(one) for one in (usage, turn.end_of("r-1", "stop"))]
    return list(mia4.frames_of(b"\n\n".join(sent).decode().split("\n")))


def cut(text: str) -> list[str]:
    return [text[i : i + CUT] for i in range(0, len(text), CUT)]


CASES = {
    "answer": written(cut("Anna is."), Split()),
    "answer_attention": written(cut("Anna is."), Split(), has_attention=True),
    "stop": written(cut("Anna is Tom"), Split(), stop="Tom"),
    "marker": written(cut(MARKED), MARKER),
    "marker_dropped": written(cut(MARKED), MARKER, drops_reasoning=True),
    "marker_missing": written(cut("Anna is."), MARKER),
    "marker_missing_attention": written(cut("Anna is."), MARKER, has_attention=True),
    "tags": written(cut(TAGGED), TAGS),
    "tags_attention": written(cut(TAGGED), TAGS, has_attention=True),
    "tags_dropped": written(cut(TAGGED), TAGS, drops_reasoning=True),
    "tags_missing": written(cut(MARKED), TAGS),
    "think": written(cut("<think>Tom asks.</think>Anna is."), Split()),
    "harmony": written(
        cut("<|channel|>analysis<|message|>Tom asks.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Anna is."),
        Split(mode="harmony"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_frames_are_the_golden(name: str):
    golden = json.loads((GOLDENS / "frames.json").read_text("utf-8"))
    assert [list(one) for one in CASES[name]] == golden[name]


def test_error_has_the_fields_of_the_seed():
    writer = FrameWriter("r-1", "demo", Reading(), drops_reasoning=True)
    last = writer.error(Answer(503, "OOM", "no memory")), turn.end_of("r-1", "error")
    sent = [turn.encoded(one) for one in last]
    assert list(mia4.frames_of(b"\n\n".join(sent).decode().split("\n"))) == [
        ("error", {"request_id": "r-1", "model_id": "demo", "code": "OOM",
                   "error_type": "unavailable", "message": "no memory"}),
        ("end", {"request_id": "r-1", "status": "error", "stop_reason": "error"}),
    ]  # fmt: skip


TEXTS = st.sampled_from([MARKED, TAGGED, "Anna is.", "<think>Tom asks.</think>Anna <is.", ""])


@given(
    text=TEXTS,
    split=st.sampled_from([MARKER, TAGS, Split()]),
    cuts=st.lists(st.integers(0, 60)),
    has_attention=st.booleans(),
)
def test_any_cutting_gives_the_same_texts_and_each_token_its_row(
    text: str, split: Split, cuts: list[int], has_attention: bool
):
    ends = [0, *sorted(min(one, len(text)) for one in cuts), len(text)]
    parts = [text[i:j] for i, j in pairwise(ends)]
    found = written(parts, split, has_attention=has_attention)
    whole = written([text], split)
    for name in ("token", "analysis"):
        assert mia4.text_of(found, name) == mia4.text_of(whole, name)
        sent = mia4.named(found, name)
        assert [one["seq"] for one in sent] == list(range(len(sent)))
        if not has_attention:
            continue
        indices = [int(one["attention"].rpartition("/")[2]) for one in sent]
        assert indices == sorted(indices)
        # Of its own token, a frame has a part of the text.
        assert all(one["text"] in parts[i] for one, i in zip(sent, indices, strict=True))
    assert mia4.named(found, "reasoning") == mia4.named(whole, "reasoning")
    [usage] = mia4.named(found, "usage")
    assert usage["output_tokens"] >= usage["reasoning_tokens"] + usage["final_tokens"]
    mia4.check_end(found)
