"""Attention of the prompt itself: `attend` and ``Capture(prompt=True)``."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, errors
from tests.support import tiny_gguf
from tests.support.reference import relative_error
from tests.support.rows import KINDS, Kind, forward_ids, has_device, near, random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine, PromptBlock
    from tests.support.reference import Result

    from .conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")
PROMPT = random_ids(70)
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
UNSEEN = {"logits": -np.inf, "scores": -np.inf, "probs": 0.0}


@pytest.fixture(params=[False, True], ids=["flash_off", "flash_on"])
def flash_attn(request: pytest.FixtureRequest) -> bool:
    return request.param


def attend(
    engine: Engine, capture: Capture | str = "probs", **options: Any
) -> np.ndarray[Any, Any]:
    whole = engine.attend(PROMPT, capture, **options).array()
    assert isinstance(whole, np.ndarray)
    return whole


def check_rows(rows: np.ndarray[Any, Any], result: Result, kind: Kind, start: int, limit: float):
    """Columns up to each query equal the reference, the others say that nothing is seen."""
    want = {"logits": result.kq, "scores": result.scores, "probs": result.probs}[kind]
    for i in range(rows.shape[2]):
        n = start + i + 1
        got, exact = rows[:, :, i, :n], want[:, :, n - 1, :n]
        # A product of the first few columns may be near zero by chance: no measure of its error.
        size = np.abs(exact if n >= 8 else want[:, :, 7, :8]).max(-1, keepdims=True)
        assert (np.abs(got - exact) / size).max() <= near(limit)
        assert (rows[:, :, i, n:] == UNSEEN[kind]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_ubatch", [512, 32])
def test_rows_of_every_position_equal_reference(
    make_engine: MakeEngine, tmp_path: Path, kind: Kind, n_ubatch: int, flash_attn: bool
) -> None:
    # Flat attention: rounding inside of flash attention reaches the layers above less.
    model = tiny_gguf.write_preset(tmp_path / "flat.gguf", "tiny_qwen2", score_spread=1.0)
    engine = make_engine(model, kv_type="f32", flash_attn=flash_attn, n_ubatch=n_ubatch)
    blocks = list(engine.attend(PROMPT, kind))
    starts = [0] if n_ubatch == 512 else [0, 32, 64]
    assert [block.start for block in blocks] == starts
    assert [block.n_rows for block in blocks] == ([70] if n_ubatch == 512 else [32, 32, 6])
    # From 64 queries on attention is llama.cpp's, which sums V in F32 then, and in F16 on a device
    # of the tests.
    is_short = n_ubatch < 64
    is_exact = not flash_attn or (is_short and engine.attention_kernel == "kqview")
    sums_f16 = is_short and not is_exact
    result = forward_ids(model, PROMPT, flash_attn=sums_f16)
    for block in blocks:
        assert isinstance(block.rows, np.ndarray)
        assert block.rows.shape == (3, 4, block.n_rows, 70)
        check_rows(block.rows, result, kind, block.start, 1e-5 if is_exact else 2e-3)


@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_threads_share_the_rows(
    make_engine: MakeEngine, tiny_llama: Path, n_threads: int, flash_attn: bool
) -> None:
    engine = make_engine(
        tiny_llama, kv_type="f32", flash_attn=flash_attn, n_threads=n_threads, n_ubatch=33
    )
    is_exact = not flash_attn or engine.attention_kernel == "kqview"
    result = forward_ids(tiny_llama, PROMPT, flash_attn=not is_exact)
    # On this model, of sharp attention, F16 sums of V are seen in the layers above.
    check_rows(attend(engine, "scores"), result, "scores", 0, 1e-5 if is_exact else 5e-3)


def test_chosen_heads_layers_and_float16(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    full = attend(engine)
    chosen = attend(engine, Capture("probs", layers=(2, 0), heads=(3, 1), dtype="float16"))
    assert chosen.dtype == np.float16
    np.testing.assert_array_equal(chosen, full[[2, 0]][:, [3, 1]].astype(np.float16))


# ---- the last rows, and what the slot holds


def test_last_rows_equal_the_end_of_all_rows(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, flash_attn=flash_attn, n_ubatch=32)
    full = attend(engine)
    for n in (1, 5, 6, 7, 40, 70, 1000):
        fresh = make_engine(tiny_llama, flash_attn=flash_attn, n_ubatch=32)
        rows = fresh.attend(PROMPT, last=n)
        assert (rows.start, rows.n_rows) == (max(0, 70 - n), min(n, 70))
        np.testing.assert_allclose(rows.array(), full[:, :, -n:], atol=near(1e-6))


def test_what_the_slot_holds_is_decoded_again_only_where_rows_are_wanted(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=False)
    full = attend(engine)
    assert engine.slots[0].tokens == PROMPT
    again = engine.attend(PROMPT)
    np.testing.assert_allclose(again.array(), full, atol=near(1e-6))
    assert again.usage.cached_tokens == 0
    tail = engine.attend(PROMPT, last=10)
    np.testing.assert_allclose(tail.array(), full[:, :, -10:], atol=near(1e-6))
    assert tail.usage.cached_tokens == 60
    generation = engine.generate(PROMPT, max_tokens=1, **GREEDY)
    generation.read()
    assert generation.usage.cached_tokens == 69


def test_attend_computes_no_token(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    rows = engine.attend(PROMPT)
    rows.array()
    stats = engine.stats()
    assert (stats.n_tokens, stats.prefill_tokens, stats.n_decodes) == (0, 70, 1)
    assert rows.usage.prefill_s > 0
    assert not engine.slots[0].is_busy


# ---- prompt=True


@pytest.mark.parametrize("n_ubatch", [512, 32])
def test_generation_hands_out_prompt_rows_and_the_same_tokens(
    make_engine: MakeEngine, tiny_llama: Path, n_ubatch: int, flash_attn: bool
) -> None:
    def engine() -> Engine:
        return make_engine(tiny_llama, flash_attn=flash_attn, n_ubatch=n_ubatch)

    plain = list(engine().generate(PROMPT, max_tokens=6, capture="probs", **GREEDY))
    generation = engine().generate(
        PROMPT, max_tokens=6, capture=Capture("probs", prompt=True), **GREEDY
    )
    blocks = list(generation.prompt_attention)
    tokens = list(generation)
    assert [t.id for t in tokens] == [t.id for t in plain]
    # With its rows, the prompt's last token is evaluated together with the others.
    for one, other in zip(tokens, plain, strict=True):
        np.testing.assert_allclose(
            np.asarray(one.attention), np.asarray(other.attention), atol=2e-3
        )
    if has_device():  # their product of many rows sums in another order than that of one
        return
    assert blocks[-1].start + blocks[-1].n_rows == len(PROMPT)
    np.testing.assert_array_equal(blocks[-1].rows[:, :, -1], tokens[0].attention)
    whole = np.concatenate([np.asarray(block.rows) for block in blocks], axis=2)
    np.testing.assert_array_equal(whole, attend(engine()))


def test_prompt_rows_can_be_taken_after_tokens_and_between(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ubatch=32)
    wanted = Capture("probs", prompt=True)
    first = engine.generate(PROMPT, max_tokens=4, capture=wanted, **GREEDY)
    tokens = list(first)
    late = list(first.prompt_attention)
    assert len(tokens) == 4
    assert [block.start for block in late] == [0, 32, 64]
    second = engine.generate(PROMPT, max_tokens=4, capture=wanted, **GREEDY)
    blocks: list[PromptBlock] = [next(second.prompt_attention)]
    ids = [next(second).id]
    blocks += second.prompt_attention
    ids += [token.id for token in second]
    assert ids == [token.id for token in tokens]
    for one, other in zip(late, blocks, strict=True):
        np.testing.assert_allclose(one.rows, other.rows, atol=near(0), rtol=0)
    assert next(second.prompt_attention, None) is None


async def test_blocks_and_tokens_can_be_awaited(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_ubatch=32)
    starts = [block.start async for block in engine.attend(PROMPT)]
    assert starts == [0, 32, 64]
    generation = engine.generate(
        PROMPT, max_tokens=3, capture=Capture("probs", prompt=True), **GREEDY
    )
    blocks = [block async for block in generation.prompt_attention]
    tokens = [token async for token in generation]
    assert (len(blocks), len(tokens)) == (3, 3)
    rows = engine.attend(PROMPT)
    await rows.__anext__()
    await asyncio.wait_for(rows.aclose(), 10)
    assert not engine.slots[0].is_busy


# ---- memory


def test_one_block_is_a_view_and_several_are_a_counted_copy(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    exact: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
    engine = make_engine(tiny_llama, **exact)
    whole = attend(engine)
    assert not whole.flags.owndata
    assert not whole.flags.writeable
    assert engine._core.pool_contains(whole.__array_interface__["data"][0])
    assert engine.stats().copied_bytes == 0
    chunked = make_engine(tiny_llama, n_ubatch=32, **exact)
    copied = attend(chunked)
    assert chunked.stats().copied_bytes == copied.nbytes
    np.testing.assert_allclose(copied, whole, atol=near(1e-6))


def test_array_has_the_rows_of_the_blocks_that_are_left(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_llama, n_ubatch=16, n_batch=16)
    whole = attend(engine)
    left = engine.attend(PROMPT, Capture("probs", hidden=[1]))
    n = next(left).n_rows
    np.testing.assert_array_equal(left.array(), whole[:, :, n:])
    assert left.hidden.shape[1] == len(PROMPT) - n
    block = kqview.load(kqview.save(tmp_path / "rows.npz", left)).prompt_attention
    assert block is not None
    assert (block.start, block.n_rows) == (n, len(PROMPT) - n)


def test_blocks_stay_within_the_budget(make_engine: MakeEngine, tiny_llama: Path) -> None:
    row_bytes = 3 * 4 * 70 * 4
    full = attend(make_engine(tiny_llama, kv_type="f32", flash_attn=False))
    engine = make_engine(
        tiny_llama, kv_type="f32", flash_attn=False, attention_budget_bytes=60 * row_bytes
    )
    n_rows = 0
    for block in engine.attend(PROMPT):
        assert block.n_rows <= 15
        assert isinstance(block.rows, np.ndarray)
        end = block.start + block.n_rows
        np.testing.assert_allclose(block.rows, full[:, :, block.start : end], atol=near(1e-6))
        n_rows += block.n_rows
        del block
    assert n_rows == 70
    assert engine.stats().pool.peak_leased_bytes <= 60 * row_bytes
    with pytest.raises(errors.OutOfMemory, match="attention_budget_bytes"):
        engine.attend(PROMPT).array()


def test_held_blocks_that_fill_the_budget_follow_on_full(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, attention_budget_bytes=40 * 3 * 4 * 70 * 4)
    held: list[PromptBlock] = []

    def hold(on_full: Any) -> None:
        held.clear()
        held.extend(engine.attend(PROMPT, Capture("probs", on_full=on_full, wait_s=0.05)))

    for on_full in ("raise", "wait"):
        with pytest.raises(errors.PoolExhausted, match="views"):
            hold(on_full)
    held.clear()
    hold("drop")
    kept = [block for block in held if block.rows is not None]
    assert 0 < len(kept) < len(held)
    assert held[-1].start + held[-1].n_rows == 70
    assert engine.stats().dropped_rows == sum(b.n_rows for b in held if b.rows is None)


def test_closing_early_frees_the_slot_and_keeps_views(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ubatch=16)
    with engine.attend(PROMPT) as rows:
        block = next(rows)
    assert not engine.slots[0].is_busy
    engine.close()
    np.testing.assert_allclose(np.asarray(block.rows).sum(-1), 1, atol=1e-5)
    assert next(rows, None) is None


# ---- bad input


def test_what_attend_refuses(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama)
    with pytest.raises(errors.RequestError, match="no tokens"):
        engine.attend([])
    with pytest.raises(errors.PromptTooLong, match=r"\b513\b"):
        engine.attend([1] * 513)
    with pytest.raises(errors.InvalidToken, match=r"prompt\[1\].* -1$"):
        engine.attend([1, -1])
    with pytest.raises(errors.RequestError, match=r"last must .*got 0"):
        engine.attend(PROMPT, last=0)
    with pytest.raises(errors.InvalidCapture, match="vocab_logits"):
        engine.attend(PROMPT, Capture(hidden=[1], vocab_logits=True))
    with pytest.raises(errors.InvalidCapture, match="layer 9 has no hidden state"):
        engine.attend(PROMPT, Capture(hidden=[9]))
    with pytest.raises(errors.InvalidCapture, match="capture is None"):
        engine.attend(PROMPT, None)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidCapture, match="layers"):
        engine.generate(PROMPT, capture=Capture(layers=(), vocab_logits=True, prompt=True))
    with pytest.raises(errors.InvalidToken, match=r"prompt\[1\]\[0\].* -1$"):
        engine.attend([[1], [-1]])
    generation = engine.generate(PROMPT, max_tokens=1, capture="probs")
    with pytest.raises(errors.InvalidCapture, match="prompt=True"):
        _ = generation.prompt_attention
    engine.close()
    with pytest.raises(errors.ClosedError):
        engine.attend(PROMPT)


def test_array_twice_says_that_the_blocks_are_gone(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    rows = make_engine(tiny_llama).attend(PROMPT)
    rows.array()
    with pytest.raises(errors.InvalidCapture, match="taken already"):
        rows.array()


# ---- hidden states


@pytest.mark.parametrize("n_ubatch", [512, 32])
def test_states_of_every_position_equal_reference(
    make_engine: MakeEngine, tiny_qwen2: Path, n_ubatch: int, flash_attn: bool
) -> None:
    engine = make_engine(
        tiny_qwen2, kv_type="f32", flash_attn=flash_attn, n_ubatch=n_ubatch,
        attention_kernel="llama.cpp",
    )  # fmt: skip
    found = engine.attend(PROMPT, Capture("probs", hidden="all"))
    whole = found.hidden
    result = forward_ids(tiny_qwen2, PROMPT, flash_attn=flash_attn and n_ubatch < 64)
    assert whole.shape == (3, 70, engine.model.n_embd)
    assert whole.dtype == np.float32
    limit = near(2e-3 if flash_attn else 1e-5)
    for layer, want in zip(whole, result.hidden, strict=True):
        assert relative_error(layer, want) <= limit
    # With hidden states both arrays stay, to be read in any order.
    rows = found.array()
    assert isinstance(rows, np.ndarray)
    np.testing.assert_array_equal(rows, attend(engine))
    assert found.hidden is whole
    assert found.array() is rows
    assert engine.stats().n_tokens == 0


def test_states_of_the_prompt_equal_those_of_tokens(
    make_engine: MakeEngine, tiny_llama: Path, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=flash_attn, n_ubatch=32)
    capture = Capture(layers=(), hidden=(2, 0))
    tokens = list(engine.generate(PROMPT, max_tokens=20, capture=capture, **GREEDY))
    ids = [*PROMPT, *(token.id for token in tokens[:-1])]
    whole = engine.attend(ids, capture, last=20).hidden
    one_by_one = np.stack([np.asarray(token.hidden) for token in tokens], axis=1)
    np.testing.assert_allclose(whole, one_by_one, rtol=near(2e-3), atol=near(2e-3))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_states_with_a_generation_are_those_of_attend(
    make_engine: MakeEngine, tmp_path: Path, kv_type: str
) -> None:
    model = tiny_gguf.write_preset(tmp_path / "wide.gguf", "tiny_llama", n_embd=128)
    engine = make_engine(model, n_ubatch=32, kv_type=kv_type, flash_attn=True, n_slots=2)
    capture = Capture("probs", layers=[1], hidden=[2, 1], prompt=True)
    list(engine.generate(PROMPT[:40], max_tokens=2, **GREEDY))  # what is cached comes again
    generation = engine.generate(PROMPT, max_tokens=2, capture=capture, **GREEDY)
    blocks = list(generation.prompt_attention)
    assert [block.start for block in blocks] == [0, 32, 64]
    states = [np.asarray(block.hidden) for block in blocks]
    assert [state.shape for state in states] == [(2, n, 128) for n in (32, 32, 6)]
    assert not any(state.flags.writeable or state.flags.owndata for state in states)
    whole = np.concatenate(states, axis=1)
    np.testing.assert_allclose(
        whole, engine.attend(PROMPT, capture).hidden, rtol=near(1e-5), atol=near(1e-5, "states")
    )
    np.testing.assert_array_equal(next(generation).hidden, whole[:, -1])  # type: ignore[arg-type]


def test_states_as_float16_are_half_as_large(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, kv_type="f32")
    exact = engine.attend(PROMPT, Capture(layers=(), hidden=[0, 2])).hidden
    half = Capture(layers=(), hidden=[0, 2], dtype="float16")
    rounded = engine.attend(PROMPT, half)
    assert rounded.hidden.dtype == np.float16
    np.testing.assert_array_equal(rounded.hidden, exact.astype(np.float16))
    assert engine.stats().pool.peak_leased_bytes <= 2 * exact.nbytes
    token = next(engine.generate(PROMPT, capture=half, **GREEDY))
    assert token.hidden is not None
    assert token.hidden.nbytes == half.bytes_per_token(engine.model, 70)
    np.testing.assert_allclose(token.hidden, exact[:, -1], rtol=1e-2, atol=1e-2)


def test_states_without_attention_and_their_names(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=False)
    found = engine.attend(PROMPT, Capture(layers=(), hidden=[1]), last=7)
    named = found.named()
    assert {name: state.shape for name, state in named.items()} == {
        "blocks.1.hook_resid_post": (1, 7, engine.model.n_embd)
    }
    both = engine.attend(PROMPT, Capture("probs", layers=[0], hidden=[1]), last=7)
    assert set(both.named()) == {"blocks.0.attn.hook_pattern", "blocks.1.hook_resid_post"}
    np.testing.assert_allclose(
        both.hidden, found.hidden, rtol=near(1e-3), atol=near(1e-4, "states")
    )
    with pytest.raises(errors.InvalidCapture, match="hidden states alone"):
        found.array()
    with pytest.raises(errors.InvalidCapture, match='hidden="all"'):
        _ = engine.attend(PROMPT).hidden


def test_states_stay_within_the_budget(make_engine: MakeEngine, tiny_llama: Path) -> None:
    full = make_engine(tiny_llama, kv_type="f32", flash_attn=False)
    capture = Capture(layers=(), hidden="all")
    whole = full.attend(PROMPT, capture).hidden
    budget = whole.nbytes * 6 // 7
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=False, attention_budget_bytes=budget)
    for block in engine.attend(PROMPT, capture):
        end = block.start + block.n_rows
        np.testing.assert_allclose(
            block.hidden,
            whole[:, block.start : end],
            atol=near(1e-5, "states"),  # type: ignore[arg-type]
        )
        assert block.n_rows <= 15
        del block
    assert engine.stats().pool.peak_leased_bytes <= budget
    with pytest.raises(errors.OutOfMemory, match="attention_budget_bytes"):
        _ = engine.attend(PROMPT, capture).hidden
    with pytest.raises(errors.PoolExhausted, match="attention_budget_bytes"):
        engine.attend([PROMPT, PROMPT], capture)


def test_saved_states_of_a_prompt_are_loaded_again(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_llama)
    for name, layers in (("both.npz", [1]), ("alone.npz", [])):
        found = engine.attend(PROMPT, Capture("probs", layers=layers, hidden=[0, 2]))
        block = kqview.load(kqview.save(tmp_path / name, found)).prompt_attention
        assert block is not None
        assert block.n_rows == 70
        np.testing.assert_array_equal(block.hidden, found.hidden)  # type: ignore[arg-type]
        if layers:
            np.testing.assert_array_equal(block.rows, found.array())  # type: ignore[arg-type]


def test_last_states_with_the_last_norm_are_embeddings(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, pooling="none")
    states = engine.attend(PROMPT, Capture(layers=(), hidden=[-1])).hidden[0]
    vectors = engine.embed(PROMPT, normalize=False)
    normed = states / np.sqrt((states.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    norm = vectors[0] / normed[0]
    np.testing.assert_allclose(normed * norm, vectors, rtol=near(2e-3), atol=near(2e-3))


def test_states_beside_a_text_change_no_logits(make_engine: MakeEngine, tiny_llama: Path) -> None:
    # In pieces as whole: in F32.
    engine = make_engine(tiny_llama, n_slots=2, run_ahead=0, kv_type="f32", flash_attn=False)
    alone = [token.id for token in engine.generate(PROMPT, max_tokens=8, **GREEDY)]
    scored = engine.score(PROMPT).logprobs
    ids: list[int] = []
    # Of steps whose logits nobody reads, the last layer's output is wanted of all tokens.
    capture = Capture(layers=(), hidden="all")
    for token in engine.generate(PROMPT, slot=0, max_tokens=8, **GREEDY):
        ids.append(token.id)
        whole = engine.attend(PROMPT, capture).hidden
        parts = engine.attend(PROMPT, capture, score=True)
        np.testing.assert_allclose(parts.hidden, whole, atol=near(1e-4, "states"))
    assert ids == alone
    np.testing.assert_array_equal(engine.score(PROMPT).logprobs, scored)


# ---- many prompts


@pytest.mark.parametrize("n_slots", [1, 3])
def test_list_of_prompts_gives_a_list_in_order(
    make_engine: MakeEngine, tiny_llama: Path, n_slots: int
) -> None:
    engine = make_engine(tiny_llama, n_slots=n_slots, kv_type="f32", n_ubatch=32)
    capture = Capture("probs", hidden=[0, 2])
    prompts = [random_ids(n, seed=n) for n in (40, 3, 70, 1, 12)]
    found = engine.attend(prompts, capture, last=10)
    assert [one.n_rows for one in found] == [10, 3, 10, 1, 10]
    for ids, one in zip(prompts, found, strict=True):
        alone = engine.attend(ids, capture, last=10)
        np.testing.assert_allclose(
            one.hidden, alone.hidden, rtol=near(1e-4), atol=near(1e-4, "states")
        )
        np.testing.assert_allclose(
            np.asarray(one.array()), np.asarray(alone.array()), atol=near(1e-5)
        )
        assert one.usage.prompt_tokens == len(ids)
    assert not any(slot.is_busy for slot in engine.slots)
    texts = engine.attend((np.array([1, 2]), [3]))
    assert [len(list(one)) for one in texts] == [1, 1]
    with pytest.raises(errors.InvalidToken, match=r"engine\.map"):
        engine.generate(prompts)  # type: ignore[arg-type]
