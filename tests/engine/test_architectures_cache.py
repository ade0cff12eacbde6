"""The KV cache of every architecture: going back, shifting and saving are exact, or refused.

llama.cpp's own tiny models (`archs.NAMES`); caches of every kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, errors, mod
from kqview.mods import Added
from kqview.state import inspect
from tests.support import ses1, tiny_gguf
from tests.support.archs import NAMES, WITHOUT_CACHE
from tests.support.rows import has_device, near

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kqview import Engine, Generation, Slot
    from tests.engine.conftest import MakeEngine

    Models = dict[str, Path]

pytestmark = pytest.mark.full


# ---- going back: what follows equals a fresh evaluation
#
# A plain cache drops its tail. Recurrent and hybrid models, and compressed keys, go back to a
# checkpoint, and what is missing is evaluated again: `usage.cached_tokens` says so. Logprobs are
# compared as well as ids: a state that is one token behind may still give the same ids. The cache
# is F32 and flash attention is off; what is left is the rounding of prompts that are cut into
# batches in another way.

N_PROMPT = 20
# llama.cpp's graph of cogvlm gives the logits of a batch's first token for those of its last one:
# what a prompt goes on with depends on where it is cut.
GENERATING = [name for name in NAMES if name not in (*WITHOUT_CACHE, "cogvlm-dense")]
# Not to any token, but to a checkpoint.
CANNOT_GO_BACK = (
    *("bailingmoe3-moe", "deepseek4-moe", "falcon-h1-dense", "glm5-next-moe"),
    *("granitehybrid-dense", "jamba-dense", "kimi-k3-moe", "kimi-linear-moe", "lfm2-dense"),
    *("lfm2moe-moe", "mamba-dense", "mamba2-dense", "minimax-01-moe", "nemotron_h-dense"),
    *("nemotron_h_moe-dense", "plamo2-dense", "qwen35-dense", "qwen35moe-moe", "qwen3next-moe"),
    "qwen4exp-moe",
)
# Of these: to any of the last tokens of a step, with Engine(draft=...).
KEEPING_STATES = (
    *("bailingmoe3-moe", "glm5-next-moe", "kimi-k3-moe", "lfm2-dense", "lfm2moe-moe"),
    *("nemotron_h-dense", "nemotron_h_moe-dense", "qwen35-dense", "qwen35moe-moe"),
    "qwen4exp-moe",
)
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "top_logprobs": 3}
ROUNDED = near(1e-3, "logprobs")


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


@mod
def take_back(event: Any, actions: Any, _tokenizer: Any) -> Any:
    """Take 4 of 6 tokens back, once."""
    return actions.backtrack(4) if isinstance(event, Added) and event.step == 6 else None


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


def kept_of(slot: Slot, n: int, can_go_back: bool) -> int:
    """How many tokens a slot keeps of its first *n*."""
    return n if can_go_back else max((one for one in slot.checkpoints if one <= n), default=0)


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
    held = slot.n_tokens
    assert held in (N_PROMPT + 2, kept_of(slot, N_PROMPT + 2, can_go_back))
    assert slot.tokens == (prompt + taken)[:held]
    again = Said(engine.generate(prompt + taken, max_tokens=17, **options))
    again.check(fresh, 3)
    assert again.n_cached == held

    # Truncated, continued.
    held = kept_of(slot, N_PROMPT + 5, can_go_back)
    slot.truncate(N_PROMPT + 5)
    assert slot.n_tokens == held
    again = Said(engine.generate(prompt + fresh.ids[:6], max_tokens=10, **options))
    again.check(fresh, 6)
    assert again.n_cached == held

    # Taken back by a mod, generated again.
    steered = engine.generate(prompt, max_tokens=12, mods=[take_back], **options)
    steered.read()
    assert steered.tokens == fresh.ids[:12]

    # A prompt that parts from the cache in its middle.
    other = prompt[:12] + prompt_of(2, 8)
    held = kept_of(slot, 12, can_go_back)
    again = Said(engine.generate(other, max_tokens=12, **options))
    assert again.n_cached == held
    slot.clear()
    again.check(Said(engine.generate(other, max_tokens=12, **options)))

    # The same prompt again.
    held = kept_of(slot, N_PROMPT - 1, can_go_back)
    again.check(twice := Said(engine.generate(other, max_tokens=12, **options)))
    assert twice.n_cached == held

    # Another slot's text.
    (branch,) = engine.branch(slot, 1)
    more = [*branch.tokens, 5, 6]
    again = Said(engine.generate(more, max_tokens=12, **(options | {"slot": branch.id})))
    assert again.n_cached == len(more) - 2
    slot.clear()
    again.check(Said(engine.generate(more, max_tokens=12, **options)))


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
    held = kept_of(engine.slots[1], 49, can_go_back)
    again = Said(engine.generate(prompts[1], max_tokens=20, slot=0, **OPTIONS))
    again.check(alone[1])
    assert again.n_cached == held


def test_list_of_models_that_cannot_go_back_is_complete(
    architectures: Models, make_engine: MakeEngine
) -> None:
    kept: dict[str, int] = {}
    for name in GENERATING:
        engine = make_engine(architectures[name], n_ctx=64)
        engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).read()
        engine.slots[0].truncate(4)
        kept[name] = engine.slots[0].n_tokens
        engine.close()
    assert [name for name, n in kept.items() if n != 4] == list(CANNOT_GO_BACK)
    assert {kept[name] for name in CANNOT_GO_BACK} == {2}


@pytest.mark.parametrize("swa_full", [True, False])
def test_window_that_forgets_is_evaluated_again(
    make_engine: MakeEngine, tmp_path: Path, swa_full: bool
) -> None:
    model = tiny_gguf.write_gemma3n(tmp_path / "model.gguf")
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


# ---- shifting: no key ends up elsewhere
#
# Keys and queries of a first layer with attention depend on a token and its position alone. So
# after tokens were pruned its rows must be those of a fresh evaluation, whatever the layers above
# have kept of the pruned tokens: the check needs no other implementation, and covers all ways of
# rotating keys.

SHIFTING = [name for name in NAMES if name not in WITHOUT_CACHE]
# Rotated twice in place of once, and rounded to the cache's type in between.
SHIFT_LIMITS = {"f32": near(2e-4, "shifted"), "f16": 4e-3, "q8_0": 3e-2}
# Some that must not be refused, with an F32 cache; and those that llama.cpp would move wrongly.
SHIFTED = (
    "llama-dense",
    "qwen2-dense",
    "phi2-dense",
    "gptneox-dense",
    "deepseek2-moe",
    "bloom-dense",
)
MOVED_WRONGLY = (
    *("baichuan-dense", "cogvlm-dense", "gpt2-dense", "hunyuan-dense-dense", "hunyuan-moe-moe"),
    *("maincoder-dense", "mpt-dense", "pangu-embedded-dense", "starcoder-dense"),
)
SHIFT_PROMPT = np.random.default_rng(1).integers(0, 128, 90).tolist()
SHIFT_LEFT = SHIFT_PROMPT[:8] + SHIFT_PROMPT[20:50] + SHIFT_PROMPT[57:]


def rows_of(engine: Engine, ids: list[int], **options: Any) -> np.ndarray[Any, Any]:
    (token,) = engine.generate(
        ids, max_tokens=1, temperature=0.0, ignore_eos=True, capture=Capture("logits", layers=[0]),
        **options,
    )  # fmt: skip
    assert token.attention is not None
    return np.asarray(token.attention[0])


@pytest.mark.parametrize("kv_type", SHIFT_LIMITS)
@pytest.mark.parametrize("name", SHIFTING)
def test_keys_of_the_first_layer_are_where_a_fresh_evaluation_has_them(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str, kv_type: str
) -> None:
    try:
        engine = make_engine(
            architectures[name], n_ctx=256, kv_type=kv_type, flash_attn=kv_type != "f32"
        )
    except errors.RequestError:
        return  # heads that are no multiple of a block
    engine.generate(SHIFT_PROMPT, max_tokens=1, ignore_eos=True).read()
    try:
        generation = engine.generate(SHIFT_LEFT, max_tokens=1, reuse="shift", ignore_eos=True)
    except errors.UnsupportedModel:
        assert kv_type != "f32" or name not in SHIFTED
        with pytest.raises(errors.UnsupportedModel):
            engine.slots[0].shift(3, 9)
        assert engine.slots[0].tokens == SHIFT_PROMPT
        return
    assert name not in MOVED_WRONGLY
    generation.read()
    assert generation.usage.cached_tokens == len(SHIFT_LEFT) - 1
    try:
        kept = rows_of(engine, [*SHIFT_LEFT, 7, 9], reuse="shift")
    except errors.UnsupportedModel:  # logits of ALiBi, sparse attention
        if not has_device():
            raise
        return
    engine.slots[0].clear()
    fresh = rows_of(engine, [*SHIFT_LEFT, 7, 9])
    shown = np.isfinite(fresh)
    np.testing.assert_array_equal(np.isfinite(kept), shown)
    largest = np.abs(fresh[shown]).max()
    assert np.abs(kept[shown] - fresh[shown]).max() <= SHIFT_LIMITS[kv_type] * largest


# ---- saving: whole and exactly, or not at all

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}


@pytest.mark.parametrize("write", [tiny_gguf.write_bert, tiny_gguf.write_t5])
def test_model_without_a_cache_is_not_saved(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    slot = make_engine(write(tmp_path / "model.gguf")).slots[0]
    empty = ses1.Blob([], [], [], False).encode()
    for call in (slot.save, lambda: slot.restore(empty), lambda: slot.restore(b"SES1")):
        with pytest.raises(errors.UnsupportedModel, match="no KV cache"):
            call()
    assert slot.tokens == []


@pytest.mark.parametrize(
    "write", [tiny_gguf.write_gemma3n, tiny_gguf.write_gemma4, tiny_gguf.write_mamba]
)
@pytest.mark.parametrize("flash_attn", [False, True])
def test_slot_of_windows_or_of_recurrent_state_goes_on_in_another_engine(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path], flash_attn: bool
) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "kv_type": "f32", "flash_attn": flash_attn}
    model = write(tmp_path / "model.gguf")
    engine = make_engine(model, n_slots=2, **options)
    prompt = prompt_of(6, 700)
    engine.generate(prompt, max_tokens=1, slot=1, **OPTIONS).read()
    blob = engine.slots[1].save()
    seen = inspect(blob)
    assert (list(seen.tokens), seen.n_stream, seen.kv_type) == (prompt, 1, "f32")
    longer = [*prompt, *prompt_of(7, 5)]
    expected = Said(engine.generate(longer, max_tokens=10, slot=1, **OPTIONS))
    assert expected.n_cached == 700

    other = make_engine(model, n_slots=3, **options)
    slot = other.slots[2]
    other.generate(prompt_of(8, 40), max_tokens=3, slot=2, **OPTIONS).read()
    assert slot.restore(blob, exact=True) == len(blob)
    assert slot.tokens == prompt
    assert slot.save()[: 12 + 4 * 700] == blob[: 12 + 4 * 700]
    restored = Said(other.generate(longer, max_tokens=10, slot=2, **OPTIONS))
    assert restored.n_cached == 700
    assert (restored.ids, restored.logprobs) == (expected.ids, expected.logprobs)

    # What a window hides was saved as well: a shorter text begins in the cache too.
    slot.restore(blob, exact=True)
    part = [*prompt[:300], 9]
    again = Said(other.generate(part, max_tokens=5, slot=2, **OPTIONS))
    assert again.n_cached == (0 if write is tiny_gguf.write_mamba else 300)
    slot.clear()
    again.check(Said(other.generate(part, max_tokens=5, slot=2, **OPTIONS)))


@pytest.mark.parametrize("write", [tiny_gguf.write_gemma3n, tiny_gguf.write_mamba])
def test_every_part_of_a_saved_slot_is_checked(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    engine = make_engine(write(tmp_path / "model.gguf"), **EXACT)
    slot = engine.slots[0]
    engine.generate(prompt_of(9, 30), max_tokens=1, **OPTIONS).read()
    blob = slot.save()
    held = slot.tokens
    # The last number is one of a window's values, or of a recurrent state.
    for changed in (blob[:-4] + b"\0\0\xc0\x7f", blob[:-1], blob + b"\0", blob[: len(blob) // 2]):
        with pytest.raises(errors.StateFormatError):
            slot.restore(changed)
        assert slot.tokens == held
        assert slot.save() == blob


def test_recurrent_slot_that_is_truncated_is_empty(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(tiny_gguf.write_mamba(tmp_path / "mamba.gguf"))
    engine.generate([1, 2, 3], max_tokens=4, ignore_eos=True).read()
    engine.slots[0].truncate(1)  # its state cannot forget the tail alone
    assert engine.slots[0].tokens == []


# The others are saved exactly.
REFUSED = {
    "deepseek4-moe": "compresses over several tokens",
    **dict.fromkeys(WITHOUT_CACHE, "no KV cache"),
}


@pytest.mark.full
def test_every_architecture_is_saved_exactly_or_refused(
    make_engine: MakeEngine, architectures: dict[str, Path]
) -> None:
    refused: dict[str, str] = {}
    wrong: list[str] = []
    for name, path in architectures.items():
        engine = make_engine(path, n_ctx=256, n_slots=2, **EXACT)
        slot = engine.slots[1]
        prompt = prompt_of(10, 40)
        if name not in WITHOUT_CACHE:
            engine.generate(prompt, max_tokens=1, slot=1, **OPTIONS).read()
        try:
            blob = slot.save()
        except errors.UnsupportedModel as failure:
            refused[name] = str(failure)
            with pytest.raises(errors.UnsupportedModel):
                slot.restore(b"SES1")
            engine.close()
            continue
        longer = [*prompt, 7, 8]
        first = Said(engine.generate(longer, max_tokens=4, slot=1, **OPTIONS))
        other = engine.slots[0]
        other.restore(blob, exact=True)
        again = other.save()
        second = Said(engine.generate(longer, max_tokens=4, slot=0, **OPTIONS))
        is_same = (second.ids, second.logprobs) == (first.ids, first.logprobs)
        if not is_same or (second.n_cached, len(again)) != (40, len(blob)):
            wrong.append(name)
        engine.close()
    assert wrong == []
    assert sorted(refused) == sorted(REFUSED)
    for name, reason in REFUSED.items():
        assert reason in refused[name]


def test_every_window_that_forgets_goes_back_and_is_saved(
    make_engine: MakeEngine, architectures: dict[str, Path]
) -> None:
    prompt = prompt_of(11, 330)
    wrong: list[str] = []
    for name in GENERATING:
        whole = make_engine(architectures[name], n_ctx=512, n_ubatch=16, **EXACT)
        if not whole._model.window_layers:  # pyright: ignore[reportPrivateUsage]
            whole.close()
            continue
        engine = make_engine(
            architectures[name], n_ctx=512, n_ubatch=16, n_slots=2, swa_full=False,
            checkpoint_every=64, **EXACT,
        )  # fmt: skip
        slot = engine.slots[0]
        engine.generate(prompt, max_tokens=9, slot=0, **OPTIONS).read()
        for n in (300, 70):  # in its cells, or not
            text = [*prompt[:n], 5, 6]
            again = Said(engine.generate(text, max_tokens=6, slot=0, **OPTIONS))
            whole.slots[0].clear()
            fresh = Said(whole.generate(text, max_tokens=6, **OPTIONS))
            if again.n_cached < (n if n > 70 and name not in CANNOT_GO_BACK else 64):
                wrong.append(f"{name}: {again.n_cached} of {n}")
            try:
                again.check(fresh)
            except AssertionError as error:
                wrong.append(f"{name} at {n}: {error}")
        if name not in REFUSED:
            blob, marks = slot.save_marked()
            other = engine.slots[1]
            other.restore_marked(blob, marks)
            text = [*slot.tokens, 7]
            first, second = (
                Said(engine.generate(text, max_tokens=4, slot=one.id, **OPTIONS))
                for one in (slot, other)
            )
            if first.ids != second.ids or second.n_cached != len(text) - 1:
                wrong.append(f"{name}: restored")
        engine.close()
        whole.close()
    assert wrong == []
