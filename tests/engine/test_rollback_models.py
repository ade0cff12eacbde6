"""Going back in every architecture that generates: what follows equals a fresh evaluation.

llama.cpp's own tiny models (`archs.NAMES`). A plain cache drops its tail; recurrent state, hybrid
models and compressed keys cannot, and are evaluated again: `usage.cached_tokens` says so. Logprobs
are compared as well as ids: a state that is one token behind may still give the same ids. The cache
is F32 and flash attention is off; what is left is the rounding of prompts that are cut into batches
in another way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import shared_kv_gguf
from tests.support.archs import NAMES, WITHOUT_CACHE

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine, Generation

    from .conftest import MakeEngine

    Models = dict[str, Path]

N_PROMPT = 20
# llama.cpp's graph of cogvlm gives the logits of a batch's first token for those of its last one:
# what a prompt goes on with depends on where it is cut.
GENERATING = [name for name in NAMES if name not in (*WITHOUT_CACHE, "cogvlm-dense")]
# Their state has no snapshots of earlier tokens; deepseek4 keeps compressed keys.
CANNOT_GO_BACK = (
    *("bailingmoe3-moe", "deepseek4-moe", "falcon-h1-dense", "glm5-next-moe"),
    *("granitehybrid-dense", "jamba-dense", "kimi-k3-moe", "kimi-linear-moe", "lfm2-dense"),
    *("lfm2moe-moe", "mamba-dense", "mamba2-dense", "minimax-01-moe", "nemotron_h-dense"),
    *("nemotron_h_moe-dense", "plamo2-dense", "qwen35-dense", "qwen35moe-moe", "qwen3next-moe"),
    "qwen4exp-moe",
)
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "top_logprobs": 3}
ROUNDED = 1e-3


def prompt_of(seed: int, n: int = N_PROMPT) -> list[int]:
    return np.random.default_rng(seed).integers(0, 128, n).tolist()


class Said:
    """Ids and logprobs of a generation."""

    def __init__(self, generation: Generation) -> None:
        tokens = list(generation)
        self.ids = [token.id for token in tokens]
        self.logprobs = [token.logprob for token in tokens]
        self.n_cached = generation.usage.cached_tokens

    def check(self, expected: Said, start: int = 0) -> None:
        n = len(self.ids)
        assert self.ids == expected.ids[start : start + n]
        want = expected.logprobs[start : start + n]
        np.testing.assert_allclose(self.logprobs, want, rtol=0, atol=ROUNDED)


@pytest.fixture(params=GENERATING)
def engine(
    request: pytest.FixtureRequest, architectures: Models, make_engine: MakeEngine
) -> Engine:
    """An engine with two slots, for each of the models."""
    model = architectures[request.param]
    return make_engine(model, n_ctx=256, n_slots=2, kv_type="f32", flash_attn=False)


@pytest.fixture
def can_go_back(request: pytest.FixtureRequest) -> bool:
    return request.node.callspec.params["engine"] not in CANNOT_GO_BACK


@pytest.mark.peers
def test_every_way_back_equals_a_fresh_evaluation(engine: Engine, can_go_back: bool) -> None:
    prompt = prompt_of(1)
    slot = engine.slots[0]
    options = {**OPTIONS, "slot": 0}
    fresh = Said(engine.generate(prompt, max_tokens=20, **options))
    assert fresh.n_cached == 0

    # Cancelled after 3 of 20, continued.
    slot.clear()
    with engine.generate(prompt, max_tokens=20, **options) as generation:
        taken = [next(generation).id for _ in range(3)]
    assert taken == fresh.ids[:3]
    assert slot.tokens in (prompt + taken[:2], [])
    again = Said(engine.generate(prompt + taken, max_tokens=17, **options))
    again.check(fresh, 3)
    assert again.n_cached == N_PROMPT + 2 or not can_go_back

    # Truncated, continued.
    slot.truncate(N_PROMPT + 5)
    assert slot.n_tokens == (N_PROMPT + 5 if can_go_back else 0)
    again = Said(engine.generate(prompt + fresh.ids[:6], max_tokens=10, **options))
    again.check(fresh, 6)
    assert again.n_cached == (N_PROMPT + 5 if can_go_back else 0)

    # A prompt that parts from the cache in its middle.
    other = prompt[:12] + prompt_of(2, 8)
    again = Said(engine.generate(other, max_tokens=12, **options))
    assert again.n_cached == (12 if can_go_back else 0)
    slot.clear()
    again.check(Said(engine.generate(other, max_tokens=12, **options)))


@pytest.mark.peers
def test_two_slots_do_not_disturb_each_other(engine: Engine, can_go_back: bool) -> None:
    prompts = [prompt_of(3), prompt_of(4, 50)]
    alone = []
    for i, prompt in enumerate(prompts):
        alone.append(Said(engine.generate(prompt, max_tokens=20, slot=i, **OPTIONS)))
        engine.slots[i].clear()
    generations = [
        engine.generate(prompt, max_tokens=20, slot=i, **OPTIONS)
        for i, prompt in enumerate(prompts)
    ]
    taken: list[list[int]] = [[], []]
    for _ in range(5):
        for i in (0, 1):
            taken[i].append(next(generations[i]).id)
    generations[1].close()
    rest = [token.id for token in generations[0]]
    assert taken[0] + rest == alone[0].ids
    assert taken[1] == alone[1].ids[:5]
    again = engine.generate(prompts[1] + taken[1], max_tokens=15, slot=1, **OPTIONS)
    Said(again).check(alone[1], 5)
    # The same prompt in the other slot: copied where that is possible.
    engine.slots[0].clear()
    again = Said(engine.generate(prompts[1], max_tokens=20, slot=0, **OPTIONS))
    again.check(alone[1])
    assert again.n_cached == (49 if can_go_back else 0)


@pytest.mark.peers
def test_list_of_models_that_cannot_go_back_is_complete(
    architectures: Models, make_engine: MakeEngine
) -> None:
    found = []
    for name in GENERATING:
        engine = make_engine(architectures[name], n_ctx=64)
        engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).read()
        engine.slots[0].truncate(4)
        if engine.slots[0].n_tokens == 0:
            found.append(name)
        engine.close()
    assert found == list(CANNOT_GO_BACK)


@pytest.mark.parametrize("swa_full", [True, False])
def test_window_that_forgets_is_evaluated_again(
    make_engine: MakeEngine, tmp_path: Path, swa_full: bool
) -> None:
    model = shared_kv_gguf.write_gemma3n(tmp_path / "model.gguf")
    exact: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 16, "kv_type": "f32", "flash_attn": False}
    engine = make_engine(model, swa_full=swa_full, **exact)
    prompt = prompt_of(5, 700)
    Said(engine.generate(prompt, max_tokens=20, **OPTIONS))
    for n in (715, 690, 300, 40):
        ids = prompt[:n] + prompt_of(n, 4)
        again = Said(engine.generate(ids, max_tokens=10, **OPTIONS))
        other = make_engine(model, **exact)
        fresh = Said(other.generate(ids, max_tokens=10, **OPTIONS))
        again.check(fresh)
        if swa_full:
            assert again.n_cached == min(n, 700)
        engine.generate(prompt, max_tokens=20, **OPTIONS).read()
