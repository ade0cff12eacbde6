"""Draws where the heads of SmolLM2 are that copy: bench/results/heads-smollm2.png.

Left the induction heads: the mean attention, in 60 random tokens that come twice, to the token
behind the earlier occurrence. Right the retrieval heads: how often a head looks most at the token
that an answer copies next (24 made examples of "needle"). Needs matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kqview import Engine, heads
from kqview.heads import measures

TARGET = Path(__file__).parents[1] / "results" / "heads-smollm2.png"
N_TOKENS = 60
N_EXAMPLES = 24


def induction(engine: Engine) -> Any:
    low, high = 1000, 40_000  # ids of words, where there are so many
    if high > engine.model.n_vocab:
        low, high = 0, engine.model.n_vocab
    half = np.random.default_rng(0).integers(low, high, N_TOKENS).tolist()
    maps = engine.attend([*half, *half]).array()
    assert not isinstance(maps, tuple)
    at = np.arange(N_TOKENS, 2 * N_TOKENS)
    return maps[:, :, at, at - N_TOKENS + 1].mean(axis=-1)


def retrieval(engine: Engine) -> Any:
    found = [
        measures.needle(engine, one["context"], one["question"], one["answer"]).values.mean(axis=0)
        for one in heads.made_examples("needle", N_EXAMPLES)
    ]
    return np.mean(found, axis=0).reshape(engine.model.n_layer, engine.model.n_head)


def main() -> None:
    with Engine.demo("smollm2", n_ctx=1024) as engine:
        maps = {"induction": induction(engine), "retrieval": retrieval(engine)}
    figure = Figure(figsize=(8, 2.9), layout="constrained", dpi=110)
    image: Any = None
    for axes, (title, scores) in zip(figure.subplots(1, 2), maps.items(), strict=True):
        image = axes.imshow(scores.T, cmap="magma", vmin=0, vmax=1, aspect="auto")
        axes.set(title=f"{title} heads", xlabel="layer", ylabel="head", yticks=range(0, 9, 2))
    figure.colorbar(image, ax=figure.axes, shrink=0.9)
    figure.savefig(TARGET)
    print(TARGET.name, TARGET.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
