"""Edits against the same intervention in transformers, by forward hooks.

transformers reads the very files: llama.cpp's own tiny models. Both compute in float32, eager
attention and no flash attention. Outputs of all layers are compared, and how much an intervention
changes them shows that the limit sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, Edit
from kqview.demo import MODEL_PATH as DEMO
from tests.support.reference import relative_error
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.needs("transformers")

N = 20
NAMES = (
    "llama-dense", "qwen2-dense", "qwen3-dense", "gemma2-dense", "gemma3-dense", "phi3-dense",
    "falcon-dense", "bloom-dense", "gpt2-dense", "starcoder2-dense", "stablelm-dense",
    "nemotron-dense", "qwen2moe-moe", "qwen3moe-moe", "gpt-oss-moe", "minimax-m2-moe", "lfm2-dense",
)  # fmt: skip
CLOSE = 1e-4


def first_of(module: Any, *names: str) -> Any:
    """The first of these submodules that there is."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


@dataclass
class Peer:
    """A model in transformers, and what is done to its modules."""

    model: Any
    hooks: list[Any] = field(default_factory=list[Any])

    @classmethod
    def load(cls, path: Path) -> Peer:
        import torch
        import transformers

        return cls(
            transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        )

    @property
    def layers(self) -> Any:
        return first_of(first_of(self.model, "model", "transformer"), "layers", "h")

    def projection(self, layer: int) -> Any:
        """What the outputs of heads go through."""
        attention = first_of(self.layers[layer], "self_attn", "self_attention", "attn")
        return first_of(attention, "o_proj", "dense", "c_proj", "out_proj")

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

    def outputs(self, ids: list[int], mask: Any = None) -> Any:
        """Outputs of all layers, ``(n_layers, n_tokens, n_embd)``; ends what was begun."""
        import torch

        found: list[Any] = []

        def keep(output: Any) -> Any:
            found.append(output[0].detach().numpy().copy())
            return output

        for layer in self.layers:
            self.behind(layer, keep)
        with torch.no_grad():
            self.model(torch.tensor([ids]), attention_mask=mask, use_cache=False)
        for one in self.hooks:
            one.remove()
        self.hooks.clear()
        return np.stack(found)


def of_torch(values: Any) -> Any:
    import torch

    return torch.tensor(np.asarray(values, np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_an_edit_is_the_intervention_of_a_forward_hook(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str
) -> None:
    peer = Peer.load(architectures[name])
    engine = make_engine(architectures[name], n_ctx=256, kv_type="f32", flash_attn=False)
    ids = [one % engine.model.n_vocab for one in random_ids(N, seed=3)]

    def ours(*edits: Edit) -> Any:
        return np.array(engine.attend(ids, Capture(layers=(), hidden="all"), edits=edits).hidden)

    plain, alike = ours(), peer.outputs(ids)
    # What both compute without any edit; EXACTNESS.md says where it differs.
    noise = relative_error(plain, alike)
    limit = max(CLOSE, 2 * noise)
    assert noise <= 1e-2
    vector = np.random.default_rng(1).normal(size=plain.shape[2]) * np.abs(plain).mean()
    layer = engine.model.attention_layers[0]
    last = len(plain) - 1

    def check(edit: Edit) -> None:
        found, want = ours(edit), peer.outputs(ids)
        assert relative_error(found, want) <= limit
        assert relative_error(want, alike) > 3 * limit

    peer.behind(peer.layers[0], lambda x: x + of_torch(vector))
    check(Edit.add(vector, 0))

    def put(x: Any) -> Any:
        x = x.clone()
        x[:, [3, 9]] = of_torch(vector)
        return x

    peer.behind(peer.layers[0], put)
    check(Edit.set(vector, 0, [3, 9]))

    def scaled(x: Any) -> Any:
        heads = x.reshape(*x.shape[:2], engine.model.n_head, -1).clone()
        heads[:, :, 1] *= 0.0
        heads[:, :, 0] *= 2.0
        return heads.reshape(x.shape)

    peer.before(peer.projection(layer), scaled)
    check(Edit.scale_heads({(layer, 1): 0.0, (layer, 0): 2.0}))

    def doubled(x: Any) -> Any:
        return 2.0 * x

    has_norm = hasattr(peer.layers[last], "post_feedforward_layernorm")
    attended = peer.layers[layer].post_attention_layernorm if has_norm else peer.projection(layer)
    peer.behind(attended, doubled)
    check(Edit.hook(doubled, at="attention_out", layers=[layer]))
    mlp = first_of(peer.layers[last], "post_feedforward_layernorm", "mlp", "feed_forward")
    peer.behind(getattr(mlp, "dense_4h_to_h", mlp) if name == "bloom-dense" else mlp, doubled)
    check(Edit.hook(doubled, at="mlp_out", layers=[last]))


@pytest.mark.parametrize("name", ["llama-dense", "qwen2-dense", "qwen3-dense", "starcoder2-dense"])
def test_a_bias_is_what_the_mask_of_transformers_adds(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str
) -> None:
    peer = Peer.load(architectures[name])
    engine = make_engine(architectures[name], n_ctx=256, kv_type="f32", flash_attn=False)
    ids = [one % engine.model.n_vocab for one in random_ids(N, seed=3)]
    mask = np.triu(np.full((N, N), -np.inf), 1)
    mask[:, 2:7] += 1.5
    mask[10:, 0:1] = -np.inf
    edits = [Edit.attention_bias([(2, 7)], 1.5), Edit.block((10, None), (0, 1))]
    found = engine.attend(ids, Capture(layers=(), hidden="all"), edits=edits)
    want = peer.outputs(ids, of_torch(mask)[None, None])
    assert relative_error(np.asarray(found.hidden), want) <= CLOSE
    assert relative_error(peer.outputs(ids), want) > 10 * CLOSE


def test_patching_ranks_heads_as_transformers_does(make_engine: MakeEngine) -> None:
    import torch

    peer = Peer.load(DEMO)
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
            for one in peer.hooks:
                one.remove()
            peer.hooks.clear()
    np.testing.assert_allclose(found, want, atol=0.02)
    clear = np.abs(want) > 0.05
    assert clear.sum() >= 3
    assert np.argsort(found[clear]).tolist() == np.argsort(want[clear]).tolist()
