"""What the tests rely on: the check of many models, and the float64 numpy transformer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import stock, tiny_gguf
from tests.support.reference import Reference, Result, relative_error

if TYPE_CHECKING:
    from pathlib import Path

# ---- a model that ends its process ends no other check, and is named


# ---- the reference against the stock eval-callback route, and properties that hold without it
#
# Two independent implementations agree here to float32 rounding; kqview is then compared with
# either.

PROMPT = [(i * 37 + 11) % 256 for i in range(20)]
N_DECODE = 6
ARCHS = ("llama", "qwen2")


@pytest.fixture(scope="module", params=ARCHS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write_preset(
        tmp_path_factory.mktemp("reference") / "model.gguf", f"tiny_{request.param}"
    )


def stock_rows(model: Path, **options: object) -> stock.Run:
    return stock.read_rows(model, PROMPT, n_predict=N_DECODE + 1, **options)  # type: ignore[arg-type]


def forward_all(model: Path, run: stock.Run, **options: object) -> Result:
    """The reference over the prompt and every token that was decoded (the last one was not)."""
    return Reference.load(model).forward(PROMPT + run.tokens[:-1], **options)  # type: ignore[arg-type]


def row_errors(run: stock.Run, want: Result, n_prompt: int = len(PROMPT)) -> dict[str, float]:
    """Largest relative error of any (step, layer, head) row, and of any row of logits."""
    errors = {"kq": 0.0, "scores": 0.0, "probs": 0.0}
    for step in run.steps:
        n_context = step.n_past + 1
        for kind in errors:
            row = getattr(want, kind)[:, :, step.n_past, :n_context]
            errors[kind] = max(errors[kind], relative_error(getattr(step, kind), row))
    errors["logits"] = relative_error(run.logits, want.logits[n_prompt - 1 :])
    return errors


@pytest.mark.needs("peers")
def test_reference_with_f32_cache_matches_stock_to_rounding(model: Path) -> None:
    run = stock_rows(model, kv_type="f32")
    errors = row_errors(run, forward_all(model, run))
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.needs("peers")
def test_reference_with_f16_cache_matches_stock_f16_cache(model: Path) -> None:
    run = stock_rows(model, kv_type="f16")
    errors = row_errors(run, forward_all(model, run, kv_type="f16", operand_type="f16"))
    assert max(errors.values()) <= 2e-3, errors


@pytest.mark.needs("peers")
def test_reference_matches_every_prompt_row_across_ubatches(model: Path) -> None:
    run = stock_rows(model, kv_type="f32", n_ubatch=8, rows="all")
    want = forward_all(model, run)
    n = len(PROMPT)
    assert len(run.steps[0].layers) == want.kq.shape[0]
    for layer in run.steps[0].layers:
        assert layer.probs.shape == (want.kq.shape[1], n, n)
        assert relative_error(layer.probs, want.probs[layer.layer, :, :n, :n]) <= 1e-5
        causal = np.tril(np.ones((n, n), bool))
        got = np.where(causal, layer.kq, 0)
        assert relative_error(got, np.where(causal, want.kq[layer.layer, :, :n, :n], 0)) <= 1e-5


@pytest.mark.needs("peers")
def test_reference_with_float32_angles_matches_stock_at_long_context(model: Path) -> None:
    prompt = (PROMPT * 60)[:1200]
    run = stock.read_rows(model, prompt, n_predict=2, kv_type="f32")
    want = Reference.load(model).forward(prompt + run.tokens[:-1], angle_type="f32")
    errors = row_errors(run, want, n_prompt=len(prompt))
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.needs("peers")
def test_stock_feeds_forced_ids_instead_of_greedy_ones(model: Path) -> None:
    forced = [5, 6, 7]
    run = stock_rows(model, kv_type="f32", forced_ids=forced)
    assert run.tokens[:3] == forced
    errors = row_errors(run, forward_all(model, run))
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.needs("peers")
def test_stock_with_flash_attention_gives_logits_and_no_rows(model: Path) -> None:
    run = stock_rows(model, kv_type="f16", flash_attn=True)
    assert all(step.layers == [] for step in run.steps)
    # Flash attention rounds V's sum differently again; the tokens before a near tie are the same.
    want = Reference.load(model).forward(PROMPT, kv_type="f16", operand_type="f16")
    assert relative_error(run.logits[:1], want.logits[-1:]) <= 5e-3


def test_random_model_layers_and_heads_attend_differently(model: Path) -> None:
    probs = Reference.load(model).forward(PROMPT).probs[:, :, -1]
    rows = probs.reshape(-1, probs.shape[-1])
    distance = np.abs(rows[:, None] - rows[None]).max(-1)[np.triu_indices(len(rows), 1)]
    assert distance.min() > 0.05
    # Neither uniform (1 / 20) nor on one column everywhere.
    assert 0.1 < rows.max(-1).mean() < 0.9


def test_reference_is_causal(model: Path) -> None:
    reference = Reference.load(model)
    short, long = reference.forward(PROMPT[:10]), reference.forward(PROMPT)
    np.testing.assert_allclose(long.probs[:, :, :10, :10], short.probs, atol=1e-12)
    np.testing.assert_allclose(long.logits[:10], short.logits, atol=1e-10)
