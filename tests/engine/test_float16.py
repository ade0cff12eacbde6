"""Values beyond float16's range become its largest ones: -inf is what is masked, nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture
from kqview.server.attention import AttentionWanted, shaped
from tests.support import tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

LARGEST = 65504.0
CAPTURES: list[dict[str, Any]] = [
    {},
    {"layers": [1], "heads": [2, 0]},
    {"reduce": "mean_heads"},
    {"reduce": "max_heads"},
    {"reduce": "mean"},
    {"top_k": 5},
    {"reduce": "max_heads", "top_k": 3},
]


@pytest.fixture(scope="module")
def large_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Products of K and Q far beyond float16, both ways."""
    path = tmp_path_factory.mktemp("model") / "large.gguf"
    return tiny_gguf.write_preset(path, "tiny_llama", score_spread=4e5)


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", ["logits", "scores"])
@pytest.mark.parametrize("options", CAPTURES, ids=str)
def test_rows_beyond_float16_saturate_and_masked_columns_stay_so(
    make_engine: MakeEngine, large_llama: Path, kind: Any, flash_attn: bool, options: dict[str, Any]
) -> None:
    engine = make_engine(large_llama, flash_attn=flash_attn, kv_type="f32")
    prompt = random_ids(30)
    rows = {
        dtype: np.asarray(engine.attend(prompt, Capture(kind, dtype=dtype, **options)).array())
        for dtype in ("float32", "float16")
    }
    whole, half = rows["float32"], rows["float16"]
    assert half.dtype == np.float16
    masked = np.isneginf(whole)
    assert np.isfinite(whole[~masked]).all()
    assert np.abs(whole[~masked]).max() > 2 * LARGEST
    np.testing.assert_array_equal(np.isneginf(half), masked)
    want = np.clip(whole, -LARGEST, LARGEST, where=~masked, out=whole.copy())
    np.testing.assert_allclose(half, want, rtol=2e-3, atol=1e-2)
    (token,) = engine.generate(prompt, max_tokens=1, capture=Capture(kind, dtype="float16"))
    assert np.isfinite(np.asarray(token.attention)).all()


def test_server_saturates_what_it_averages_itself() -> None:
    wanted = AttentionWanted("logits", "aggregated", "weighted_layers", dtype="float16")
    rows = np.array([[1e5, -1e6, -np.inf, 3.0]] * 2, np.float32)
    dense: Any = shaped(wanted, rows)
    np.testing.assert_array_equal(
        dense.values, np.array([LARGEST, -LARGEST, -np.inf, 3.0], np.float16)
    )
