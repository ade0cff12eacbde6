"""What a model writes for JSON: valid text stays as it is, everything else becomes valid."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kqview.chat.json_text import DEPTH_MAX, JsonText, literal

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)  # fmt: skip
SIGNS = [
    "{",
    "}",
    "[",
    "]",
    ":",
    ",",
    '"',
    "\\",
    "\\u",
    "d83d",
    "\\ude00",
    "NaN",
    "1e999",
    "-",
    " ",
]


def refuse(word: str) -> None:
    raise AssertionError(f"{word} is no JSON")


def parsed(text: str) -> Any:
    """*text* as the strictest client reads it."""
    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def whole(text: str, cuts: tuple[int, ...] = ()) -> tuple[str, int]:
    reader, made, n = JsonText(), "", 0
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    for start, end in pairwise(ends):
        piece, n_taken = reader.feed(text[start:end])
        made, n = made + piece, n + n_taken
    return made, n if reader.is_over else -1


@given(
    value=st.dictionaries(st.text(), VALUES, max_size=4) | st.lists(VALUES, max_size=4),
    is_ascii=st.booleans(),
    indent=st.none() | st.integers(0, 2),
    cuts=st.lists(st.integers(0, 99), max_size=5),
)
def test_valid_json_stays_as_it_is_however_it_is_cut(
    value: Any, is_ascii: bool, indent: int | None, cuts: list[int]
):
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    made, n = whole(text + " {more}", tuple(cuts))
    assert n == len(text)
    assert parsed(made) == value
    assert made == text


@given(text=st.lists(st.sampled_from(SIGNS) | st.text(max_size=2)).map("".join), cut=st.integers(0))
def test_any_text_becomes_valid_json_however_it_is_cut(text: str, cut: int):
    text = "{" + text + "]" * (text.count("{") + text.count("[") + 1) + '"' + "]" * 99
    made, n = whole(text)
    assert n > 0
    assert isinstance(parsed(made), dict)
    assert whole(text, (cut % len(text),)) == (made, n)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": NaN, "b": [-Infinity, 1e999]}', {"a": "NaN", "b": ["-Infinity", "1e999"]}),
        ('{"a": True, "b": None, "c": two words}', {"a": True, "b": None, "c": "two words"}),
        (r'{"\ud800": "\ude00\ud83d\ude00\ud83d\ud83d\n\ud83d"}',
         {"\ufffd": "\ufffd\U0001f600\ufffd\ufffd\n\ufffd"}),
        (r'{"a": "\x \u12g \\"}', {"a": "\\x \\u12g \\"}),
        ('{"a": "one\ntwo\0"}', {"a": "one\ntwo\0"}),
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1,, 2 "x" {}', {"a": [1, 2, "x", {}]}),
        ('{a: 1, "b", "c":, "d" 2}', {"a": 1, "b": None, "c": None, "d": 2}),
        ('{"a": [1}', {"a": [1]}),
        ('{"a": 007, "b": 0x1F, "c": ' + "9" * 5000 + "}",
         {"a": "007", "b": "0x1F", "c": "9" * 5000}),
    ],
)  # fmt: skip
def test_what_json_does_not_have_is_mended(text: str, value: object):
    made, n = whole(text + "]}}")
    assert n > 0
    assert parsed(made) == value


def test_what_is_nested_too_deeply_becomes_a_string():
    made, n = whole('{"a": ' + "[" * 5000 + "]" * 5000 + "}")
    assert n == 10_007
    value = parsed(made)["a"]
    for _ in range(DEPTH_MAX - 1):
        [value] = value
    n_left = 5000 - DEPTH_MAX + 1
    assert value == "[" * n_left + "]" * n_left


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ('["\\ud800"]', ["\ufffd"]), ("NaN", "NaN"), ("1e999", "1e999"), ("[1e999]", ["1e999"]),
        ("-Infinity", "-Infinity"), (" 1.5 ", 1.5), (" one ", " one "), ('"x', '"x'),
        ("9" * 5000, "9" * 5000), ("[" * 2000 + "]" * 2000, "[" * 2000 + "]" * 2000),
    ],
)  # fmt: skip
def test_literal_is_json_or_the_text(word: str, value: object):
    assert parsed(literal(word)) == value
