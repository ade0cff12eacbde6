"""Models that attend to a selection of the tokens: rows have a column for every token all the same.

llama.cpp selects in two ways. Most models mask what was not selected, and the stock build's tensors
are the reference. minimax-m3 (with flash attention, decoding) and glm5-next (decoding) gather the
selected keys into a smaller tensor: there the columns are compared with the stock build's product
over all keys, which the layers below the sparse one do not change. The generator's models select
everything; copies of them with another top_k do not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support import stock
from tests.support.arch_check import ModelCheck, relative
from tests.support.archs import with_value

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from .conftest import MakeEngine

    Models = dict[str, Path]

pytestmark = pytest.mark.peers

EXACT = 1e-5
ROUNDED = 2e-3
# Another selection of a deeper layer's keys, by a rounding of its indexer, would be an error of 1.
DRIFTED = 2e-2
MASKED = "deepseek32-moe deepseek4-moe dots3note-moe glm-dsa-moe hy_v4-moe qwen4exp-moe"


def sparse(model: Path, path: Path, top_k: int) -> Path:
    architecture = model.stem.removesuffix("-moe")
    return with_value(model, path, f"{architecture}.attention.indexer.top_k", top_k)


def prompt_of(n_tokens: int, seed: int = 11) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, n_tokens).tolist()


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
