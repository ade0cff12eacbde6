"""Edits against the same intervention in transformers, by forward hooks.

Tiny random models are made in transformers and converted by llama.cpp's own converter: the same
float32 weights, in float64 with eager attention against an F32 cache without flash attention.
Compared are the last token's logits, the probabilities of all heads and the outputs of all layers,
without edits and with each. llama.cpp names no outputs of an encoder's layers.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, Edit, errors
from kqview.demo import MODEL_PATH as DEMO
from tests.support import hf_models
from tests.support.engines import open_engine
from tests.support.hf_llama import hf_llama
from tests.support.reference import relative_error
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engine.conftest import MakeEngine

    Outcome = dict[str, Any]

pytestmark = pytest.mark.needs("transformers")

N = 20
IDS = random_ids(N, seed=3)
# Of src/kqview/EXACTNESS.md: rows of F32 weights and cache; three times `gelu-tanh` and a bit.
CLOSE, CLOSE_GELU = 1e-5, 5e-4


@dataclass
class Peer:
    """A model in transformers, what is done to its modules, and an engine of the same weights."""

    model: Any
    arch: hf_models.Arch
    engine: Any
    hooks: list[Any] = field(default_factory=list[Any])

    @property
    def layers(self) -> Any:
        return hf_models.layers(self.model)

    @property
    def first(self) -> int:
        """The first layer with attention."""
        return self.engine.model.attention_layers[0]

    def attention(self, layer: int) -> Any:
        return self.layers[layer].get_submodule(self.arch.attention)

    def projection(self, layer: int) -> Any:
        """What the outputs of heads go through."""
        return self.layers[layer].get_submodule(self.arch.projection)

    def behind(self, module: Any, change: Callable[[Any], Any]) -> None:
        """Replace what a module returns, the first of several values."""

        def hook(_module: Any, _given: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (change(output[0]), *output[1:])
            return change(output)

        self.hooks.append(module.register_forward_hook(hook))

    def before(self, module: Any, change: Callable[[Any], Any]) -> None:
        """Replace what a module is given."""
        self.hooks.append(
            module.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
        )

    def bias(self, layer: int, added: Any) -> None:
        """Add ``(n_heads or 1, N, N)`` to what a layer's attention adds to its scores."""

        def hook(module: Any, given: Any, named: dict[str, Any]) -> Any:
            bound = inspect.signature(module.forward).bind(*given, **named)
            mask = bound.arguments.get(self.arch.mask)
            bound.arguments[self.arch.mask] = (
                added[None] if mask is None else mask[..., -N:] + added
            )
            return bound.args, bound.kwargs

        self.hooks.append(self.attention(layer).register_forward_pre_hook(hook, with_kwargs=True))

    def theirs(self) -> Outcome:
        """What transformers computes; ends what was begun."""
        import torch

        hidden: list[Any] = []

        def keep(output: Any) -> Any:
            hidden.append(output[0].detach().numpy().copy())
            return output

        for layer in self.layers:
            self.behind(layer, keep)
        options = {} if self.arch.is_encoder else {"use_cache": False}
        with torch.no_grad():
            found = self.model(torch.tensor([IDS]), output_attentions=True, **options)
        self.end()
        rows = [one[0].numpy() for one in found.attentions if one is not None]
        if self.arch.is_encoder:
            return {"probs": np.stack(rows)}
        logits = found.logits[0, -1].numpy()
        return {"probs": np.stack(rows), "hidden": np.stack(hidden), "logits": logits}

    def end(self) -> None:
        """Take all hooks away."""
        for one in self.hooks:
            one.remove()
        self.hooks.clear()

    def ours(self, *edits: Edit) -> Outcome:
        if self.arch.is_encoder:
            return {"probs": self.engine.attend(IDS, "probs", edits=edits).array()}
        found = self.engine.attend(IDS, Capture("probs", hidden="all"), edits=edits)
        capture = Capture(vocab_logits=True)
        tokens = self.engine.generate(IDS, max_tokens=1, capture=capture, edits=edits)
        logits = np.array(next(tokens).logits)
        return {"probs": found.array(), "hidden": np.array(found.hidden), "logits": logits}

    @cached_property
    def plain(self) -> Outcome:
        """What transformers computes without edits."""
        return self.theirs()

    @property
    def limit(self) -> float:
        return CLOSE_GELU if hf_models.gelus(self.model) else CLOSE

    def values(self, array: Any) -> Any:
        """In the model's type."""
        import torch

        return torch.tensor(np.asarray(array), dtype=next(self.model.parameters()).dtype)

    def differences(self, found: Outcome, want: Outcome) -> dict[str, float]:
        return {name: relative_error(found[name], want[name]) for name in want}

    def assert_close(self, found: Outcome, want: Outcome, begin: Callable[[Peer], object]) -> None:
        """Within the limit or, where a model multiplies what is rounded, as far as its float32 is.

        transformers itself is 7.7e-4 from its float64 after a bias in gemma3, of seven layers.
        """
        differences = self.differences(found, want)
        if max(differences.values()) > self.limit:
            self.model.float()
            begin(self)
            of_float32 = self.differences(self.theirs(), want)
            self.model.double()
            assert max(differences.values()) <= 2 * max(of_float32.values()), of_float32
            assert max(differences.values()) <= 1e-3


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.needs("converter")) for name in hf_models.ARCHS],
)
def peer(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Peer]:
    name = request.param
    model = hf_models.make(name)
    path = hf_models.convert(model, tmp_path_factory.mktemp("hf") / name)
    with open_engine(path, n_ctx=256, n_threads=1, kv_type="f32", flash_attn=False) as engine:
        yield Peer(model, hf_models.ARCHS[name], engine)


# ---- interventions: each begins in transformers and returns the edit


def vector(peer: Peer) -> Any:
    """As long as what layers give out."""
    states = peer.plain["hidden"]
    return np.random.default_rng(1).normal(size=states.shape[2]) * np.abs(states).mean()


def add(peer: Peer) -> Edit:
    added = vector(peer)
    peer.behind(peer.layers[0], lambda x: x + peer.values(added))
    return Edit.add(added, 0)


def put(peer: Peer) -> Edit:
    state = vector(peer)

    def change(x: Any) -> Any:
        x = x.clone()
        x[:, [3, N - 1]] = peer.values(state)
        return x

    peer.behind(peer.layers[0], change)
    return Edit.set(state, 0, [3, N - 1])


def scale_heads(peer: Peer) -> Edit:
    def change(x: Any) -> Any:
        heads = x.reshape(*x.shape[:2], hf_models.N_HEADS, -1).clone()
        heads[:, :, 1] *= 0.0
        heads[:, :, 0] *= 2.0
        return heads.reshape(x.shape)

    peer.before(peer.projection(peer.first), change)
    return Edit.scale_heads({(peer.first, 1): 0.0, (peer.first, 0): 2.0})


def bias(peer: Peer) -> Edit:
    added = np.zeros((1, N, N))
    added[..., 2:7] = 1.5
    for layer in peer.engine.model.attention_layers:
        peer.bias(layer, peer.values(added))
    return Edit.attention_bias([(2, 7)], 1.5)


def bias_of_a_head(peer: Peer) -> Edit:
    added = np.zeros((hf_models.N_HEADS, N, N))
    added[1, :, 2:7] = 1.5
    peer.bias(peer.first, peer.values(added))
    return Edit.attention_bias([(2, 7)], 1.5, layers=[peer.first], heads=[1])


def block(peer: Peer) -> Edit:
    added = np.zeros((1, N, N))
    added[..., 15:, 12:14] = -np.inf
    for layer in peer.engine.model.attention_layers:
        peer.bias(layer, peer.values(added))
    return Edit.block((15, None), (12, 14))


def test_without_edits_both_compute_the_same(peer: Peer) -> None:
    peer.assert_close(peer.ours(), peer.plain, lambda _: None)


@pytest.mark.parametrize("begin", [add, put, scale_heads, bias, bias_of_a_head, block])
def test_an_edit_is_the_intervention_of_a_forward_hook(
    peer: Peer, begin: Callable[[Peer], Edit]
) -> None:
    if peer.arch.is_encoder and begin in (add, put):
        with pytest.raises(errors.UnsupportedModel, match="output of layer 0 cannot be edited"):
            peer.ours(Edit.add(np.ones(peer.engine.model.n_embd), 0))
        return
    plain = peer.plain
    edit = begin(peer)
    want = peer.theirs()
    peer.assert_close(peer.ours(edit), want, begin)
    seen = peer.differences(plain, want)
    if not peer.arch.is_encoder:
        del seen["probs"]  # those of a hybrid's only attention layer stay
    assert min(seen.values()) > 10 * peer.limit, seen


@pytest.mark.parametrize("peer", ["llama", "qwen2"], indirect=True)
def test_a_hook_of_a_part_is_that_of_transformers(peer: Peer) -> None:
    def doubled(x: Any) -> Any:
        return 2.0 * x

    plain, last = peer.plain, len(peer.layers) - 1
    for module, at, layer in (
        (peer.projection(0), "attention_out", 0),
        (peer.layers[last].mlp, "mlp_out", last),
    ):
        peer.behind(module, doubled)
        want = peer.theirs()
        found = peer.differences(peer.ours(Edit.hook(doubled, at=at, layers=[layer])), want)
        assert max(found.values()) <= peer.limit, found
        assert peer.differences(plain, want)["logits"] > 10 * peer.limit


def test_patching_ranks_heads_as_transformers_does(make_engine: MakeEngine) -> None:
    import torch

    peer = Peer(hf_llama(DEMO), hf_models.Arch(), None)
    engine = make_engine(DEMO, n_slots=2, kv_type="f32", flash_attn=False)
    words = " red blue old river green red blue old", " red blue old stone green red blue old"
    clean, corrupted = (engine.tokenize(text, add_special=False) for text in words)
    answer, other = (engine.tokenize(one, add_special=False)[0] for one in (" river", " stone"))
    found = kqview.patch(engine, clean, corrupted, (answer, other))
    n_head = engine.model.n_head

    def difference(ids: list[int]) -> float:
        with torch.no_grad():
            logits = peer.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        return float(logits[answer] - logits[other])

    kept: dict[int, Any] = {}
    hooks = [
        peer.projection(i).register_forward_pre_hook(
            lambda _, given, i=i: kept.__setitem__(i, given[0].clone())
        )
        for i in range(len(found))
    ]
    at_clean = difference(clean)
    for one in hooks:
        one.remove()
    at_corrupted = difference(corrupted)
    want = np.empty_like(found)
    for i in range(len(found)):
        for head in range(n_head):

            def patched(x: Any, i: int = i, head: int = head) -> Any:
                heads = x.reshape(*x.shape[:2], n_head, -1).clone()
                heads[:, :, head] = kept[i].reshape(heads.shape)[:, :, head]
                return heads.reshape(x.shape)

            peer.before(peer.projection(i), patched)
            want[i, head] = (difference(corrupted) - at_corrupted) / (at_clean - at_corrupted)
            peer.end()
    np.testing.assert_allclose(found, want, atol=0.02)
    clear = np.abs(want) > 0.05
    assert clear.sum() >= 3
    assert np.argsort(found[clear]).tolist() == np.argsort(want[clear]).tolist()
