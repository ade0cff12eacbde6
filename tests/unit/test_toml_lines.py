"""The lines of a TOML text's keys: the same keys as tomllib's, where they were written."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kqview.server.toml_lines import Key, lines_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = """\
a.b = 1  # a is an implicit table
"quoted \\u00e9" = '''
[not a table]
'''
[server]
n = [1, # [no]
  2, [3, "#]"], {x = 1, y."z w" = 2}]
s = \"\"\"abc ""q\\\"
# no comment \"\"\"\"\"
[[tables.inner]]
'k.k' = 1979-05-27 07:32:00
[tables.inner.deep]
empty = [ ]
[[tables.inner]]
k = {}
"""


def test_every_key_has_the_line_on_which_it_is_written():
    assert lines_of(TEXT) == {
        ("a",): 1, ("a", "b"): 1, ("quoted é",): 2,
        ("server",): 5, ("server", "n"): 6, ("server", "n", 0): 6, ("server", "n", 1): 7,
        ("server", "n", 2): 7, ("server", "n", 2, 0): 7, ("server", "n", 2, 1): 7,
        ("server", "n", 3): 7, ("server", "n", 3, "x"): 7, ("server", "n", 3, "y"): 7,
        ("server", "n", 3, "y", "z w"): 7, ("server", "s"): 8,
        ("tables",): 10, ("tables", "inner"): 10, ("tables", "inner", 0): 10,
        ("tables", "inner", 0, "k.k"): 11, ("tables", "inner", 0, "deep"): 12,
        ("tables", "inner", 0, "deep", "empty"): 13,
        ("tables", "inner", 1): 14, ("tables", "inner", 1, "k"): 15,
    }  # fmt: skip
    assert set(lines_of(TEXT)) == set(keys_of(tomllib.loads(TEXT)))
    assert lines_of(TEXT.replace("\n", "\r\n")) == lines_of(TEXT)


def keys_of(value: Any, key: Key = ()) -> Iterator[Key]:
    """Where every value in what tomllib read is."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, one in items:
        yield (*key, name)
        if isinstance(one, dict | list):
            yield from keys_of(one, (*key, name))


# ---- texts of all kinds

NAMES = st.text(st.sampled_from("ab.'\"\\#[]= é\n\t"), min_size=0, max_size=4)
STRINGS = st.text(st.sampled_from("a\"'\\#[]{},=\n\r é"), max_size=8)
SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**40), 2**40), st.floats(-10, 10, width=16), STRINGS
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(NAMES, VALUES, max_size=4)


@dataclass
class Writer:
    """Writes a document in one of many ways, and notes where it wrote each key."""

    draw: Any
    text: str = ""
    lines: dict[Key, int] = field(default_factory=dict[Key, int])

    def document(self, tables: dict[str, Any]) -> None:
        """Simple values and inline tables first, then tables and arrays of tables."""
        simple = {name: one for name, one in tables.items() if not self.becomes_header(one)}
        for name, value in simple.items():
            self.pair((), name, value)
        for name, value in tables.items():
            if name in simple:
                continue
            arrays = [(i, one) for i, one in enumerate(value)] if isinstance(value, list) else []
            for i, one in arrays or [(None, value)]:
                self.blank()
                self.note((name,))
                key: Key = (name,) if i is None else (name, i)
                self.note(key)
                opens, closes = ("[ ", " ]") if i is None else ("[[ ", " ]]")
                self.text += opens + self.name(name) + closes
                self.end_line()
                for inner, part in one.items():
                    self.pair(key, inner, part)

    def becomes_header(self, value: Any) -> bool:
        is_tables = isinstance(value, list) and value and all(isinstance(v, dict) for v in value)
        return (isinstance(value, dict) or bool(is_tables)) and self.draw(st.booleans())

    def pair(self, key: Key, name: str, value: Any) -> None:
        self.blank()
        self.inline_pair(key, name, value)
        self.end_line()

    def inline_pair(self, key: Key, name: str, value: Any) -> None:
        self.note((*key, name))
        self.text += self.name(name) + self.draw(st.sampled_from([" = ", "=", "\t=  "]))
        self.value((*key, name), value)

    def value(self, key: Key, value: Any) -> None:
        if isinstance(value, dict):
            self.text += "{ "
            for i, (name, one) in enumerate(value.items()):
                self.text += ", " if i else ""
                self.inline_pair(key, name, one)
            self.text += " }"
        elif isinstance(value, list):
            self.text += "["
            for i, one in enumerate(value):
                self.gap()
                self.note((*key, i))
                self.value((*key, i), one)
                self.gap()
                self.text += "," if i < len(value) - 1 or self.draw(st.booleans()) else ""
            self.gap()
            self.text += "]"
        elif isinstance(value, str):
            self.text += self.string(value)
        else:
            self.text += json.dumps(value)

    def string(self, value: str) -> str:
        forms = [json.dumps(value)]
        multi = value.replace("\\", "\\\\").replace("\r", "\\r").replace('""', '"\\"')
        forms.append(
            '"""\n' + multi.removesuffix('"') + ('\\"' if multi.endswith('"') else "") + '"""'
        )
        if not set(value) & set("'\n\r"):
            forms += [f"'{value}'", f"'''{value}'''"]
        return self.draw(st.sampled_from(forms))

    def name(self, name: str) -> str:
        forms = [json.dumps(name)]
        if name and set(name) <= set("ab"):
            forms.append(name)
        if not set(name) & set("'\n\t"):
            forms.append(f"'{name}'")
        return self.draw(st.sampled_from(forms))

    def gap(self) -> None:
        self.text += self.draw(st.sampled_from(["", " ", "\n\t", " # ]},\n", "\n\n"]))

    def blank(self) -> None:
        self.text += self.draw(st.sampled_from(["", "\n", "# [x] = {\n", "  "]))

    def end_line(self) -> None:
        self.text += self.draw(st.sampled_from(["\n", " # = [\n", "\n\n"]))

    def note(self, key: Key) -> None:
        self.lines.setdefault(key, self.text.count("\n") + 1)


@settings(max_examples=40)
@given(TABLES, st.data())
def test_keys_of_any_document_are_found_where_they_were_written(
    tables: dict[str, Any], data: st.DataObject
):
    writer = Writer(data.draw)
    writer.document(tables)
    assert tomllib.loads(writer.text) == tables
    assert lines_of(writer.text) == writer.lines


@given(
    st.lists(
        st.sampled_from(
            ["a", "b.", '"', "'", '"""', "'''", "[", "]", "[[", "]]", "{", "}", "=", " = 1", ",",
             "\n", "#", "\\", " ", "1", "x = [", "]\n", "[a]\n", "[[b]]\n", "a.b = {}\n"]
        ),
        max_size=14,
    ).map("".join)
)  # fmt: skip
@example("[[b]]\n[b.a]\nx = 1\n[[b]]\n[b.a]\ny = '''''''\n")
@example('a = """"""""\nb = 1')
def test_keys_of_any_text_that_tomllib_reads_are_those_of_tomllib(text: str):
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    assert set(lines_of(text)) == set(keys_of(data))


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment", "[a]", "a = 1"])
def test_short_texts_end(text: str):
    assert set(lines_of(text)) == set(keys_of(tomllib.loads(text)))
