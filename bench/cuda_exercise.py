"""A short run of everything that touches device memory, for compute-sanitizer; checks the results.

Every kind, type and reduction, rows of a prompt, two slots, saving and restoring a slot, a request
that is cancelled, views that outlive their engine. It uses the bundled demo model, so that a
checker that slows kernels a hundredfold finishes in a minute.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from kqview import Capture, Engine
from kqview.errors import InvalidCapture, UnsupportedModel

if TYPE_CHECKING:
    from numpy.typing import NDArray

CAPTURES = (
    Capture("logits"),
    Capture("scores"),
    Capture("probs"),
    Capture("probs", dtype="float16"),
    Capture("logits", layers=(3, 0), heads=(1, 5)),
    Capture("probs", reduce="mean_heads"),
    Capture("probs", reduce="max"),
    Capture("scores", reduce="max_heads", dtype="float16"),
    Capture("logits", heads=(1, 5), reduce="mean_heads"),
    Capture("logits", reduce="mean", top_k=4),
    Capture("probs", top_k=4),
    Capture("probs", hidden=(1,)),
)
# Rows are computed beside a step only with flash attention.
WAYS = ((True, "in graph"), (True, "beside"), (False, "in graph"))


def main() -> None:
    """Run it and print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=-1, help="layers on the device; -1 for all")
    parser.add_argument("--tokens", type=int, default=6, help="tokens of each generation")
    args = parser.parse_args()
    views: list[NDArray[np.generic]] = []
    n_rows = 0
    refused: set[str] = set()
    for flash_attn, device_rows in WAYS:
        with Engine.demo(
            n_ctx=256, n_slots=2, n_threads=1, n_gpu_layers=args.layers, flash_attn=flash_attn,
            device_rows=device_rows,
        ) as engine:  # fmt: skip
            ids = engine.tokenize("Mirelda found a silver key near the old bridge. Then Mirel")
            for capture in CAPTURES:
                both = [
                    engine.generate(ids, slot=i, max_tokens=args.tokens, capture=capture)
                    for i in range(2)
                ]
                for generation in both:
                    try:
                        for token in generation:
                            views.append(_checked(token.attention, capture))
                            n_rows += 1
                    except (InvalidCapture, UnsupportedModel) as error:  # a device cannot do all
                        refused.add(f"{capture}: {error}")
            whole = engine.attend(ids, "probs").array()
            assert whole.shape[-2:] == (len(ids), len(ids))
            np.testing.assert_allclose(whole.sum(axis=-1), 1, rtol=1e-3)
            views.append(whole)
            blob = engine.slots[0].save()
            engine.slots[1].restore(blob, exact=True)
            stopped = engine.generate(ids, slot=1, max_tokens=64, capture="probs")
            views.append(_checked(next(stopped).attention, CAPTURES[2]))
            stopped.cancel()
    # The engines are closed; the views must still be readable.
    assert all(np.isfinite(np.asarray(view, np.float64)).any() for view in views)
    for text in sorted(refused):
        print(text)
    print(f"{n_rows} tokens with attention, {len(CAPTURES)} captures, {len(refused)} refused")


def _checked(rows: NDArray[np.generic] | tuple[object, ...] | None, capture: Capture) -> NDArray:
    assert isinstance(rows, np.ndarray)
    values = np.asarray(rows, np.float64)
    assert not np.isnan(values).any()
    if capture.kind == "probs" and capture.reduce is None and capture.top_k is None:
        np.testing.assert_allclose(values.sum(axis=-1), 1, rtol=5e-3)
    return rows


if __name__ == "__main__":
    main()
