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
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import stock, tiny_gguf
from tests.support.archs import (
    NAMES,
    WITHOUT_CACHE,
    Checks,
    ModelCheck,
    relative,
    row_error,
    with_value,
)
from tests.support.rows import KINDS, near
from tests.support.tiny_gguf import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kqview.types import Token
    from tests.engine.conftest import MakeEngine
    from tests.support.archs import Report
    from tests.support.rows import Kind

    Models = dict[str, Path]


EXACT = near(1e-5)
ROUNDED = near(2e-3)
TABLE = Path(__file__).with_name("ARCHITECTURES.md")
WITHOUT_ATTENTION = ("mamba-dense", "mamba2-dense")
# Their last layer is not as wide as llama.cpp takes an embedding to be: it would end the process.
WITHOUT_EMBEDDING = ("deepseek4-moe", "qwen4exp-moe")
# llama.cpp does not name the output of all their layers.
WITHOUT_STATES = (
    "deepseek4-moe", "glm5-next-moe", "hy_v4-moe", "nemotron_h-dense", "nemotron_h_moe-dense",
    "plamo2-dense", "qwen4exp-moe",
)  # fmt: skip
# Their softmax has a sink, an extra logit without a column.
# Models, some or all of whose layers stay with llama.cpp: keys that are gathered or stand for
# several tokens; and grok, for which it has no flash attention.
LAYERS_OF_KQVIEW = {"deepseek4-moe": 2, "grok-moe": 0, "minimax-m3-moe": 1}
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


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cogvlm-dense"])
def test_score_of_a_generated_token_is_its_logprob(reports: Checks, name: str) -> None:
    # llama.cpp's graph of CogVLM gives the logits of a step's first tokens instead of its last.
    assert reports[name].score_error <= 10 * EXACT


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_CACHE])
def test_states_of_the_prompt_are_those_of_its_tokens(reports: Checks, name: str) -> None:
    assert (reports[name].states_error < 0) == (name in WITHOUT_STATES)
    assert reports[name].states_error <= 10 * EXACT


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_ATTENTION])
def test_probs_sum_to_one_or_less_with_sinks(reports: Checks, name: str) -> None:
    for low, high in reports[name].sums.values():
        assert high <= 1 + 1e-6
        if name in WITH_SINKS:
            assert low > 0.7
            assert high < 0.999
        else:
            assert low >= 1 - 1e-6


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_ATTENTION])
def test_sums_over_spans_are_those_of_the_rows(reports: Checks, name: str) -> None:
    assert reports[name].span_error <= 1e-6


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_CACHE])
def test_rows_of_kqviews_own_attention_are_those_without_flash_attention(
    reports: Checks, name: str
) -> None:
    report = reports[name]
    n_layers = len(report.expected_layers)
    assert report.kernel_layers == LAYERS_OF_KQVIEW.get(name, n_layers)
    assert report.kernel_error <= (ROUNDED if name in LAYERS_OF_KQVIEW else EXACT)


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
    with pytest.raises(PromptTooLong, match=rf"\b{n}\b"):
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


# ---- each way in which attention departs from the plain one
#
# Values are the stock build's tensors, flash attention off, or a formula. Gemma 3n and 4 are ours.
# With flash attention on the first layer is compared tightly; above it llama.cpp's own rounding
# adds up (see test_values.py).

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


@pytest.mark.needs("host layers")
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


@pytest.mark.needs("peers")
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


@pytest.mark.needs("host layers")
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
def f16_reports(architectures: Models) -> Iterator[Checks]:
    names = sorted({*MLA.split(), *QK_NORM.split(), *FUSED_QKV.split(), *HYBRIDS})
    # Another prompt than that of `reports`, and the default cache.
    checks = Checks([architectures[name] for name in names], n_prompt=33, kv_type="f16")
    yield checks
    checks.close()


def tensors_of(model: Path) -> set[str]:
    return {tensor.name for tensor in Reader(model).tensors}


@pytest.mark.parametrize("name", MLA.split())
def test_latent_attention_equals_stock(
    architectures: Models, f16_reports: Checks, name: str
) -> None:
    assert any("attn_kv_a" in tensor for tensor in tensors_of(architectures[name]))
    assert_equal_f16(f16_reports[name])


@pytest.mark.parametrize("name", QK_NORM.split())
def test_normed_queries_and_keys_equal_stock(
    architectures: Models, f16_reports: Checks, name: str
) -> None:
    assert {"blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight"} <= tensors_of(
        architectures[name]
    )
    assert_equal_f16(f16_reports[name])


@pytest.mark.parametrize("name", FUSED_QKV.split())
def test_fused_projection_equals_stock(
    architectures: Models, f16_reports: Checks, name: str
) -> None:
    assert "blk.0.attn_qkv.weight" in tensors_of(architectures[name])
    assert_equal_f16(f16_reports[name])


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_model_has_rows_of_its_attention_layers_alone(
    f16_reports: Checks, name: str
) -> None:
    assert_equal_f16(f16_reports[name])
    assert tuple(f16_reports[name].expected_layers) == HYBRIDS[name]


def assert_equal_f16(report: Report) -> None:
    """As `assert_equal`; llama.cpp rounds Q to F16 where it computes kq from an F16 cache."""
    assert report.failure == ""
    assert all(layers == report.expected_layers for layers in report.layers.values())
    assert report.largest(flash_attn=False) <= EXACT
    assert report.largest(flash_attn=True, first_layer=True) <= ROUNDED
    assert report.largest(flash_attn=True) <= DRIFTED


@pytest.mark.needs("peers")
@pytest.mark.parametrize("write", [tiny_gguf.write_gemma3n, tiny_gguf.write_gemma4])
def test_layers_that_share_a_cache_have_rows_of_their_own(tmp_path: Path, write: Any) -> None:
    report = ModelCheck(write(tmp_path / f"{write.__name__}.gguf"), n_prompt=40).run()
    assert_equal(report, DRIFTED)
    assert report.expected_layers == list(range(22 if "3n" in write.__name__ else 6))
    assert 0 in report.n_hidden.values()
    assert max(report.n_hidden.values()) > 0


def test_layers_of_different_heads_are_a_tuple(tmp_path: Path, make_engine: MakeEngine) -> None:
    engine = make_engine(tiny_gguf.write_gemma4(tmp_path / "gemma4.gguf"))
    (token,) = engine.generate([1, 2, 3, 4], max_tokens=1, ignore_eos=True, capture="probs")
    assert isinstance(token.attention, tuple)
    assert [rows.shape for rows in token.attention] == [(4, 4), (2, 4)] * 3
    blocks = engine.attend([1, 2, 3, 4, 5], capture="probs").array()
    assert isinstance(blocks, tuple)
    assert [rows.shape for rows in blocks] == [(4, 5, 5), (2, 5, 5)] * 3


# ---- attention to a selection of the tokens: rows have a column for every token all the same
#
# llama.cpp selects in two ways. Most models mask what was not selected, and the stock build's
# tensors are the reference. minimax-m3 (with flash attention, decoding) and glm5-next (decoding)
# gather the selected keys into a smaller tensor: there the columns are compared with the stock
# build's product over all keys, which the layers below the sparse one do not change. The
# generator's models select everything; copies of them with another top_k do not.

MASKED = "deepseek32-moe deepseek4-moe dots3note-moe glm-dsa-moe hy_v4-moe qwen4exp-moe"


def sparse(model: Path, path: Path, top_k: int) -> Path:
    architecture = model.stem.removesuffix("-moe")
    return with_value(model, path, f"{architecture}.attention.indexer.top_k", top_k)


def prompt_of(n_tokens: int, seed: int = 11) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, n_tokens).tolist()


@pytest.mark.needs("peers")
@pytest.mark.parametrize("name", MASKED.split())
def test_masked_selection_equals_stock_in_the_prompt_and_after(
    architectures: Models, tmp_path: Path, name: str
) -> None:
    model = sparse(architectures[name], tmp_path / f"{name}.gguf", 8)
    report = ModelCheck(model, n_prompt=60).run()
    assert report.failure == ""
    assert report.layers["probs on"] == report.layers["probs off"] == report.expected_layers
    assert report.largest(flash_attn=False) <= EXACT
    assert report.largest(flash_attn=True, first_layer=True) <= EXACT
    assert report.largest(flash_attn=True) <= DRIFTED
    # 65 columns, of which a query sees 8 or a few more; deepseek4 selects among compressed keys and
    # sees the last 32 tokens.
    heads = dict(zip(report.expected_layers, report.n_heads, strict=True))
    n_hidden = 65 - 32 if name == "deepseek4-moe" else 54
    assert any(n / heads[layer] >= n_hidden for layer, n in report.n_hidden.items())


class Gathered:
    """A model that gathers keys, and the stock build's product over all keys of the same text."""

    def __init__(self, dense: Path, folder: Path) -> None:
        self.name = dense.stem
        # Blocks of 4 tokens: minimax-m3 counts blocks, glm5-next tokens.
        self.top_k, self.layer = (2, 1) if self.name == "minimax-m3-moe" else (8, 0)
        self.dense = dense
        self.model = sparse(dense, folder / f"{self.name}.gguf", self.top_k)

    def product(self, prompt: list[int], ids: list[int], **options: Any) -> list[stock.Layer]:
        """For each step the layer's kq, whose inputs no sparse layer has changed."""
        run = stock.read_rows(
            self.dense, prompt, n_predict=max(1, len(ids)), forced_ids=ids, kv_type="f32",
            n_ctx=512, **options,
        )  # fmt: skip
        return [
            next(layer for layer in step.layers if layer.layer == self.layer) for step in run.steps
        ]


@pytest.fixture(params=["minimax-m3-moe", "glm5-next-moe"])
def gathered(request: pytest.FixtureRequest, architectures: Models, tmp_path: Path) -> Gathered:
    return Gathered(architectures[request.param], tmp_path)


def test_gathered_keys_are_columns_of_their_tokens(
    make_engine: MakeEngine, gathered: Gathered
) -> None:
    # 250 tokens and more: across llama.cpp's padding of the cache to 256 cells.
    for n_prompt in (20, 61, 250):
        prompt = prompt_of(n_prompt)
        rows: dict[str, list[NDArray[np.float32]]] = {}
        ids: list[int] = []
        for kind in ("logits", "scores", "probs"):
            engine = make_engine(gathered.model, flash_attn=True, kv_type="f32")
            tokens = list(
                engine.generate(
                    prompt, max_tokens=10, temperature=0.0, ignore_eos=True, capture=kind
                )
            )
            index = engine.model.attention_layers.index(gathered.layer)
            rows[kind] = [np.asarray(token.attention[index]) for token in tokens]
            ids = [token.id for token in tokens]
        scale = engine.model.attention_scale
        products = gathered.product(prompt, ids)
        for i_step, product in enumerate(products[1:], 1):  # step 0 is the prompt's
            logits, scores, probs = (rows[kind][i_step] for kind in ("logits", "scores", "probs"))
            seen = np.isfinite(logits)
            n_columns = n_prompt + i_step
            assert logits.shape == (len(seen), n_columns)
            n_seen = seen.sum(axis=-1)
            # minimax-m3: the newest block, complete or not, and another one. glm5-next: two
            # complete blocks, and what does not fill one.
            n_newest = (n_columns - 1) % 4 + 1
            is_minimax = gathered.name == "minimax-m3-moe"
            assert (n_seen == (4 + n_newest if is_minimax else 8 + n_newest % 4)).all()
            assert seen[:, -1].all() or n_newest == 4
            want = np.where(seen, product.kq[:, -1].astype(np.float64), 0)
            # Below minimax-m3's sparse layer is one whose V flash attention rounds.
            limit = ROUNDED if is_minimax else EXACT
            assert relative(np.where(seen, logits, 0), want) <= limit
            np.testing.assert_allclose(scores[seen], logits[seen] * scale, rtol=1e-6)
            shares = np.exp(np.where(seen, scores.astype(np.float64), -np.inf))
            assert relative(probs, shares / shares.sum(axis=-1, keepdims=True)) <= EXACT


@pytest.mark.needs("peers")
def test_selection_of_a_prompt_is_hidden_column_by_column(
    make_engine: MakeEngine, architectures: Models, tmp_path: Path
) -> None:
    # minimax-m3 has a mask for each KV head there.
    model = Gathered(architectures["minimax-m3-moe"], tmp_path)
    prompt = prompt_of(60)
    (product,) = model.product(prompt, [], rows="all")
    rows = {}
    for kind in ("logits", "probs"):
        engine = make_engine(model.model, flash_attn=True, kv_type="f32")
        rows[kind] = np.asarray(engine.attend(prompt, capture=kind).array()[model.layer])
    seen = np.isfinite(rows["logits"])
    position = np.arange(60)
    # Two blocks of 4, one of which is the query's own.
    n_own = position % 4 + 1
    np.testing.assert_array_equal(seen.sum(axis=-1), [np.where(position < 4, 0, 4) + n_own] * 2)
    assert not np.array_equal(seen[0], seen[1])  # each KV head selects for itself
    want = product.kq.astype(np.float64)
    assert relative(np.where(seen, rows["logits"], 0), np.where(seen, want, 0)) <= ROUNDED
    shares = np.exp(np.where(seen, rows["logits"] * engine.model.attention_scale, -np.inf))
    assert relative(rows["probs"], shares / shares.sum(axis=-1, keepdims=True)) <= EXACT


@pytest.mark.needs("peers")
@pytest.mark.parametrize("flash_attn", [False, True])
def test_selection_of_a_prompt_equals_stock_where_only_decoding_gathers(
    make_engine: MakeEngine, architectures: Models, tmp_path: Path, flash_attn: bool
) -> None:
    model = Gathered(architectures["glm5-next-moe"], tmp_path).model
    prompt = prompt_of(60)
    run = stock.read_rows(model, prompt, kv_type="f32", n_ctx=512, rows="all")
    (layer,) = run.steps[0].layers
    engine = make_engine(model, flash_attn=flash_attn, kv_type="f32")
    rows = np.asarray(engine.attend(prompt, capture="probs").array()[0])
    assert ((rows > 0).sum(axis=-1).max()) <= 11
    assert relative(rows, layer.probs.astype(np.float64)) <= EXACT


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_rows_of_a_prompt_in_small_chunks_are_those_of_one(
    make_engine: MakeEngine, gathered: Gathered, kind: str
) -> None:
    # glm5-next gathers for every query of a chunk of 16 or fewer.
    prompt = prompt_of(60)
    rows = []
    for n_ubatch in (512, 12):
        engine = make_engine(gathered.model, flash_attn=True, kv_type="f32", n_ubatch=n_ubatch)
        rows.append(np.asarray(engine.attend(prompt, capture=kind).array()[gathered.layer]))
    whole, chunks = rows
    seen = np.isfinite(whole)
    np.testing.assert_array_equal(seen, np.isfinite(chunks))
    want = np.where(seen, whole, 0).astype(np.float64)
    assert relative(np.where(seen, chunks, 0), want) <= ROUNDED


# ---- two slots at once with such models, one of them captured
#
# A neighbour must neither change what a slot selects nor what its rows show.

# Those that gather, then those that mask.
TOP_K = {
    "minimax-m3-moe": 2,
    "glm5-next-moe": 8,
    "deepseek32-moe": 8,
    "deepseek4-moe": 8,
    "dots3note-moe": 8,
    "glm-dsa-moe": 8,
    "hy_v4-moe": 8,
    "qwen4exp-moe": 8,
}
SLOT_OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12}


def slot_prompt(n_tokens: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, n_tokens).tolist()


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("captured", [0, 1])
@pytest.mark.parametrize("name", TOP_K)
def test_captured_slot_beside_a_busy_one_has_the_rows_that_it_has_alone(
    make_engine: MakeEngine,
    architectures: dict[str, Path],
    tmp_path: Path,
    name: str,
    captured: int,
    flash_attn: bool,
) -> None:
    key = f"{name.removesuffix('-moe')}.attention.indexer.top_k"
    model = with_value(architectures[name], tmp_path / f"{name}.gguf", key, TOP_K[name])
    options: dict[str, Any] = {"n_slots": 2, "n_ctx": 256, "kv_type": "f32"}
    engine = make_engine(model, flash_attn=flash_attn, **options)
    prompts = [slot_prompt(45, 1), slot_prompt(70, 2)]
    alone = []
    for i, prompt in enumerate(prompts):
        capture = "logits" if i == captured else None
        alone.append(list(engine.generate(prompt, slot=i, capture=capture, **SLOT_OPTIONS)))
        engine.slots[i].clear()
    generations = [
        engine.generate(prompt, slot=i, capture="logits" if i == captured else None, **SLOT_OPTIONS)
        for i, prompt in enumerate(prompts)
    ]
    together = [[next(generation)] for generation in generations]
    for _ in range(SLOT_OPTIONS["max_tokens"] - 1):
        for tokens, generation in zip(together, generations, strict=True):
            tokens.append(next(generation))
    for one, other in zip(alone, together, strict=True):
        assert [token.id for token in one] == [token.id for token in other]
    n_hidden = 0
    for want, got in zip(alone[captured], together[captured], strict=True):
        assert want.attention is not None
        assert got.attention is not None
        for row, expected in zip(got.attention, want.attention, strict=True):
            np.testing.assert_array_equal(np.isfinite(row), np.isfinite(expected))
            shown = np.isfinite(expected)
            n_hidden += int((~shown).sum())
            largest = np.abs(expected[shown]).max()
            assert np.abs(row[shown] - expected[shown]).max() <= ROUNDED * largest
    assert n_hidden > 0 or (name == "minimax-m3-moe" and not flash_attn)  # sees all of them then
    assert all(token.attention is None for token in together[1 - captured])


# ---- a quantised KV cache
#
# The stock build's product over such a cache rounds q as well, to Q8_0, before it multiplies; the
# tap takes q as it is. So the two differ by about 1 % of a row's largest logit for q8_0 and q4_0
# alike, and the tap's rows are the nearer ones to those of an F32 cache. Both is asserted for the
# first layer; above it the reference keeps V in F16 (llama.cpp has no quantised V without flash
# attention), and V's own rounding adds up. Flash attention is on: without it llama.cpp refuses a
# quantised V.

N_TOKENS = 6
# Of the first layer: what 8 or 4 bits of a key lose, and the reference's rounding of q.
QUANTISED_LIMITS: dict[tuple[stock.KvType, Kind], tuple[float, float]] = {
    ("q8_0", "logits"): (0.02, 0.02),
    ("q8_0", "probs"): (1e-3, 1e-3),
    ("q4_0", "logits"): (0.25, 0.02),
    ("q4_0", "probs"): (1e-2, 1e-3),
}


def row_errors(tokens: list[Token], run: stock.Run, kind: Kind) -> list[float]:
    """Largest error of each layer."""
    found = [0.0] * len(run.steps[0].layers)
    for token, step in zip(tokens, run.steps, strict=True):
        assert token.attention is not None
        for i, layer in enumerate(step.layers):
            found[i] = max(found[i], row_error(kind, np.asarray(token.attention[i]), layer))
    return found


def stock_errors(run: stock.Run, exact: stock.Run, kind: Kind) -> list[float]:
    """The same of the stock build's own rows over the quantised cache."""
    found = [0.0] * len(exact.steps[0].layers)
    for step, want in zip(run.steps, exact.steps, strict=True):
        for i, layer in enumerate(want.layers):
            got = step.layers[i]
            rows = got.probs[:, -1] if kind == "probs" else got.kq[:, -1]
            found[i] = max(found[i], row_error(kind, rows, layer))
    return found


@pytest.mark.needs("peers")
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["llama-dense", "qwen3-dense", "gemma3-dense", "gpt-oss-moe"])
def test_rows_of_quantised_cache_are_near_stock_and_nearer_the_exact_ones(
    make_engine: MakeEngine,
    architectures: dict[str, Path],
    name: str,
    kv_type: stock.KvType,
    kind: Kind,
) -> None:
    model = architectures[name]
    prompt = np.random.default_rng(3).integers(0, 128, 40).tolist()
    engine = make_engine(model, kv_type=kv_type, flash_attn=True)
    tokens = list(
        engine.generate(prompt, max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True, capture=kind)
    )
    ids = [token.id for token in tokens]
    same, exact = (
        stock.read_rows(
            model, prompt, n_predict=N_TOKENS, forced_ids=ids, kv_type=reference, n_ctx=512
        )
        for reference in (kv_type, "f32")
    )
    to_exact, to_same = QUANTISED_LIMITS[kv_type, kind]
    assert row_errors(tokens, same, kind)[0] <= to_same
    assert row_errors(tokens, exact, kind)[0] <= to_exact
    if kv_type == "q8_0" and kind == "logits":
        assert row_errors(tokens, exact, kind)[0] < stock_errors(same, exact, kind)[0]
    assert max(row_errors(tokens, same, kind)) <= 0.1


@pytest.mark.needs("peers")
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["deepseek2-moe", "minimax-m3-moe", "lfm2-dense"])
def test_rows_of_quantised_cache_are_near_the_exact_ones(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str, kv_type: stock.KvType
) -> None:
    # The stock build cannot quantise K alone where V lies in K (deepseek2).
    model = architectures[name]
    prompt = np.random.default_rng(4).integers(0, 128, 40).tolist()
    engine = make_engine(model, kv_type=kv_type, flash_attn=True)
    tokens = list(
        engine.generate(
            prompt, max_tokens=N_TOKENS, temperature=0.0, ignore_eos=True, capture="logits"
        )
    )
    ids = [token.id for token in tokens]
    exact = stock.read_rows(
        model, prompt, n_predict=N_TOKENS, forced_ids=ids, kv_type="f32", n_ctx=512
    )
    first, *above = row_errors(tokens, exact, "logits")
    assert 0 < first <= QUANTISED_LIMITS[kv_type, "logits"][0]
    assert max(above, default=0) <= 0.3
