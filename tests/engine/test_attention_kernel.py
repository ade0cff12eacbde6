"""The attention of kqview's own CPU kernel: rows, states and texts against the float64 reference.

Prompts and all that follows them go through the kernel (without AVX, steps of up to 63 tokens), so
with an F32 cache nothing is rounded anywhere, and rows, hidden states and texts are held to the
tight tolerance, where llama.cpp's flash attention needs 2e-3. tests/native/test_attend.cpp has the
shapes of the kernel, tests/engine/test_architectures.py all architectures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pytest

from kqview import Capture, Engine, errors, system_info
from kqview.engine_options import KvType
from tests.support import tiny_gguf
from tests.support.reference import relative_error
from tests.support.rows import KINDS, Kind, forward, largest_error, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

OURS: dict[str, Any] = {"attention_kernel": "kqview", "flash_attn": True}
EXACT = 1e-5
N_LAYER = 3
CAPTURES = [
    Capture("logits", layers=(2, 0), heads=(3, 1)),
    Capture("probs", dtype="float16"),
    Capture("probs", top_k=5),
    Capture("probs", reduce="mean_heads"),
    Capture("scores", reduce="max_heads"),
    Capture("probs", reduce="mean"),
    Capture("logits", reduce="max", dtype="float16"),
    Capture("probs", spans=[(0, 3), (3, None)]),
]


@pytest.fixture(params=["llama", "qwen2"])
def model(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"tiny_{request.param}")


def values_of(token: Token) -> np.ndarray[Any, Any]:
    assert isinstance(token.attention, np.ndarray)
    return np.asarray(token.attention, np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_prompt", [1, 8, 63, 64, 200])
def test_rows_are_exact(make_engine: MakeEngine, model: Path, kind: Kind, n_prompt: int) -> None:
    engine = make_engine(model, kv_type="f32", **OURS)
    prompt = random_ids(n_prompt)
    tokens = run(engine, prompt, 100, capture=kind)
    # llama.cpp's flash attention of 64 queries rounds keys and values to F16.
    has_all = n_prompt < 64 or " AVX = 1" in system_info()["cpu_features"]
    error = largest_error(tokens, forward(model, prompt, tokens), kind, prompt)
    assert error <= (EXACT if has_all else 5e-3)


@pytest.mark.parametrize("n_threads", [2, 3])
def test_threads_share_the_work(make_engine: MakeEngine, tiny_llama: Path, n_threads: int) -> None:
    engine = make_engine(tiny_llama, kv_type="f32", n_threads=n_threads, n_ctx=700, **OURS)
    prompt = random_ids(8)
    tokens = run(engine, prompt, 600, capture="probs")
    assert largest_error(tokens, forward(tiny_llama, prompt, tokens), "probs", prompt) <= EXACT


@pytest.mark.parametrize("capture", CAPTURES, ids=str)
def test_every_form_of_row_is_that_without_flash_attention(
    make_engine: MakeEngine, tiny_llama: Path, capture: Capture
) -> None:
    prompt = random_ids(8)
    plain, ours = (
        run(make_engine(tiny_llama, kv_type="f32", **options), prompt, 20, capture=capture)
        for options in ({"flash_attn": False}, OURS)
    )
    limit = 1e-3 if capture.dtype == "float16" else EXACT
    for one, other in zip(plain, ours, strict=True):
        assert one.id == other.id
        if capture.top_k:
            np.testing.assert_array_equal(one.attention_positions, other.attention_positions)
        assert relative_error(values_of(other), values_of(one)) <= limit


@pytest.mark.parametrize("n_prompt", [8, 150])
@pytest.mark.parametrize("capture", [*CAPTURES[:6], CAPTURES[7]], ids=str)
def test_rows_of_a_prompt_and_of_the_token_behind_it(
    make_engine: MakeEngine, tiny_llama: Path, capture: Capture, n_prompt: int
) -> None:
    prompt = random_ids(n_prompt)
    blocks: list[np.ndarray[Any, Any]] = []
    for options in ({"flash_attn": False}, OURS):
        engine = make_engine(tiny_llama, kv_type="f32", **options)
        blocks.append(np.asarray(engine.attend(prompt, capture).array(), np.float64))
    limit = 1e-3 if capture.dtype == "float16" else EXACT
    finite = (
        np.where(np.isinf(blocks[0]), 0, blocks[0]),
        np.where(np.isinf(blocks[1]), 0, blocks[1]),
    )
    np.testing.assert_array_equal(np.isinf(blocks[0]), np.isinf(blocks[1]))
    assert np.abs(finite[0] - finite[1]).max() <= limit * np.abs(finite[0]).max()


def test_perplexity_is_that_without_flash_attention() -> None:
    text = "Mirelda found a silver key near the old bridge. Then Mirelda went home and showed it."
    perplexities: list[float] = []
    for options in ({"flash_attn": False}, OURS):
        # In steps of 16 tokens, so that every token goes through the kernel.
        with Engine.demo(kv_type="f32", n_ubatch=16, n_threads=1, n_ctx=256, **options) as engine:
            perplexities.append(float(np.exp(-np.nanmean(engine.score(text).logprobs))))
    assert perplexities[1] == pytest.approx(perplexities[0], rel=2e-4)


def test_slots_of_different_lengths_share_steps(make_engine: MakeEngine, tiny_llama: Path) -> None:
    prompts = [random_ids(n, seed=n) for n in (2, 5, 8)]
    options: dict[str, Any] = {
        "max_tokens": 40, "temperature": 0.0, "ignore_eos": True, "capture": "probs"
    }  # fmt: skip
    engine = make_engine(tiny_llama, kv_type="f32", n_slots=3, n_ctx=128, **OURS)
    generations = [engine.generate(prompt, **options) for prompt in prompts]
    runs: list[list[Token]] = [[] for _ in prompts]
    for _ in range(40):
        for tokens, generation in zip(runs, generations, strict=True):
            tokens.append(next(generation))
    assert engine.stats().n_decodes < 3 * 40
    for prompt, tokens in zip(prompts, runs, strict=True):
        result = forward(tiny_llama, prompt, tokens)
        assert largest_error(tokens, result, "probs", prompt) <= EXACT


def test_hidden_states_are_exact(make_engine: MakeEngine, model: Path) -> None:
    engine = make_engine(model, kv_type="f32", **OURS)
    prompt = random_ids(8)
    tokens = run(engine, prompt, 30, capture=Capture("probs", hidden=(0, 1, 2)))
    result = forward(model, prompt, tokens)
    for i, token in enumerate(tokens):
        assert token.hidden is not None
        want = result.hidden[:, len(prompt) - 1 + i]
        assert relative_error(np.asarray(token.hidden), want) <= EXACT


@pytest.mark.parametrize(("kv_type", "limit"), [("f16", 2e-3), ("bf16", 5e-2), ("q8_0", 0.1)])
def test_caches_of_other_types(
    make_engine: MakeEngine, tmp_path: Path, kv_type: str, limit: float
) -> None:
    model = tiny_gguf.write_preset(tmp_path / "wide.gguf", "tiny_llama", n_embd=128)
    prompt = random_ids(8)
    tokens = run(make_engine(model, kv_type=kv_type, **OURS), prompt, 50, capture="probs")
    result = forward(model, prompt, tokens, kv_type="f16" if kv_type == "f16" else "f32")
    assert largest_error(tokens, result, "probs", prompt) <= limit


def test_who_computes_is_said(make_engine: MakeEngine, tiny_llama: Path) -> None:
    ours = make_engine(tiny_llama, **OURS)
    assert ours.attention_kernel == "kqview"  # before the first step
    run(ours, random_ids(4), 3, capture="logits")
    assert ours.attention_kernel == "kqview"
    assert ours.stats().attended_layers == N_LAYER
    assert ours.stats().graph_nodes_added == 0  # rows are its by-product
    for options in ({"attention_kernel": "llama.cpp"}, {"flash_attn": False}):
        theirs = make_engine(tiny_llama, **{"flash_attn": True, **options})
        run(theirs, random_ids(4), 3, capture="logits")
        assert theirs.attention_kernel == "llama.cpp"
        assert theirs.stats().graph_nodes_added == N_LAYER
    without = make_engine(tiny_llama, attention_kernel="kqview", flash_attn=False)
    assert without.attention_kernel == "llama.cpp"


@pytest.mark.parametrize("kv_type", get_args(KvType))
def test_by_default_it_is_kqview_for_every_cache(
    make_engine: MakeEngine, tmp_path: Path, kv_type: KvType
) -> None:
    model = tiny_gguf.write_preset(tmp_path / "wide.gguf", "tiny_llama", n_embd=128)
    engine = make_engine(model, kv_type=kv_type, n_gpu_layers=0)
    assert engine.attention_kernel == "kqview"
    assert engine.stats().attended_layers == N_LAYER


@pytest.mark.parametrize("value", ["flash", True, 1])
def test_unknown_kernel_is_refused(tiny_llama: Path, value: Any) -> None:
    with pytest.raises(errors.RequestError, match="attention_kernel must be one of 'auto'"):
        Engine(tiny_llama, attention_kernel=value)
