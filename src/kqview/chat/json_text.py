"""JSON as a model wrote it, made valid: what clients get of a tool call can always be parsed. Pure.

JSON has no NaN, no number beyond a double's range, no half of a surrogate pair and no bare words,
but models write them. Such a number or word becomes the string that the model wrote, such a half
U+FFFD. Commas, colons, values and brackets that are missing or wrong are mended.
"""

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

from kqview import json_input
from kqview.stop_strings import HeldText

DEPTH_MAX: Final = 64
"""Deepest nesting; what is nested deeper becomes a string."""

_DIGITS_MAX: Final = 300  # which a double still holds
_WORDS: Final = {"True": "true", "False": "false", "None": "null"}  # as Python spells them
_PLAIN: Final = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')  # of a string
_WORD: Final = re.compile(r'[^{}\[\]:,"]+')
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_ESCAPE: Final = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_ESCAPE_BEGUN: Final = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}"
    r"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?"
)
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


def _finite(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _whole(text: str) -> int | str:
    return int(text) if len(text) <= _DIGITS_MAX else text


_DECODER: Final = json.JSONDecoder(parse_constant=str, parse_float=_finite, parse_int=_whole)


def decoded(text: str, start: int = 0) -> tuple[Any, int]:
    """The value at *start* and its end; valid values only, see above.

    The caller has checked the depth of *text*.

    Raises:
        ValueError: There is none.
    """
    value, end = _DECODER.raw_decode(text, start)
    if "\\u" in text or _SURROGATE.search(text):
        value = json.loads(_SURROGATE.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    return value, end


def literal(word: str) -> str:
    """What a model wrote for a value that need not be text, as JSON."""
    text = word.strip()
    if text in _WORDS:
        return _WORDS[text]
    try:
        json_input.check_depth(text)
        value, end = decoded(text)
    except ValueError:
        value, end = None, -1
    if end != len(text):
        python = Notation(PYTHON)
        made, n = python.feed(text) if text[:1] in ("{", "[") and "'" in text else ("", -1)
        return made if python.is_over and n == len(text) else quoted(word)
    if not isinstance(value, str | list | dict):
        return text
    written = json.dumps(value, ensure_ascii=False)
    return written if isinstance(value, str) else JsonText().feed(written)[0]


class JsonText:
    """Makes an object or list in JSON valid while it comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        """Whether the value is complete."""
        self._closers: list[str] = []
        self._next: Literal["key", "colon", "value", "comma"] = "value"
        self._comma = ""  # and white space behind it, until another item comes
        self._words: list[str] = []  # pieces of a bare word
        self._in_string = False
        self._escape = ""
        self._n_raw = 0  # brackets that are open inside of a string for what is nested too deeply

    def feed(self, text: str) -> tuple[str, int]:
        """Add *text*: JSON to go on with, and how many characters belong to the value."""
        made: list[str] = []
        at = 0
        while at < len(text) and not self.is_over:
            kind = _PLAIN if self._in_string and not self._escape else _WORD
            run = None if self._escape or self._n_raw else kind.match(text, at)
            char = text[at]
            at = at + 1 if run is None else run.end()
            if self._n_raw:
                self._n_raw += (char in "{[") - (char in "}]")
                made += quoted(char)[1:-1], "" if self._n_raw else '"' + self._end_item()
            elif self._in_string:
                made.append(self._string(char) if run is None else run[0])
            elif run is not None:
                self._words.append(run[0])
            else:
                made += self._bare(), self._sign(char)
        return "".join(made), at

    def end(self) -> str:
        """What makes a text valid that has no object or list: JSON to go on with."""
        if self._closers or self._in_string or self.is_over:
            return ""
        word = "".join(self._words).strip()
        return quoted(word) if word else "{}"

    def _string(self, char: str) -> str:
        if self._escape or char == "\\":
            self._escape += char
            if _ESCAPE_BEGUN.fullmatch(self._escape):
                return ""
            escape, self._escape = self._escape, ""
            if _ESCAPE.fullmatch(escape):
                return escape
            half = _HALF.match(escape)
            rest = escape[half.end() if half else 1 :]
            return ("\\ufffd" if half else "\\\\") + "".join(map(self._string, rest))
        if char == '"':
            self._in_string = False
            return char + self._end_item()
        return quoted(char)[1:-1]

    def _bare(self) -> str:
        """The word before a sign, with the white space around it."""
        word, self._words = "".join(self._words), []
        text = word.strip()
        if not text or not self._closers:
            return self._space(word if not text else "")
        before, _, after = word.partition(text)
        made = self._space(before) + self._begin_item()
        is_key = self._next == "key"
        made += (quoted(text) if is_key else literal(text)) + self._end_item()
        return made + self._space(after)

    def _space(self, text: str) -> str:
        text = "".join(char if char in " \t\r\n" else " " for char in text)
        if not self._comma:
            return text
        self._comma += text
        return ""

    def _sign(self, char: str) -> str:
        if char == '"':
            self._in_string = True
            return self._begin_item() + char
        if char in "{[":
            return self._open(char)
        if char in "}]":
            return self._close()
        if char == ":" and self._next == "colon":
            self._next = "value"
            return char
        if char == "," and self._closers:
            made = self._end_pair()
            if self._next == "comma":
                self._comma, self._next = char, self._first()
            return made
        return ""

    def _open(self, char: str) -> str:
        made = self._begin_item()
        if self._next == "key":
            made, self._next = f'{made}"": ', "value"
        if len(self._closers) >= DEPTH_MAX:
            self._n_raw = 1
            return f'{made}"{char}'
        self._closers.append("}" if char == "{" else "]")
        self._next = self._first()
        return made + char

    def _close(self) -> str:
        if not self._closers:
            return ""
        made = self._end_pair()
        self._comma = ""
        made += self._closers.pop()
        self._next = "value"
        return made + self._end_item()

    def _first(self) -> Literal["key", "value"]:
        return "key" if self._closers[-1] == "}" else "value"

    def _begin_item(self) -> str:
        """What is missing before a key or value."""
        made, self._comma = self._comma, ""
        if self._next == "comma":
            made, self._next = ", ", self._first()
        elif self._next == "colon":
            made, self._next = ": ", "value"
        return made

    def _end_item(self) -> str:
        self._next = "colon" if self._next == "key" else "comma"
        self.is_over = not self._closers and self._next == "comma"
        return ""

    def _end_pair(self) -> str:
        """What is missing of a pair that has a key."""
        is_object = bool(self._closers) and self._closers[-1] == "}"
        missing = {"colon": ": null", "value": "null" if is_object else ""}.get(self._next, "")
        if missing:
            self._next = "comma"
        return missing


PYTHON: Final = ("'", '"')
"""Quotes of Python, in whose texts backslashes escape."""


class Notation(JsonText):
    """Makes JSON of an object or list with other quotes than JSON's, while it comes in pieces."""

    _SIGNS: Final = str.maketrans({"=": ":", "(": "[", ")": "]"})  # JsonText closes what is open

    def __init__(self, quotes: Sequence[str], *, is_open: bool = False) -> None:
        """Read texts in *quotes*; *is_open*: the value is an object whose bracket is not fed."""
        super().__init__()
        self._begun = super().feed("{")[0] if is_open else ""
        self._outside, self._quote = HeldText(quotes), ""
        self._has_escapes = quotes == PYTHON
        self._inside = HeldText(())
        self._after = ""  # a backslash, until the next character comes

    def feed(self, text: str) -> tuple[str, int]:
        """As `JsonText.feed`."""
        made, self._begun, rest = [self._begun], "", text
        while True:
            if self._after and rest:
                char, rest, self._after = rest[0], rest[1:], ""
                made.append(super().feed(quoted("'")[1:-1] if char == "'" else f"\\{char}")[0])
            marks = self._inside if self._quote else self._outside
            before, mark = marks.feed(rest)
            if self._quote:
                made.append(super().feed(quoted(before)[1:-1])[0])
            else:
                piece, n = super().feed(before.translate(self._SIGNS))
                made.append(piece)
                if self.is_over:
                    left = len(before) - n + len(mark or "") + len(marks.take())
                    return "".join(made), len(text) - left
            if mark is None:
                return "".join(made), len(text)
            rest = marks.take()
            if mark == "\\":
                self._after = mark
                continue
            made.append(super().feed('"')[0])
            self._quote = "" if self._quote else mark
            self._inside = HeldText([mark, "\\"] if self._has_escapes else [mark])


def quoted(text: str) -> str:
    """*text* as a string of JSON, with U+FFFD for half a surrogate pair, which has no UTF-8."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return json.dumps(whole, ensure_ascii=False)
