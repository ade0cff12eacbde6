"""Offsets: which characters of a text each token stands for. Pure; knows no model.

Most vocabularies keep every byte, so tokens are matched with the text byte by byte. Two deviations
are allowed there: the space that SentencePiece puts before a text, and white space that a
vocabulary drops around a special token. Vocabularies that normalize (BERT's) are matched on
characters in lower case and without accents.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

Offsets = list[tuple[int, int]]

_SPACE: Final = re.compile(rb"\s*")


def offsets_of(text: str, pieces: Sequence[bytes]) -> Offsets | None:
    """The (start, stop) of each token of *text*; None if the tokens are not of this text.

    Args:
        text: A text.
        pieces: The bytes of each of its tokens, without those that the vocabulary adds around it.
    """
    return _by_bytes(text, pieces) or _by_letters(text, pieces)


def _by_bytes(text: str, pieces: Sequence[bytes]) -> Offsets | None:
    data = text.encode()
    found: Offsets = []
    place = 0
    for piece in pieces:
        start = _start_of(piece, data, place)
        if start is None:
            return None
        place = start + len(piece if data.startswith(piece, start) else piece[1:])
        found.append((start, place))
    if data[place:].strip():
        return None
    return found if text.isascii() else _in_characters(data, found)


def _start_of(piece: bytes, data: bytes, place: int) -> int | None:
    """Where *piece* begins, at *place* or after white space; with or without a first space."""
    known = (piece, piece[1:]) if piece[:1] == b" " else (piece,)
    if data.startswith(known, place):
        return place
    space = _SPACE.match(data, place)
    assert space is not None
    return space.end() if data.startswith(known, space.end()) else None


def _in_characters(data: bytes, spans: Iterable[tuple[int, int]]) -> Offsets:
    # For each byte, the number of characters that began up to it.
    begun = list(accumulate((byte & 0xC0 != 0x80 for byte in data), initial=0))
    return [
        (begun[start + 1] - 1, begun[stop]) if stop > start else (begun[start], begun[start])
        for start, stop in spans
    ]


def _by_letters(text: str, pieces: Sequence[bytes]) -> Offsets | None:
    letters = [(letter, i) for i, char in enumerate(text) for letter in _plain(char)]
    found: Offsets = []
    place = 0
    for piece in pieces:
        while place < len(letters) and letters[place][0].isspace():
            place += 1
        wanted = _plain(piece.decode("utf-8", "replace")).strip()
        stop = place + len(wanted)
        if not wanted or "".join(letter for letter, _ in letters[place:stop]) != wanted:
            stop = _end_of_word(letters, place)  # an unknown word is one token
        if stop == place:
            return None
        found.append((letters[place][1], letters[stop - 1][1] + 1))
        place = stop
    return None if any(not letter.isspace() for letter, _ in letters[place:]) else found


def _plain(text: str) -> str:
    parts = unicodedata.normalize("NFD", text.lower())
    return "".join(char for char in parts if unicodedata.category(char) != "Mn")


def _end_of_word(letters: Sequence[tuple[str, int]], place: int) -> int:
    stop = place
    while stop < len(letters) and letters[stop][0].isalnum():
        stop += 1
    return stop if stop > place else min(place + 1, len(letters))
