"""Every architecture that llama.cpp's own tests make: which layers have rows, and their values.

128 tiny random models (architecture and variant), each in a worker process: an abort names its
model. Every model generates 6 tokens behind 20 (diffusion models attend to the 20) with each kind,
flash attention off and on, and every row is compared with the stock build's tensors, flash
attention off. The cache is F32: with flash attention llama.cpp rounds it to F16 itself, and with an
F16 cache V's sums are rounded on top (see test_values.py). `python -m tests.support.archs_table`
writes the figures to ARCHITECTURES.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.archs import NAMES, WITHOUT_CACHE, Checks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import MakeEngine

pytestmark = pytest.mark.peers

EXACT = 1e-5
ROUNDED = 2e-3
TABLE = Path(__file__).with_name("ARCHITECTURES.md")
WITHOUT_ATTENTION = ("mamba-dense", "mamba2-dense")
# Their last layer is not as wide as llama.cpp takes an embedding to be: it would end the process.
WITHOUT_EMBEDDING = ("deepseek4-moe", "qwen4exp-moe")
# Their softmax has a sink, an extra logit without a column.
WITH_SINKS = ("deepseek4-moe", "gpt-oss-moe", "granite_swa-dense", "hy_v4-moe", "mimo2-moe")


@pytest.fixture(scope="module")
def reports(architectures: dict[str, Path]) -> Iterator[Checks]:
    checks = Checks(list(architectures.values()))
    yield checks
    checks.close()


def test_generator_makes_the_known_models(architectures: dict[str, Path]) -> None:
    assert tuple(sorted(architectures)) == NAMES
    assert len(NAMES) == 128


@pytest.mark.parametrize("name", NAMES)
def test_model_runs_with_rows_of_the_layers_that_have_a_softmax(reports: Checks, name: str) -> None:
    report = reports[name]
    assert report.failure == ""
    assert report.mode == ("attend" if name in WITHOUT_CACHE else "generate")
    assert (report.expected_layers == []) == (name in WITHOUT_ATTENTION)
    n_runs = 6 if name in WITHOUT_ATTENTION else 8  # three kinds and the prompt's rows, twice
    assert list(report.layers.values()) == [report.expected_layers] * n_runs


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_flash_attention_are_the_stock_tensors(reports: Checks, name: str) -> None:
    assert reports[name].largest(flash_attn=False) <= EXACT


@pytest.mark.parametrize("name", NAMES)
def test_rows_with_flash_attention_equal_the_stock_tensors(reports: Checks, name: str) -> None:
    assert reports[name].largest(flash_attn=True, first_layer=True) <= EXACT
    assert reports[name].largest(flash_attn=True) <= ROUNDED


@pytest.mark.parametrize("name", NAMES)
def test_model_opened_with_pooling_embeds_or_is_refused(reports: Checks, name: str) -> None:
    error = reports[name].embedding_error
    assert (error < 0) == (name in WITHOUT_EMBEDDING)
    assert error <= ROUNDED


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_ATTENTION])
def test_probs_sum_to_one_or_less_with_sinks(reports: Checks, name: str) -> None:
    for low, high in reports[name].sums.values():
        assert high <= 1 + 1e-6
        if name in WITH_SINKS:
            assert low > 0.7
            assert high < 0.999
        else:
            assert low >= 1 - 1e-6


@pytest.mark.parametrize("name", WITHOUT_CACHE)
@pytest.mark.parametrize("flash_attn", [False, True])
def test_diffusion_model_attends_to_both_sides_and_does_not_generate(
    architectures: dict[str, Path], make_engine: MakeEngine, name: str, flash_attn: bool
) -> None:
    from kqview.errors import PromptTooLong, UnsupportedModel

    engine = make_engine(architectures[name], flash_attn=flash_attn, n_ctx=64)
    rows = engine.attend(list(range(40)), capture="probs").array()
    assert not isinstance(rows, tuple)
    assert rows.shape == (2, 2, 40, 40)
    assert rows.min() > 0  # behind the query too
    with pytest.raises(UnsupportedModel):
        engine.generate([1, 2, 3])
    with pytest.raises(PromptTooLong):
        engine.attend([1] * 65)
    assert rows.shape == engine.attend(list(range(40)), capture="scores").array().shape


@pytest.mark.parametrize("name", ["gpt2-dense", "starcoder-dense"])
def test_generation_ends_where_learned_positions_do(
    architectures: dict[str, Path], make_engine: MakeEngine, name: str
) -> None:
    from kqview.errors import PromptTooLong

    engine = make_engine(architectures[name], n_ctx=1024)
    n = engine.n_ctx
    assert n == engine.model.n_ctx_train < 1024
    generation = engine.generate([1] * (n - 3), max_tokens=50, ignore_eos=True)
    assert len(list(generation)) == 4
    assert generation.finish_reason == "length"
    with pytest.raises(PromptTooLong, match=f"knows {n} positions"):
        engine.generate([1] * (n + 1))


@pytest.mark.parametrize("name", WITHOUT_ATTENTION)
def test_recurrent_model_generates_and_has_nothing_to_capture(
    architectures: dict[str, Path], make_engine: MakeEngine, name: str
) -> None:
    from kqview.errors import InvalidCapture

    engine = make_engine(architectures[name])
    assert engine.model.attention_layers == ()
    assert len(list(engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True))) == 4
    with pytest.raises(InvalidCapture):
        engine.generate([1, 2, 3], capture="probs")


def test_table_lists_every_model_without_failure() -> None:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if "| " in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert tuple(row[0] for row in cells) == NAMES
    assert all(row[2] == row[3] for row in cells)
