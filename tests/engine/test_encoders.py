"""Encoders: `Engine.attend` gives every row, to both sides; they do not generate.

Values are the stock build's tensors of one llama_decode (BERT, which has no cache) or llama_encode
(T5's encoder), flash attention off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture
from kqview.errors import InvalidCapture, PromptTooLong, UnsupportedModel
from tests.support import encoder_gguf, stock
from tests.support.arch_check import row_error
from tests.support.rows import KINDS, Kind

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

EXACT = 1e-5
ROUNDED = 2e-3


@pytest.fixture(params=[encoder_gguf.write_bert, encoder_gguf.write_t5], ids=["bert", "t5"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return request.param(tmp_path / "encoder.gguf")


def ids_of(n_tokens: int) -> list[int]:
    return np.random.default_rng(8).integers(0, 256, n_tokens).tolist()


@pytest.mark.peers
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_encoder_equal_stock(
    make_engine: MakeEngine, model: Path, kind: Kind, flash_attn: bool
) -> None:
    engine = make_engine(model, flash_attn=flash_attn, kv_type="f32")
    ids = ids_of(41)
    is_t5 = engine.model.architecture == "t5"
    try:
        run = stock.read_rows(model, ids, rows="all", kv_type="f32", n_ctx=512, encode=is_t5)
    except stock.PeersMissing as missing:
        pytest.skip(str(missing))
    layers = run.steps[0].layers
    assert engine.model.attention_layers == tuple(layer.layer for layer in layers) == (0, 1, 2)
    rows: Any = engine.attend(ids, capture=kind).array()
    assert rows.shape == (3, 4, 41, 41)
    errors = [row_error(kind, rows[i], layer) for i, layer in enumerate(layers)]
    # T5 has a bias in its scores, which llama.cpp's flash attention cannot add: it leaves it off.
    assert errors[0] <= EXACT
    assert max(errors) <= (ROUNDED if flash_attn and not is_t5 else EXACT)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_encoder_sees_both_sides_and_sums_to_one(
    make_engine: MakeEngine, model: Path, flash_attn: bool
) -> None:
    engine = make_engine(model, flash_attn=flash_attn)
    first: Any = engine.attend(ids_of(30), capture="probs").array()
    assert first.min() > 0
    np.testing.assert_allclose(first.sum(axis=-1), 1, atol=2e-6)
    # Nothing of an earlier text is left.
    engine.attend(ids_of(50)[20:], capture="probs").array()
    np.testing.assert_array_equal(engine.attend(ids_of(30), capture="probs").array(), first)


def test_encoder_refuses_to_generate_and_what_one_step_cannot_hold(
    make_engine: MakeEngine, model: Path
) -> None:
    engine = make_engine(model, n_ubatch=32)
    with pytest.raises(UnsupportedModel):
        engine.generate([1, 2, 3])
    with pytest.raises(PromptTooLong):
        engine.attend([1] * 33)
    with pytest.raises(InvalidCapture):
        engine.attend([1, 2], capture=Capture("probs", layers=[9]))
    assert np.shape(engine.attend([1] * 32, capture="probs").array()) == (3, 4, 32, 32)
