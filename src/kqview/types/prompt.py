"""PromptBlock: rows of a run of prompt tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kqview.types.token import Attention, Positions


@dataclass(slots=True, eq=False, repr=False)
class PromptBlock:
    """Attention rows of the prompt's tokens ``start .. start + n_rows``.

    Attributes:
        start: Position of the first row's query in the prompt.
        n_rows: Rows, one for each query.
        rows: Shape ``(n_layers, n_heads, n_rows, n_context)``, float32 or float16, read-only, a
            view that nobody copied and that stays valid for as long as it is held. ``n_context`` is
            the length of the whole prompt in every block; positions behind a query are -inf in
            logits and scores and 0 in probs, unless the model sees both sides. With a reduction the
            axes of heads (and layers) are gone; a tuple of ``(n_heads, n_rows, n_context)``, one a
            layer, where layers differ in heads; ``top_k`` keeps k values in place of ``n_context``.
            None where ``on_full="drop"`` dropped it.
        positions: With ``top_k``: int32 positions of the values, shaped as rows. Else None.
        hidden: Not of `attend`: what `Engine.embed` computes comes this way, float32 of shape
            ``(n_rows, n_values)``.
    """

    start: int
    n_rows: int
    rows: Attention | None
    positions: Positions | None = None
    hidden: NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        """One line; arrays show as shape and dtype."""
        if self.rows is None:
            shown = "None"
        elif isinstance(self.rows, tuple):
            shown = f"<{len(self.rows)} layers>"
        else:
            shown = f"<{self.rows.shape} {self.rows.dtype}>"
        return f"PromptBlock(start={self.start}, n_rows={self.n_rows}, rows={shown})"
