"""TokenTable: the bytes of every token, and the lookups by prefix that strategies need.

Made once for each tokenizer, which keeps it alive; immutable afterwards, any thread.
"""

from bisect import bisect_left
from collections import defaultdict
from functools import cached_property
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from kqview.mods.tokenizer import ModTokenizer

Ids = NDArray[np.int64]
"""Ids of tokens, shape ``(n,)``."""

NO_IDS: Final[Ids] = np.empty(0, np.int64)


class TokenTable:
    """The bytes of every id of a vocabulary, with the lookups that strategies need.

    Control tokens, such as the end of the text, have no bytes here: no answer contains one.

    Args:
        tokenizer: The tokenizer that mods get.
    """

    def __init__(self, tokenizer: ModTokenizer) -> None:
        control = set(tokenizer.all_special_ids)
        self.n_vocab: Final = len(tokenizer)
        self.pieces: Final = [
            b"" if i in control else tokenizer.token_bytes(i) for i in range(self.n_vocab)
        ]
        self.control_ids: Final = np.array(
            [i for i, piece in enumerate(self.pieces) if not piece], np.int64
        )
        self._ids: Final[dict[bytes, list[int]]] = defaultdict(list)
        for i, piece in enumerate(self.pieces):
            if piece:
                self._ids[piece].append(i)
        self._longest: Final = max(map(len, self._ids), default=0)
        end = tokenizer.eos_token_id
        self.end_ids: Final = [] if end is None else [end]

    @classmethod
    def of(cls, tokenizer: ModTokenizer) -> "TokenTable":
        """Return the table of *tokenizer*, made at the first call."""
        table = _tables.get(tokenizer)
        if table is None:
            table = _tables[tokenizer] = cls(tokenizer)
        return table

    @cached_property
    def texts(self) -> list[str | None]:
        """Text of each id; None for control tokens and for incomplete UTF-8."""
        return [decoded(piece) or None for piece in self.pieces]

    @cached_property
    def _sorted(self) -> list[bytes]:
        return sorted(self._ids)

    def beginnings(self, text: bytes) -> list[int]:
        """Ids whose bytes are a prefix of *text*, or all of it."""
        return [
            i
            for n in range(1, min(len(text), self._longest) + 1)
            for i in self._ids.get(text[:n], ())
        ]

    def longer_than(self, text: bytes) -> list[int]:
        """Ids whose bytes begin with *text* and are longer."""
        pieces = self._sorted
        found: list[int] = []
        for k in range(bisect_left(pieces, text), len(pieces)):
            if not pieces[k].startswith(text):
                break
            if len(pieces[k]) > len(text):
                found += self._ids[pieces[k]]
        return found


# Only a cache: a table holds nothing of a request and is freed with its tokenizer.
_tables: WeakKeyDictionary[ModTokenizer, TokenTable] = WeakKeyDictionary()


def decoded(text: bytes) -> str:
    """*text*, or "" if it begins or ends inside a character."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return ""
