"""Checkpoints of recurrent and hybrid models and of windows' caches, and branches of a slot.

A cache with recurrent state cannot drop its newest tokens, one that keeps only what windows see not
all of them: it goes back to a checkpoint, and what follows is evaluated again. Texts, rows and
logits must be those of a fresh evaluation, bit for bit where the steps are the same, and
`usage.cached_tokens` and the engine's counters say what was evaluated.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Edit, errors, mod
from kqview.mods import Added
from kqview.state import inspect
from kqview.state.ses1 import checkpoints_in
from tests.support import tiny_gguf
from tests.support.rows import near, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kqview import Engine, Token
    from tests.engine.conftest import MakeEngine

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": 1024}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# A prompt that is cut into other steps gives other sums, in their last bits.
ROUNDED = near(2e-4)  # 1.1e-4 with AVX2
WRITERS = {"hybrid": tiny_gguf.write_jamba, "recurrent": tiny_gguf.write_mamba}
# Architectures whose recurrent state is kept after each of a step's last tokens, to guess on.
GUESSING = ("lfm2-dense", "nemotron_h-dense", "qwen35-dense")
# Its windows' caches have 256 cells.
WINDOWS: dict[str, Any] = {"swa_full": False, "n_ubatch": 16}


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

    def ids(self, prompt: Sequence[int], n: int) -> list[int]:
        self._engine.slots[0].clear()
        generation = self._engine.generate(list(prompt), max_tokens=n, **GREEDY)
        generation.read()
        return generation.tokens

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


def test_chat_with_stop_strings_evaluates_no_token_twice(
    make_engine: MakeEngine, model: Path
) -> None:
    engine = make_engine(model, **EXACT)
    text, reasons = random_ids(60), set[str | None]()
    for turn in range(6):
        stopped = engine.generate(text, max_tokens=12, stop=["e", "a", "\n", " "], **GREEDY)
        stopped.read()
        reasons.add(stopped.finish_reason)
        assert n_evaluated(engine) == len(engine.slots[0].tokens)
        text = [*text, *stopped.tokens, *random_ids(20, seed=turn)]
    assert "stop_sequence" in reasons


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


@mod
def take_three_back(event: Any, actions: Any, _tokenizer: Any) -> Any:
    """Take 3 of 5 tokens back, once."""
    return actions.backtrack(3) if isinstance(event, Added) and event.step == 5 else None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "kind",
    [*WRITERS, pytest.param("windows", marks=pytest.mark.needs("host layers")), *GUESSING],
)
def test_whatever_happens_to_slots_what_follows_equals_a_fresh_evaluation(
    make_engine: MakeEngine, architectures: dict[str, Path], tmp_path: Path, kind: str, seed: int
) -> None:
    guesses = kind in GUESSING
    write = WRITERS.get(kind, tiny_gguf.write_gemma4)
    model = architectures[kind] if guesses else write(tmp_path / "model.gguf")
    fresh = Fresh(make_engine, model)
    random = Random(seed)
    engine = make_engine(
        model,
        n_slots=3,
        checkpoint_every=random.choice([0, 40]),
        checkpoint_bytes=random.choice([None, 200_000, 60_000]),
        **(WINDOWS if kind == "windows" else {}),
        **({"draft": "prompt-lookup", "learns_costs": False} if guesses else {}),
        **EXACT,
    )

    def predicted(prompt: list[int], n: int) -> dict[str, Any]:
        """The text, of which a fifth is wrong."""
        if not guesses:
            return {}
        ids = fresh.ids(prompt, n)
        return {"prediction": [id_ if random.random() < 0.8 else 5 for id_ in ids]}

    n = 300 if kind == "windows" else 150  # more than the cells of a window

    def some_ids(n: int, seed: int = 0) -> list[int]:
        return [one % engine.model.n_vocab for one in random_ids(n, seed=seed)]

    texts = [some_ids(n), [*some_ids(80, 1), tiny_gguf.IM_END % engine.model.n_vocab]]
    blobs: list[bytes] = []
    saved: list[tuple[bytes, Any]] = []
    for turn in range(40):
        slot = random.choice(engine.slots)
        text = random.choice(texts)
        prompt = text[: random.randint(1, min(len(text), 700))]
        prompt = [*prompt, *some_ids(random.randint(1, 80), 100 + turn)]
        chosen = {"slot": random.choice([None, slot.id])}
        match random.randrange(14):
            case 0:
                slot.truncate(random.randint(0, slot.n_tokens))
            case 1 if slot.n_tokens > 1:
                slot.remove([(random.randint(1, slot.n_tokens - 1), slot.n_tokens)])
            case 2:
                engine.branch(slot, random.randint(1, 2))
            case 3:
                blobs.append(slot.save())
            case 4:
                saved.append(slot.save_marked())
            case 5 if blobs:
                slot.restore(random.choice(blobs), exact=True)
            case 6 | 7 if saved:
                slot.restore_marked(*random.choice(saved))
            case 8:
                steered = engine.generate(
                    prompt, max_tokens=9, mods=[take_three_back], **chosen, **GREEDY
                )
                steered.read()
                assert steered.tokens == fresh.ids(prompt, 9)
            case 9:
                options = {"max_tokens": 12, **predicted(prompt, 12), **chosen, **GREEDY}
                stopped = engine.generate(prompt, stop=["e", "t", "\x05"], **options)
                stopped.read()
                assert stopped.tokens == fresh.ids(prompt, len(stopped.tokens))
            case 10:  # they take turns in one slot
                prompts = [prompt, [*prompt[: len(prompt) // 2], 7, 8, 9]]
                pair = [
                    engine.generate(one, max_tokens=6, slot=0, **predicted(one, 6), **GREEDY)
                    for one in prompts
                ]
                for _ in range(6):
                    for one in pair:
                        next(one)
                for one, ids in zip(pair, prompts, strict=True):
                    assert next(one, None) is None
                    assert one.tokens == fresh.ids(ids, 6)
            case _:
                options = fresh.options(**predicted(prompt, 8), **chosen)
                with engine.generate(prompt, **options) as generation:
                    tokens = [next(generation) for _ in range(random.randint(1, 8))]
                fresh.check(tokens, prompt)
                texts.append([*prompt, *(token.id for token in tokens)])
    assert not guesses or engine.stats().accepted_tokens > 10


@pytest.mark.parametrize("name", GUESSING)
def test_slot_whose_step_with_guesses_failed_goes_on_from_a_checkpoint(
    make_engine: MakeEngine, architectures: dict[str, Path], name: str
) -> None:
    prompt = [one % 128 for one in random_ids(60)]
    fresh = Fresh(make_engine, architectures[name])
    predicted = {"prediction": fresh.ids(prompt, 24)}
    engine = make_engine(
        architectures[name], draft="prompt-lookup", learns_costs=False, aborted_decodes=[4], **EXACT
    )
    with pytest.raises(errors.DecodeError):
        engine.generate(prompt, max_tokens=24, **predicted, **GREEDY).read()
    again = engine.generate(prompt, **fresh.options(max_tokens=24, **predicted))
    fresh.check(list(again), prompt)
    assert again.usage.cached_tokens == len(prompt) - 1
    assert again.usage.accepted_tokens > 5


# ---- windows whose cache keeps only what they see


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    return tiny_gguf.write_gemma4(tmp_path / "windows.gguf")


@pytest.mark.needs("host layers")
def test_window_goes_back_as_far_as_it_has_cells_or_to_a_checkpoint(
    make_engine: MakeEngine, windows: Path
) -> None:
    fresh = Fresh(make_engine, windows)
    engine = make_engine(windows, checkpoint_every=200, **WINDOWS, **EXACT)
    prompt = random_ids(700)
    run(engine, fresh, prompt, 0)
    slot = engine.slots[0]
    assert slot.checkpoints == [200, 400, 600, 699]
    run(engine, fresh, [*prompt[:650], *random_ids(9, seed=1)], 650)
    run(engine, fresh, [*prompt[:300], *random_ids(9, seed=2)], 200)
    slot.truncate(201)
    assert slot.n_tokens == 201
    none = make_engine(windows, checkpoint_bytes=0, **WINDOWS, **EXACT)
    run(none, fresh, prompt, 0)
    assert none.slots[0].checkpoints == []
    run(none, fresh, [*prompt[:650], *random_ids(9, seed=1)], 650)
    run(none, fresh, [*prompt[:300], *random_ids(9, seed=2)], 0)


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", ["qk", "scores", "probs"])
def test_rows_of_windows_are_those_of_the_full_cache(
    make_engine: MakeEngine, windows: Path, kind: Any, flash_attn: bool
) -> None:
    # llama.cpp's kernel for both, which rounds keys to F16.
    options = {**EXACT, "flash_attn": flash_attn, "n_ubatch": 16, "attention_kernel": "llama.cpp"}
    limit = 5e-3 if flash_attn else near(5e-4)  # 2.3e-4 with AVX2
    engines = [
        make_engine(windows, swa_full=full, n_slots=n, **options)
        for full, n in ((True, 1), (False, 2))
    ]
    prompt = random_ids(600)
    captures = [
        Capture(kind),
        Capture(kind, reduce="mean"),
        Capture(kind, layers=[0, 2], top_k=5),
    ]
    if kind == "probs":
        captures.append(Capture(kind, layers=[2], spans=[(0, 9), (580, None)]))
    for capture in captures:
        want, found = (
            list(engine.generate(prompt, max_tokens=4, capture=capture, slot=i, **GREEDY))
            for i, engine in enumerate(engines)
        )
        for one, other in zip(found, want, strict=True):
            assert one.id == other.id
            pairs = zip(layers_of(one), layers_of(other), strict=True)
            for rows, expected in pairs:
                np.testing.assert_allclose(rows, expected, rtol=0, atol=limit)
    # Two slots in one step, the ring of each at another place.
    texts = [random_ids(300 + 50 * i, seed=i) for i in range(2)]
    alone = []
    for text in texts:
        engines[0].slots[0].clear()
        alone.append(list(engines[0].generate(text, max_tokens=5, capture=kind, **GREEDY)))
    pair = [engines[1].generate(text, max_tokens=5, capture=kind, slot=i, **GREEDY)
            for i, text in enumerate(texts)]  # fmt: skip
    for generation, expected_tokens in zip(pair, alone, strict=True):
        for one, other in zip(generation, expected_tokens, strict=True):
            for rows, expected in zip(layers_of(one), layers_of(other), strict=True):
                np.testing.assert_allclose(rows, expected, rtol=0, atol=limit)


def layers_of(token: Token) -> list[np.ndarray[Any, Any]]:
    """What was captured, as arrays; in the order of the positions for the largest values."""
    assert token.attention is not None
    if token.attention_positions is not None:
        return [
            np.sort(np.asarray(token.attention_positions)),
            np.sort(np.asarray(token.attention)),
        ]
    return [np.asarray(rows) for rows in token.attention]


@pytest.mark.needs("host layers")
def test_prompt_rows_of_windows_are_those_of_the_full_cache(
    make_engine: MakeEngine, windows: Path
) -> None:
    want, found = (
        make_engine(windows, swa_full=full, n_ubatch=16, **EXACT).attend(random_ids(500)).array()
        for full in (True, False)
    )
    for rows, expected in zip(found, want, strict=True):
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-4)


@pytest.mark.needs("host layers")
def test_prompts_in_one_step_are_cut_together(make_engine: MakeEngine, windows: Path) -> None:
    options: dict[str, Any] = {"swa_full": False, "n_ubatch": 128, **EXACT, "n_ctx": 2048}
    engine = make_engine(windows, n_slots=2, **options)
    alone = make_engine(windows, **options)
    # Where a message ends the first one's step does; the second one has no such place.
    prompts = [[i % 200 for i in range(1000)], [(7 * i + 3) % 200 for i in range(1000)]]
    prompts[0][900] = tiny_gguf.IM_END
    edits = [
        Edit.add(np.full(engine.model.n_embd, 0.01), layers=[0]),
        Edit.scale_heads({(1, 0): 0}),
    ]
    for some in (edits[:1], edits):
        want = [list(alone.generate(one, edits=some, max_tokens=2, **GREEDY)) for one in prompts]
        running = [engine.generate(one, edits=some, max_tokens=2, **GREEDY) for one in prompts]
        for one, tokens in zip(running, want, strict=True):
            assert [token.id for token in one] == [token.id for token in tokens]
        for slot in (*engine.slots, *alone.slots):
            slot.clear()


@pytest.mark.needs("host layers")
def test_attention_of_windows_is_edited_in_the_full_cache_alone(
    make_engine: MakeEngine, windows: Path
) -> None:
    engine = make_engine(windows, **WINDOWS, **EXACT)
    with pytest.raises(errors.InvalidEdit, match=r"layers 0, 2, 4 cannot.*swa_full"):
        engine.generate([1, 2, 3], edits=[Edit.attention_bias([(0, 1)], 1.0)])
    edit = Edit.attention_bias([(0, 200)], 1.0, layers=[1, 3])
    full = make_engine(windows, n_ubatch=16, **EXACT)
    want, found = (
        list(one.generate(random_ids(500), max_tokens=4, edits=[edit], top_logprobs=1, **GREEDY))
        for one in (full, engine)
    )
    for one, other in zip(found, want, strict=True):
        assert one.id == other.id
        assert one.logprob == pytest.approx(other.logprob, abs=ROUNDED)


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("n", [9, 200, 700])
def test_slot_of_a_window_is_saved_and_goes_on_elsewhere(
    make_engine: MakeEngine, windows: Path, n: int
) -> None:
    fresh = Fresh(make_engine, windows)
    engine = make_engine(windows, n_slots=2, **WINDOWS, **EXACT)
    prompt = random_ids(n)
    engine.generate(prompt, slot=1, **fresh.options()).read()
    held = engine.slots[1].tokens
    blob, marks = engine.slots[1].save_marked()
    assert list(inspect(blob).tokens) == held
    other = make_engine(windows, n_slots=3, **WINDOWS, **EXACT)
    other.generate(random_ids(400, seed=3), slot=2, **fresh.options()).read()
    slot = other.slots[2]
    assert slot.restore_marked(blob, marks) == len(blob)
    assert slot.checkpoints == engine.slots[1].checkpoints == [n - 1]
    run(other, fresh, [*held, 3, 4], len(held))
    run(other, fresh, prompt, n - 1)


def test_slot_saved_with_another_swa_full_is_a_mismatch(
    make_engine: MakeEngine, windows: Path
) -> None:
    engines = [make_engine(windows, swa_full=full, n_ubatch=16, **EXACT) for full in (True, False)]
    blobs: list[bytes] = []
    for engine in engines:
        engine.generate(random_ids(600), max_tokens=1, **GREEDY).read()
        blobs.append(engine.slots[0].save())
    assert len(blobs[1]) < len(blobs[0])
    for engine, blob, wanted in zip(engines, reversed(blobs), ("False", "True"), strict=True):
        with pytest.raises(errors.StateMismatch, match=f"swa_full={wanted}"):
            engine.slots[0].restore(blob)
        assert engine.slots[0].n_tokens == 600


# ---- state files


def chatted(engine: Engine, fresh: Fresh, n_turns: int = 3) -> list[list[int]]:
    """A chat; returns its text before each turn, and at the end."""
    texts: list[list[int]] = [[]]
    for turn in range(n_turns):
        prompt = [*texts[-1], *random_ids(70, seed=turn), tiny_gguf.IM_END, 10]
        generation = engine.generate(prompt, **fresh.options())
        generation.read()
        texts.append([*prompt, *generation.tokens])
    return texts


def test_file_carries_checkpoints_so_that_the_last_message_can_be_edited(
    make_engine: MakeEngine, model: Path, fresh: Fresh, tmp_path: Path
) -> None:
    engine = make_engine(model, **EXACT)
    before = chatted(engine, fresh)[-2]
    slot = engine.slots[0]
    paths = [tmp_path / name for name in ("with", "without")]
    sizes = [slot.save_file(path, checkpoints=i == 0) for i, path in enumerate(paths)]
    assert sizes == [path.stat().st_size for path in paths]
    blob, marks = slot.save_marked()
    n_text = sizes[0] - sizes[1] - len(marks.checkpoints)  # it says their size
    assert 0 < n_text < 40
    assert checkpoints_in(marks.checkpoints) == tuple(slot.checkpoints)
    checkpoints = slot.checkpoints
    engine.close()
    edited = [*before, *random_ids(70, seed=9), tiny_gguf.IM_END, 10]
    for path, n_cached in zip(paths, (len(before) - 1, 0), strict=True):
        again = make_engine(model, n_slots=2, **EXACT)
        assert again.slots[1].restore_file(path) == len(blob)
        assert again.slots[1].checkpoints == (checkpoints if n_cached else [])
        run(again, fresh, edited, n_cached)
    # The bytes of a file do as well, and a reader of raw blobs finds one in front.
    again.slots[0].restore(paths[0].read_bytes())
    assert again.slots[0].checkpoints == checkpoints
    assert paths[0].read_bytes().startswith(blob)


def test_checkpoints_of_a_file_are_kept_within_the_budget(
    make_engine: MakeEngine, model: Path, fresh: Fresh, tmp_path: Path
) -> None:
    engine = make_engine(model, checkpoint_every=20, **EXACT)
    chatted(engine, fresh)
    n = len(engine.slots[0].checkpoints)
    path = tmp_path / "slot"
    engine.slots[0].save_file(path)
    n_bytes = (len(engine.slots[0].save_marked()[1].checkpoints) - 8) // n - 12
    for budget, n_kept in ((0, 0), (n_bytes - 1, 0), (2 * n_bytes, 2), (n * n_bytes, n)):
        other = make_engine(model, checkpoint_bytes=budget, **EXACT)
        other.slots[0].restore_file(path)
        assert len(other.slots[0].checkpoints) == n_kept
        assert other.slots[0].tokens == engine.slots[0].tokens


def test_checkpoints_that_are_not_sound_are_refused_and_change_nothing(
    make_engine: MakeEngine, model: Path, fresh: Fresh, tmp_path: Path
) -> None:
    engine = make_engine(model, **EXACT)
    chatted(engine, fresh)
    slot = engine.slots[0]
    blob, marks = slot.save_marked()
    sound = marks.checkpoints
    held, checkpoints = slot.tokens, slot.checkpoints
    count = struct.unpack_from("<I", sound, 4)[0]
    others: dict[str, bytes] = {
        "magic": b"X" + sound[1:],
        "n_tokens": sound[:8] + struct.pack("<I", slot.n_tokens + 1) + sound[12:],
        "bytes": sound[:12] + struct.pack("<Q", 2**63) + sound[20:],
        "the end": sound[:4] + struct.pack("<I", count - 1) + sound[8:],
        "cut short": sound[:-1],
        "behind it": sound + b"\0",
        "not finite": sound[:-4] + struct.pack("<f", float("nan")),
    }
    for what, data in others.items():
        with pytest.raises(errors.StateFormatError, match=f"checkpoints of a saved slot.*{what}"):
            slot.restore_marked(blob, replace(marks, checkpoints=data))
    # One changed byte in a file, which its checksum finds; a size that the file does not have.
    path = tmp_path / "slot"
    slot.save_file(path)
    data = path.read_bytes()
    at = len(blob) + len(sound) // 2
    changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    larger = data.replace(b'"checkpoint_bytes":', b'"checkpoint_bytes":9')
    n_text = struct.unpack_from("<I", data, len(data) - 12)[0]
    larger = larger[:-12] + struct.pack("<I", n_text + 1) + larger[-8:]
    for altered, what in ((changed, "checksum"), (larger, "the trailer claims")):
        with pytest.raises(errors.StateFormatError, match=what):
            slot.restore(altered)
    assert (slot.tokens, slot.checkpoints) == (held, checkpoints)
    run(engine, fresh, held[:-3], max(n for n in checkpoints if n < len(held) - 3))


def test_checkpoints_of_another_model_are_a_mismatch(
    make_engine: MakeEngine, hybrid: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    engine = make_engine(hybrid, **EXACT)
    engine.generate(random_ids(40), max_tokens=3, **GREEDY).read()
    checkpoints = engine.slots[0].save_marked()[1].checkpoints
    wider = tiny_gguf.write_jamba(tmp_path / "wider.gguf", n_embd=128)
    for model in (wider, tiny_llama):
        other = make_engine(model, **EXACT)
        other.generate(random_ids(50), max_tokens=3, **GREEDY).read()
        slot = other.slots[0]
        blob, marks = slot.save_marked()
        with pytest.raises(errors.StateMismatch, match="checkpoints of a saved slot"):
            slot.restore_marked(blob, replace(marks, checkpoints=checkpoints))
        assert slot.n_tokens == 52


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
