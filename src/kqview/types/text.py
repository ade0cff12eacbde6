"""Tokenized and ChatPrompt: ids together with the part of a text that each of them is."""

from typing import NamedTuple


class Tokenized(NamedTuple):
    """The result of `Engine.tokenize` with ``offsets=True``.

    Attributes:
        ids: Token ids.
        offsets: For each id, the (start, stop) indices of its characters in the text. Tokens that
            share a character, because it takes several of them, have the same character. The span
            is empty for ids that stand for no character, such as BOS.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]


class ChatPrompt(NamedTuple):
    """The result of `Engine.apply_chat_template` with ``spans=True``.

    Attributes:
        ids: Token ids of the whole prompt.
        spans: For each message, the (start, stop) indices of its ids, with its header and its end.
            The first span starts at 0: it includes what the template writes before the messages,
            such as BOS, tools or a default system message. The header of the answer belongs to no
            message.
    """

    ids: list[int]
    spans: list[tuple[int, int]]
