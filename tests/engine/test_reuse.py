"""What a request takes over from the cache: ``reuse="exact"``, the default, and ``reuse="shift"``.

Exact: it gives what an engine that has seen nothing else would compute. The cache may hold
approximate tokens: of a slot that was shifted, a blob of unknown origin, a copy of either. Which
ones is marked, and the mark goes where the cells go. Every row and logprob of default requests is
compared with a fresh evaluation, after random operations and on each way by which a mark could get
lost.

Shift: the cache of what follows pruned tokens is kept, at its new positions. The reference keeps
what was computed while the pruned tokens were there (`CachedReference`), so the rows are compared
with what the cache holds, not with a fresh evaluation of the shorter prompt.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import errors
from kqview.state import SessionStore, write_state
from tests.support import tiny_gguf
from tests.support.reference import CachedReference, relative_error
from tests.support.rows import KINDS, Kind, near, random_ids, rounds_as_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kqview import Engine, Generation, Slot
    from kqview.types import Token
    from tests.engine.conftest import MakeEngine


# ---- reuse="exact"

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": 128}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# Parts of a prompt evaluated in other steps differ by rounding.
LIMIT = near(1e-5)
PROMPT = random_ids(80)
LEFT = PROMPT[:10] + PROMPT[40:]


class Fresh:
    """An engine whose cache is emptied before each evaluation."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.n_checked = 0

    def check(self, prompt: Sequence[int], tokens: Sequence[Token]) -> None:
        """The rows of *tokens*, and their logprobs, are those of their sequence."""
        self.engine.slots[0].clear()
        ids = list(prompt)
        for token in tokens:
            if token.discarded:
                return  # from here on approximate, as asked for
            (want,) = self.engine.generate(
                ids, max_tokens=1, capture="logits", top_logprobs=20, **GREEDY
            )
            error = relative_error(np.asarray(token.attention), np.asarray(want.attention))
            assert error <= LIMIT, f"rows of token {token.index} after {len(prompt)}: {error}"
            theirs = dict(want.top_logprobs or [])
            ours = dict(token.top_logprobs or [])
            both = theirs.keys() & ours.keys()
            # Near ties may change places at the end of the list.
            assert len(both) >= (12 if rounds_as_gpu() else 18)
            assert max(abs(ours[i] - theirs[i]) for i in both) <= near(1e-4, "logprobs")
            ids.append(token.id)
            self.n_checked += 1

    def check_rows(self, prompt: Sequence[int], rows: np.ndarray[Any, Any]) -> None:
        """*rows* are those of the prompt's last positions."""
        self.engine.slots[0].clear()
        want = self.engine.attend(prompt, "logits").array()
        want = np.asarray(want)[:, :, -rows.shape[2] :]
        shown = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(rows), shown)
        error = relative_error(np.where(shown, rows, 0), np.where(shown, want, 0))
        assert error <= LIMIT, f"rows of a prompt of {len(prompt)}: {error}"
        self.n_checked += 1


@pytest.fixture
def fresh(make_engine: MakeEngine, tiny_llama: Path) -> Fresh:
    return Fresh(make_engine(tiny_llama, **EXACT))


def start(engine: Engine, prompt: Sequence[int], **options: Any) -> Generation:
    settings = {"max_tokens": 3, "capture": "logits", "top_logprobs": 20, **GREEDY, **options}
    return engine.generate(prompt, **settings)


# ---- each way by which approximate tokens were taken for exact ones


def shifted(engine: Engine) -> None:
    """Slot 0 holds `LEFT`, whose tail was computed behind tokens that are gone."""
    engine.generate(PROMPT, slot=0, max_tokens=1, **GREEDY).read()
    engine.slots[0].shift(10, 30)
    assert engine.slots[0].tokens == LEFT


def reused(engine: Engine) -> None:
    """The same by a request that asked for it."""
    engine.generate(PROMPT, slot=0, max_tokens=1, **GREEDY).read()
    engine.generate(LEFT, slot=0, max_tokens=1, reuse="shift", **GREEDY).read()


def saved_and_restored(engine: Engine) -> None:
    reused(engine)
    blob = engine.slots[0].save()
    engine.slots[0].clear()
    engine.slots[0].restore(blob)


def restored_in_another_slot(engine: Engine) -> None:
    reused(engine)
    engine.slots[1].restore(engine.slots[0].save())
    engine.slots[0].clear()


MAKERS = (shifted, reused, saved_and_restored, restored_in_another_slot)


@pytest.mark.parametrize("slot", [None, 0, 1])
@pytest.mark.parametrize("make", MAKERS)
def test_default_request_takes_over_exact_tokens_alone(
    make_engine: MakeEngine, tiny_llama: Path, fresh: Fresh, make: Any, slot: int | None
) -> None:
    # In slot 1 by a fork, or in the slot that holds most of it.
    engine = make_engine(tiny_llama, n_slots=2, **EXACT)
    make(engine)
    tokens = list(start(engine, [*LEFT, 7], slot=slot))
    fresh.check([*LEFT, 7], tokens)


@pytest.mark.parametrize("make", MAKERS)
def test_attend_takes_over_exact_tokens_alone(
    make_engine: MakeEngine, tiny_llama: Path, fresh: Fresh, make: Any
) -> None:
    engine = make_engine(tiny_llama, n_slots=2, **EXACT)
    make(engine)
    rows = engine.attend([*LEFT, 7, 8], "logits", last=2).array()
    fresh.check_rows([*LEFT, 7, 8], np.asarray(rows))


@pytest.mark.parametrize("make", [shifted, saved_and_restored])
def test_prefix_goes_on_from_what_the_slot_holds(
    make_engine: MakeEngine, tiny_llama: Path, make: Any
) -> None:
    engine = make_engine(tiny_llama, n_slots=2, **EXACT)
    make(engine)
    [slot] = [one for one in engine.slots if one.n_tokens]
    held = slot.tokens
    assert slot.n_exact < len(held)
    generation = start(engine, [*held, 7], max_tokens=2, slot=slot.id, reuse="prefix")
    next(generation)
    assert generation.usage.cached_tokens == len(held)
    generation.read()
    assert generation.usage.cached_tokens == len(held)
    assert slot.n_exact < len(held)  # it stays approximate


def test_mark_goes_where_the_cells_go(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_llama, n_slots=2, **EXACT)
    slot, other = engine.slots
    engine.generate(PROMPT, slot=0, max_tokens=4, **GREEDY).read()
    assert slot.n_exact == slot.n_tokens == 83
    slot.shift(70, 3)
    assert (slot.n_exact, slot.n_tokens) == (70, 80)
    slot.shift(20, 30)
    assert (slot.n_exact, slot.n_tokens) == (20, 50)
    slot.shift(45, 5)  # the end: nothing moves
    assert (slot.n_exact, slot.n_tokens) == (20, 45)
    blob, marks = slot.save_marked()
    path = tmp_path / "slot.ses1"
    write_state(path, blob, slot.state_facts(), marks)
    for restore, n_exact in (
        (lambda: other.restore(blob), 0),
        (lambda: other.restore(blob, exact=True), 45),
        (lambda: other.restore_marked(blob, marks), 20),
        (lambda: other.restore(path.read_bytes()), 20),
        (lambda: other.restore(path.read_bytes(), exact=True), 20),  # the trailer knows better
    ):
        restore()
        assert (other.n_exact, other.n_tokens) == (n_exact, 45)
        assert slot.n_exact == 20
    other.truncate(21)
    assert other.n_exact == 20
    other.truncate(20)
    assert other.n_exact == 20
    # What is evaluated behind exact tokens is exact, behind others it is not.
    ids = [*other.tokens, *random_ids(30, seed=4)]
    engine.generate(ids, slot=1, max_tokens=1, **GREEDY).read()
    assert other.n_exact == 50
    engine.generate([*slot.tokens, 1, 2, 3], slot=0, max_tokens=1, reuse="shift", **GREEDY).read()
    assert (slot.n_exact, slot.n_tokens) == (20, 48)
    again = engine.generate(slot.tokens, slot=0, max_tokens=1, **GREEDY)
    again.read()
    assert again.usage.cached_tokens == 20
    assert slot.n_exact == slot.n_tokens == 48
    slot.clear()
    assert slot.n_exact == 0


def test_full_slot_that_was_shifted_is_exact_up_to_what_it_kept(
    make_engine: MakeEngine, tiny_llama: Path, fresh: Fresh
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    tokens = list(start(engine, PROMPT, max_tokens=60, context_shift=True, n_keep=12))
    fresh.check(PROMPT, tokens)
    slot = engine.slots[0]
    assert slot.n_exact == 12 < slot.n_tokens
    held = slot.tokens
    fresh.check(held, list(start(engine, held)))


def test_file_without_a_mark_is_of_unknown_origin(
    make_engine: MakeEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    slot = engine.slots[0]
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    path = tmp_path / "slot.ses1"
    write_state(path, slot.save(), slot.state_facts())
    slot.restore(path.read_bytes())
    assert (slot.n_exact, slot.n_tokens) == (0, 80)
    slot.restore(path.read_bytes(), exact=True)
    assert slot.n_exact == 80


def test_keys_that_saw_what_followed_them_are_not_taken_over(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    # Every query of this model sees the whole prompt, and another prompt ends otherwise.
    model = tiny_gguf.write_preset(tmp_path / "model.gguf", "tiny_llama", causal=False)
    engine = make_engine(model, n_slots=2, **EXACT)
    whole = np.asarray(engine.attend(PROMPT, "logits", last=1).array())
    engine.slots[0].clear()
    list(engine.attend([*PROMPT[:50], *random_ids(20, seed=2)], "logits", last=1))
    assert (engine.slots[0].n_exact, engine.slots[0].n_tokens) == (0, 70)
    for _ in range(2):
        again = np.asarray(engine.attend(PROMPT, "logits", last=1).array())
        assert relative_error(again, whole) <= LIMIT
    generation = engine.generate(PROMPT, slot=1, max_tokens=1, capture="logits", **GREEDY)
    (token,) = generation
    assert generation.usage.cached_tokens == 0  # no fork either
    assert relative_error(np.asarray(token.attention), whole[:, :, 0]) <= LIMIT


# ---- random sequences


class Crowd:
    """Operations on an engine of three slots; default requests are checked."""

    def __init__(self, engine: Engine, fresh: Fresh, folder: Path, seed: int) -> None:
        self.engine = engine
        self.fresh = fresh
        self.folder = folder
        self.rng = Random(seed)
        self.store = SessionStore(folder, max_sessions=1)
        self.names: set[str] = set()
        self.texts = [random_ids(100, seed=i) for i in range(3)]

    @property
    def slot(self) -> Slot:
        return self.rng.choice(self.engine.slots)

    def prompt(self) -> list[int]:
        """What a slot holds, a text, or one of them with a part cut out; and a new end."""
        ids = self.rng.choice([self.slot.tokens, self.rng.choice(self.texts)])
        if self.rng.random() < 0.4 and len(ids) > 8:
            first = self.rng.randrange(1, len(ids) - 4)
            ids = ids[:first] + ids[first + self.rng.randrange(1, 30) :]
        ids = ids[
            : self.rng.choice([len(ids), self.rng.randrange(1, len(ids) + 1)] if ids else [0])
        ]
        return [*ids[:110], *self.rng.choices(range(256), k=self.rng.choice([0, 1, 4]))] or [5]

    def generate(self) -> None:
        ids = self.prompt()
        options: dict[str, Any] = {"slot": self.rng.choice([None, 0, 1, 2])}
        if self.rng.random() < 0.3:
            options |= {"context_shift": True, "n_keep": self.rng.randrange(len(ids))}
        n_tokens = self.rng.choice([1, 3, 3, 24])
        self.fresh.check(ids, list(start(self.engine, ids, max_tokens=n_tokens, **options)))

    def go_on(self) -> None:
        slot = self.slot
        if ids := slot.tokens:
            self.fresh.check(ids, list(start(self.engine, ids, slot=slot.id)))

    def attend(self) -> None:
        ids = self.prompt()
        n_rows = self.rng.randrange(1, min(len(ids), 6) + 1)
        rows = self.engine.attend(ids, "logits", last=n_rows).array()
        self.fresh.check_rows(ids, np.asarray(rows))

    def reuse(self) -> None:
        options: dict[str, Any] = {"reuse": "shift", "reuse_min_tokens": 4}
        list(start(self.engine, self.prompt(), slot=self.rng.choice([None, 0, 1]), **options))

    def fork(self) -> None:
        """Several requests of one beginning at a time; one may be left early."""
        ids = self.prompt()
        prompts = [[*ids, i] for i in range(self.rng.choice([2, 3]))]
        running = [start(self.engine, one) for one in prompts]
        if self.rng.random() < 0.5:
            running[0].close()
            del running[0], prompts[0]
        for one, generation in zip(prompts, running, strict=True):
            self.fresh.check(one, list(generation))

    def cancel(self) -> None:
        ids = self.prompt()
        with start(self.engine, ids, max_tokens=20) as generation:
            tokens = [next(generation) for _ in range(self.rng.randrange(3))]
        self.fresh.check(ids, tokens)

    def shift(self) -> None:
        slot = self.slot
        if (n := slot.n_tokens) > 1:
            n_keep = self.rng.randrange(n - 1)
            slot.shift(n_keep, self.rng.randrange(1, n - n_keep))

    def truncate(self) -> None:
        slot = self.slot
        slot.truncate(self.rng.randrange(slot.n_tokens + 1))

    def restore_raw(self) -> None:
        source = self.slot
        is_exact = source.n_exact == source.n_tokens
        self.slot.restore(source.save(), exact=is_exact and self.rng.random() < 0.7)

    def restore_marked(self) -> None:
        self.slot.restore_marked(*self.slot.save_marked())

    def restore_file(self) -> None:
        source = self.slot
        blob, marks = source.save_marked()
        write_state(self.folder / "file", blob, source.state_facts(), marks)
        self.slot.restore((self.folder / "file").read_bytes())

    def save_session(self) -> None:
        name = self.rng.choice("abc")
        self.store.save(name, self.slot)
        self.names.add(name)

    def restore_session(self) -> None:
        if self.names:
            self.store.restore(self.rng.choice(sorted(self.names)), self.slot)

    def run(self, n_operations: int) -> None:
        checked = [self.generate, self.go_on, self.go_on, self.attend, self.fork, self.cancel]
        changing: list[Callable[[], None]] = [
            self.reuse, self.shift, self.shift, self.truncate, self.restore_raw,
            self.restore_marked, self.restore_file, self.save_session, self.restore_session,
        ]  # fmt: skip
        done: list[str] = []
        for i in range(n_operations):
            operation = self.rng.choice(checked if i % 2 else changing)
            done.append(operation.__name__)
            try:
                operation()
            except AssertionError as failure:
                raise AssertionError(f"{failure}; after {', '.join(done)}") from None
            for slot in self.engine.slots:
                assert 0 <= slot.n_exact <= slot.n_tokens


@pytest.mark.parametrize("seed", range(8))
def test_default_requests_are_exact_after_whatever_was_done(
    make_engine: MakeEngine, tiny_llama: Path, fresh: Fresh, tmp_path: Path, seed: int
) -> None:
    engine = make_engine(tiny_llama, n_slots=3, **EXACT)
    Crowd(engine, fresh, tmp_path, seed).run(60)
    assert fresh.n_checked > 60


# ---- reuse="shift"

LONG_PROMPT = random_ids(120)
F32: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
SHIFT: dict[str, Any] = {**GREEDY, "reuse": "shift", "reuse_min_tokens": 4}
# llama.cpp's flash attention rounds V to F16, which shows from the second layer on, the more the
# sharper heads are; another column would be an error of 1.
LIMITS = {False: 2e-5, True: 3e-2}
Ranges = list[tuple[int, int]]
PRUNED: list[Ranges] = [
    [(10, 30)],
    [(0, 7)],
    [(5, 1), (20, 13), (60, 2), (90, 20)],
    [(3, 50), (57, 59)],
]


def prune(ids: list[int], ranges: Ranges) -> list[int]:
    left = list(ids)
    for start, n in reversed(ranges):
        del left[start : start + n]
    return left


def text_of(generation: Generation) -> list[tuple[int, float | None]]:
    return [(token.id, token.logprob) for token in generation]


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranges", PRUNED)
def test_rows_after_pruning_equal_reference(
    make_engine: MakeEngine, tiny_llama: Path, ranges: Ranges, kind: Kind, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, kv_type="f32", flash_attn=flash_attn)
    engine.generate(LONG_PROMPT, max_tokens=1, **GREEDY).read()
    reference = CachedReference(tiny_llama)
    reference.decode_all(LONG_PROMPT)
    for start, n in reversed(ranges):
        reference.discard(start, n)
    left = prune(LONG_PROMPT, ranges)
    generation = engine.generate([*left, 7, 9], max_tokens=6, capture=kind, **SHIFT)
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(left)
    assert generation.usage.prompt_tokens == len(left) + 2
    reference.decode(7)
    found = reference.errors(9, tokens, kind)
    assert found[0] <= 2e-5
    assert found.max() <= LIMITS[flash_attn]
    assert engine.slots[0].tokens == [*left, 7, 9, *(token.id for token in tokens[:-1])]


def test_pruning_again_and_again_equals_reference(
    make_engine: MakeEngine, tiny_qwen2: Path
) -> None:
    engine = make_engine(tiny_qwen2, **F32)
    reference = CachedReference(tiny_qwen2)
    engine.generate(LONG_PROMPT, max_tokens=1, **GREEDY).read()
    reference.decode_all(LONG_PROMPT)
    held = LONG_PROMPT
    for i, ranges in enumerate([[(4, 6)], [(30, 9), (50, 3)], [(0, 2)], [(60, 30)]]):
        for start, n in reversed(ranges):
            reference.discard(start, n)
        prompt = [*prune(held, ranges), i]
        tokens = list(engine.generate(prompt, max_tokens=4, capture="probs", **SHIFT))
        assert reference.errors(i, tokens, "probs").max() <= 2e-5
        held = engine.slots[0].tokens
        assert len(held) == reference.n_tokens


def test_pruned_prompt_that_ends_within_the_cache_decodes_its_last_token_again(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **F32)
    engine.generate(LONG_PROMPT, max_tokens=1, **GREEDY).read()
    left = prune(LONG_PROMPT[:100], [(10, 30)])
    generation = engine.generate(left, max_tokens=3, capture="scores", **SHIFT)
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(left) - 1
    reference = CachedReference(tiny_llama)
    reference.decode_all(LONG_PROMPT[:99])
    reference.discard(10, 30)
    assert reference.errors(LONG_PROMPT[99], tokens, "scores").max() <= 2e-5


def test_pruned_prompt_is_exact_unless_asked_otherwise(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **F32)
    left = prune(LONG_PROMPT, [(10, 30)])
    options = {**GREEDY, "max_tokens": 8, "top_logprobs": 0}
    fresh = text_of(make_engine(tiny_llama, **F32).generate(left, **options))
    engine.generate(LONG_PROMPT, max_tokens=1, **GREEDY).read()
    shifted = engine.generate(left, **options | {"reuse": "shift"})
    kept = text_of(shifted)
    assert shifted.usage.cached_tokens == len(left) - 1
    assert kept != fresh  # it is approximate, and this model shows it
    # What the shift has kept is not taken for exact by those who want that.
    again = engine.generate(left, **options)
    assert [id_ for id_, _ in text_of(again)] == [id_ for id_, _ in fresh]
    assert again.usage.cached_tokens == 10
    exact = engine.generate(left, **options)
    np.testing.assert_allclose(
        [p for _, p in text_of(exact)], [p for _, p in fresh], rtol=0, atol=1e-4
    )
    assert exact.usage.cached_tokens == len(left) - 1


@pytest.mark.parametrize(
    "kv_type", ["f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
)
def test_cache_of_another_slot_stays_bit_for_bit(
    make_engine: MakeEngine, tmp_path: Path, kv_type: str
) -> None:
    model = tiny_gguf.write_model(tmp_path / "wide.gguf", n_embd=128, n_head=2, n_head_kv=1)
    engine = make_engine(model, n_slots=2, kv_type=kv_type, flash_attn=True)
    for slot in (0, 1):
        engine.generate(LONG_PROMPT, max_tokens=1, slot=slot, **GREEDY).read()
    before = engine.slots[1].save()
    engine.generate(prune(LONG_PROMPT, [(10, 30)]), max_tokens=2, slot=0, **SHIFT).read()
    engine.slots[0].shift(3, 20)
    assert engine.slots[1].save() == before


def test_penalties_see_the_pruned_prompt(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **F32)
    options = {"repeat_penalty": 1e6, "repeat_last_n": -1, "max_tokens": 5}
    engine.generate(LONG_PROMPT, max_tokens=1, **GREEDY).read()
    left = prune(LONG_PROMPT, [(10, 80)])
    tokens = [token.id for token in engine.generate(left, **SHIFT, **options)]
    assert set(tokens).isdisjoint(left)
    assert len(set(tokens)) == 5


@pytest.mark.parametrize(
    "options",
    [
        {"reuse": "other"},
        {"reuse": True},
        {"cache_prompt": "no"},
        {"reuse_min_tokens": 0},
        {"reuse_min_tokens": -1},
        {"reuse_min_tokens": 2**31},
        {"reuse_min_tokens": 1.5},
    ],
)
def test_options_out_of_range_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(tiny_llama)
    with pytest.raises(errors.RequestError, match=next(iter(options))):
        engine.generate([1, 2, 3], **options)
    assert engine.stats().n_requests == 0


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (tiny_gguf.write_mamba, "recurrent"),
        (tiny_gguf.write_gemma3n, "sliding windows"),
    ],
)
@pytest.mark.parametrize("options", [{"reuse": "shift"}, {"context_shift": True}])
def test_models_that_cannot_shift_are_refused_before_anything_runs(
    make_engine: MakeEngine,
    tmp_path: Path,
    write: Callable[[Path], Path],
    reason: str,
    options: dict[str, Any],
) -> None:
    engine = make_engine(write(tmp_path / "model.gguf"))
    with pytest.raises(errors.UnsupportedModel, match=reason):
        engine.generate([1, 2, 3], **options)
    assert engine.stats().n_requests == 0
    assert len(list(engine.generate([1, 2, 3], max_tokens=3, ignore_eos=True))) == 3


def test_cache_whose_keys_cannot_be_rotated_is_refused(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, kv_type="bf16")
    engine.generate(LONG_PROMPT, max_tokens=1, **GREEDY).read()
    with pytest.raises(errors.UnsupportedModel, match="bf16"):
        engine.generate(prune(LONG_PROMPT, [(10, 30)]), **SHIFT)
    with pytest.raises(errors.UnsupportedModel):
        engine.slots[0].shift(3, 20)
    assert engine.slots[0].tokens == LONG_PROMPT


def test_encoders_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine(tiny_gguf.write_bert(tmp_path / "bert.gguf"))
    with pytest.raises(errors.UnsupportedModel):
        engine.generate([1, 2, 3], reuse="shift")


# ---- rows after a roll-back, a restore and a prefix reuse

PROMPT_40 = random_ids(40)


def roll_back(engine: Engine) -> list[int]:
    with engine.generate(PROMPT_40, max_tokens=30, temperature=0, ignore_eos=True) as generation:
        for _ in range(3):
            next(generation)
    return engine.slots[0].tokens


def truncate(engine: Engine) -> list[int]:
    engine.generate(PROMPT_40, max_tokens=10, temperature=0, ignore_eos=True).read()
    engine.slots[0].truncate(33)
    return engine.slots[0].tokens


def restore(engine: Engine) -> list[int]:
    engine.generate(PROMPT_40, max_tokens=10, temperature=0, ignore_eos=True).read()
    blob = engine.slots[0].save()
    engine.generate(random_ids(60, seed=9), max_tokens=5).read()
    engine.slots[0].restore(blob, exact=True)
    return engine.slots[0].tokens


def reuse(engine: Engine) -> list[int]:
    engine.generate(PROMPT_40, max_tokens=10, temperature=0, ignore_eos=True).read()
    return PROMPT_40[:25]


def fork(engine: Engine) -> list[int]:
    engine.generate(PROMPT_40, max_tokens=10, temperature=0, ignore_eos=True, slot=1).read()
    return PROMPT_40[:36]


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [roll_back, truncate, restore, reuse, fork])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_rows_equal_reference(
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
    architecture: str,
    before: Callable[[Engine], list[int]],
    kind: Kind,
    flash_attn: bool,
) -> None:
    model: Path = request.getfixturevalue(f"tiny_{architecture}")
    engine = make_engine(model, kv_type="f32", flash_attn=flash_attn, n_slots=2)
    kept = before(engine)
    generation = engine.generate(
        [*kept, 7, 9], max_tokens=6, capture=kind, temperature=0, ignore_eos=True, slot=0
    )
    tokens = list(generation)
    assert generation.usage.cached_tokens == len(kept)
    reference = CachedReference(model)
    reference.decode_all([*kept, 7])
    found = reference.errors(9, tokens, kind)
    assert found[0] <= 2e-5
    assert found.max() <= LIMITS[flash_attn]
