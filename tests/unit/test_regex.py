"""Patterns of Python in the syntax of Rust: they match what they match in Python."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("llguidance")

from kqview import Sampling
from kqview.errors import InvalidSampling
from tests.support.accepting import regex_accepts

TEXTS = (
    *(
        "",
        "a",
        "A",
        "b",
        "ab",
        "AB",
        "aB",
        "a\nb",
        "a b",
        "aa",
        "aaa",
        "a-b",
        "a/b",
        "[",
        "&&",
        "~",
    ),
    *(
        "1",
        "\N{ARABIC-INDIC DIGIT THREE}",
        "é",
        "É",
        "_",
        "\x1f",
        "\u2003",
        "\t",
        "<a>",
        "x.y",
        "#",
    ),
    *("\N{COMBINING ACUTE ACCENT}", "1234", "12:30", "x@y.de", "^", "\\", "]", "\N{GRINNING FACE}"),
)


@pytest.mark.parametrize(
    "pattern",
    [
        re.compile(p, flags)
        for p, flags in [
            (r"^\d{4}$|^\d\d:\d\d\Z", 0),
            ("ab|É", re.IGNORECASE),
            ("a.b|.", re.DOTALL),
            ("a.b|.", 0),
            (r" a [ ] b  # a comment", re.VERBOSE),
            (r"\w+", 0),
            (r"\w+", re.ASCII),
            (r"\W|\s", 0),
            (r"[^\W\d]|\S", re.ASCII),
            (r"\D\D?", 0),
            (r"[\w.-]+@[a-z]+\.\w{2,}", 0),
            (r"(?P<n>a|b){,2}", 0),
            (r"(?:a*?)+", 0),
            (r"(?i:a)B", 0),
            (r"(?-i:a)b", re.IGNORECASE),
            (r"(?a:\d)|[\x5b&~^\]\\]{1,2}", 0),
            (r"(?u:\d)", re.ASCII),
            (r"<a>|x\.y|\#|a/b", 0),
            (r"a(?#comment)|()", 0),
            ("[^a]", re.IGNORECASE),
            ("[😀-😂]", 0),
        ]
    ],
    ids=lambda pattern: pattern.pattern,
)
def test_pattern_matches_what_it_matches_in_python(pattern: re.Pattern[str]):
    regex: Any = Sampling(regex=pattern).regex
    matched = [text for text in TEXTS if pattern.fullmatch(text)]
    assert matched
    assert [text for text in TEXTS if regex_accepts(regex, text)] == matched


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (re.compile("(?=a)b"), r"look-ahead .*; write it without, or use grammar"),
        (re.compile("(?<!a)b"), "negative look-ahead or look-behind"),
        (re.compile(r"(a)\1"), "backreference"),
        (re.compile("(?P<n>a)(?P=n)"), "backreference"),
        (re.compile("(a)?(?(1)b|c)"), "conditional group"),
        (re.compile("(?>a)b"), "atomic group"),
        (re.compile("a++"), "possessive quantifier"),
        (re.compile(r"a\b"), "word boundary"),
        (re.compile("^a", re.MULTILINE), "re.MULTILINE"),
        (re.compile(b"a"), "pattern of bytes"),
        (7, "a str, a compiled pattern or None, got 7"),
    ],
)
def test_pattern_that_cannot_be_followed_is_refused_by_name(pattern: Any, words: str):
    with pytest.raises(InvalidSampling, match=words) as failure:
        Sampling(regex=pattern)
    assert failure.value.parameter == "regex"
