"""TOML lines: on which line of a text each of its keys stands.

``tomllib`` reads a text and checks it, but forgets where its values came from. This finds the keys
of a text that tomllib has accepted, so it checks nothing itself.
"""

import re
import tomllib
from bisect import bisect_right
from typing import Final

Key = tuple[str | int, ...]
"""Where a value is: names of tables and keys, and indices in arrays, such as ``("a", 0, "b")``."""

_SPACE: Final = re.compile(r"[ \t]*")
_BLANK: Final = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_DOT: Final = re.compile(r"[ \t]*\.[ \t]*")
_KEY: Final = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
_STRING: Final = re.compile(
    r'''"""(?:[^"\\]|\\[\s\S]|"{1,2}(?!"))*"{3,5}'''
    r"""|'''(?:[^']|'{1,2}(?!'))*'{3,5}"""
    r"""|"(?:[^"\\]|\\.)*"|'[^']*'"""
)
_SCALAR: Final = re.compile(r"[^,\]}#\n]*")


def lines_of(text: str) -> dict[Key, int]:
    """The line, from 1, of each table, key and element of an array in *text*.

    A table that is not written itself, such as ``a`` of ``[a.b]``, is where its first key is.

    Args:
        text: What `tomllib.loads` has accepted.
    """
    return _Scanner(text.replace("\r\n", "\n")).lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self._at = 0
        self._n_tables: dict[Key, int] = {}  # of each array of tables
        self.lines: dict[Key, int] = {}
        table: Key = ()
        self._skip(_BLANK)
        while self._at < len(text):
            if self._takes("[["):
                table = self._header(is_array=True)
            elif self._takes("["):
                table = self._header(is_array=False)
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _header(self, *, is_array: bool) -> Key:
        names = self._names()
        self._take("]]" if is_array else "]")
        table: Key = ()
        for i, name in enumerate(names):
            table = (*table, name)
            self._note(table)
            if is_array and i == len(names) - 1:
                self._n_tables[table] = self._n_tables.get(table, 0) + 1
            if table in self._n_tables:  # what follows belongs to its last element
                table = (*table, self._n_tables[table] - 1)
                self._note(table)
        return table

    def _pair(self, table: Key) -> None:
        for name in self._names():
            table = (*table, name)
            self._note(table)
        self._take("=")
        self._value(table)

    def _names(self) -> list[str]:
        names: list[str] = []
        self._skip(_SPACE)
        while True:
            written = self._skip(_KEY)
            names.append(
                tomllib.loads(f"key = {written}")["key"] if written[0] in "\"'" else written
            )
            if not self._skip(_DOT):
                return names

    def _value(self, key: Key) -> None:
        self._skip(_SPACE)
        if self._takes("["):
            self._skip(_BLANK)
            i = 0
            while not self._takes("]"):
                self._note((*key, i))
                self._value((*key, i))
                self._separator()
                i += 1
        elif self._takes("{"):
            self._skip(_BLANK)
            while not self._takes("}"):
                self._pair(key)
                self._separator()
        elif not self._skip(_STRING):
            self._skip(_SCALAR)

    def _separator(self) -> None:
        self._skip(_BLANK)
        self._takes(",")
        self._skip(_BLANK)

    def _note(self, key: Key) -> None:
        self.lines.setdefault(key, bisect_right(self._ends, self._at - 1) + 1)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        """What *pattern* matches here, which is passed over; "" if it does not."""
        match = pattern.match(self._text, self._at)
        if match is None:
            return ""
        self._at = match.end()
        return match[0]

    def _takes(self, mark: str) -> bool:
        is_here = self._text.startswith(mark, self._at)
        self._at += len(mark) if is_here else 0
        return is_here

    def _take(self, mark: str) -> None:
        self._skip(_SPACE)
        assert self._takes(mark), f"no {mark!r} at {self._at}: tomllib has not accepted this text"
