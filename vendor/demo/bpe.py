"""A byte-level BPE vocabulary, trained from text: the tokenizer of the demo model.

Holds the merges and the token texts in the form a GGUF file stores them (tokenizer model "gpt2",
pre-tokenizer "qwen2"). Encoding follows llama.cpp for ASCII text. Only training uses this class:
kqview tokenizes with llama.cpp. It needs nothing beyond the standard library.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The "qwen2" pattern with \p{L} and \p{N} spelled for the standard `re`.
_WORDS = re.compile(
    r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|(?:[^\r\n\w]|_)?[^\W\d_]+|\d"
    r"| ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")


def _byte_characters() -> list[str]:
    """Return the printable character that stands for each byte in a GPT-2 style vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        characters.setdefault(byte, chr(256 + len(characters) - len(printable)))
    return [characters[byte] for byte in range(256)]


class BytePairVocabulary:
    """Special tokens first, then the 256 bytes, then one token for each merge."""

    def __init__(self, merges: list[tuple[str, str]]) -> None:
        self.merges = merges
        self._characters = _byte_characters()
        self.tokens = [*SPECIAL_TOKENS, *self._characters, *(a + b for a, b in merges)]
        self._ids = {token: i for i, token in enumerate(self.tokens)}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._bytes = {character: byte for byte, character in enumerate(self._characters)}
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def train(cls, text: str, n_vocab: int, n_least: int = 3) -> BytePairVocabulary:
        """Return a vocabulary of *n_vocab* tokens whose merges are the commonest pairs of *text*.

        Words that occur less than *n_least* times are not counted. A tie goes to the pair that
        sorts first, so one text always gives one vocabulary.
        """
        characters = _byte_characters()
        counts = Counter(_WORDS.findall(text))
        words: list[tuple[list[str], int]] = [
            ([characters[byte] for byte in word.encode()], count)
            for word, count in counts.items()
            if count >= n_least
        ]
        merges: list[tuple[str, str]] = []
        while len(merges) < n_vocab - 256 - len(SPECIAL_TOKENS):
            pairs: Counter[tuple[str, str]] = Counter()
            for pieces, count in words:
                for pair in pairwise(pieces):
                    pairs[pair] += count
            best = min(pairs, key=lambda pair: (-pairs[pair], pair))
            merges.append(best)
            words = [(_merge(pieces, best), count) for pieces, count in words]
        return cls(merges)

    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*; the spelled-out special tokens become single ids."""
        ids: list[int] = []
        for part in _SPECIAL.split(text):
            if part in SPECIAL_TOKENS:
                ids.append(self._ids[part])
            else:
                for word in _WORDS.findall(part):
                    ids += self._encode_word(word)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of *ids*; bytes that are no UTF-8 become U+FFFD."""
        parts = [
            token.encode() if token in SPECIAL_TOKENS else bytes(self._bytes[c] for c in token)
            for token in (self.tokens[i] for i in ids)
        ]
        return b"".join(parts).decode(errors="replace")

    def _encode_word(self, word: str) -> list[int]:
        known = self._cache.get(word)
        if known is not None:
            return known
        pieces = [self._characters[byte] for byte in word.encode()]
        while len(pieces) > 1:
            ranked = [self._ranks.get(pair, len(self.merges)) for pair in pairwise(pieces)]
            best = min(ranked)
            if best == len(self.merges):
                break
            i = ranked.index(best)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        ids = self._cache[word] = [self._ids[piece] for piece in pieces]
        return ids


def _merge(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    """Return *pieces* with each occurrence of *pair* joined, from left to right."""
    merged: list[str] = []
    i = 0
    while i < len(pieces):
        if i + 1 < len(pieces) and (pieces[i], pieces[i + 1]) == pair:
            merged.append(pieces[i] + pieces[i + 1])
            i += 2
        else:
            merged.append(pieces[i])
            i += 1
    return merged
