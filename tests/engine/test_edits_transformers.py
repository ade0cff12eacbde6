"""Edits against the same intervention in transformers, by forward hooks.

transformers reads the very files, of those architectures that it takes from a GGUF as we write it,
and an encoder the other way round. Both compute in float32, eager attention and no flash attention.
Outputs of all layers are compared, and how much an intervention changes them shows that the limit
sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, Edit
from kqview.convert import convert_classifier
from kqview.demo import MODEL_PATH as DEMO
from tests.engine.test_convert_classifier import CONFIG, TEXTS, TOKENS, write_folder
from tests.support import tiny_gguf
from tests.support.reference import relative_error
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.needs("transformers")

N = 20
NAMES = ("llama", "qwen2")
CLOSE = 1e-4


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
        return self.model.model.layers

    def projection(self, layer: int) -> Any:
        """What the outputs of heads go through."""
        return self.layers[layer].self_attn.o_proj

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


@pytest.fixture(params=NAMES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tiny_gguf.write_model(
        tmp_path / f"{request.param}.gguf", arch=request.param, n_embd=128, rms_eps=1e-5
    )


def of_torch(values: Any) -> Any:
    import torch

    return torch.tensor(np.asarray(values, np.float32))


def test_an_edit_is_the_intervention_of_a_forward_hook(make_engine: MakeEngine, path: Path) -> None:
    peer = Peer.load(path)
    engine = make_engine(path, n_ctx=256, kv_type="f32", flash_attn=False)
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

    peer.behind(peer.projection(layer), doubled)
    check(Edit.hook(doubled, at="attention_out", layers=[layer]))
    peer.behind(peer.layers[last].mlp, doubled)
    check(Edit.hook(doubled, at="mlp_out", layers=[last]))


def test_a_bias_is_what_the_mask_of_transformers_adds(make_engine: MakeEngine, path: Path) -> None:
    peer = Peer.load(path)
    engine = make_engine(path, n_ctx=256, kv_type="f32", flash_attn=False)
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


def test_edits_of_an_encoder_are_the_interventions_of_transformers(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    import torch
    import transformers

    torch.manual_seed(1)
    config = transformers.BertConfig(
        **{**CONFIG, "vocab_size": len(TOKENS)}, attn_implementation="eager"
    )
    model = transformers.BertForSequenceClassification(config).eval()
    folder = write_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    convert_classifier(folder, tmp_path / "out.gguf")
    engine = make_engine(tmp_path / "out.gguf", kv_type="f32", flash_attn=False)
    ids = engine.tokenize(max(TEXTS, key=len))
    layers = model.bert.encoder.layer

    def scaled(_module: Any, given: Any) -> Any:
        heads = given[0].reshape(*given[0].shape[:2], engine.model.n_head, -1).clone()
        heads[:, :, 1] *= 30.0
        return (heads.reshape(given[0].shape), *given[1:])

    layers[0].attention.output.dense.register_forward_pre_hook(scaled)
    bias = torch.zeros(1, 1, 1, len(ids))
    bias[..., 1:3] = 1.5
    with torch.no_grad():
        found = model(
            torch.tensor([ids]), attention_mask=bias.expand(1, 1, len(ids), -1),
            output_attentions=True,
        )  # fmt: skip
    want = np.stack([one[0].numpy() for one in found.attentions])
    edits = [Edit.scale_heads({(0, 1): 30.0}), Edit.attention_bias([(1, 3)], 1.5)]
    ours = engine.attend(ids, "probs", edits=edits).array()
    # GELU of llama.cpp is a table of float16.
    assert relative_error(ours, want) <= 5e-4
    assert relative_error(engine.attend(ids, "probs").array(), want) > 2e-2
    assert relative_error(engine.attend(ids, "probs", edits=edits[1:]).array(), want) > 2e-3
