"""Every architecture shifts its cache or says that it cannot, and no key ends up elsewhere.

Keys and queries of a first layer with attention depend on a token and its position alone. So after
tokens were pruned its rows must be those of a fresh evaluation, whatever the layers above have kept
of the pruned tokens: the check needs no other implementation, and covers all ways of rotating keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, errors
from tests.support.archs import NAMES, WITHOUT_CACHE

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine

    from .conftest import MakeEngine

pytestmark = pytest.mark.peers

GENERATING = [name for name in NAMES if name not in WITHOUT_CACHE]
# Rotated twice in place of once, and rounded to the cache's type in between.
LIMITS = {"f32": 2e-4, "f16": 4e-3, "q8_0": 3e-2}
# Some that must not be refused, with an F32 cache; and those that llama.cpp would move wrongly.
SHIFTED = (
    "llama-dense",
    "qwen2-dense",
    "phi2-dense",
    "gptneox-dense",
    "deepseek2-moe",
    "bloom-dense",
)
MOVED_WRONGLY = (
    *("baichuan-dense", "cogvlm-dense", "gpt2-dense", "hunyuan-dense-dense", "hunyuan-moe-moe"),
    *("maincoder-dense", "mpt-dense", "pangu-embedded-dense", "starcoder-dense"),
)
PROMPT = np.random.default_rng(1).integers(0, 128, 90).tolist()
LEFT = PROMPT[:8] + PROMPT[20:50] + PROMPT[57:]


def rows_of(engine: Engine, ids: list[int], **options: Any) -> np.ndarray[Any, Any]:
    (token,) = engine.generate(
        ids, max_tokens=1, temperature=0.0, ignore_eos=True, capture=Capture("logits", layers=[0]),
        **options,
    )  # fmt: skip
    assert token.attention is not None
    return np.asarray(token.attention[0])


@pytest.mark.parametrize("kv_type", LIMITS)
@pytest.mark.parametrize("name", GENERATING)
def test_keys_of_the_first_layer_are_where_a_fresh_evaluation_has_them(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str, kv_type: str
) -> None:
    try:
        engine = make_engine(
            architectures[name], n_ctx=256, kv_type=kv_type, flash_attn=kv_type != "f32"
        )
    except errors.RequestError:
        return  # heads that are no multiple of a block
    engine.generate(PROMPT, max_tokens=1, ignore_eos=True).read()
    try:
        generation = engine.generate(LEFT, max_tokens=1, reuse="shift", ignore_eos=True)
    except errors.UnsupportedModel:
        assert kv_type != "f32" or name not in SHIFTED
        with pytest.raises(errors.UnsupportedModel):
            engine.slots[0].shift(3, 9)
        assert engine.slots[0].tokens == PROMPT
        return
    assert name not in MOVED_WRONGLY
    generation.read()
    assert generation.usage.cached_tokens == len(LEFT) - 1
    kept = rows_of(engine, [*LEFT, 7, 9], reuse="shift")
    engine.slots[0].clear()
    fresh = rows_of(engine, [*LEFT, 7, 9])
    shown = np.isfinite(fresh)
    np.testing.assert_array_equal(np.isfinite(kept), shown)
    largest = np.abs(fresh[shown]).max()
    assert np.abs(kept[shown] - fresh[shown]).max() <= LIMITS[kv_type] * largest
