"""Forms: attention as shares, and under the shapes and names of transformers and TransformerLens.

A layer's rows have shape ``(n_heads, n_query, n_context)`` here; both libraries want an axis for
the batch before it.
"""

from collections.abc import Iterable
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kqview.errors import InvalidCapture, RequestError, shown
from kqview.extras import needed
from kqview.types.capture import Capture

Array = NDArray[np.floating[Any]]
Framework = Literal["np", "pt"]

RESIDUAL: Final = "hook_resid_post"
_LENS_NAMES: Final = {"scores": "attn.hook_attn_scores", "probs": "attn.hook_pattern"}


def softmax(scores: Array) -> Array:
    """The softmax of *scores* over the last axis; of scores that are all minus infinity, zeros."""
    largest = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def check_whole(who: str, capture: Capture) -> None:
    """Refuse captures without whole rows of single heads, for *who*."""
    option = "reduce" if capture.reduce is not None else capture.shortened_by
    if option is not None:
        raise InvalidCapture(
            f"{who}() needs whole rows of single heads, but the capture has {option}; "
            f"capture without {option}"
        )


def check_hf(capture: Capture) -> None:
    """Refuse what transformers does not return."""
    check_whole("to_hf", capture)
    if capture.kind != "probs":
        raise InvalidCapture(
            f"to_hf() needs probabilities, which transformers returns, but the capture has kind "
            f"'{capture.kind}'; capture 'probs'"
        )


def lens_name(capture: Capture) -> str:
    """The name of the rows in a layer's block, for TransformerLens."""
    check_whole("named", capture)
    if capture.kind not in _LENS_NAMES:
        raise InvalidCapture(
            f"TransformerLens has no name for kind '{capture.kind}'; capture 'scores' or 'probs'"
        )
    return _LENS_NAMES[capture.kind]


def hf_form(layers: Iterable[Array], framework: Framework) -> tuple[Any, ...]:
    """The rows of each layer with an axis for the batch: views, or tensors of their own."""
    arrays = tuple(rows[None] for rows in layers)
    if framework == "np":
        return arrays
    # A copy: torch would write into a view of it without an error.
    return tuple(_torch().from_numpy(array.copy()) for array in arrays)


def lens_form(
    layers: Iterable[int], name: str, arrays: Iterable[Array], framework: Framework
) -> dict[str, Any]:
    """The array of each layer, as of `hf_form`, under its name for TransformerLens."""
    named = zip(layers, hf_form(arrays, framework), strict=True)
    return {f"blocks.{layer}.{name}": array for layer, array in named}


def check_framework(framework: object) -> None:
    """Refuse other frameworks than numpy and torch, and torch where it is missing.

    Raises:
        RequestError: *framework* is neither "np" nor "pt".
        KqviewError: torch is not installed.
    """
    if framework not in ("np", "pt"):
        raise RequestError(
            f"framework is {shown(framework)}; use 'np' for numpy or 'pt' for torch",
            parameter="framework",
        )
    if framework == "pt":
        _torch()


def _torch() -> Any:
    return needed("torch", "framework='pt' needs", "install it, or use 'np'")
