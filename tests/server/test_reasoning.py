"""Reasoning apart from content, whatever the pieces in which an answer comes."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kqview.server.api.reasoning import (
    HarmonySplitter,
    MarkerSplitter,
    NoReasoning,
    Piece,
    TagSplitter,
    ThinkSplitter,
    joined,
    opened_by,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kqview.server.api.reasoning import Splitter

SPLITTERS: dict[str, Callable[[], Splitter]] = {
    "none": NoReasoning,
    "think": ThinkSplitter,
    "think opened": lambda: ThinkSplitter(opened_by="<think>"),
    "tags": lambda: TagSplitter({"analysis": "reasoning", "final": "content"}),
    "marker": lambda: MarkerSplitter("===FINAL==="),
    "harmony": HarmonySplitter,
}
WORDS = (
    "<think>", "</think>", "<analysis>", "</analysis>", "<final>", "</final>", "===FINAL===",
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "analysis", "final",
    "commentary to=functions.f ", "assistant", "<", "<|", "=", " ", "\n", "a", "é", "🙂",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=12).map("".join)


def split(splitter: Splitter, parts: Sequence[str]) -> list[Piece]:
    pieces = [piece for part in parts for piece in splitter.feed(part)]
    return joined([*pieces, *splitter.flush()])


@pytest.mark.parametrize("name", SPLITTERS)
@settings(max_examples=50, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=8))
@example(text="<think>a</think>b", cuts=[3, 9, 12])
def test_any_cutting_of_any_text_gives_the_same_split(name: str, text: str, cuts: list[int]):
    whole = split(SPLITTERS[name](), [text])
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [text[start:end] for start, end in pairwise(ends)]
    assert split(SPLITTERS[name](), parts) == whole
    assert split(SPLITTERS[name](), list(text)) == whole


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("none", "<think>a</think>b", [("content", "<think>a</think>b")]),
        ("think", "<think>\n a b \n</think>\n\nc d ", [("reasoning", "a b"), ("content", "c d ")]),
        ("think", " no mark <think>x</think>", [("content", " no mark <think>x</think>")]),
        ("think", "\n[THINK]a[/THINK]b", [("reasoning", "a"), ("content", "b")]),
        ("think", "<think>cut off ", [("reasoning", "cut off")]),
        ("think", "<think></think>b", [("content", "b")]),
        ("think", "<thin", [("content", "<thin")]),
        ("think opened", "a</think>b", [("reasoning", "a"), ("content", "b")]),
        ("think opened", "a</thin", [("reasoning", "a</thin")]),
        (
            "tags",
            "<analysis>a < b</analysis>\n<final>c</final>",
            [("reasoning", "a < b"), ("content", "\nc")],
        ),
        ("marker", "a\n===FINAL===\nb", [("reasoning", "a\n"), ("content", "\nb")]),
        ("marker", "a===FIN", [("reasoning", "a===FIN")]),
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b",
            [("reasoning", "a"), ("content", "b")],
        ),
        (
            "harmony",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            [("call", "{}")],
        ),
        (
            "harmony",
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.g"
            "<|channel|>commentary json<|message|><|call|>",
            [("content", "I look."), ("call", "")],
        ),
        ("harmony", "no channel at all", [("content", "no channel at all")]),
    ],
)  # fmt: skip
def test_answer_is_split_at_its_marks(name: str, text: str, expected: list[tuple[str, str]]):
    pieces = split(SPLITTERS[name](), [text])
    assert [(piece.kind, piece.text) for piece in pieces] == expected


def test_call_of_a_channel_names_its_function():
    text = "<|channel|>commentary to=functions.look_up <|message|>{}"
    assert {piece.name for piece in split(HarmonySplitter(), [text])} == {"look_up"}


def test_reasoning_comes_while_it_is_written():
    splitter = ThinkSplitter()
    assert splitter.feed("<think>One") == [Piece("reasoning", "One")]
    assert splitter.feed(" two</th") == [Piece("reasoning", " two")]
    assert splitter.feed("ink>Three") == [Piece("content", "Three")]
    harmony = HarmonySplitter()
    assert harmony.feed("Unmarked") == [Piece("content", "Unmarked")]


@pytest.mark.parametrize(
    ("prompt", "mark"),
    [("...<think>\n", "<think>"), ("[THINK]", "[THINK]"), ("<think>\n</think>\n", None)],
)
def test_prompt_that_ends_with_an_open_mark_is_noticed(prompt: str, mark: str | None):
    assert opened_by(prompt) == mark
