"""Each way in which a model's attention departs from the plain one, by a test of its name.

Values are the stock build's tensors, flash attention off, or a formula. The models are llama.cpp's
tiny random ones (conftest.architectures), Gemma 3n and 4 are ours. With flash attention on the
first layer is compared tightly; above it llama.cpp's own rounding adds up (see test_values.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import shared_kv_gguf
from tests.support.arch_check import ModelCheck
from tests.support.archs import Checks, with_value
from tests.support.rows import KINDS
from tests.support.tiny_gguf import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from tests.support.arch_check import Report

    from .conftest import MakeEngine

    Models = dict[str, Path]

pytestmark = pytest.mark.peers

EXACT = 1e-5
ROUNDED = 2e-3
# Above the first layer, where llama.cpp's flash attention rounds for 150 tokens or many layers.
DRIFTED = 2e-2
WINDOW = 32

WINDOWS = (
    "afmoe-moe cohere2-dense cohere2moe-moe exaone-moe-moe gemma2-dense gemma3-dense gpt-oss-moe "
    "granite_swa-dense laguna-moe maple-moe mellum-moe mimo2-moe muse-glimmer-dense olmo2-dense "
    "plamo3-dense spark2_5-dense dots3note-moe"
)
WINDOWS_ONLY = "deepseek4-moe lfm2-dense"
ALIBI = "bloom-dense jais-dense mpt-dense refact-dense refact-moe"
SINKS = "deepseek4-moe gpt-oss-moe granite_swa-dense hy_v4-moe mimo2-moe"
MLA = (
    "bailingmoe3-moe deepseek2-moe deepseek32-moe dots3note-moe glm-dsa-moe glm5-next-moe "
    "hy_v4-moe kimi-k3-moe kimi-linear-moe minicpm3-dense mistral4-moe"
)
QK_NORM = (
    "afmoe-moe exaone4-dense gemma3-dense hunyuan-dense-dense olmo2-dense qwen3-dense qwen3moe-moe"
)
FUSED_QKV = (
    "bloom-dense dbrx-moe falcon-dense gpt2-dense gptneox-dense jais-dense mpt-dense qwen-dense "
    "starcoder-dense"
)
HYBRIDS = {
    "bailingmoe3-moe": (0,), "falcon-h1-dense": (0, 1), "granitehybrid-dense": (0,),
    "jamba-dense": (0,), "kimi-linear-moe": (0,), "lfm2-dense": (0,), "minimax-01-moe": (1,),
    "nemotron_h-dense": (0,), "plamo2-dense": (0,), "qwen3next-moe": (1,), "qwen35-dense": (1,),
    "qwen4exp-moe": (1,),
}  # fmt: skip


def assert_equal(report: Report, above: float = ROUNDED) -> None:
    """Every layer has rows, and they are the stock build's."""
    assert report.failure == ""
    assert all(layers == report.expected_layers for layers in report.layers.values())
    assert report.largest(flash_attn=False) <= EXACT
    assert report.largest(flash_attn=True, first_layer=True) <= EXACT
    assert report.largest(flash_attn=True) <= above


def random_prompt(n_tokens: int, seed: int = 5) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, n_tokens).tolist()


def last_row(engine: Any, ids: list[int], kind: str) -> list[NDArray[np.float64]]:
    """Row of the last id's query: an array (n_heads, n_context) for each layer."""
    (token,) = engine.generate(ids, max_tokens=1, temperature=0.0, ignore_eos=True, capture=kind)
    return [np.asarray(rows, np.float64) for rows in token.attention]


# ---- masks and biases


@pytest.fixture(scope="module")
def long_reports(architectures: Models) -> Iterator[Checks]:
    """Prompts of 150 tokens: beyond every window, and beyond deepseek4's blocks of 128."""
    names = f"{WINDOWS} {WINDOWS_ONLY}".split()
    checks = Checks([architectures[name] for name in names], n_prompt=150)
    yield checks
    checks.close()


@pytest.mark.parametrize("name", WINDOWS.split())
def test_sliding_window_hides_what_lies_behind_it(long_reports: Checks, name: str) -> None:
    report = long_reports[name]
    assert_equal(report, DRIFTED)
    n_columns = 150 + 5
    hidden = {
        layer: n / heads
        for (layer, n), heads in zip(report.n_hidden.items(), report.n_heads, strict=True)
    }
    # One layer has the window, the other sees everything.
    assert sorted(hidden.values()) == [0, n_columns - WINDOW]


@pytest.mark.parametrize("name", WINDOWS_ONLY.split())
def test_model_of_window_layers_alone_equals_stock(long_reports: Checks, name: str) -> None:
    assert_equal(long_reports[name], DRIFTED)
    assert min(long_reports[name].n_hidden.values()) > 0


@pytest.mark.parametrize("name", ALIBI.split())
@pytest.mark.parametrize("flash_attn", [False, True])
def test_alibi_bias_grows_with_distance_and_is_in_scores_alone(
    architectures: Models, make_engine: MakeEngine, name: str, flash_attn: bool
) -> None:
    ids = random_prompt(30)
    rows = {}
    for kind in KINDS:
        engine = make_engine(architectures[name], flash_attn=flash_attn, kv_type="f32")
        rows[kind] = last_row(engine, ids, kind)
    scale = engine.model.attention_scale
    distance = np.arange(29, -1, -1)
    for logits, scores in zip(rows["logits"], rows["scores"], strict=True):
        # Press et al. 2022: slopes 2^(-8 h / n_heads) for head h from 1.
        slopes = 2.0 ** (-8 * np.arange(1, 3) / 2)
        np.testing.assert_allclose(
            scores - logits * scale, -slopes[:, None] * distance, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(("name", "cap"), [("gemma2-dense", 0.02), ("grok-moe", 0.02)])
def test_soft_cap_bounds_scores(
    architectures: Models, tmp_path: Path, make_engine: MakeEngine, name: str, cap: float
) -> None:
    # The generator's caps are far above these models' scores: a lower one, which matters.
    key = f"{name.split('-')[0]}.attn_logit_softcapping"
    model = with_value(architectures[name], tmp_path / "capped.gguf", key, cap)
    report = ModelCheck(model).run()
    assert_equal(report)
    rows = {
        (kind, flash): last_row(make_engine(model, flash_attn=flash), random_prompt(30), kind)
        for kind in ("logits", "scores")
        for flash in (False, True)
    }
    for flash_attn in (False, True):
        scores = np.abs(np.concatenate(rows["scores", flash_attn]))
        logits = np.abs(np.concatenate(rows["logits", flash_attn]))
        assert scores.max() <= cap
        assert scores.max() > 0.5 * cap
        # Not a scaled copy: the largest are pressed together.
        assert logits.max() / np.median(logits) > 1.05 * scores.max() / np.median(scores)


@pytest.mark.parametrize("name", SINKS.split())
@pytest.mark.parametrize("flash_attn", [False, True])
def test_sinks_take_a_share_of_every_row(
    architectures: Models, make_engine: MakeEngine, name: str, flash_attn: bool
) -> None:
    ids = random_prompt(30)
    model = architectures[name]
    scores = last_row(make_engine(model, flash_attn=flash_attn, kv_type="f32"), ids, "scores")
    probs = last_row(make_engine(model, flash_attn=flash_attn, kv_type="f32"), ids, "probs")
    for entering, leaving in zip(scores, probs, strict=True):
        shares = np.exp(entering - entering.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        kept = leaving.sum(axis=-1, keepdims=True)
        assert ((kept > 0.5) & (kept < 0.999)).all()
        np.testing.assert_allclose(leaving / kept, shares, rtol=1e-4, atol=1e-9)


# ---- where K and Q come from


@pytest.fixture(scope="module")
def reports(architectures: Models) -> Iterator[Checks]:
    names = sorted({*MLA.split(), *QK_NORM.split(), *FUSED_QKV.split(), *HYBRIDS})
    # Another prompt than in test_architectures.py, and the default cache.
    checks = Checks([architectures[name] for name in names], n_prompt=33, kv_type="f16")
    yield checks
    checks.close()


def tensors_of(model: Path) -> set[str]:
    return {tensor.name for tensor in Reader(model).tensors}


@pytest.mark.parametrize("name", MLA.split())
def test_latent_attention_equals_stock(architectures: Models, reports: Checks, name: str) -> None:
    assert any("attn_kv_a" in tensor for tensor in tensors_of(architectures[name]))
    assert_equal_f16(reports[name])


@pytest.mark.parametrize("name", QK_NORM.split())
def test_normed_queries_and_keys_equal_stock(
    architectures: Models, reports: Checks, name: str
) -> None:
    assert {"blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"} <= tensors_of(
        architectures[name]
    )
    assert_equal_f16(reports[name])


@pytest.mark.parametrize("name", FUSED_QKV.split())
def test_fused_projection_equals_stock(architectures: Models, reports: Checks, name: str) -> None:
    assert "blk.0.attn_qkv.weight" in tensors_of(architectures[name])
    assert_equal_f16(reports[name])


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_model_has_rows_of_its_attention_layers_alone(reports: Checks, name: str) -> None:
    assert_equal_f16(reports[name])
    assert tuple(reports[name].expected_layers) == HYBRIDS[name]


def assert_equal_f16(report: Report) -> None:
    """As `assert_equal`; llama.cpp rounds Q to F16 where it computes kq from an F16 cache."""
    assert report.failure == ""
    assert all(layers == report.expected_layers for layers in report.layers.values())
    assert report.largest(flash_attn=False) <= EXACT
    assert report.largest(flash_attn=True, first_layer=True) <= ROUNDED
    assert report.largest(flash_attn=True) <= DRIFTED


@pytest.mark.parametrize("write", [shared_kv_gguf.write_gemma3n, shared_kv_gguf.write_gemma4])
def test_layers_that_share_a_cache_have_rows_of_their_own(tmp_path: Path, write: Any) -> None:
    report = ModelCheck(write(tmp_path / f"{write.__name__}.gguf"), n_prompt=40).run()
    assert_equal(report, DRIFTED)
    assert report.expected_layers == list(range(22 if "3n" in write.__name__ else 6))
    assert 0 in report.n_hidden.values()
    assert max(report.n_hidden.values()) > 0


def test_layers_of_different_heads_are_a_tuple(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(shared_kv_gguf.write_gemma4(tmp_path / "gemma4.gguf"))
    (token,) = engine.generate([1, 2, 3, 4], max_tokens=1, ignore_eos=True, capture="probs")
    assert isinstance(token.attention, tuple)
    assert [rows.shape for rows in token.attention] == [(4, 4), (2, 4)] * 3
    blocks = engine.attend([1, 2, 3, 4, 5], capture="probs").array()
    assert isinstance(blocks, tuple)
    assert [rows.shape for rows in blocks] == [(4, 5, 5), (2, 5, 5)] * 3
