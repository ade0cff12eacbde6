"""Requests as KoboldCpp reads them: numbers in other forms, halves of characters, unknown names."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given, strategies as st

from kqview.server.web.lenient import LenientDecoder, with_whole_pairs


class Body(msgspec.Struct):
    """A few kinds of fields."""

    text: str | None = None
    number: int | None = None
    share: float | None = None
    ids: list[int | str] | None = None


DECODER = LenientDecoder(Body)


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        ('{"number": 80.0}', "number", 80),
        ('{"number": "80"}', "number", 80),
        ('{"number": 1180591620717411303424}', "number", 2**70),
        ('{"share": "0.5"}', "share", 0.5),
        ('{"ids": [7.0, "7", "x"]}', "ids", [7, "7", "x"]),
        (r'{"text": "\ud83d"}', "text", "\ufffd"),
        (r'{"text": "\ude00 \uD83D\uDE00 \ud83d\ud83d\ude00"}', "text", "\ufffd 😀 \ufffd😀"),
        (r'{"text": "\\ud83d"}', "text", r"\ud83d"),
        (r'{"text": "\\\ud83d"}', "text", "\\\ufffd"),
        ('{"number": null}', "number", None),
    ],
)
@pytest.mark.parametrize("is_text", [True, False])
def test_value_is_read(raw: str, field: str, value: object, is_text: bool):
    body = DECODER.decode(raw if is_text else raw.encode())
    assert getattr(body, field) == value


@pytest.mark.parametrize(
    "raw",
    [
        '{"number": 80.5}',
        '{"number": "many"}',
        '{"text": 1}',
        '{"text": "',
        b'{"text": "\xff"}',
        "[",
    ],
)
def test_what_is_no_such_value_is_refused(raw: str | bytes):
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)):
        DECODER.decode(raw)


def test_names_that_the_type_does_not_have_are_told():
    raw = r'{"number": 1, "top_kk": 2, "half \ud83d": 3, "ids": []}'
    assert DECODER.unknown(raw, DECODER.decode(raw)) == ("top_kk", "half \ufffd")
    packed = LenientDecoder(Body, packs=True)
    raw = msgspec.msgpack.encode({"number": 1.0, "top_kk": 2})
    body = packed.decode(raw)
    assert body.number == 1
    assert packed.unknown(raw, body) == ("top_kk",)


def test_names_that_are_not_utf8_are_told_as_far_as_they_can_be_read():
    raw = b'{"number": 1, "n\x8dme": 2}'
    assert DECODER.unknown(raw, DECODER.decode(raw)) == ("n\ufffdme",)
    packed = LenientDecoder(Body, packs=True)
    raw = msgspec.msgpack.encode({"number": 1.0, "name": 2}).replace(b"name", b"n\x8dme")
    with pytest.raises(msgspec.DecodeError, match="cannot be read"):
        packed.unknown(raw, packed.decode(raw))


def test_names_are_told_as_far_as_a_reply_repeats_them():
    raw = json.dumps({f"{i:0100}": 0 for i in range(1000)})
    names = DECODER.unknown(raw, Body())
    assert 0 < sum(map(len, names)) <= 64 * 64


# Pieces whose joins may form or break a pair.
@given(st.lists(st.sampled_from([r"\ud83d", r"\ude00", r"\\", r"\n", "u", "d83d", "x", r"\u0041"])))
def test_halves_are_replaced_and_all_else_is_as_python_reads_it(pieces: list[str]):
    raw = '"' + "".join(pieces) + '"'
    halves = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
    assert json.loads(with_whole_pairs(raw)) == json.loads(raw).translate(halves)
