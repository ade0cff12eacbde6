"""Checkpoints of recurrent and hybrid models, and branches of a slot.

A cache with recurrent state cannot drop its newest tokens: it goes back to a checkpoint, and what
follows is evaluated again. Texts, rows and logits must be those of a fresh evaluation, bit for bit
where the steps are the same, and `usage.cached_tokens` and the engine's counters say what was
evaluated.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, errors, mod
from kqview.mods import Added
from tests.support import tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kqview import Engine, Token
    from tests.engine.conftest import MakeEngine

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": 1024}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# A prompt that is cut into other steps gives other sums, in their last bits.
ROUNDED = 1e-4
WRITERS = {"hybrid": tiny_gguf.write_jamba, "recurrent": tiny_gguf.write_mamba}


@pytest.fixture(params=WRITERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return WRITERS[request.param](tmp_path / "model.gguf")


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return tiny_gguf.write_jamba(tmp_path / "hybrid.gguf")


def n_evaluated(engine: Engine) -> int:
    stats = engine.stats()
    return stats.prefill_tokens + stats.decode_tokens


class Fresh:
    """What an engine that has seen nothing else generates."""

    def __init__(self, make_engine: MakeEngine, model: Path) -> None:
        self._engine = make_engine(model, **EXACT)
        self._captures = bool(self._engine.model.attention_layers)

    def options(self, **options: Any) -> dict[str, Any]:
        """With rows where the model has any, and logprobs."""
        capture = {"capture": Capture("probs", vocab_logits=True)} if self._captures else {}
        return {"max_tokens": 8, "top_logprobs": 3, **capture, **GREEDY, **options}

    def check(self, tokens: Sequence[Token], prompt: Sequence[int], limit: float = ROUNDED) -> None:
        self._engine.slots[0].clear()
        want = list(self._engine.generate(list(prompt), **self.options(max_tokens=len(tokens))))
        assert [one.id for one in tokens] == [one.id for one in want]
        for one, other in zip(tokens, want, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=limit)
            if not self._captures:
                continue
            assert one.attention is not None
            assert other.attention is not None
            for rows, expected in zip(one.attention, other.attention, strict=True):
                np.testing.assert_allclose(rows, expected, rtol=0, atol=limit)
            assert one.logits is not None
            assert other.logits is not None
            np.testing.assert_allclose(one.logits, other.logits, rtol=0, atol=10 * limit)


@pytest.fixture
def fresh(make_engine: MakeEngine, model: Path) -> Fresh:
    return Fresh(make_engine, model)


def run(
    engine: Engine, fresh: Fresh, prompt: list[int], n_cached: int, limit: float = ROUNDED
) -> list[int]:
    """Generate, check against a fresh evaluation, count; return the text."""
    before = n_evaluated(engine)
    generation = engine.generate(prompt, **fresh.options())
    tokens = list(generation)
    fresh.check(tokens, prompt, limit)
    assert generation.usage.cached_tokens == n_cached
    assert n_evaluated(engine) - before == len(prompt) - n_cached + len(tokens) - 1
    return [*prompt, *(token.id for token in tokens)]


def test_regenerated_answer_evaluates_one_token_and_is_bit_equal(
    make_engine: MakeEngine, model: Path, fresh: Fresh
) -> None:
    engine = make_engine(model, **EXACT)
    prompt = random_ids(300)
    run(engine, fresh, prompt, 0, limit=0)
    assert engine.slots[0].checkpoints == [299]
    run(engine, fresh, prompt, 299, limit=0)
    run(engine, fresh, prompt, 299, limit=0)


def test_chat_whose_last_message_is_edited_keeps_what_came_before(
    make_engine: MakeEngine, model: Path, fresh: Fresh
) -> None:
    engine = make_engine(model, **EXACT)
    text: list[int] = []
    for turn in range(4):
        before = text
        prompt = [*text, *random_ids(70, seed=turn), tiny_gguf.IM_END, 10]
        # The last token of the answer was not evaluated.
        text = run(engine, fresh, prompt, max(0, len(text) - 1))
        assert before == [] or len(before) - 1 in engine.slots[0].checkpoints
    edited = [*before, *random_ids(70, seed=9), tiny_gguf.IM_END, 10]
    run(engine, fresh, edited, len(before) - 1)


def test_new_prompt_of_many_messages_can_be_edited_at_once(
    make_engine: MakeEngine, model: Path, fresh: Fresh
) -> None:
    engine = make_engine(model, **EXACT)
    messages = [[*random_ids(80, seed=i), tiny_gguf.IM_END] for i in range(4)]
    prompt = [id_ for one in messages for id_ in one] + [10, 11]
    run(engine, fresh, prompt, 0)
    assert engine.slots[0].checkpoints == [243, 324, 325]
    edited = prompt[:250] + random_ids(40, seed=8)
    run(engine, fresh, edited, 243)


def test_long_prompt_has_checkpoints_at_intervals(
    make_engine: MakeEngine, model: Path, fresh: Fresh
) -> None:
    engine = make_engine(model, checkpoint_every=100, **EXACT)
    prompt = random_ids(450)
    run(engine, fresh, prompt, 0)
    slot = engine.slots[0]
    assert slot.checkpoints == [100, 200, 300, 400, 449]
    run(engine, fresh, prompt[:260] + random_ids(50, seed=3), 200)
    slot.truncate(150)
    assert slot.tokens == prompt[:100]
    assert slot.checkpoints == [100]
    run(engine, fresh, prompt, 100)
    slot.truncate(30)
    assert slot.tokens == []
    assert slot.checkpoints == []


def test_range_at_the_end_is_removed_from_a_cache_that_cannot_shift(
    make_engine: MakeEngine, model: Path, fresh: Fresh
) -> None:
    engine = make_engine(model, checkpoint_every=100, **EXACT)
    prompt = random_ids(250)
    run(engine, fresh, prompt, 0)
    slot = engine.slots[0]
    n = slot.n_tokens
    with pytest.raises(errors.UnsupportedModel):
        slot.remove([(10, 20)])
    assert slot.n_tokens == n
    assert slot.remove([(210, 240), (230, n)]) == 200
    run(engine, fresh, prompt, 200)


@mod
def take_back(event: Any, actions: Any, _tokenizer: Any) -> Any:
    """Take 4 of 30 tokens back, three times."""
    if isinstance(event, Added) and event.step in (30, 40, 50):
        return actions.backtrack(4)
    return None


def test_tokens_that_a_mod_takes_back_are_evaluated_from_the_last_checkpoint(
    make_engine: MakeEngine, model: Path
) -> None:
    prompt = random_ids(200)
    want = make_engine(model, **EXACT).generate(prompt, max_tokens=50, **GREEDY)
    want.read()
    engine = make_engine(model, **EXACT)
    generation = engine.generate(prompt, max_tokens=50, mods=[take_back], **GREEDY)
    generation.read()
    assert generation.tokens == want.tokens
    # Checkpoints lie 8 tokens apart: at most 7 and the 4 that were taken back come again.
    assert n_evaluated(engine) <= 200 + 50 + 3 * 12


def test_stop_string_leaves_a_slot_from_which_the_chat_goes_on(
    make_engine: MakeEngine, model: Path, fresh: Fresh
) -> None:
    engine = make_engine(model, **EXACT)
    prompt = random_ids(100)
    full = engine.generate(prompt, max_tokens=20, **GREEDY)
    stop = full.read()[4:7]
    engine.slots[0].clear()
    stopped = engine.generate(prompt, max_tokens=20, stop=[stop], **GREEDY)
    stopped.read()
    held = engine.slots[0].tokens
    before = n_evaluated(engine)
    again = engine.generate([*held, *random_ids(30, seed=4)], **fresh.options())
    fresh.check(list(again), [*held, *random_ids(30, seed=4)])
    assert again.usage.cached_tokens == len(held) >= 99
    assert n_evaluated(engine) - before == 30 + 7


def test_prompt_that_another_slot_has_is_copied_from_its_checkpoint(
    make_engine: MakeEngine, model: Path, fresh: Fresh
) -> None:
    engine = make_engine(model, n_slots=2, **EXACT)
    system = [*random_ids(120), tiny_gguf.IM_END]
    first = [*system, *random_ids(90, seed=1)]
    engine.generate(first, slot=0, **fresh.options()).read()
    assert engine.slots[0].checkpoints == [121, 210]
    second = [*system, *random_ids(90, seed=2)]
    generation = engine.generate(second, slot=1, **fresh.options())
    fresh.check(list(generation), second)
    assert generation.usage.cached_tokens == 121
    # The other slot was not touched.
    again = engine.generate(first, slot=0, **fresh.options())
    fresh.check(list(again), first)
    assert again.usage.cached_tokens == 210


def test_generations_that_take_turns_in_a_slot_keep_their_common_beginning(
    make_engine: MakeEngine, model: Path
) -> None:
    system = [*random_ids(300), tiny_gguf.IM_END]
    prompts = [[*system, *random_ids(20, seed=i)] for i in (1, 2)]
    want = []
    for prompt in prompts:
        want.append(make_engine(model, **EXACT).generate(prompt, max_tokens=6, **GREEDY))
        want[-1].read()
    engine = make_engine(model, **EXACT)
    generations = [engine.generate(prompt, max_tokens=6, **GREEDY) for prompt in prompts]
    for _ in range(6):
        for generation in generations:
            next(generation)
    for generation, expected in zip(generations, want, strict=True):
        assert next(generation, None) is None
        assert generation.tokens == expected.tokens
    n_turns = engine.stats().n_parkings + 2
    assert n_evaluated(engine) <= 301 + n_turns * (20 + 6)


@pytest.mark.parametrize("n_kept", [0, 1, 3])
def test_budget_bounds_what_is_kept(make_engine: MakeEngine, hybrid: Path, n_kept: int) -> None:
    fresh = Fresh(make_engine, hybrid)
    # 2 recurrent layers, each with 3 * 128 values of a convolution and 128 * 16 of a state.
    n_bytes = 2 * 4 * (3 * 128 + 128 * 16) + 200  # and a head
    engine = make_engine(
        hybrid, n_slots=2, checkpoint_every=50, checkpoint_bytes=n_kept * n_bytes, **EXACT
    )
    prompt = random_ids(300)
    engine.generate(prompt, slot=0, **fresh.options()).read()
    assert len(engine.slots[0].checkpoints) == n_kept
    engine.generate(random_ids(200, seed=1), slot=1, **fresh.options()).read()
    assert sum(len(slot.checkpoints) for slot in engine.slots) == n_kept
    run(engine, fresh, [*prompt[:-1], 7, 8], max(engine.slots[0].checkpoints, default=0))


def test_model_whose_cache_drops_its_tail_has_no_checkpoints(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, checkpoint_every=10, n_ctx=128)
    engine.generate(random_ids(60), max_tokens=4, **GREEDY).read()
    assert engine.slots[0].checkpoints == []
    engine.slots[0].truncate(30)
    assert engine.slots[0].n_tokens == 30


def test_deterministic_request_has_the_bits_of_one_without_checkpoints(
    make_engine: MakeEngine, model: Path, fresh: Fresh
) -> None:
    prompt = [*random_ids(200), tiny_gguf.IM_END, *random_ids(100)]
    options = fresh.options(deterministic=True)
    want = list(make_engine(model, checkpoint_bytes=0, **EXACT).generate(prompt, **options))
    engine = make_engine(model, checkpoint_every=16, **EXACT)
    engine.generate(prompt, max_tokens=3, **GREEDY).read()
    found = list(engine.generate(prompt, **options))
    assert [(one.id, one.logprob) for one in found] == [(one.id, one.logprob) for one in want]


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_to_slots_what_follows_equals_a_fresh_evaluation(
    make_engine: MakeEngine, model: Path, fresh: Fresh, seed: int
) -> None:
    random = Random(seed)
    engine = make_engine(
        model,
        n_slots=3,
        checkpoint_every=random.choice([0, 40]),
        checkpoint_bytes=random.choice([None, 200_000, 60_000]),
        **EXACT,
    )
    texts = [random_ids(150), [*random_ids(80, seed=1), tiny_gguf.IM_END]]
    blobs: list[bytes] = []
    for turn in range(30):
        slot = random.choice(engine.slots)
        match random.randrange(8):
            case 0:
                slot.truncate(random.randint(0, slot.n_tokens))
            case 1:
                engine.branch(slot, random.randint(1, 2))
            case 2:
                blobs.append(slot.save())
            case 3 if blobs:
                slot.restore(random.choice(blobs), exact=True)
            case _:
                text = random.choice(texts)
                prompt = text[: random.randint(1, len(text))]
                prompt = [*prompt, *random_ids(random.randint(1, 80), seed=100 + turn)]
                options = fresh.options(slot=random.choice([None, slot.id]))
                with engine.generate(prompt, **options) as generation:
                    tokens = [next(generation) for _ in range(random.randint(1, 8))]
                fresh.check(tokens, prompt)
                texts.append([*prompt, *(token.id for token in tokens)])


# ---- branches


def branchable(make: Callable[[Path], Path]) -> Any:
    return pytest.param(make, id=make.__name__)


@pytest.mark.parametrize(
    "write",
    [
        branchable(tiny_gguf.write_model),
        branchable(tiny_gguf.write_gemma4),
        branchable(tiny_gguf.write_jamba),
        branchable(tiny_gguf.write_mamba),
    ],
)
def test_branches_go_on_without_a_second_prefill(
    make_engine: MakeEngine, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    model = write(tmp_path / "model.gguf")
    fresh = Fresh(make_engine, model)
    engine = make_engine(model, n_slots=4, **EXACT)
    prompt = random_ids(250)
    engine.generate(prompt, slot=1, **fresh.options()).read()
    held = engine.slots[1].tokens
    assert len(held) == 257
    before = n_evaluated(engine)
    branches = engine.branch(engine.slots[1], 3)
    assert [slot.id for slot in branches] == [0, 2, 3]
    assert n_evaluated(engine) == before
    starts = [[*held, *random_ids(4, seed=slot.id)] for slot in branches]
    generations = [
        engine.generate(start, slot=slot.id, **fresh.options())
        for slot, start in zip(branches, starts, strict=True)
    ]
    for generation, start in zip(generations, starts, strict=True):
        fresh.check(list(generation), start)
        assert generation.usage.cached_tokens == 257
    assert engine.slots[1].tokens == held
    assert n_evaluated(engine) - before == 3 * (4 + 7)
    # Copies are as exact as what they are copies of.
    assert branches[0].n_exact == branches[0].n_tokens


def test_branch_names_what_is_wrong(make_engine: MakeEngine, hybrid: Path) -> None:
    engine = make_engine(hybrid, n_slots=3, **EXACT)
    other = make_engine(hybrid, n_slots=3, **EXACT)
    for n in (0, -1, "2", 1.5):
        with pytest.raises(errors.RequestError, match="n must be"):
            engine.branch(0, n)  # type: ignore[arg-type]
    with pytest.raises(errors.RequestError, match="2 other slots"):
        engine.branch(0, 3)
    for slot in (3, -1, "0", other.slots[0]):
        with pytest.raises(errors.UnknownSlot):
            engine.branch(slot, 1)  # type: ignore[arg-type]
    generation = engine.generate(random_ids(10), slot=1, max_tokens=50, **GREEDY)
    next(generation)
    with pytest.raises(errors.BusyError, match="slot 1"):
        engine.branch(1, 1)
    with pytest.raises(errors.BusyError, match="n is 2, but 1 other"):
        engine.branch(0, 2)
    assert [slot.id for slot in engine.branch(0, 1)] == [2]
    generation.close()
    engine.close()
    with pytest.raises(errors.ClosedError):
        engine.branch(0, 1)
