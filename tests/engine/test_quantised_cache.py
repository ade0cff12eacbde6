"""Rows over a quantised KV cache, of models that use it in different ways.

The stock build's product over such a cache rounds q as well, to Q8_0, before it multiplies; the tap
takes q as it is. So the two differ by about 1 % of a row's largest logit for q8_0 and q4_0 alike,
and the tap's rows are the nearer ones to those of an F32 cache. Both is asserted for the first
layer; above it the reference keeps V in F16 (llama.cpp has no quantised V without flash attention),
and V's own rounding adds up. Flash attention is on: without it llama.cpp refuses a quantised V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import stock
from tests.support.arch_check import row_error

if TYPE_CHECKING:
    from pathlib import Path

    from kqview.types import Token
    from tests.support.rows import Kind

    from .conftest import MakeEngine

pytestmark = pytest.mark.peers

N_TOKENS = 6
# Of the first layer: what 8 or 4 bits of a key lose, and the reference's rounding of q.
LIMITS: dict[tuple[stock.KvType, Kind], tuple[float, float]] = {
    ("q8_0", "logits"): (0.02, 0.02),
    ("q8_0", "probs"): (1e-3, 1e-3),
    ("q4_0", "logits"): (0.25, 0.02),
    ("q4_0", "probs"): (1e-2, 1e-3),
}


def errors(tokens: list[Token], run: stock.Run, kind: Kind) -> list[float]:
    """Largest error of each layer."""
    found = [0.0] * len(run.steps[0].layers)
    for token, step in zip(tokens, run.steps, strict=True):
        assert token.attention is not None
        for i, layer in enumerate(step.layers):
            found[i] = max(found[i], row_error(kind, np.asarray(token.attention[i]), layer))
    return found


def stock_errors(run: stock.Run, exact: stock.Run, kind: Kind) -> list[float]:
    """The same of the stock build's own rows over the quantised cache."""
    found = [0.0] * len(exact.steps[0].layers)
    for step, want in zip(run.steps, exact.steps, strict=True):
        for i, layer in enumerate(want.layers):
            got = step.layers[i]
            rows = got.probs[:, -1] if kind == "probs" else got.kq[:, -1]
            found[i] = max(found[i], row_error(kind, rows, layer))
    return found


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["llama-dense", "qwen3-dense", "gemma3-dense", "gpt-oss-moe"])
def test_rows_of_quantised_cache_are_near_stock_and_nearer_the_exact_ones(
    make_engine: MakeEngine,
    architectures: dict[str, Path],
    name: str,
    kv_type: stock.KvType,
    kind: Kind,
) -> None:
    model = architectures[name]
    prompt = np.random.default_rng(3).integers(0, 128, 40).tolist()
    engine = make_engine(model, kv_type=kv_type, flash_attn=True)
    tokens = list(
        engine.generate(prompt, max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True, capture=kind)
    )
    ids = [token.id for token in tokens]
    same, exact = (
        stock.read_rows(
            model, prompt, n_predict=N_TOKENS, forced_ids=ids, kv_type=reference, n_ctx=512
        )
        for reference in (kv_type, "f32")
    )
    to_exact, to_same = LIMITS[kv_type, kind]
    assert errors(tokens, same, kind)[0] <= to_same
    assert errors(tokens, exact, kind)[0] <= to_exact
    if kv_type == "q8_0" and kind == "logits":
        assert errors(tokens, exact, kind)[0] < stock_errors(same, exact, kind)[0]
    assert max(errors(tokens, same, kind)) <= 0.1


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["deepseek2-moe", "minimax-m3-moe", "lfm2-dense"])
def test_rows_of_quantised_cache_are_near_the_exact_ones(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str, kv_type: stock.KvType
) -> None:
    # The stock build cannot quantise K alone where V lies in K (deepseek2).
    model = architectures[name]
    prompt = np.random.default_rng(4).integers(0, 128, 40).tolist()
    engine = make_engine(model, kv_type=kv_type, flash_attn=True)
    tokens = list(
        engine.generate(
            prompt, max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True, capture="logits"
        )
    )
    ids = [token.id for token in tokens]
    exact = stock.read_rows(
        model, prompt, n_predict=N_TOKENS, forced_ids=ids, kv_type="f32", n_ctx=512
    )
    first, *above = errors(tokens, exact, "logits")
    assert 0 < first <= LIMITS[kv_type, "logits"][0]
    assert max(above, default=0) <= 0.3
