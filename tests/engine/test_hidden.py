"""Hidden states: the residual stream behind chosen layers, against the float64 reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, errors
from tests.support.reference import relative_error
from tests.support.rows import forward, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")
PROMPT = random_ids(33)


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
    engine = make_engine(model, kv_type="f32", flash_attn=flash_attn, n_ubatch=16)
    tokens = run(engine, PROMPT, 8, capture=Capture("probs", hidden=hidden))
    result = forward(model, PROMPT, tokens, flash_attn=flash_attn)
    for token in tokens:
        assert token.hidden is not None
        assert token.hidden.shape == (len(hidden), result.hidden.shape[-1])
        assert token.hidden.dtype == np.float32
        want = result.hidden[list(hidden), len(PROMPT) - 1 + token.index]
        assert relative_error(token.hidden, want) <= limit


def test_states_lie_beside_the_rows_that_come_without_them(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    plain = run(make_engine(tiny_llama), PROMPT, 4, capture="probs")
    engine = make_engine(tiny_llama)
    tokens = run(engine, PROMPT, 4, capture=Capture("probs", hidden=[1]))
    for a, b in zip(plain, tokens, strict=True):
        np.testing.assert_array_equal(a.attention, b.attention)  # type: ignore[arg-type]
        assert b.hidden is not None
        assert not b.hidden.flags.writeable
        assert not b.hidden.flags.owndata
        assert engine._core.pool_contains(b.hidden.__array_interface__["data"][0])
    assert engine.stats().copied_bytes == 0


def test_states_without_attention(make_engine: MakeEngine, tiny_llama: Path) -> None:
    both = run(make_engine(tiny_llama), PROMPT, 4, capture=Capture("probs", hidden=[0, 2]))
    engine = make_engine(tiny_llama)
    alone = run(engine, PROMPT, 4, capture=Capture(layers=(), hidden=[0, 2]))
    for a, b in zip(both, alone, strict=True):
        assert b.attention is None
        np.testing.assert_array_equal(a.hidden, b.hidden)  # type: ignore[arg-type]
    assert engine.stats().graph_nodes_added == 2


def test_states_outlive_tokens_and_engine(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    token = run(engine, PROMPT, 1, capture=Capture(layers=(), hidden=[2]))[0]
    state = token.hidden
    assert state is not None
    before = state.copy()
    del token
    run(engine, PROMPT, 50, capture=Capture(layers=(), hidden=[2]))
    engine.close()
    np.testing.assert_array_equal(state, before)


@pytest.mark.parametrize("layer", [3, 99, 2**40])
def test_layers_that_are_not_there_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, layer: int
) -> None:
    with pytest.raises(errors.InvalidCapture, match=r"has no hidden state here.*0, 1, 2"):
        make_engine(tiny_llama).generate(PROMPT, capture=Capture(hidden=[layer]))


def test_named_states_and_rows(make_engine: MakeEngine, tiny_llama: Path) -> None:
    token: Any = run(
        make_engine(tiny_llama), PROMPT, 1, capture=Capture("scores", layers=[2, 0], hidden=[1])
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
