"""LoRA adapters: attention is that of the model whose weights hold the adapter already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import errors
from tests.support import tiny_gguf
from tests.support.rows import KINDS, Kind, forward, largest_error, near, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

PROMPT = random_ids(25)
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, -0.5])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_rows_equal_those_of_merged_weights(
    make_engine: MakeEngine,
    tiny_llama: Path,
    tmp_path: Path,
    kind: Kind,
    scale: float,
    flash_attn: bool,
) -> None:
    merged = tmp_path / "merged.gguf"
    adapter = tiny_gguf.write_lora(tmp_path / "lora.gguf", "tiny_llama", merged=merged, scale=scale)
    engine = make_engine(tiny_llama, lora=(adapter, scale), kv_type="f32", flash_attn=flash_attn)
    tokens = run(engine, PROMPT, 6, capture=kind)
    is_exact = not flash_attn or engine.attention_kernel == "kqview"
    result = forward(merged, PROMPT, tokens, flash_attn=not is_exact)
    assert largest_error(tokens, result, kind, PROMPT) <= near(1e-5 if is_exact else 2e-3)
    # Without the adapter the rows are others: the limit sees the difference.
    plain = forward(tiny_llama, PROMPT, tokens, flash_attn=not is_exact)
    assert largest_error(tokens, plain, kind, PROMPT) > 0.05


def test_two_adapters_add_up(make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged.gguf"
    adapter = tiny_gguf.write_lora(tmp_path / "lora.gguf", "tiny_llama", merged=merged)
    engine = make_engine(tiny_llama, lora=[(adapter, 0.75), (adapter, 0.25)], **EXACT)
    tokens = run(engine, PROMPT, 3, capture="probs")
    assert largest_error(tokens, forward(merged, PROMPT, tokens), "probs", PROMPT) <= near(1e-5)
    single = make_engine(tiny_llama, lora=str(adapter), **EXACT)
    again = run(single, PROMPT, 3, capture="probs")
    np.testing.assert_allclose(again[0].attention, tokens[0].attention, atol=near(1e-5))  # type: ignore[arg-type]


def test_adapters_that_do_not_fit_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(errors.ModelLoadError, match="No such file"):
        make_engine(tiny_llama, lora=tmp_path / "missing.gguf")
    with pytest.raises(errors.ModelLoadError, match="not a GGUF file"):
        make_engine(tiny_llama, lora=tiny_gguf.write_not_gguf(tmp_path / "text.gguf"))
    with pytest.raises(errors.ModelLoadError, match=r"LoRA adapter .* cannot be used"):
        make_engine(tiny_llama, lora=tiny_llama)
    other = tiny_gguf.write_lora(
        tmp_path / "qwen2.gguf", "tiny_qwen2", merged=tmp_path / "merged.gguf"
    )
    with pytest.raises(errors.ModelLoadError, match=r"LoRA adapter .* cannot be used"):
        make_engine(tiny_llama, lora=other)


@pytest.mark.parametrize(
    "lora", [5, [5], [None], ("a.gguf", float("nan")), [("a.gguf", "1")], [("a.gguf", 1e9)], "a\0b"]
)
def test_options_of_another_form_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, lora: Any
) -> None:
    with pytest.raises(errors.RequestError, match=r"^lora "):
        make_engine(tiny_llama, lora=lora)


# ---- scales of a request


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return tiny_gguf.write_lora(tmp_path / "lora.gguf", "tiny_llama", merged=tmp_path / "merged")


OPTIONS: dict[str, Any] = {
    **{"max_tokens": 12, "temperature": 0, "ignore_eos": True},
    **{"capture": "probs", "top_logprobs": 5},
}


def values_of(tokens: list[Any]) -> tuple[list[int], list[Any], list[Any]]:
    """Ids, logprobs of the best tokens, and rows, of which all but the ids are rounded."""
    best = [[value for _, value in token.top_logprobs] for token in tokens]
    return [token.id for token in tokens], best, [np.asarray(token.attention) for token in tokens]


def assert_alike(tokens: list[Any], want: list[Any]) -> None:
    ids, best, rows = values_of(tokens)
    want_ids, want_best, want_rows = values_of(want)
    assert ids == want_ids
    np.testing.assert_allclose(best, want_best, atol=near(1e-4, "logprobs"))
    for row, want_row in zip(rows, want_rows, strict=True):
        np.testing.assert_allclose(row, want_row, atol=near(1e-5))


SCALES = (1.0, -0.5, 0.0)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("flash_attn", [False, True])
def test_request_with_a_scale_equals_an_engine_opened_with_it(
    make_engine: MakeEngine, tiny_llama: Path, adapter: Path, flash_attn: bool
) -> None:
    settings = {"kv_type": "f32", "flash_attn": flash_attn}
    want = {
        scale: list(
            make_engine(tiny_llama, lora=(adapter, scale), **settings).generate(PROMPT, **OPTIONS)
        )
        for scale in SCALES
    }
    assert len({tuple(values_of(tokens)[0]) for tokens in want.values()}) == len(SCALES)
    engine = make_engine(tiny_llama, lora=(adapter, 0.25), n_slots=4, **settings)
    for scale in SCALES:  # alone
        assert_alike(list(engine.generate(PROMPT, lora={0: scale}, **OPTIONS)), want[scale])
    # Beside each other, and beside one with the default scale.
    beside = engine.generate(PROMPT, **{**OPTIONS, "max_tokens": 40})
    running = {scale: engine.generate(PROMPT, lora={0: scale}, **OPTIONS) for scale in SCALES}
    for scale, generation in running.items():
        assert_alike(list(generation), want[scale])
    assert len(list(beside)) == 40


def test_default_scales_change_between_requests(
    make_engine: MakeEngine, tiny_llama: Path, adapter: Path
) -> None:
    opened = make_engine(tiny_llama, lora=(adapter, -0.5), **EXACT)
    want = list(opened.generate(PROMPT, **OPTIONS))
    engine = make_engine(tiny_llama, lora=[adapter, (adapter, 0.5)], **EXACT)
    assert [(one.id, one.path, one.scale) for one in engine.lora] == [
        (0, str(adapter), 1.0),
        (1, str(adapter), 0.5),
    ]
    running = engine.generate(PROMPT, **{**OPTIONS, "max_tokens": 30})
    before = list(make_engine(tiny_llama, lora=(adapter, 1.5), **EXACT).generate(PROMPT, **OPTIONS))
    engine.set_lora_scales({1: -0.5})
    assert [one.scale for one in engine.lora] == [0.0, -0.5]
    assert_alike(list(running)[: len(before)], before)
    assert_alike(list(engine.generate(PROMPT, **OPTIONS)), want)


@pytest.mark.parametrize(
    "lora", [5, [(0, 1.0)], {2: 1.0}, {-1: 1.0}, {True: 1.0}, {"x": 1.0}, {0: None}, {0: 1e9}]
)
def test_scales_that_cannot_be_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, adapter: Path, lora: Any
) -> None:
    engine = make_engine(tiny_llama, lora=adapter)
    with pytest.raises(errors.RequestError, match=r"^lora ") as caught:
        engine.generate(PROMPT, lora=lora)
    assert caught.value.parameter == "lora"
    with pytest.raises(errors.RequestError, match=r"^scales "):
        engine.set_lora_scales(lora)
    assert [one.scale for one in engine.lora] == [1.0]
    plain = make_engine(tiny_llama)
    assert plain.lora == ()
    with pytest.raises(errors.RequestError, match="loaded none"):
        plain.generate(PROMPT, lora={0: 1.0})
