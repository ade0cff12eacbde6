"""Token: one generated token with the attention of the query that produced it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Attention = NDArray[np.floating[Any]] | tuple[NDArray[np.floating[Any]], ...]


@dataclass(slots=True, eq=False, repr=False)
class Token:
    """One generated token.

    Tokens compare by identity: arrays have no single truth value.

    Attributes:
        id: Id in the vocabulary.
        text: Text that this token completes, "" inside a UTF-8 character; the texts of a
            generation join to its exact output.
        index: Position in the generation, from 0.
        logprob: Natural logarithm of the probability of ``id``, None unless top_logprobs was given.
        top_logprobs: The most probable ids with their logprobs, best first, None unless asked for.
        attention: Row of the query that produced this token, columns are the ``n_context`` tokens
            before it. Shape ``(n_layers, n_heads, n_context)``, float32 or float16, read-only, a
            view that nobody copied and that stays valid for as long as it is held. A tuple of
            ``(n_heads, n_context)``, one a layer, where layers differ in heads. None without
            capture, and where ``on_full="drop"`` dropped it.
        forced: True where a mod fed this token in place of sampling it.
    """

    id: int
    text: str
    index: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] | None = None
    attention: Attention | None = None
    forced: bool = False

    def __repr__(self) -> str:
        """One line; arrays show as shape and dtype."""
        parts = [f"id={self.id}, text={self.text!r}, index={self.index}"]
        if self.logprob is not None:
            parts.append(f"logprob={self.logprob:.4g}")
        if self.top_logprobs:
            parts.append(f"top_logprobs=<{len(self.top_logprobs)}>")
        if isinstance(self.attention, tuple):
            parts.append(f"attention=<{len(self.attention)} layers>")
        elif self.attention is not None:
            parts.append(f"attention=<{self.attention.shape} {self.attention.dtype}>")
        if self.forced:
            parts.append("forced=True")
        return f"Token({', '.join(parts)})"
