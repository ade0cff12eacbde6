"""Edits of the architectures of llama.cpp's own tests, each held against what needs no model.

Float64 formulas on what an engine captures without edits: probabilities times exp(bias), normalised
again with the share that goes to a sink; an output plus a vector; a state put in place of itself.
The heads of `scale_heads` are those of `attention_bias`, and so those of captured rows: where a
head gives out nothing, it does not matter what it attends to. What attention and the feed-forward
part add to the stream is the difference of two layers' outputs. What is refused where, and models
whose layers are no plain sum, are listed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Edit, errors
from tests.support.archs import NAMES, WITHOUT_CACHE
from tests.support.engines import open_engine
from tests.support.reference import relative_error
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# One of each kind of attention and of layer; the others run with this file named.
KINDS = (
    "llama-dense", "qwen2-dense", "qwen3-dense", "gemma2-dense", "gemma3-dense", "gpt-oss-moe",
    "mimo2-moe", "deepseek2-moe", "minicpm3-dense", "falcon-dense", "gptneox-dense", "phi2-dense",
    "phi3-dense", "command-r-dense", "cohere2-dense", "bloom-dense", "mpt-dense", "gpt2-dense",
    "starcoder-dense", "stablelm-dense", "olmo2-dense", "granitehybrid-dense", "qwen3next-moe",
    "falcon-h1-dense", "jamba-dense", "grok-moe", "llada-dense", "dream-dense",
)  # fmt: skip
MODELS = [pytest.param(name, marks=() if name in KINDS else pytest.mark.full) for name in NAMES]
# Attention whose mask is made in the graph, or that gathers its keys, in some layers at least.
NO_BIAS = frozenset({
    "deepseek32-moe", "deepseek4-moe", "dots3note-moe", "glm-dsa-moe", "glm5-next-moe", "hy_v4-moe",
    "qwen4exp-moe",
})  # fmt: skip
# Layers that add up more than attention and one feed-forward part, or scale what they add to.
NO_SUM = frozenset({"falcon-h1-dense", "minimax-01-moe", "talkie-dense"})
NO_ATTENTION_OUT = frozenset({"refact-moe"})
# Two feed-forward parts side by side (arctic), layers that run several times, or none.
NO_MLP_OUT = frozenset(
    {"arctic-moe", "hrm_text-dense", "mamba-dense", "mamba2-dense", "refact-moe"}
)
N = 20
CLOSE = 1e-5


class Edited:
    """One model, and what it computes without edits."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name, self.engine = name, engine
        self.layers: tuple[int, ...] = engine.model.attention_layers
        self.ids = [one % engine.model.n_vocab for one in random_ids(N, seed=3)]
        self._plain: Any = None

    @property
    def plain(self) -> Any:
        """Outputs of all layers without edits."""
        if self._plain is None:
            self._plain = self.hidden()
        return self._plain

    @property
    def first(self) -> int:
        """The first layer with attention."""
        if not self.layers:
            pytest.skip("it has no attention")
        return self.layers[0]

    def rows(self, layer: int, *edits: Edit) -> Any:
        """Probabilities, ``(n_heads, n_tokens, n_tokens)``."""
        found = self.engine.attend(self.ids, Capture("probs", layers=[layer]), edits=edits)
        return np.asarray(found.array()[0], np.float64)

    def hidden(self, *edits: Edit) -> Any:
        """Outputs of all layers, ``(n_layers, n_tokens, n_embd)``."""
        try:
            capture = Capture(layers=(), hidden="all")
            return np.array(self.engine.attend(self.ids, capture, edits=edits).hidden)
        except errors.InvalidCapture:
            pytest.skip("llama.cpp does not name the outputs of its layers")

    def at(self, point: Any, layer: int) -> Any:
        """What a layer has there, ``(n_tokens, n_embd)``."""
        seen: list[Any] = []
        self.hidden(Edit.hook(seen.append, at=point, layers=[layer]))
        return np.concatenate(seen)

    def vector(self) -> Any:
        """One of the size of its states."""
        seed = np.random.default_rng(7)
        return seed.normal(size=self.plain.shape[2]) * float(np.abs(self.plain).mean())


@pytest.fixture(scope="module", params=MODELS)
def edited(request: pytest.FixtureRequest, architectures: dict[str, Path]) -> Iterator[Edited]:
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "kv_type": "f32"}
    path = architectures[request.param]
    with open_engine(path, flash_attn=False, attention_budget_bytes=2**28, **options) as engine:
        yield Edited(request.param, engine)


def after(probs: Any, weights: Any) -> Any:
    """Rows whose columns have these weights, normalised with what goes to no column."""
    sink = np.maximum(1.0 - probs.sum(-1, keepdims=True), 0.0)
    sink[sink < CLOSE] = 0.0
    found = probs * weights
    return found / (found.sum(-1, keepdims=True) + sink)


def test_a_bias_multiplies_probabilities_and_normalises_them_again(edited: Edited) -> None:
    boosted = np.ones((1, N, N))
    boosted[..., 2:7] = np.exp(1.5)
    if edited.name in NO_BIAS:
        with pytest.raises(errors.UnsupportedModel, match="edits: scores of layer"):
            edited.rows(edited.first, Edit.attention_bias([(2, 7)], 1.5))
        return
    for layer in {edited.first, edited.layers[-1]}:
        plain = edited.rows(layer)
        edits = [Edit.attention_bias([(2, 7)], 1.5, layers=[layer])]
        if layer == edited.first:  # of all layers, but nothing is different before it
            edits.append(Edit.attention_bias([(2, 7)], 1.5))
        for edit in edits:
            assert relative_error(edited.rows(layer, edit), after(plain, boosted)) <= CLOSE
        of_head = edited.rows(layer, Edit.attention_bias([(2, 7)], 1.5, layers=[layer], heads=[-1]))
        assert relative_error(of_head[-1], after(plain, boosted)[-1]) <= CLOSE
        assert np.array_equal(of_head[:-1], plain[:-1])


def test_blocked_keys_have_no_share(edited: Edited) -> None:
    if edited.name in NO_BIAS:
        return
    plain, seen = edited.rows(edited.first), np.ones((1, N, N))
    seen[:, 6:, 1:9] = 0.0
    seen[:, range(N), range(N)] = 1.0  # a token always sees itself
    found = edited.rows(edited.first, Edit.block((6, None), (1, 9)))
    assert (found[:, 9:, 1:9] == 0).all()
    assert relative_error(found, after(plain, seen)) <= CLOSE


def test_heads_that_are_scaled_are_those_whose_rows_are_captured(edited: Edited) -> None:
    layer = edited.first

    def scaled(head: int, factor: float = 0.0) -> Edit:
        return Edit.scale_heads({(layer, head): factor})

    n_head = len(edited.rows(layer))
    same = edited.hidden(*(scaled(head, 1.0) for head in range(n_head)))
    assert np.array_equal(same, edited.plain)
    without = edited.hidden(scaled(-1))
    assert not np.array_equal(without[layer], edited.plain[layer])
    assert np.array_equal(without[:layer], edited.plain[:layer])
    if edited.name in NO_BIAS:
        return
    blind = Edit.block((0, None), (0, None), layers=[layer], heads=[-1])
    assert np.array_equal(edited.hidden(scaled(-1), blind), without)
    if n_head > 1:
        assert not np.array_equal(edited.hidden(scaled(0), blind), edited.hidden(scaled(0)))


def test_a_vector_is_added_to_the_output_of_a_layer(edited: Edited) -> None:
    plain, vector = edited.plain, edited.vector()
    for layer in (0, len(plain) - 1):
        found = edited.hidden(Edit.add(vector, layer, positions=[4, -1]))
        want = plain[layer].astype(np.float64)
        want[[4, N - 1]] += vector
        assert relative_error(found[layer], want) <= CLOSE
        assert np.array_equal(found[layer][5:-1], plain[layer][5:-1])
        assert np.array_equal(found[:layer], plain[:layer])
        everywhere = edited.hidden(Edit.add(vector, layer, scale=2.0))
        assert relative_error(everywhere[layer], plain[layer] + 2.0 * vector) <= CLOSE
        assert layer or not np.array_equal(found[1:], plain[1:])  # layers above read it


def test_a_state_put_in_its_own_place_changes_nothing(edited: Edited) -> None:
    plain = edited.plain
    own = Edit.set(plain[0][[3, 9]], 0, [3, 9])
    assert np.array_equal(edited.hidden(own), plain)
    found = edited.hidden(Edit.set(edited.vector(), 0, [3, 9]))
    assert np.array_equal(found[0][[3, 9]], np.float32([edited.vector()] * 2))
    assert not np.array_equal(found[1:], plain[1:])


def test_what_parts_add_is_the_difference_of_two_outputs(edited: Edited) -> None:
    plain, vector = edited.plain, edited.vector()
    layer = edited.layers[-1] if edited.layers else len(plain) - 1
    lacking = {"attention_out": NO_ATTENTION_OUT, "mlp_out": NO_MLP_OUT}
    parts = np.zeros_like(plain[0], np.float64)
    for point, names in lacking.items():
        if edited.name in names or (point == "attention_out" and not edited.layers):
            with pytest.raises(errors.UnsupportedModel, match=f"edits: {point} by a hook of layer"):
                edited.at(point, layer)
        else:
            parts += edited.at(point, layer)
    if layer > 0 and edited.layers and edited.name not in NO_SUM.union(*lacking.values()):
        assert relative_error(plain[layer - 1] + parts, plain[layer]) <= CLOSE
    if edited.name not in NO_MLP_OUT | NO_SUM:
        more = Edit.hook(lambda rows: rows + vector, at="mlp_out", layers=[layer])
        assert relative_error(edited.hidden(more)[layer], plain[layer] + vector) <= CLOSE


def test_generated_tokens_have_the_rows_of_a_prompt(edited: Edited) -> None:
    if edited.name in WITHOUT_CACHE or not edited.layers:
        pytest.skip("it does not generate, or has no attention")
    edits = [Edit.scale_heads({(edited.first, -1): 2.0})]
    if edited.name not in NO_BIAS:
        edits += [Edit.attention_bias([(2, 7)], 1.5), Edit.block((N - 1, None), (0, 2))]
    options: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
    tokens = list(edited.engine.generate(edited.ids, capture="probs", edits=edits, **options))
    ids = edited.ids + [one.id for one in tokens[:-1]]
    whole = edited.engine.attend(ids, "probs", edits=edits).array()
    for i, token in enumerate(tokens):
        for ours, theirs in zip(token.attention, whole, strict=True):
            want = np.asarray(theirs)[:, N - 1 + i, : N + i]
            assert relative_error(np.asarray(ours), want) <= 10 * CLOSE
