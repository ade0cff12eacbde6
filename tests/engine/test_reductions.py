"""Reductions and the k largest values: as numpy computes them from whole rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, errors
from tests.support.rows import KINDS, Kind, random_ids, run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")
PROMPT = random_ids(40)
Array = np.ndarray[Any, Any]
REDUCTIONS: dict[Any, Callable[[Array], Array]] = {
    "mean_heads": lambda rows: rows.mean(1),
    "max_heads": lambda rows: rows.max(1),
    "mean": lambda rows: rows.mean((0, 1)),
    "max": lambda rows: rows.max((0, 1)),
}


@pytest.fixture(params=[False, True], ids=["flash_off", "flash_on"])
def flash_attn(request: pytest.FixtureRequest) -> bool:
    return request.param


def captured(make_engine: MakeEngine, model: Path, capture: Capture, **options: Any) -> list[Any]:
    engine = make_engine(model, **options)
    return run(engine, PROMPT, 5, capture=capture)


def largest(rows: Array, k: int) -> tuple[Array, Array]:
    """Values and positions of the k largest of the last axis, the earlier one among equals."""
    order = np.argsort(-rows, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(rows, order, -1), order


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_threads", [1, 2, 3, 6])
def test_reduced_rows_equal_numpy(
    make_engine: MakeEngine,
    tiny_llama: Path,
    reduce: Any,
    kind: Kind,
    n_threads: int,
    flash_attn: bool,
) -> None:
    options = {"flash_attn": flash_attn, "n_threads": n_threads}
    full = captured(make_engine, tiny_llama, Capture(kind), **options)
    reduced = captured(make_engine, tiny_llama, Capture(kind, reduce=reduce), **options)
    for whole, token in zip(full, reduced, strict=True):
        want = REDUCTIONS[reduce](whole.attention)
        assert token.attention.shape == want.shape
        assert token.attention.flags.c_contiguous
        scale = np.abs(whole.attention).max()
        np.testing.assert_allclose(token.attention, want, atol=1e-6 * scale)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_reductions_of_chosen_heads_and_layers_as_float16(
    make_engine: MakeEngine, tiny_llama: Path, reduce: Any, flash_attn: bool
) -> None:
    chosen: dict[str, Any] = {"layers": (2, 0), "heads": (3, 1, 0)}
    full = captured(make_engine, tiny_llama, Capture("probs", **chosen), flash_attn=flash_attn)
    half = Capture("probs", reduce=reduce, dtype="float16", **chosen)
    for whole, token in zip(
        full, captured(make_engine, tiny_llama, half, flash_attn=flash_attn), strict=True
    ):
        assert token.attention.dtype == np.float16
        np.testing.assert_allclose(token.attention, REDUCTIONS[reduce](whole.attention), atol=1e-3)


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("n_threads", [1, 2])
def test_reduced_prompt_rows_equal_numpy(
    make_engine: MakeEngine, tiny_llama: Path, reduce: Any, n_threads: int, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, n_ubatch=16, n_threads=n_threads, flash_attn=flash_attn)
    want = REDUCTIONS[reduce](engine.attend(PROMPT, "probs").array())
    got = engine.attend(PROMPT, Capture("probs", reduce=reduce)).array()
    assert isinstance(got, np.ndarray)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 7, 40, 1000])
def test_the_k_largest_equal_a_sort(
    make_engine: MakeEngine, tiny_llama: Path, kind: Kind, k: int, flash_attn: bool
) -> None:
    full = captured(make_engine, tiny_llama, Capture(kind), flash_attn=flash_attn)
    top = captured(make_engine, tiny_llama, Capture(kind, top_k=k), flash_attn=flash_attn)
    for whole, token in zip(full, top, strict=True):
        values, positions = largest(whole.attention, k)
        np.testing.assert_array_equal(token.attention, values)
        np.testing.assert_array_equal(token.attention_positions, positions)
        assert token.attention.dtype == np.float32
        assert token.attention_positions.dtype == np.int32
        assert not token.attention_positions.flags.writeable


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_the_k_largest_of_reduced_rows(
    make_engine: MakeEngine, tiny_llama: Path, reduce: Any
) -> None:
    reduced = captured(make_engine, tiny_llama, Capture("probs", reduce=reduce))
    top = captured(make_engine, tiny_llama, Capture("probs", reduce=reduce, top_k=4))
    for whole, token in zip(reduced, top, strict=True):
        values, positions = largest(whole.attention, 4)
        np.testing.assert_array_equal(token.attention, values)
        np.testing.assert_array_equal(token.attention_positions, positions)


def test_the_k_largest_of_prompt_rows(make_engine: MakeEngine, tiny_llama: Path) -> None:
    full = make_engine(tiny_llama).attend(PROMPT, "probs").array()
    assert isinstance(full, np.ndarray)
    for n_ubatch in (512, 16):
        rows = make_engine(tiny_llama, n_ubatch=n_ubatch).attend(PROMPT, Capture("probs", top_k=3))
        values, positions = rows.top_k()
        assert isinstance(values, np.ndarray)
        assert values.shape == positions.shape == (3, 4, 40, 3)  # type: ignore[union-attr]
        want, _ = largest(full, 3)
        np.testing.assert_allclose(values, want, atol=1e-6)
        seen = np.take_along_axis(full, np.asarray(positions, np.int64), -1)
        np.testing.assert_allclose(seen, want, atol=1e-6)


def test_positions_need_top_k(make_engine: MakeEngine, tiny_llama: Path) -> None:
    with pytest.raises(errors.InvalidCapture, match="top_k"):
        make_engine(tiny_llama).attend(PROMPT, "probs").top_k()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("reduce", [None, *REDUCTIONS])
@pytest.mark.parametrize("top_k", [None, 5])
@pytest.mark.parametrize("hidden", [(), (0, 2)])
def test_bytes_per_token_is_what_the_arrays_take(
    make_engine: MakeEngine, tiny_llama: Path, dtype: Any, reduce: Any, top_k: Any, hidden: Any
) -> None:
    capture = Capture("probs", dtype=dtype, reduce=reduce, top_k=top_k, hidden=hidden)
    engine = make_engine(tiny_llama)
    token = run(engine, PROMPT, 1, capture=capture)[0]
    arrays = (token.attention, token.attention_positions, token.hidden)
    n_bytes = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert capture.bytes_per_token(engine.model, len(PROMPT)) == n_bytes


def test_reductions_and_whole_rows_alternate(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, flash_attn=flash_attn)
    captures = [Capture("probs"), *(Capture("probs", reduce=r) for r in REDUCTIONS)]
    captures += [Capture("probs", top_k=2), Capture("logits", hidden=[1])]
    run(engine, PROMPT, 3)  # from here on the slot holds the prompt: all prefill the same way
    first = [run(engine, PROMPT, 3, capture=capture) for capture in captures]
    for capture, before in zip(captures, first, strict=True):
        again = run(engine, PROMPT, 3, capture=capture)
        for a, b in zip(before, again, strict=True):
            np.testing.assert_array_equal(a.attention, b.attention)  # type: ignore[arg-type]
