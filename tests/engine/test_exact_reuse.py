"""``reuse="exact"``, the default, gives what an engine that has seen nothing else would compute.

The cache that a request goes on from may hold approximate tokens: of a slot that was shifted, a
blob of which nobody says where it comes from, a copy of either. Which ones is marked, and the mark
goes where the cells go. Every row and logprob of default requests is compared here with a fresh
evaluation, after random operations and on each way by which a mark could get lost.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.state import SessionStore, write_state
from tests.support import tiny_gguf
from tests.support.reference import relative_error
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kqview import Engine, Generation, Slot
    from kqview.types import Token

    from .conftest import MakeEngine

EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": 128}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
# Parts of a prompt evaluated in other steps differ by rounding.
LIMIT = 1e-5
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
            assert len(both) >= 18  # near ties may change places at the end of the list
            assert max(abs(ours[i] - theirs[i]) for i in both) <= 1e-4
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
