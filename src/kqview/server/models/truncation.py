"""Truncation: a text that is too long loses its front, as in KoboldCpp. Pure."""

from collections.abc import Sequence
from typing import Final

_LEAST_PROMPT: Final = 4  # tokens that a long memory leaves to the prompt, as in KoboldCpp


def truncated(
    ids: Sequence[int], memory: Sequence[int], *, n_first: int, limit: int, max_tokens: int
) -> Sequence[int]:
    """The ids of a text that fits into *limit* tokens together with what is generated from it.

    As in KoboldCpp, *max_tokens* are left for that; but no more than half of *limit*, because a
    client that asks for very much would lose its whole prompt.

    Args:
        ids: Of the whole text; returned as they are if they fit.
        memory: Of the part that follows the first ids, which stays: only if it leaves no room for
            the text behind it, it loses its own front.
        n_first: How many ids at the beginning stay.
        limit: Most tokens of both together, at least 1.
        max_tokens: Most tokens to generate.
    """
    room = limit - min(max_tokens, limit // 2)
    if len(ids) <= room:
        return ids
    n_first = min(n_first, room - 1)
    n_behind = max(0, len(ids) - n_first - len(memory))
    n_memory = max(0, min(len(memory), room - n_first - min(_LEAST_PROMPT, n_behind)))
    n_end = room - n_first - n_memory
    return [*ids[:n_first], *memory[len(memory) - n_memory :], *ids[len(ids) - n_end :]]
