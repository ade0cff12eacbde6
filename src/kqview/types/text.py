"""Ids of a text; Tokenized, ChatPrompt and SlotMessage: which part of a text ids are."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

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


class SlotMessage(tuple[int, int]):
    """A message in a slot, see `Slot.messages`: the (first, last) indices of its ids, inclusive.

    It is that pair and compares as such; the role comes with it.

    Attributes:
        role: "system", "user", "assistant" or "tool", by the header with which the model's chat
            template begins a message of that role; None if it begins with none of them.
    """

    role: str | None

    def __new__(cls, first: int, last: int, role: str | None = None) -> Self:
        """Make the pair."""
        made = super().__new__(cls, (first, last))
        made.role = role
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[int, int, str | None]]:
        return type(self), (self[0], self[1], self.role)

    @property
    def span(self) -> tuple[int, int]:
        """(start, stop) as slices and `Slot.remove` take them."""
        return self[0], self[1] + 1

    def __repr__(self) -> str:
        return f"SlotMessage({self[0]}, {self[1]}, role={self.role!r})"
