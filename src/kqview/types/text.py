"""Ids of a text; Tokenized and ChatPrompt: ids with the part of a text that each of them is."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids, as a list, a tuple or a numpy array of whole numbers."""


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
