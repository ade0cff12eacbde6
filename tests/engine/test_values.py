"""Captured values against a float64 numpy transformer and against the stock llama.cpp build.

Relative error is max|a - b| / max|b| of each (layer, head) row. With flash attention off the rows
are llama.cpp's own tensors. With flash attention on they are ours over the same K cache: the first
layer is as exact, and the layers above differ from a computation without flash attention because
llama.cpp's CPU kernel sums V in F16 (its own logits of these models move by 0.6 to 1.6 %). The
reference sums so too, and then all layers agree.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from kqview import Capture, errors
from tests.support import stock, tiny_gguf
from tests.support.reference import relative_error
from tests.support.rows import (
    KINDS,
    Kind,
    forward,
    has_device,
    largest_error,
    largest_stock_error,
    near,
    random_ids,
    run,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")

EXACT = 1e-5
ROUNDED = 2e-3
FLASH_SUMS = 5e-2  # what F16 sums of V do to the layers above them


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}")


def stock_rows(
    model: Path, prompt: list[int], forced_ids: list[int], kv_type: Literal["f16", "f32", "q8_0"],
    **options: int,
) -> stock.Run:  # fmt: skip
    """The stock build's rows of the same sequence, flash attention off."""
    return stock.read_generation(model, prompt, forced_ids, kv_type=kv_type, n_ctx=512, **options)


# ---- float64 reference


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kv_type", "flash_attn", "limit"),
    [
        ("f32", False, EXACT),
        ("f32", True, ROUNDED),
        ("f16", False, ROUNDED),
        ("f16", True, ROUNDED),
    ],
)
def test_rows_of_prompt_and_decode_equal_reference(
    make_engine: MakeEngine,
    model: Path,
    kind: Kind,
    kv_type: Literal["f16", "f32"],
    flash_attn: bool,
    limit: float,
    record_property: Callable[[str, object], None],
) -> None:
    engine = make_engine(
        model, kv_type=kv_type, flash_attn=flash_attn, attention_kernel="llama.cpp"
    )
    prompt = random_ids(20)
    tokens = run(engine, prompt, 20, capture=kind)
    # llama.cpp rounds q to F16 where it meets an F16 cache.
    operand_type = kv_type if not flash_attn else "f32"
    result = forward(
        model, prompt, tokens, kv_type=kv_type, operand_type=operand_type, flash_attn=flash_attn
    )
    error = largest_error(tokens, result, kind, prompt)
    record_property("largest_error", error)
    assert error <= near(limit)


@pytest.mark.parametrize(("flash_attn", "limit"), [(False, EXACT), (True, ROUNDED)])
def test_500_tokens_have_no_stale_or_swapped_row(
    make_engine: MakeEngine,
    tmp_path: Path,
    flash_attn: bool,
    limit: float,
    record_property: Callable[[str, object], None],
) -> None:
    # Flatter attention: 500 tokens of F16 sums drift less.
    model = tiny_gguf.write_preset(tmp_path / "flat.gguf", "tiny_llama", score_spread=1.0)
    engine = make_engine(
        model, n_ctx=600, kv_type="f32", flash_attn=flash_attn, attention_kernel="llama.cpp"
    )
    prompt = random_ids(17)
    tokens = run(engine, prompt, 500, capture="probs")
    result = forward(model, prompt, tokens, flash_attn=flash_attn)
    error = largest_error(tokens, result, "probs", prompt)
    record_property("largest_error", error)
    assert error <= near(limit)
    # The limit of the CPU is tight enough to see a row of the token before.
    before = [
        np.abs(np.asarray(b.attention)[..., :-1] - np.asarray(a.attention)).max(axis=-1).min()
        for a, b in pairwise(tokens)
    ]
    assert np.median(before) > 5 * limit


@pytest.mark.parametrize("n_prompt", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_prompt_of_several_chunks_has_right_last_row(
    make_engine: MakeEngine, tiny_qwen2: Path, n_prompt: int, flash_attn: bool
) -> None:
    engine = make_engine(
        tiny_qwen2, n_ubatch=32, kv_type="f32", flash_attn=flash_attn, attention_kernel="llama.cpp"
    )
    prompt = random_ids(n_prompt, seed=n_prompt)
    tokens = run(engine, prompt, 3, capture="logits")
    result = forward(tiny_qwen2, prompt, tokens, flash_attn=flash_attn)
    # The prompt's last token goes on its own, like the two generated ones that are decoded.
    assert engine.stats().n_decodes == -(-(n_prompt - 1) // 32) + 3
    assert largest_error(tokens, result, "logits", prompt) <= near(ROUNDED if flash_attn else EXACT)


def test_rows_of_two_compute_threads_equal_reference(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    prompt = random_ids(40)
    engine = make_engine(
        tiny_llama, n_threads=2, kv_type="f32", flash_attn=True, attention_kernel="llama.cpp"
    )
    tokens = run(engine, prompt, 6, capture="probs")
    result = forward(tiny_llama, prompt, tokens, flash_attn=True)
    assert largest_error(tokens, result, "probs", prompt) <= near(ROUNDED)


# ---- what rows are among themselves


@pytest.mark.parametrize("flash_attn", [False, True])
def test_rows_of_probs_sum_to_one(make_engine: MakeEngine, model: Path, flash_attn: bool) -> None:
    tokens = run(make_engine(model, flash_attn=flash_attn), random_ids(33), 60, capture="probs")
    for token in tokens:
        rows = np.asarray(token.attention, np.float64)
        assert rows.min() >= 0
        np.testing.assert_allclose(rows.sum(axis=-1), 1.0, atol=2e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flash_attn", [False, True])
def test_layers_and_heads_differ_pairwise(
    make_engine: MakeEngine, model: Path, kind: Kind, flash_attn: bool
) -> None:
    tokens = run(make_engine(model, flash_attn=flash_attn), random_ids(24), 5, capture=kind)
    for token in tokens:
        rows = np.asarray(token.attention).reshape(-1, np.shape(token.attention)[-1])
        for i, row in enumerate(rows):
            for other in rows[i + 1 :]:
                assert np.abs(row - other).max() > 1e-3 * np.abs(row).max()


def test_columns_count_prompt_and_generated_tokens(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    # Across llama.cpp's padding of the cache to 256 cells, which never shows.
    prompt = random_ids(250)
    tokens = run(make_engine(tiny_llama), prompt, 20, capture="logits")
    assert [np.shape(token.attention) for token in tokens] == [
        (3, 4, len(prompt) + index) for index in range(20)
    ]
    assert all(np.isfinite(np.asarray(token.attention)).all() for token in tokens)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_softmax_of_scores_is_probs_and_scores_are_scaled_logits(
    make_engine: MakeEngine, model: Path, flash_attn: bool
) -> None:
    rows: dict[str, list[np.ndarray]] = {}
    scale = 0.0
    for kind in KINDS:
        engine = make_engine(model, flash_attn=flash_attn)
        scale = engine.model.attention_scale
        tokens = run(engine, random_ids(37), 12, capture=kind)
        rows[kind] = [np.asarray(token.attention, np.float64) for token in tokens]
    assert scale == pytest.approx(16**-0.5)
    for logits, scores, probs in zip(rows["logits"], rows["scores"], rows["probs"], strict=True):
        np.testing.assert_allclose(scores, logits * scale, rtol=3e-7)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        np.testing.assert_allclose(
            probs, weights / weights.sum(axis=-1, keepdims=True), rtol=3e-6, atol=1e-9
        )


# ---- the same cache, used again


def test_second_prompt_with_shared_prefix_has_right_columns(
    make_engine: MakeEngine, model: Path
) -> None:
    engine = make_engine(model, kv_type="f32", flash_attn=False)
    first = random_ids(60)
    run(engine, first, 10, capture="probs")
    second = first[:40] + random_ids(25, seed=1)
    generation = engine.generate(
        second, max_tokens=15, temperature=1.0, seed=3, ignore_eos=True, capture="probs"
    )
    tokens = list(generation)
    assert generation.usage.cached_tokens == 40
    result = forward(model, second, tokens)
    assert largest_error(tokens, result, "probs", second) <= near(EXACT)


def test_text_that_goes_on_after_an_early_close_has_right_columns(
    make_engine: MakeEngine, model: Path
) -> None:
    engine = make_engine(model, kv_type="f32", flash_attn=False, run_ahead=8)
    text = random_ids(30)
    rng = np.random.default_rng(5)
    for turn in range(25):
        n_taken = int(rng.integers(1, 6))
        generation = engine.generate(
            text, max_tokens=100, temperature=1.0, seed=turn, ignore_eos=True, capture="logits"
        )
        tokens = [next(generation) for _ in range(n_taken)]
        generation.close()
        assert engine.slots[0].tokens == text + generation.tokens[:-1]
        result = forward(model, text, tokens)
        assert largest_error(tokens, result, "logits", text) <= near(EXACT)
        # Goes on from what was taken, or from somewhere before it with other words.
        text = text + generation.tokens
        if turn % 3 == 2:
            text = text[: int(rng.integers(1, len(text)))] + random_ids(12, seed=turn)


# ---- stock build


@pytest.mark.needs("peers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_rows_equal_the_stock_builds_tensors(
    make_engine: MakeEngine,
    model: Path,
    kind: Kind,
    kv_type: Literal["f16", "f32"],
    record_property: Callable[[str, object], None],
) -> None:
    prompt = random_ids(50)
    engine = make_engine(model, kv_type=kv_type, flash_attn=False)
    tokens = run(engine, prompt, 30, capture=kind)
    other = stock_rows(model, prompt, [token.id for token in tokens], kv_type)
    error = largest_stock_error(tokens, other, kind)
    record_property("largest_error", error)
    assert error <= near(EXACT)


@pytest.mark.needs("peers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_type", ["f32", "f16"])
def test_flash_attention_rows_equal_the_stock_builds_tensors_without_it(
    make_engine: MakeEngine,
    model: Path,
    kind: Kind,
    kv_type: Literal["f16", "f32"],
    record_property: Callable[[str, object], None],
) -> None:
    prompt = random_ids(50)
    engine = make_engine(model, kv_type=kv_type, flash_attn=True)
    tokens = run(engine, prompt, 30, capture=kind)
    other = stock_rows(model, prompt, [token.id for token in tokens], kv_type)
    first, above = (largest_stock_error(tokens, other, kind, layers) for layers in ((0,), (1, 2)))
    record_property("largest_error_of_first_layer", first)
    record_property("largest_error_of_layers_above", above)
    assert first <= near(EXACT if kv_type == "f32" else ROUNDED)
    assert above <= near(FLASH_SUMS)


@pytest.mark.needs("peers")
def test_chunked_prompt_equals_the_stock_builds_tensors(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    prompt = random_ids(70)
    engine = make_engine(tiny_llama, kv_type="f16", flash_attn=False, n_ubatch=32)
    tokens = run(engine, prompt, 5, capture="scores")
    other = stock_rows(tiny_llama, prompt, [token.id for token in tokens], "f16", n_ubatch=32)
    assert largest_stock_error(tokens, other, "scores") <= near(EXACT)


@pytest.mark.needs("peers")
@pytest.mark.parametrize("kind", KINDS)
def test_quantised_cache_is_near_the_stock_build(
    make_engine: MakeEngine,
    tmp_path: Path,
    kind: Kind,
    record_property: Callable[[str, object], None],
) -> None:
    # Q8_0 keeps 8 bits of each key; the stock build also rounds q to Q8_0 and keeps V in F16.
    model = tiny_gguf.write_preset(tmp_path / "wide.gguf", "tiny_llama", n_embd=128)
    prompt = random_ids(50)
    engine = make_engine(model, kv_type="q8_0", flash_attn=True)
    tokens = run(engine, prompt, 20, capture=kind)
    other = stock_rows(model, prompt, [token.id for token in tokens], "q8_0")
    first, every = (largest_stock_error(tokens, other, kind, layers) for layers in ((0,), None))
    record_property("largest_error_of_first_layer", first)
    record_property("largest_error", every)
    assert first <= near(0.03)
    assert every <= near(0.1, "quantised cache")


# ---- hidden states

IDS = random_ids(33)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("hidden", [(0, 1, 2), (2, 0), (1,)])
@pytest.mark.parametrize(("flash_attn", "limit"), [(False, 1e-5), (True, 2e-3)])
def test_states_of_prompt_and_decode_equal_reference(
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
    architecture: str,
    hidden: tuple[int, ...],
    flash_attn: bool,
    limit: float,
) -> None:
    model: Path = request.getfixturevalue(f"tiny_{architecture}")
    engine = make_engine(
        model, kv_type="f32", flash_attn=flash_attn, n_ubatch=16, attention_kernel="llama.cpp"
    )
    tokens = run(engine, IDS, 8, capture=Capture("probs", hidden=hidden))
    result = forward(model, IDS, tokens, flash_attn=flash_attn)
    for token in tokens:
        assert token.hidden is not None
        assert token.hidden.shape == (len(hidden), result.hidden.shape[-1])
        assert token.hidden.dtype == np.float32
        want = result.hidden[list(hidden), len(IDS) - 1 + token.index]
        assert relative_error(token.hidden, want) <= near(limit)


def test_states_lie_beside_the_rows_that_come_without_them(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    plain = run(make_engine(tiny_llama), IDS, 4, capture="probs")
    engine = make_engine(tiny_llama)
    tokens = run(engine, IDS, 4, capture=Capture("probs", hidden=[1]))
    for a, b in zip(plain, tokens, strict=True):
        np.testing.assert_array_equal(a.attention, b.attention)  # type: ignore[arg-type]
        assert b.hidden is not None
        assert not b.hidden.flags.writeable
        assert not b.hidden.flags.owndata
        assert engine._core.pool_contains(b.hidden.__array_interface__["data"][0])
    assert engine.stats().copied_bytes == 0


def test_states_without_attention(make_engine: MakeEngine, tiny_llama: Path) -> None:
    both = run(make_engine(tiny_llama), IDS, 4, capture=Capture("probs", hidden=[0, 2]))
    engine = make_engine(tiny_llama)
    alone = run(engine, IDS, 4, capture=Capture(layers=(), hidden=[0, 2]))
    for a, b in zip(both, alone, strict=True):
        assert b.attention is None
        np.testing.assert_array_equal(a.hidden, b.hidden)  # type: ignore[arg-type]
    # On a device the states are copied from where the step leaves them.
    assert engine.stats().graph_nodes_added == (0 if has_device() else 2)


def test_states_outlive_tokens_and_engine(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    token = run(engine, IDS, 1, capture=Capture(layers=(), hidden=[2]))[0]
    state = token.hidden
    assert state is not None
    before = state.copy()
    del token
    run(engine, IDS, 50, capture=Capture(layers=(), hidden=[2]))
    engine.close()
    np.testing.assert_array_equal(state, before)


@pytest.mark.parametrize("layer", [3, 99, 2**40])
def test_layers_that_are_not_there_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, layer: int
) -> None:
    with pytest.raises(errors.InvalidCapture, match=r"0, 1, 2|no model has"):
        make_engine(tiny_llama).generate(IDS, capture=Capture(hidden=[layer]))


def test_named_states_and_rows(make_engine: MakeEngine, tiny_llama: Path) -> None:
    token: Any = run(
        make_engine(tiny_llama), IDS, 1, capture=Capture("scores", layers=[2, 0], hidden=[1])
    )[0]
    named = token.named()
    assert set(named) == {
        "blocks.2.attn.hook_attn_scores",
        "blocks.0.attn.hook_attn_scores",
        "blocks.1.hook_resid_post",
    }
    rows = named["blocks.0.attn.hook_attn_scores"]
    assert rows.shape == (1, 4, 1, 33)
    assert np.shares_memory(rows, token.attention)
    np.testing.assert_array_equal(rows[0, :, 0], token.attention[1])
    assert named["blocks.1.hook_resid_post"].shape == (1, 1, token.hidden.shape[-1])
