"""Reasoning apart from content, whatever the pieces in which an answer comes."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings, strategies as st

from kqview.chat.reasoning import (
    THINK_TAGS,
    Piece,
    Split,
    TokenCounter,
)
from kqview.chat.turn import opened_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kqview.chat.reasoning import HarmonySplitter, MarkSplitter

    Splitter = MarkSplitter | HarmonySplitter

MARKER = "===FINAL==="
SPLITS = {
    "none": Split(mode="none"),
    "think": Split(),
    "think opened": Split(opened="<think>"),
    "tags": Split(mode="tags", marker=MARKER),
    "tags opened": Split(mode="tags", marker=MARKER, opened="<analysis>"),
    "tags alone": Split(mode="tags"),
    "marker": Split(mode="marker", marker=MARKER),
    "harmony": Split(mode="harmony"),
    "frames": Split(frames=("<final>", "</final>")),
    "recipients": Split(mode="harmony", has_recipients=True),
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


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """*pieces* with adjacent ones of one kind joined; each call stays one piece."""
    whole: list[Piece] = []
    for piece in pieces:
        begins_call = piece.kind == "call" and not piece.text
        if whole and whole[-1].kind == piece.kind and not begins_call:
            whole[-1] = Piece(piece.kind, whole[-1].text + piece.text, piece.name)
        else:
            whole.append(piece)
    return whole


def visible(pieces: Iterable[Piece]) -> list[Piece]:
    return joined(piece for piece in pieces if piece.kind != "mark")


def parts_of(text: str, cuts: Sequence[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=8))
@example(text="<think>a</think>b", cuts=[3, 9, 12])
def test_any_cutting_of_any_text_gives_the_same_split(name: str, text: str, cuts: list[int]):
    split_ = SPLITS[name]
    whole = split(split_.splitter(), [text])
    assert split(split_.splitter(), parts_of(text, cuts)) == whole
    assert split(split_.splitter(), list(text)) == whole
    assert "".join(piece.text for piece in whole) == text


# ---- the same split of a whole text, in a simple way


def by_thinking(text: str, *, is_open: bool) -> list[Piece]:
    begun = "" if is_open else r"\s*<(?P<tag>think|thinking|seed:think)>"
    end = "</think>" if is_open else "</(?P=tag)>"
    closes = "|".join(map(re.escape, THINK_TAGS.values()))
    bare = re.fullmatch(rf"\s*(?:{closes})(.*)", text, re.DOTALL)
    if bare is not None and not is_open:
        return [Piece("content", bare[1].lstrip())]
    found = re.fullmatch(f"{begun}(.*?)(?:{end}(.*))?", text, re.DOTALL)
    if found is None:
        return [Piece("content", text)]
    reasoning, content = found.groups()[-2:]
    return [Piece("reasoning", reasoning.strip()), Piece("content", (content or "").lstrip())]


def by_tags(text: str, marker: str, *, is_open: bool) -> list[Piece]:
    ends = {
        "<analysis>": ["</analysis>", "<final>", marker],
        "</analysis>": ["<analysis>", "<final>"],
        "<final>": ["</final>"],
        "</final>": ["<analysis>", "<final>"],
        marker: [],
    }
    mark, pieces = "<analysis>", []
    if not is_open:
        begun, mark, text = at_first(["<analysis>", "</analysis>", "<final>", marker], text)
        if not mark:
            return [Piece("content", begun)]
        pieces = [Piece("reasoning", begun.strip())]
    while mark:
        kind = "reasoning" if mark == "<analysis>" else "content"
        before, mark, text = at_first(ends[mark], text)
        is_bare = kind == "reasoning" or mark
        pieces.append(Piece(kind, before.strip() if is_bare else before.lstrip()))
    return pieces


def at_first(marks: Sequence[str], text: str) -> tuple[str, str, str]:
    """*text* before the first of *marks*, that mark, and the text after it."""
    wanted = "|".join(re.escape(mark) for mark in marks if mark)
    found = re.search(wanted, text) if wanted else None
    return (
        (text, "", "") if found is None else (text[: found.start()], found[0], text[found.end() :])
    )


def by_marker(text: str) -> list[Piece]:
    before, mark, after = text.partition(MARKER)
    if not mark:
        return [Piece("content", text)]
    return [Piece("reasoning", before.strip()), Piece("content", after.lstrip())]


SIMPLE: dict[str, Callable[[str], list[Piece]]] = {
    "none": lambda text: [Piece("content", text)],
    "think": lambda text: by_thinking(text, is_open=False),
    "think opened": lambda text: by_thinking(text, is_open=True),
    "tags": lambda text: by_tags(text, MARKER, is_open=False),
    "tags opened": lambda text: by_tags(text, MARKER, is_open=True),
    "tags alone": lambda text: by_tags(text, "", is_open=False),
    "marker": by_marker,
}


@pytest.mark.parametrize("name", SIMPLE)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@example(text="<analysis>a<analysis>b</analysis>c<final>d</final><final>e")
@example(text="a</analysis>b===FINAL===")
@example(text="<think>cut off ")
@example(text="<analysis>a <analysis>b</analysis><final>c <analysis>d</final>\n")
@example(text=" a===FINAL===b===FINAL===</thin")
def test_split_is_that_of_a_simple_reading_of_the_whole_text(name: str, text: str):
    expected = joined(piece for piece in SIMPLE[name](text) if piece.text)
    assert visible(split(SPLITS[name].splitter(), list(text))) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("think", "<think>\n a b \n</think>\n\nc d ", [("reasoning", "a b"), ("content", "c d ")]),
        ("think", " no mark <think>x</think>", [("content", " no mark <think>x</think>")]),
        ("think", "\n[THINK]a[/THINK]b", [("reasoning", "a"), ("content", "b")]),
        ("think", "</mm:think>a", [("content", "a")]),
        ("tags", "<analysis>a<final>b c ", [("reasoning", "a"), ("content", "b c ")]),
        ("tags", "a</analysis>b", [("reasoning", "a"), ("content", "b")]),
        ("tags", "a\n===FINAL===\nb</final>", [("reasoning", "a"), ("content", "b</final>")]),
        ("tags", " no tags <fin", [("content", " no tags <fin")]),
        (
            "tags",
            "<analysis>a</analysis><final>b</final><analysis>c</analysis><final>d</final>",
            [("reasoning", "a"), ("content", "b"), ("reasoning", "c"), ("content", "d")],
        ),
        ("marker", "a\n===FINAL===\nb", [("reasoning", "a"), ("content", "b")]),
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
        (
            "recipients",
            " to=self<|message|>a<|eom|><|start|>assistant to=user<|message|>b<|eot|>",
            [("reasoning", "a"), ("content", "b")],
        ),
        ("recipients", " to=f<|message|>call", [("content", "call")]),
        ("frames", "<final>a <final>b</final>", [("content", "a b")]),
        ("frames", "<think>a<final></think> <final>b</final>",
         [("reasoning", "a<final>"), ("content", "b")]),
        ("frames", "<|channel>thought\na\n<channel|>b", [("reasoning", "a"), ("content", "b")]),
        ("frames", "Here are my reasoning steps:", [("content", "Here are my reasoning steps:")]),
    ],
)  # fmt: skip
def test_answer_is_split_at_its_marks(name: str, text: str, expected: list[tuple[str, str]]):
    pieces = visible(split(SPLITS[name].splitter(), [text]))
    assert [(piece.kind, piece.text) for piece in pieces] == expected


def test_call_of_a_channel_names_its_function():
    text = "<|channel|>commentary to=functions.look_up <|message|>{}"
    assert {one.name for one in visible(split(SPLITS["harmony"].splitter(), [text]))} == {"look_up"}


def test_reasoning_comes_while_it_is_written():
    splitter = Split().splitter()
    assert splitter.feed("<think>One") == [Piece("mark", "<think>"), Piece("reasoning", "One")]
    assert splitter.feed(" two</th") == [Piece("reasoning", " two")]
    assert splitter.feed("ink>Three") == [Piece("mark", "</think>"), Piece("content", "Three")]
    tags = SPLITS["tags alone"].splitter()
    assert tags.feed("<analysis>One ") == [Piece("mark", "<analysis>"), Piece("reasoning", "One")]
    assert tags.feed("two") == [Piece("reasoning", " two")]
    harmony = SPLITS["harmony"].splitter()
    assert harmony.feed("Unmarked") == [Piece("content", "Unmarked")]


# ---- ending it


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
@example(text="<think>a</th")
@example(text="<analysis>a<fin")
@example(text="a===FINAL")
@example(text="<|channel|>analysis<|message|>a<|en")
@example(text="</analysis><think><analysis>")
def test_closing_text_ends_the_reasoning_and_leaves_it_as_it_is(name: str, text: str):
    splitter = SPLITS[name].splitter()
    pieces = splitter.feed(text)
    closing = splitter.closing
    if closing is None:
        return
    pieces += splitter.feed(closing)
    assert splitter.closing is None
    pieces += splitter.feed("Answer")
    pieces += splitter.flush()
    *before, answer = (piece for piece in pieces if piece.kind != "mark")
    assert answer == Piece("content", "Answer")
    assert "".join(piece.text for piece in pieces) == f"{text}{closing}Answer"
    # Nothing of the closing text, and of a mark that had begun, is reasoning.
    assert sum(len(piece.text) for piece in before) <= len(text)
    assert not any(piece.text.endswith(closing) for piece in before)


@pytest.mark.parametrize(
    ("name", "text", "closing"),
    [
        ("none", "<think>a", None),
        ("think", "<thin", None),
        ("think", "<think>a", "</think>"),
        ("think", "[THINK]a[/TH", "INK]"),
        ("think", "<think>a</think>b", None),
        ("think opened", "", "</think>"),
        ("tags", "a", None),
        ("tags", "<analysis>", "</analysis><final>"),
        ("tags", "<analysis>a</analysi", "s><final>"),
        ("tags", "<analysis>a<fin", "al>"),
        ("tags", "<analysis>a===", "FINAL==="),
        ("tags", "<analysis>a</analysis>", None),
        ("marker", "", "===FINAL==="),
        ("marker", "a==", "=FINAL==="),
        ("marker", "a===FINAL===", None),
        ("harmony", "<|channel|>analysis", None),
        (
            "harmony", "<|channel|>analysis<|message|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
        ),
        ("harmony", "<|channel|>final<|message|>a", None),
    ],
)  # fmt: skip
def test_closing_text_goes_on_from_a_mark_that_has_begun(name: str, text: str, closing: str | None):
    splitter = SPLITS[name].splitter()
    splitter.feed(text)
    assert splitter.closing == closing


def test_closing_text_leaves_room_for_a_call():
    splitter = Split(mode="harmony", may_call=True).splitter()
    splitter.feed("<|channel|>analysis<|message|>a")
    assert splitter.closing == "<|end|><|start|>assistant"


# ---- tokens


@pytest.mark.parametrize("name", SPLITS)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 60), max_size=8), n_silent=st.integers(0, 3))
def test_every_token_is_counted_once(name: str, text: str, cuts: list[int], n_silent: int):
    splitter, counter = SPLITS[name].splitter(), TokenCounter()
    parts = [part for part in parts_of(text, cuts) if part]
    expected: Counter[str] = Counter()
    kinds = [piece.kind for piece in split(SPLITS[name].splitter(), [text]) for _ in piece.text]
    for part in parts:
        counter.add("")
        counter.add(part)
        counter.classify(splitter.feed(part))
        own, kinds = kinds[: len(part)], kinds[len(part) :]
        expected[next((kind for kind in own if kind != "mark"), "mark")] += 2
    for _ in range(n_silent):
        counter.add("")
    counter.classify(splitter.flush())
    assert counter.n_waiting == n_silent
    counter.end()
    assert counter.n_waiting == 0
    assert counter.n_reasoning == expected["reasoning"]
    assert counter.n_final == expected["content"] + expected["call"]
    assert counter.n_marks == expected["mark"] + n_silent


@pytest.mark.parametrize(
    ("prompt", "mark"),
    [("...<think>\n", "<think>"), ("[THINK]", "[THINK]"), ("<think>\n</think>\n", None)],
)
def test_prompt_that_ends_with_an_open_mark_is_noticed(prompt: str, mark: str | None):
    assert opened_by(prompt) == mark
