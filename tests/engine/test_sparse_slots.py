"""Two slots at once with models that attend to a selection of the tokens, one of them captured.

The selection is small here (`test_sparse_attention.py` says why and how), so that it leaves tokens
out; keys are gathered or masked per slot. A neighbour must neither change what a slot selects nor
what its rows show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support.archs import with_value

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

pytestmark = pytest.mark.peers

# Those that gather, then those that mask.
TOP_K = {
    "minimax-m3-moe": 2,
    "glm5-next-moe": 8,
    "deepseek32-moe": 8,
    "deepseek4-moe": 8,
    "dots3note-moe": 8,
    "glm-dsa-moe": 8,
    "hy_v4-moe": 8,
    "qwen4exp-moe": 8,
}
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}
# Slots in one batch are multiplied together: other sums, rounded another way.
ROUNDED = 2e-3


def prompt_of(n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, n_tokens).tolist()


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("captured", [0, 1])
@pytest.mark.parametrize("name", TOP_K)
def test_captured_slot_beside_a_busy_one_has_the_rows_that_it_has_alone(
    make_engine: MakeEngine,
    architectures: dict[str, Path],
    tmp_path: Path,
    name: str,
    captured: int,
    flash_attn: bool,
) -> None:
    key = f"{name.removesuffix('-moe')}.attention.indexer.top_k"
    model = with_value(architectures[name], tmp_path / f"{name}.gguf", key, TOP_K[name])
    options: dict[str, Any] = {"n_slots": 2, "n_ctx": 256, "kv_type": "f32"}
    engine = make_engine(model, flash_attn=flash_attn, **options)
    prompts = [prompt_of(45, 1), prompt_of(70, 2)]
    alone = []
    for i, prompt in enumerate(prompts):
        capture = "logits" if i == captured else None
        alone.append(list(engine.generate(prompt, slot=i, capture=capture, **OPTIONS)))
        engine.slots[i].clear()
    generations = [
        engine.generate(prompt, slot=i, capture="logits" if i == captured else None, **OPTIONS)
        for i, prompt in enumerate(prompts)
    ]
    together = [[next(generation)] for generation in generations]
    for _ in range(OPTIONS["max_tokens"] - 1):
        for tokens, generation in zip(together, generations, strict=True):
            tokens.append(next(generation))
    for one, other in zip(alone, together, strict=True):
        assert [token.id for token in one] == [token.id for token in other]
    n_hidden = 0
    for want, got in zip(alone[captured], together[captured], strict=True):
        assert want.attention is not None
        assert got.attention is not None
        for row, expected in zip(got.attention, want.attention, strict=True):
            np.testing.assert_array_equal(np.isfinite(row), np.isfinite(expected))
            shown = np.isfinite(expected)
            n_hidden += int((~shown).sum())
            largest = np.abs(expected[shown]).max()
            assert np.abs(row[shown] - expected[shown]).max() <= ROUNDED * largest
    assert n_hidden > 0 or (name == "minimax-m3-moe" and not flash_attn)  # sees all of them then
    assert all(token.attention is None for token in together[1 - captured])
