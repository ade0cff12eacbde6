"""LoRA adapters: attention is that of the model whose weights hold the adapter already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import errors
from tests.support import tiny_gguf
from tests.support.rows import KINDS, Kind, forward, largest_error, random_ids, run

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

PROMPT = random_ids(25)
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, -0.5])
@pytest.mark.parametrize(("flash_attn", "limit"), [(False, 1e-5), (True, 2e-3)])
def test_rows_equal_those_of_merged_weights(
    make_engine: MakeEngine,
    tiny_llama: Path,
    tmp_path: Path,
    kind: Kind,
    scale: float,
    flash_attn: bool,
    limit: float,
) -> None:
    merged = tmp_path / "merged.gguf"
    adapter = tiny_gguf.write_lora(tmp_path / "lora.gguf", "tiny_llama", merged=merged, scale=scale)
    engine = make_engine(tiny_llama, lora=(adapter, scale), kv_type="f32", flash_attn=flash_attn)
    tokens = run(engine, PROMPT, 6, capture=kind)
    result = forward(merged, PROMPT, tokens, flash_attn=flash_attn)
    assert largest_error(tokens, result, kind, PROMPT) <= limit
    # Without the adapter the rows are others: the limit sees the difference.
    plain = forward(tiny_llama, PROMPT, tokens, flash_attn=flash_attn)
    assert largest_error(tokens, plain, kind, PROMPT) > 0.05


def test_two_adapters_add_up(make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path) -> None:
    merged = tmp_path / "merged.gguf"
    adapter = tiny_gguf.write_lora(tmp_path / "lora.gguf", "tiny_llama", merged=merged)
    engine = make_engine(tiny_llama, lora=[(adapter, 0.75), (adapter, 0.25)], **EXACT)
    tokens = run(engine, PROMPT, 3, capture="probs")
    assert largest_error(tokens, forward(merged, PROMPT, tokens), "probs", PROMPT) <= 1e-5
    single = make_engine(tiny_llama, lora=str(adapter), **EXACT)
    again = run(single, PROMPT, 3, capture="probs")
    np.testing.assert_allclose(again[0].attention, tokens[0].attention, atol=1e-5)  # type: ignore[arg-type]


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
