"""Strategies: every token that they allow keeps an answer possible, and every answer is reached."""

from __future__ import annotations

import copy
import gc
import json
import re
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from kqview.errors import InvalidSampling, RequestError
from kqview.mods import Backtrack
from kqview.mods.kit import (
    CharsMode,
    CharsStrat,
    ChoicesStrat,
    JsonSchemaStrat,
    ListStrat,
    RegexStrat,
    UntilEndType,
    UntilStrat,
)
from tests.support.hostile_grammars import chained_schema, joined_schema
from tests.support.mods import Words

if TYPE_CHECKING:
    from kqview.mods.kit import Strategy

pytestmark = pytest.mark.full

WORDS = Words(
    "hi", "it", "cat", "dog", "do", ", ", '", "', '"', '."', ".\n", "</", "</a>!", "a>b", "12",
    "3.",     "1e", " x", "ab", "é", "e\n", "{", '{"a":', "[1", "true",
)  # fmt: skip
TOKENIZER = WORDS.tokenizer()
JS_FLOAT = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")

# A strategy, and what its whole answers match.
CASES: dict[str, tuple[Any, str]] = {
    "choices": (ChoicesStrat(["hi", "hit", "dog", "é"]), "hi|hit|dog|é"),
    "tag": (UntilStrat("<a>", UntilEndType.TAG, "</a>"), r"<a>(?s:(?!.*</a>.).)*</a>"),
    "anychar": (UntilStrat("", UntilEndType.ANYCHAR, ".!"), r"[^.!]*[.!]"),
    "alpha": (CharsStrat(CharsMode.ALPHA, 4), r"[^\W\d_]{1,4}"),
    "alphanumeric": (CharsStrat(CharsMode.ALPHANUMERIC, 4, 2), r"[^\W_]{2,4}"),
    "numeric": (CharsStrat(CharsMode.NUMERIC, 3), r"[0-9]{1,3}"),
    "string": (CharsStrat(CharsMode.STRING, '"'), r'[^"\n]+"'),
    "float": (CharsStrat(CharsMode.JS_FLOAT, 6), JS_FLOAT.pattern),
    "stop of two": (CharsStrat(CharsMode.ALPHA, "\n\n", 0), r"[^\W\d_]*\n\n"),
    "list": (
        ListStrat(["cat", "dog", "do"], "[", "]", '"', min=2, max=3),
        r'\["(cat|dog|do)"(, "(cat|dog|do)"){1,2}\]',
    ),
    "bare list": (ListStrat(["cat", "do", "dog"], max=4), r"(cat|dog|do)(, (cat|dog|do)){0,3}"),
    "empty list": (ListStrat(["cat"], "[", "]", min=0, max=2), r"\[(cat(, cat)?)?\]"),
    "list of strings": (
        ListStrat(CharsStrat(CharsMode.STRING), "[", "]", '"', max=2, end_with="\n"),
        r'\["[^"\n]+"(, "[^"\n]+")?\]\n',
    ),
    "list of tags": (
        ListStrat(UntilStrat("<", UntilEndType.ANYCHAR, ">"), max=2), r"(?s:<[^>]*>(, <[^>]*>)?)"
    ),
}  # fmt: skip


def allowed(strategy: Strategy[Any], state: Any) -> list[int]:
    """Ids that may come next."""
    ids = np.asarray(strategy.allowed_tokens(state, TOKENIZER))
    ids = ids if ids.size else np.arange(len(TOKENIZER))
    return sorted(set(ids.tolist()) - set(strategy.disallowed_tokens(state, TOKENIZER).tolist()))


def write(strategy: Strategy[Any], ids: list[int]) -> Any:
    state = strategy.start(TOKENIZER)
    for token_id in ids:
        assert strategy.step(state, token_id, TOKENIZER) is None
    return state


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_answer_of_allowed_tokens_is_what_was_asked_for(name: str, data: st.DataObject):
    described, pattern = CASES[name]
    strategy = described.into_strategy(TOKENIZER)
    state = strategy.start(TOKENIZER)
    ids: list[int] = []
    for _ in range(20):
        if strategy.is_complete(state):
            break
        if forced := TOKENIZER.encode(strategy.forced_text(state)):
            assert forced[0] in allowed(strategy, state)
        token_id = data.draw(st.sampled_from(allowed(strategy, state)))
        assert strategy.step(state, token_id, TOKENIZER) is None
        ids += [token_id] if token_id else []
    if strategy.can_end(state):
        # Bytes that are no text on their own are kept as such.
        text = b"".join(WORDS.pieces[i] for i in ids).decode("utf-8", "replace")
        assert re.fullmatch(pattern, text), (ids, text)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=20)
@given(data=st.data())
def test_exactly_the_allowed_tokens_are_taken(name: str, data: st.DataObject):
    strategy = CASES[name][0].into_strategy(TOKENIZER)
    state = strategy.start(TOKENIZER)
    for _ in range(data.draw(st.integers(0, 6))):
        if strategy.is_complete(state):
            return
        assert (
            strategy.step(state, data.draw(st.sampled_from(allowed(strategy, state))), TOKENIZER)
            is None
        )
    if strategy.is_complete(state):
        return
    taken = [
        i for i in range(len(TOKENIZER)) if strategy.step(copy.copy(state), i, TOKENIZER) is None
    ]
    assert taken == allowed(strategy, state)


@pytest.mark.parametrize("name", CASES)
def test_refused_token_is_taken_back_and_changes_nothing(name: str):
    strategy = CASES[name][0].into_strategy(TOKENIZER)
    state = strategy.start(TOKENIZER)
    before = copy.deepcopy(state)
    asked_for = strategy.step(state, WORDS.eos_token_id or 0, TOKENIZER)
    assert isinstance(asked_for, Backtrack)
    assert (asked_for.n, asked_for.tokens) == (1, None)
    assert state == before


@pytest.mark.parametrize("choice", ["hi", "hit"])
def test_choice_and_its_continuation_are_both_reached(choice: str):
    strategy = ChoicesStrat(["hi", "hit"]).into_strategy(TOKENIZER)
    state = write(strategy, TOKENIZER.encode("hi"))
    assert (strategy.can_end(state), strategy.is_complete(state)) == (True, False)
    next_id = WORDS.id("t") if choice == "hit" else WORDS.eos_token_id
    assert allowed(strategy, state) == sorted([0, WORDS.id("t")])
    assert strategy.step(state, next_id or 0, TOKENIZER) is None
    assert strategy.is_complete(state)


def test_only_choice_left_is_forced():
    strategy = ChoicesStrat(["dog", "do it", "cat"]).into_strategy(TOKENIZER)
    assert strategy.forced_text(strategy.start(TOKENIZER)) == ""
    assert strategy.forced_text(write(strategy, [WORDS.id("c")])) == "at"
    assert strategy.forced_text(write(strategy, [WORDS.id("do")])) == ""


@pytest.mark.parametrize(
    ("described", "text", "answer"),
    [
        (UntilStrat("<a>", UntilEndType.TAG, "</a>"), "<a>x</a>", "x"),
        (UntilStrat("", UntilEndType.ANYCHAR, ".!"), "x!", "x"),
        (CharsStrat(CharsMode.ALPHA, "."), "x.", "x"),
        (CharsStrat(CharsMode.ALPHA, 3), "xyz", "xyz"),
        (ListStrat(["a"], "[", "]", end_with="\n"), "[a]\n", "[a]"),
        (ChoicesStrat(["a"]), "a", "a"),
    ],
)
def test_marks_of_a_strategy_are_trimmed(described: Any, text: str, answer: str):
    assert described.into_strategy(TOKENIZER).trim_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [("1", True), ("-1.5e3", True), (".5", True), ("3.", True), ("1e", False), ("-", False),
     ("-.", False), ("1e+", False)],
)  # fmt: skip
def test_number_can_end_where_it_is_whole(text: str, is_whole: bool):
    strategy = CharsStrat(CharsMode.JS_FLOAT).into_strategy(TOKENIZER)
    assert strategy.can_end(write(strategy, TOKENIZER.encode(text))) is is_whole


def test_end_that_begins_in_one_token_is_not_overshot_in_the_next():
    strategy = UntilStrat("", UntilEndType.TAG, "</a>").into_strategy(TOKENIZER)
    state = write(strategy, [WORDS.id("</")])
    assert WORDS.id("a>b") not in allowed(strategy, state)
    assert WORDS.id("</a>!") not in allowed(strategy, state)
    assert WORDS.id("a") in allowed(strategy, state)


def test_states_share_nothing():
    for described, _ in CASES.values():
        strategy = described.into_strategy(TOKENIZER)
        one, other = strategy.start(TOKENIZER), strategy.start(TOKENIZER)
        untouched = copy.deepcopy(other)
        assert strategy.step(one, allowed(strategy, one)[-1], TOKENIZER) is None
        assert other == untouched
        assert one != untouched


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "described",
    [RegexStrat("[a-c]{2,3} [0-9]+"), JsonSchemaStrat(SCHEMA), JsonSchemaStrat(json.dumps(SCHEMA))],
)
@settings(max_examples=20)
@given(data=st.data())
def test_answer_of_a_grammar_matches_it(described: Any, data: st.DataObject):
    pytest.importorskip("llguidance")
    strategy = described.into_strategy(TOKENIZER)
    state = strategy.start(TOKENIZER)
    ids: list[int] = []
    for _ in range(30):
        if strategy.is_complete(state):
            break
        token_id = data.draw(st.sampled_from(allowed(strategy, state)))
        assert strategy.step(state, token_id, TOKENIZER) is None
        ids += [token_id] if token_id else []
    if strategy.can_end(state):
        text = TOKENIZER.decode(ids)
        if isinstance(described, RegexStrat):
            assert re.fullmatch(described.pattern, text)
        else:
            assert json.loads(text).keys() == {"a", "b"}


@pytest.mark.parametrize(("kind", "n"), [("integer", 19), ("number", 17), ("string", 40)])
def test_number_of_a_schema_ends(kind: str, n: int):
    pytest.importorskip("llguidance")
    strategy = JsonSchemaStrat({"type": kind}).into_strategy(TOKENIZER)
    state = strategy.start(TOKENIZER)
    if kind == "string":
        assert strategy.step(state, WORDS.id('"'), TOKENIZER) is None
    n_digits = 0
    while n_digits < 40 and WORDS.id("7") in allowed(strategy, state):
        assert strategy.step(state, WORDS.id("7"), TOKENIZER) is None
        n_digits += 1
    assert n_digits == n


def test_grammar_forces_what_has_no_choice_and_refuses_the_rest():
    pytest.importorskip("llguidance")
    strategy = JsonSchemaStrat(SCHEMA).into_strategy(TOKENIZER)
    state = strategy.start(TOKENIZER)
    assert strategy.forced_text(state) == '{"a":'
    assert isinstance(strategy.step(state, WORDS.id("cat"), TOKENIZER), Backtrack)
    twin = copy.copy(state)
    assert strategy.step(twin, WORDS.id('{"a":'), TOKENIZER) is None
    assert strategy.forced_text(state) == '{"a":'


@pytest.mark.parametrize(
    "described",
    [
        RegexStrat("[a-"),
        JsonSchemaStrat("{"),
        JsonSchemaStrat({"type": "nothing"}),
        # Recursion overflows the stack; and seconds of CPU time.
        JsonSchemaStrat(chained_schema(5000, "properties")),
        pytest.param(JsonSchemaStrat(joined_schema("a.{#}b", 31)), marks=pytest.mark.full),
    ],
    ids=lambda described: repr(described)[:40],
)
def test_grammar_that_does_not_parse_is_refused(described: Any):
    pytest.importorskip("llguidance")
    with pytest.raises(InvalidSampling):
        described.into_strategy(TOKENIZER)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ChoicesStrat([]),
        lambda: ChoicesStrat("yes"),
        lambda: ChoicesStrat(["yes", ""]),
        lambda: UntilStrat("", UntilEndType.TAG, ""),
        lambda: UntilStrat("", "tag", "x"),  # pyright: ignore[reportArgumentType]
        lambda: CharsStrat("alpha"),  # pyright: ignore[reportArgumentType]
        lambda: CharsStrat(CharsMode.ALPHA, ""),
        lambda: CharsStrat(CharsMode.ALPHA, 2, 3),
        lambda: ListStrat([]),
        lambda: ListStrat(["a"], sep=""),
        lambda: ListStrat(["a"], min=3, max=2),
    ],
)
def test_malformed_description_is_refused(make: Any):
    with pytest.raises(RequestError):
        make()


def test_nothing_keeps_the_tokenizer_of_a_closed_engine():
    pytest.importorskip("llguidance")
    tokenizer = Words().tokenizer()
    ended = weakref.ref(tokenizer)
    RegexStrat("[a-c]+").into_strategy(tokenizer)
    ChoicesStrat(["a"]).into_strategy(tokenizer)
    del tokenizer
    gc.collect()
    assert ended() is None
