"""What a Capture means for the model of an engine, in the core's types."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from kqview import _core
from kqview.errors import InvalidCapture
from kqview.types import Capture

_INT32_MAX: Final = 2**31 - 1

_KINDS: Final = {
    "logits": _core.RowKind.logits,
    "scores": _core.RowKind.scores,
    "probs": _core.RowKind.probs,
}
_TYPES: Final = {"float32": _core.RowType.float32, "float16": _core.RowType.float16}
_REDUCTIONS: Final = {
    None: _core.RowReduction.none,
    "mean_heads": _core.RowReduction.mean_heads,
    "max_heads": _core.RowReduction.max_heads,
    "mean": _core.RowReduction.mean,
    "max": _core.RowReduction.max,
}
_ON_FULL: Final = {
    "raise": _core.FullPolicy.raise_,
    "wait": _core.FullPolicy.wait,
    "drop": _core.FullPolicy.drop,
}


def to_plan(engine: _core.Engine, capture: Capture, has_all_columns: bool) -> _core.CapturePlan:
    """What *capture* means for the engine's model.

    Args:
        engine: The engine.
        capture: What to capture.
        has_all_columns: Whether the cache keeps every position of every layer.

    Raises:
        InvalidCapture: A layer or head is not there, or the options exclude each other.
    """
    has_attention = capture.layers is None or len(capture.layers) > 0
    if not has_all_columns and has_attention:
        raise InvalidCapture(
            "capture: this model has sliding windows and swa_full is off, so its columns are no "
            "positions; open the Engine with swa_full=True"
        )
    if capture.prompt and not has_attention:
        raise InvalidCapture(
            "capture: prompt rows of no layers are asked for; name layers, or leave prompt out"
        )
    return engine.plan(
        _KINDS[capture.kind],
        _TYPES[capture.dtype],
        _core_indices(capture.layers),
        _core_indices(capture.heads),
        _REDUCTIONS[capture.reduce],
        min(capture.top_k or 0, _INT32_MAX),
        _core_indices(capture.hidden) or [],
    )


def prompt_capture(capture: Capture | str) -> Capture:
    """What `Engine.attend` captures.

    Raises:
        InvalidCapture: It is nothing, or hidden states.
    """
    wanted = Capture.of(capture)
    if wanted is None or wanted.hidden:
        raise InvalidCapture(
            "attend: hidden states are of generated tokens; use generate, or leave hidden out"
            if wanted
            else "attend: capture is None, a kind or a Capture is needed; pass 'probs'"
        )
    return replace(wanted, prompt=True)


def _core_indices(indices: Sequence[int] | None) -> list[int] | None:
    # No model has that many: the core refuses what is too large for it as well.
    return None if indices is None else [min(index, _INT32_MAX) for index in indices]


def to_policy(capture: Capture | None) -> _core.FullPolicy:
    """What to do when the attention memory is full."""
    return _ON_FULL[capture.on_full if capture else "raise"]
