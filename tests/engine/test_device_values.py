"""Values of layers on devices against the float64 transformer.

The reference is no engine: one without layers on a device may still compute long prompts there,
and would compare a GPU with itself. Where there is no device these are the CPU's values, and exact.
Contexts are on both sides of 768 tokens, where CUDA chooses other kernels.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine
from kqview.errors import UnsupportedModel
from tests.support import tiny_gguf
from tests.support.reference import relative_error
from tests.support.rows import (
    KINDS,
    ON_DEVICE,
    forward,
    has_device,
    has_gpu,
    largest_error,
    near,
    random_ids,
    reference_rows,
    run,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kqview.types import Token
    from tests.engine.conftest import MakeEngine
    from tests.support.reference import Result

N_TOKENS = 8
N_LAST = 5  # rows of the prompt
# llama.cpp's flash attention on the CPU, which prompts need, sums V in float16:
# tests/engine/test_values.py has a reference for that.
ON_CPU = {"f32": 1e-4, "f16": 2e-3, "flash": 5e-2}
FIRST_LAYER = 1e-5  # of logits: no V has entered it
FIRST_LAYER_ON_DEVICE = 1e-4  # fast sines; TF32 or float16 would be 5e-4 or more off


@pytest.fixture(params=[(True, "f32"), (False, "f32"), (True, "f16"), (False, "f16")], ids=str)
def setup(request: pytest.FixtureRequest, tiny_qwen2: Path) -> Iterator[Setup]:
    flash_attn, kv_type = request.param
    with Engine(
        tiny_qwen2, n_gpu_layers=-1, n_ctx=1024, n_threads=1, flash_attn=flash_attn,
        kv_type=kv_type,
    ) as engine:  # fmt: skip
        on_cpu = ON_CPU["flash" if flash_attn else kv_type]
        yield Setup(engine, tiny_qwen2, kv_type, near(on_cpu, "values" if has_gpu() else "rows"))


@dataclass(frozen=True)
class Setup:
    """An engine with all its layers on devices, and the error that its rows may have."""

    engine: Engine
    model: Path
    kv_type: str
    limit: float

    def expected(self, prompt: Sequence[int], tokens: Sequence[Token]) -> Result:
        # llama.cpp rounds q to float16 where it meets such a cache.
        return forward(self.model, prompt, tokens, kv_type=self.kv_type, operand_type=self.kv_type)


@pytest.mark.parametrize("n_prompt", [40, 800])
def test_rows_on_devices_are_those_of_the_reference(setup: Setup, n_prompt: int) -> None:
    prompt = random_ids(n_prompt, seed=3)
    by_kind = {kind: run(setup.engine, prompt, N_TOKENS, capture=kind) for kind in KINDS}
    stats = setup.engine.stats()
    assert (stats.device_row_bytes > 0) == (stats.device_copy_bytes > 0) == has_device()
    tokens = by_kind["logits"]
    expected = setup.expected(prompt, tokens)
    for kind, its_tokens in by_kind.items():
        assert [token.id for token in its_tokens] == [token.id for token in tokens]
        for index, token in enumerate(its_tokens):
            want = reference_rows(expected, kind, n_prompt - 1 + index)
            assert relative_error(np.asarray(token.rows), want) < setup.limit, (kind, index)
        rows = np.asarray(setup.engine.attend(prompt, Capture(kind), last=N_LAST).array())
        for i in range(N_LAST):
            i_query = n_prompt - N_LAST + i
            want = reference_rows(expected, kind, i_query)
            assert relative_error(rows[:, :, i, : i_query + 1], want) < setup.limit, (kind, i)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_first_layer_is_exact_where_each_token_is_computed_alone(
    make_engine: MakeEngine, tiny_qwen2: Path, flash_attn: bool
) -> None:
    # Products of one column are F32 sums on every device; of more, CUDA rounds to TF32.
    engine = make_engine(tiny_qwen2, kv_type="f32", flash_attn=flash_attn, n_ubatch=1)
    prompt = random_ids(40, seed=3)
    tokens = run(engine, prompt, N_TOKENS, capture="logits")
    expected = forward(tiny_qwen2, prompt, tokens, kv_type="f32", operand_type="f32")
    limit = FIRST_LAYER_ON_DEVICE if has_device() else FIRST_LAYER
    for index, token in enumerate(tokens):
        want = reference_rows(expected, "logits", len(prompt) - 1 + index)
        assert relative_error(np.asarray(token.rows)[0], want[0]) < limit, index


def reduced(rows: NDArray[np.float64], capture: Capture) -> NDArray[np.float64]:
    """What *capture* leaves of rows (n_layers, n_heads, n_columns)."""
    layers = slice(None) if capture.layers is None else list(capture.layers)
    heads = slice(None) if capture.heads is None else list(capture.heads)
    rows = rows[layers][:, heads]
    match capture.reduce:
        case None:
            return rows
        case "mean_heads":
            return rows.mean(axis=1)
        case "max_heads":
            return rows.max(axis=1)
        case "mean":
            return rows.mean(axis=(0, 1))
        case _:
            return rows.max(axis=(0, 1))


@pytest.mark.parametrize(
    "capture",
    [
        Capture("logits", dtype="float16"),
        Capture("logits", layers=(2, 0), heads=(3,)),
        Capture("probs", reduce="mean_heads"),
        Capture("probs", reduce="max"),
        Capture("scores", reduce="max"),
        Capture("logits", reduce="mean"),
        Capture("scores", reduce="max_heads", dtype="float16"),
        Capture("logits", heads=(3, 0), reduce="mean_heads"),
        Capture("logits", heads=(3, 0), reduce="max_heads"),
    ],
    ids=lambda capture: f"{capture.kind}-{capture.dtype}-{capture.reduce}-{capture.heads}",
)
def test_what_devices_choose_and_reduce_is_that_of_the_reference(
    setup: Setup, capture: Capture
) -> None:
    prompt = random_ids(40, seed=3)
    tokens = run(setup.engine, prompt, N_TOKENS, capture=capture)
    expected = setup.expected(prompt, tokens)
    rounding = 2e-3 if capture.dtype == "float16" else 0.0
    for index, token in enumerate(tokens):
        whole = reference_rows(expected, capture.kind, len(prompt) - 1 + index)
        want: Any = reduced(whole, capture)
        # A mean of values of both signs may be near zero: its error is that of its terms.
        error = np.abs(np.asarray(token.rows, np.float64) - want).max() / np.abs(whole).max()
        assert error < setup.limit + rounding, index


def test_rows_reach_memory_that_is_not_page_locked(
    make_engine: MakeEngine, tiny_qwen2: Path
) -> None:
    # A copy into such memory may be made at once, or put in place by the driver later.
    engine = make_engine(tiny_qwen2, n_ctx=1024, flash_attn=True, kv_type="f32", pinned_bytes=0)
    limit = ON_DEVICE if has_device() else ON_CPU["flash"]
    prompt = random_ids(40, seed=3)
    tokens = run(engine, prompt, N_TOKENS, capture="logits")
    assert engine.stats().pool.pinned_bytes == 0
    expected = forward(tiny_qwen2, prompt, tokens, kv_type="f32", operand_type="f32")
    assert largest_error(tokens, expected, "logits", prompt) < limit


def test_quantised_keys_are_captured_or_refused_in_words(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    # Heads of 32 values: a block of quantised keys.
    model = tiny_gguf.write_model(tmp_path / "wide.gguf", arch="llama", n_embd=128)
    engine = make_engine(model, kv_type="q8_0", flash_attn=True)
    prompt = random_ids(20, seed=3)
    plain = run(engine, prompt, 4)
    refusal = ""
    try:
        tokens = run(engine, prompt, 4, capture="logits")
    except UnsupportedModel as error:
        refusal = str(error)
        tokens = run(engine, prompt, 4)  # only the request with a capture ended
    assert [token.id for token in tokens] == [token.id for token in plain]
    if refusal:
        assert has_device()
        assert re.search("cannot compute MUL_MAT .* q8_0; choose kv_type f16", refusal)
    else:
        expected = forward(model, prompt, tokens, kv_type="f32", operand_type="f32")
        error = largest_error(tokens, expected, "logits", prompt)
        assert error < near(5e-2, "quantised cache")
