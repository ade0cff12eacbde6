"""Edits: what they change equals a float64 reference of the layer, and nothing else changes.

A request's own values are compared with `Reference`, which does the same to the same layer. What
other requests see, and what a cache gives them, is compared bit for bit.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import kqview
from kqview import Capture, ControlVector, Edit, Engine, _core, errors, mod
from kqview.demo import MODEL_PATH as DEMO
from kqview.edit import EditTarget, HeadRecord
from kqview.mods import Added
from tests.attack.calls import OwnError, values
from tests.support import stock, tiny_gguf
from tests.support.reference import BertReference, Reference, relative_error
from tests.support.rows import forward_ids, random_ids, run, sequence_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from .conftest import MakeEngine

N_LAYER, N_HEAD, N_EMBD = 3, 4, 128
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
WAYS: dict[str, dict[str, Any]] = {
    "plain": EXACT,
    "kqview": {"kv_type": "f32", "flash_attn": True, "attention_kernel": "kqview"},
    "llama.cpp": {"kv_type": "f32", "flash_attn": True, "attention_kernel": "llama.cpp"},
    "q8_0": {"kv_type": "q8_0", "flash_attn": True},
}
# llama.cpp's flash attention sums in float16, a quantised cache rounds what it holds.
LIMITS = {"plain": 1e-5, "kqview": 1e-5, "llama.cpp": 1e-2, "q8_0": 0.14}
ALL = Capture("probs", hidden="all")


def vector(seed: int, n: int | None = None) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).normal(size=(N_EMBD,) if n is None else (n, N_EMBD))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose heads are large enough for a cache of 8-bit blocks."""
    path = tmp_path_factory.mktemp("model") / "llama.gguf"
    return tiny_gguf.write_model(path, arch="llama", n_embd=N_EMBD, rms_eps=1e-5)


class Case:
    """Edits, and what they mean to the reference."""

    def __init__(self, edits: Edit | list[Edit], **reference: Any) -> None:
        self.edits = edits
        self._reference = reference

    def of_length(self, n: int) -> dict[str, Any]:
        """Arguments of `Reference.forward` for a text of *n* tokens."""
        bias = self._reference.get("bias")
        return self._reference if bias is None else {**self._reference, "bias": bias[..., :n, :n]}


def _bias(n: int = 256) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.zeros((N_LAYER, N_HEAD, n, n))


def _added(il: int, x: Any) -> Any:
    return x + 0.7 * vector(1) if il in (0, 2) else x


def _added_at(il: int, x: Any) -> Any:
    x = x.copy()
    if il == 1:
        x[[3, 9]] += vector(2)
    return x


def _set(il: int, x: Any) -> Any:
    x = x.copy()
    if il == 1:
        x[[5, 2]] = vector(3, 2)
    return x


def cases() -> dict[str, Case]:
    boosted, blocked = _bias(), _bias()
    boosted[..., 2:7] += 1.5
    blocked[:, :, 6:, 1:4] = -np.inf
    in_layers, in_heads = _bias(), _bias()
    in_layers[1:, :, :, 2:7] += 1.5
    in_heads[2, 1:3, :, 0:3] -= 2.0
    in_heads[0, 3, 6:, 1:4] = -np.inf
    factors = np.ones((N_LAYER, N_HEAD))
    factors[0, 1], factors[2, 3] = 0.0, 2.0

    def both(il: int, x: Any) -> Any:
        return _set(il, _added(il, x))

    return {
        "add": Case(Edit.add(vector(1), [0, -1], scale=0.7), behind_layer=_added),
        "add at positions": Case(Edit.add(vector(2), 1, positions=[9, 3]), behind_layer=_added_at),
        "set": Case(Edit.set(vector(3, 2), 1, [5, 2]), behind_layer=_set),
        "heads": Case(Edit.scale_heads({(0, 1): 0.0, (2, -1): 2.0}), head_factors=factors),
        "bias": Case(Edit.attention_bias([(2, 7)], 1.5), bias=boosted),
        "block": Case(Edit.block((6, None), range(1, 4)), bias=blocked),
        "bias of layers": Case(Edit.attention_bias([(2, 7)], 1.5, layers=[1, 2]), bias=in_layers),
        "bias of heads": Case(
            [
                Edit.attention_bias([(0, 3)], -2.0, layers=[2], heads=[1, 2]),
                Edit.block((6, None), (1, 4), layers=[0], heads=[-1]),
            ],
            bias=in_heads,
        ),
        "several": Case(
            [
                Edit.add(vector(1), [0, 2], scale=0.7),
                Edit.set(vector(3, 2), 1, [5, 2]),
                Edit.scale_heads({(0, 1): 0.0, (2, 3): 2.0}),
                Edit.attention_bias([(2, 7)], 1.5),
            ],
            behind_layer=both,
            head_factors=factors,
            bias=boosted,
        ),
    }


CASES = cases()
PLAIN = Case([])


def error_of(model: Path, prompt: Sequence[int], tokens: Any, case: Case) -> float:
    """Largest error of rows and states of generated tokens, the reference having the same edits."""
    ids = sequence_of(prompt, tokens)
    want = forward_ids(model, ids, **case.of_length(len(ids)))
    found = 0.0
    for i, token in enumerate(tokens):
        query = len(prompt) - 1 + i
        rows, hidden = np.asarray(token.attention), np.asarray(token.hidden)
        found = max(
            found,
            relative_error(rows, want.probs[:, :, query, : query + 1]),
            relative_error(hidden, want.hidden[:, query]),
        )
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_prompt", [20, 100])
def test_edits_equal_the_reference(
    make_engine: MakeEngine, model: Path, n_prompt: int, name: str, way: str
) -> None:
    engine = make_engine(model, **WAYS[way])
    case, prompt, limit = CASES[name], random_ids(n_prompt), LIMITS[way]
    if way == "kqview" and n_prompt > 63:
        limit = LIMITS["llama.cpp"]  # it computes prompts of that length
    tokens = run(engine, prompt, 5, capture=ALL, edits=case.edits)
    assert error_of(model, prompt, tokens, case) <= limit
    # Without the edits, the values are others: the limit sees the difference.
    assert error_of(model, prompt, tokens, PLAIN) > 2 * limit


@pytest.mark.parametrize("name", CASES)
def test_edits_of_a_model_with_biases_and_other_rotation_equal_the_reference(
    make_engine: MakeEngine, tmp_path: Path, name: str
) -> None:
    path = tiny_gguf.write_model(tmp_path / "qwen2.gguf", arch="qwen2", n_embd=N_EMBD, rms_eps=1e-5)
    tokens = run(
        make_engine(path, **EXACT), random_ids(20), 5, capture=ALL, edits=CASES[name].edits
    )
    assert error_of(path, random_ids(20), tokens, CASES[name]) <= 1e-5


def test_edits_of_an_encoder_equal_the_reference(make_engine: MakeEngine, bert: Path) -> None:
    engine, ids, reference = make_engine(bert, **EXACT), random_ids(24), BertReference(bert)
    bias, factors = np.zeros((N_HEAD, 24, 24)), np.array([1.0, 0.0, 1.0, 2.0])
    bias[..., 2:7] += 1.5
    bias[:, 6:, 10:14] = -np.inf
    bias[:, range(10, 14), range(10, 14)] = 0.0  # a token sees itself
    edits = [
        Edit.attention_bias([(2, 7)], 1.5),
        Edit.block((6, None), (10, 14)),
        Edit.scale_heads({(il, h): float(factors[h]) for il in range(N_LAYER) for h in (1, 3)}),
    ]
    found = engine.attend(ids, "probs", edits=edits).array()
    assert relative_error(found, reference.forward(ids, bias, factors)[1]) <= 1e-4
    assert relative_error(found, reference.forward(ids)[1]) > 1e-2
    # llama.cpp does not name the outputs of its layers.
    with pytest.raises(errors.UnsupportedModel, match="edits: the output of layer"):
        engine.attend(ids, "probs", edits=Edit.add(np.ones(engine.model.n_embd), 0))


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_prompt_are_those_after_the_edits(
    make_engine: MakeEngine, model: Path, name: str
) -> None:
    engine, prompt, case = make_engine(model, **EXACT), random_ids(90), CASES[name]
    want = forward_ids(model, prompt, **case.of_length(90))
    found = engine.attend(prompt, Capture("probs", hidden="all"), edits=case.edits)
    assert relative_error(found.array(), want.probs) <= 1e-5
    assert relative_error(np.asarray(found.hidden), want.hidden) <= 1e-5
    scores = engine.attend(prompt, "scores", edits=case.edits).array()
    seen = np.isfinite(want.scores)
    assert np.array_equal(np.isfinite(scores), seen)
    np.testing.assert_allclose(scores[seen], want.scores[seen], rtol=1e-4, atol=1e-4)
    # The product of keys and queries itself is not what a bias changes.
    raw = engine.attend(prompt, "qk", edits=case.edits).array()
    np.testing.assert_allclose(raw[seen], want.kq[seen], rtol=1e-3, atol=1e-3)


def test_a_score_is_that_of_the_edited_model(make_engine: MakeEngine, model: Path) -> None:
    engine, ids, case = make_engine(model, **EXACT), random_ids(40), CASES["several"]
    logits = forward_ids(model, ids, **case.of_length(40)).logits
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = logprobs[np.arange(39), ids[1:]]
    score = engine.score(ids, edits=case.edits)
    np.testing.assert_allclose(np.asarray(score.logprobs)[-39:], want, atol=1e-4)


def test_slots_have_edits_of_their_own(make_engine: MakeEngine, model: Path) -> None:
    engine = make_engine(model, n_slots=4, **EXACT)
    wanted = [CASES["add"], PLAIN, CASES["heads"], CASES["bias"]]
    prompts = [random_ids(12 + i, seed=i) for i in range(4)]
    running = [
        engine.generate(
            prompt, slot=i, max_tokens=8, temperature=1.0, seed=i, ignore_eos=True, capture=ALL,
            edits=case.edits,
        )
        for i, (prompt, case) in enumerate(zip(prompts, wanted, strict=True))
    ]  # fmt: skip
    found: list[list[Any]] = [[] for _ in running]
    for _ in range(8):  # in turn: they share steps
        for tokens, one in zip(found, running, strict=True):
            tokens.append(next(one))
    for prompt, tokens, case in zip(prompts, found, wanted, strict=True):
        assert error_of(model, prompt, tokens, case) <= 1e-5


@pytest.mark.parametrize("way", WAYS)
def test_a_request_beside_edited_ones_is_itself(
    make_engine: MakeEngine, model: Path, way: str
) -> None:
    """Bit for bit. Rounding depends on which tokens share a step, so both begin with one step."""

    def beside(edits: Any) -> tuple[int, list[Any]]:
        """Steps of both requests together, and what the first one, without edits, has got."""
        engine = make_engine(model, n_slots=3, run_ahead=16, **WAYS[way])
        is_held, may_go = threading.Event(), threading.Event()

        def hold(rows: Any) -> None:  # the engine waits for it
            is_held.set()
            may_go.wait(60)

        held = Edit.hook(hold, layers=[0], time_limit_s=60)
        before = engine.generate([1], slot=2, max_tokens=1, edits=held)
        assert is_held.wait(60)
        shared = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "capture": ALL}
        first = engine.generate(random_ids(17, 5), slot=0, **shared)
        second = engine.generate(random_ids(17, 6), slot=1, edits=edits, **shared)
        may_go.set()
        tokens, _, _ = list(first), list(second), list(before)
        n_steps = engine.stats().n_decodes
        engine.close()
        return n_steps, [(t.id, np.array(t.attention), np.array(t.hidden)) for t in tokens]

    n_steps, plain = beside(None)
    for name in ("add", "heads", "several", "block", "bias of heads"):
        n, found = beside(CASES[name].edits)
        assert n == n_steps
        for ours, theirs in zip(found, plain, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


# ---- no cost without edits


def test_a_graph_without_edits_has_no_node(make_engine: MakeEngine, model: Path) -> None:
    engine = make_engine(model, **EXACT)
    prompt = random_ids(10)

    def nodes_of(**options: Any) -> int:
        run(engine, prompt, 2, **options)
        return engine.stats().graph_nodes_added

    assert nodes_of() == 0
    assert nodes_of(edits=[]) == 0
    assert nodes_of(edits=CASES["add"].edits) == 2
    assert nodes_of(edits=CASES["heads"].edits) == 2
    ours = make_engine(model, flash_attn=True, attention_kernel="kqview")
    run(ours, prompt, 2, edits=CASES["heads"].edits)
    assert ours.stats().graph_nodes_added == 0  # our attention scales what it gives out
    # Biases of all layers and heads are part of the mask that llama.cpp hands in.
    assert nodes_of(edits=[Edit.attention_bias([(0, 3)], 1.0), Edit.block((4, None), (0, 2))]) == 0
    assert nodes_of(edits=CASES["bias of layers"].edits) == 2
    assert nodes_of(edits=CASES["bias of heads"].edits) == 2
    assert nodes_of() == 0


# ---- what a cache is worth


def cached(engine: Engine, prompt: Sequence[int], **options: Any) -> int:
    generation = engine.generate(prompt, max_tokens=1, temperature=0.0, slot=0, **options)
    list(generation)
    return generation.usage.cached_tokens


def test_a_cache_is_reused_up_to_where_edits_differ(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(40)
    everywhere, again = Edit.add(vector(1), 0), Edit.add(vector(1), 0)
    assert cached(engine, prompt) == 0
    assert cached(engine, prompt) == 39
    assert cached(engine, prompt, edits=everywhere) == 0
    assert cached(engine, prompt, edits=[again]) == 39  # of equal values
    assert cached(engine, prompt, edits=Edit.add(vector(1), 0, scale=2.0)) == 0
    assert cached(engine, prompt) == 0
    # Edits that act later leave the cells before them.
    assert cached(engine, prompt, edits=Edit.add(vector(1), 1, positions=[20])) == 20
    assert cached(engine, prompt, edits=Edit.attention_bias([(10, 12)], 1.0)) == 10
    assert cached(engine, prompt, edits=Edit.block((30, None), (0, 5))) == 10
    assert cached(engine, prompt, edits=Edit.block((35, None), (0, 5))) == 30
    assert cached(engine, prompt) == 35


def test_what_a_cache_gives_equals_a_fresh_evaluation(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(40)
    for name in ("add at positions", "bias", "several", "block", "several", "set"):
        case = CASES[name]
        tokens = run(engine, prompt, 3, capture=ALL, edits=case.edits)
        assert error_of(model, prompt, tokens, case) <= 1e-5


def test_states_in_another_order_are_another_edit(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(40)
    states = np.stack([vector(1), vector(2)])
    assert cached(engine, prompt, edits=Edit.set(states, 0, [3, 5])) == 0
    assert cached(engine, prompt, edits=Edit.set(states, 0, [3, 5])) == 39
    assert cached(engine, prompt, edits=Edit.set(states, 0, [5, 3])) == 3


def test_a_copy_of_another_slot_has_the_same_edits(make_engine: MakeEngine, model: Path) -> None:
    engine = make_engine(model, n_slots=2, **EXACT)
    prompt, edit = random_ids(80), Edit.scale_heads({(0, 0): 0.5})

    def cached_in_second(**options: Any) -> int:
        engine.slots[1].clear()
        list(engine.generate(prompt, slot=0, max_tokens=1, edits=edit))
        generation = engine.generate(prompt, slot=1, max_tokens=1, **options)
        list(generation)
        return generation.usage.cached_tokens

    assert cached_in_second(edits=edit) == 79
    assert cached_in_second() == 0
    assert cached_in_second(edits=Edit.scale_heads({(0, 0): 0.25})) == 0


def test_a_saved_slot_remembers_its_edits_but_not_their_values(
    make_engine: MakeEngine, model: Path, tmp_path: Path
) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(40)
    edits = [Edit.add(vector(1), 0, positions=[25]), Edit.block((30, None), (0, 5))]
    list(engine.generate(prompt, max_tokens=4, slot=0, edits=edits))
    engine.slots[0].save_file(tmp_path / "slot")
    assert np.float32(vector(1)[:2]).tobytes() not in (tmp_path / "slot").read_bytes()[-4096:]
    for wanted, n in ((edits, 39), (edits[:1], 30), ([], 25)):
        engine.slots[0].restore_file(tmp_path / "slot")
        assert cached(engine, prompt, edits=wanted) == n
    # Tokens that moved up are as no edits of another request leave them.
    list(engine.generate(prompt, max_tokens=4, slot=0, edits=edits[0]))
    engine.slots[0].shift(10, 5)
    moved = engine.slots[0].tokens
    assert cached(engine, moved, edits=edits[0], reuse="prefix") == 10


def test_a_slot_forgets_edits_with_the_cells(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(40)
    edit = Edit.add(vector(1), 0, positions=[25])
    assert cached(engine, prompt, edits=edit) == 0
    engine.slots[0].truncate(30)
    assert cached(engine, prompt, edits=edit) == 30
    engine.slots[0].truncate(20)
    assert cached(engine, prompt) == 20
    engine.slots[0].clear()
    assert cached(engine, prompt) == 0


POOL = {
    "none": [],
    "add": [Edit.add(vector(1), 0)],
    "late": [Edit.add(vector(2), 0, positions=[12])],
    "block": [Edit.block((9, None), (1, 3))],
    "both": [Edit.add(vector(2), 0, positions=[12]), Edit.block((9, None), (1, 3))],
}


@pytest.mark.full
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*POOL]),
            st.sampled_from(["generate", "other", "truncate", "save", "restore", "shift"]),
            st.integers(0, 20),
        ),
        max_size=8,
    )
)
def test_no_sequence_of_operations_mixes_edits_up(
    edited_engine: Engine, operations: list[tuple[str, str, int]]
) -> None:
    engine, prompt = edited_engine, random_ids(20)
    slot = engine.slots[0]
    slot.clear()
    saved: Any = None
    for name, operation, n in operations:
        if operation == "truncate":
            slot.truncate(min(n, slot.n_tokens))
        elif operation == "save":
            saved = slot.save_marked()
        elif operation == "restore" and saved:
            slot.restore_marked(*saved)
        elif operation == "shift" and slot.n_tokens > n + 1:
            slot.shift(n, 1)
        # The other slot takes what it can from this one, and this one from the other.
        into = 1 if operation == "other" else 0
        tokens = run(engine, prompt, 2, capture=ALL, edits=POOL[name], slot=into)
        case = Case(POOL[name], **reference_for(name))
        assert error_of(engine_path(engine), prompt, tokens, case) <= 1e-5


def reference_for(name: str) -> dict[str, Any]:
    def behind(il: int, x: Any) -> Any:
        x = x.copy()
        if il == 0 and name == "add":
            x += vector(1)
        if il == 0 and name in ("late", "both"):
            x[12] += vector(2)
        return x

    bias = _bias()
    if name in ("block", "both"):
        bias[:, :, 9:, 1:3] = -np.inf
    return {"behind_layer": behind, "bias": bias}


_paths: dict[int, Path] = {}


def engine_path(engine: Engine) -> Path:
    return _paths[id(engine)]


@pytest.fixture(scope="module")
def edited_engine(model: Path) -> Any:
    from tests.support.engines import open_engine

    with open_engine(model, n_threads=1, n_ctx=512, n_slots=2, **EXACT) as engine:
        _paths[id(engine)] = model
        yield engine


# ---- edits that mods change


def run_with_mod(engine: Engine, prompt: Sequence[int], answer: Any, **options: Any) -> list[Any]:
    """Eight tokens with a mod that returns what *answer* gives for a step's Added event."""

    @mod
    def changing(event: Any, actions: Any, tokenizer: Any) -> Any:
        return answer(event.step, actions) if isinstance(event, Added) else None

    generation = engine.generate(
        prompt, max_tokens=8, temperature=0.0, ignore_eos=True, capture=ALL, mods=[changing],
        mods_strict=True, **options,
    )  # fmt: skip
    return list(generation)


def test_a_mod_changes_edits_from_the_next_step_on(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(20)

    def answer(step: int, actions: Any) -> Any:
        if step == 2:
            return actions.edit(Edit.add(vector(1), 0))
        return actions.clear_edits() if step == 5 else None

    tokens = run_with_mod(engine, prompt, answer)

    # The tokens of steps 2 to 4 are evaluated with the edit: those at 21, 22 and 23.
    def behind(il: int, x: Any) -> Any:
        x = x.copy()
        if il == 0:
            x[21:24] += vector(1)
        return x

    assert error_of(model, prompt, tokens, Case([], behind_layer=behind)) <= 1e-5
    assert [start for start, _ in engine.slots[0].edits] == [0, 21, 24]
    # The cells of the prompt, and of the first token, are as they are without edits.
    assert cached(engine, sequence_of(prompt, tokens)) == 21


def test_a_mod_replaces_the_edits_of_its_request(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(20)
    tokens = run_with_mod(
        engine, prompt, lambda step, actions: actions.clear_edits() if step == 3 else None,
        edits=Edit.add(vector(1), 0),
    )  # fmt: skip

    def behind(il: int, x: Any) -> Any:
        x = x.copy()
        if il == 0:
            x[:22] += vector(1)
        return x

    assert error_of(model, prompt, tokens, Case([], behind_layer=behind)) <= 1e-5


def test_a_backtrack_evaluates_with_the_edits_in_force(
    make_engine: MakeEngine, model: Path
) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(20)
    is_done: list[int] = []

    def answer(step: int, actions: Any) -> Any:
        if step == 1:
            return actions.edit(Edit.add(vector(1), 0))
        if step == 4 and not is_done:
            is_done.append(step)
            return actions.backtrack(2, [65])
        return None

    tokens = run_with_mod(engine, prompt, answer)
    ids = [*prompt, *engine.slots[0].tokens[20:]]

    def behind(il: int, x: Any) -> Any:
        x = x.copy()
        if il == 0:
            x[20:] += vector(1)
        return x

    want = forward_ids(model, ids, behind_layer=behind)
    assert relative_error(np.asarray(tokens[-1].hidden), want.hidden[:, -1]) <= 1e-5
    assert is_done


def test_edits_of_a_mod_that_do_not_fit_are_its_failure(
    make_engine: MakeEngine, model: Path
) -> None:
    engine = make_engine(model, **EXACT)
    with pytest.raises(errors.ModFailed):
        run_with_mod(
            engine, random_ids(20), lambda step, actions: actions.edit(Edit.add(vector(1), 9))
        )
    assert len(run(engine, random_ids(20), 2)) == 2


# ---- control vectors, directions and patching


def test_a_control_vector_is_the_sum_of_its_directions(
    make_engine: MakeEngine, model: Path, tmp_path: Path
) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(20)
    directions = np.float32(vector(4, 2))
    saved = ControlVector((1, 2), directions, "llama")
    assert saved.save(tmp_path / "v.gguf") == (tmp_path / "v.gguf").stat().st_size
    read = {one.name: one.data for one in tiny_gguf.Reader(tmp_path / "v.gguf").tensors}
    assert np.array_equal(read["direction.1"], directions[0])
    tokens = run(
        engine, prompt, 4, capture=ALL, edits=Edit.control_vector(tmp_path / "v.gguf", scale=1.5)
    )

    def behind(il: int, x: Any) -> Any:
        return x if il == 0 else x + 1.5 * directions[il - 1]

    assert error_of(model, prompt, tokens, Case([], behind_layer=behind)) <= 1e-5
    # The same edits have the same hash, however they are made.
    assert cached(engine, prompt, edits=saved.edit(1.5)) == 19
    only = Edit.control_vector(tmp_path / "v.gguf", layers=[2])
    assert cached(engine, prompt, edits=Edit.add(directions[1:], [2])) == 0
    assert cached(engine, prompt, edits=only) == 19


@pytest.mark.needs("stock server")
def test_a_control_vector_does_what_it_does_in_llama_server(
    make_engine: MakeEngine, model: Path, tmp_path: Path
) -> None:
    """The same file, there for the whole context: the same tokens and logprobs."""
    path, prompt = tmp_path / "v.gguf", random_ids(20)
    ControlVector((1, 2), np.float32(vector(4, 2)), "llama").save(path)
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "n_probs": 3, "ignore_eos": True}
    options = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
    with stock.server(model, *options, "--control-vector-scaled", f"{path}:1.5") as ask:
        want = ask("POST", "/completion", body)["completion_probabilities"]
    edit = Edit.control_vector(path, scale=1.5)
    engine = make_engine(model, **EXACT)
    asked: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    tokens = list(engine.generate(prompt, edits=edit, top_logprobs=3, **asked))
    assert [one.id for one in tokens] == [one["id"] for one in want]
    for ours, theirs in zip(tokens, want, strict=True):
        top = [one["logprob"] for one in theirs["top_logprobs"]]
        np.testing.assert_allclose([p for _, p in ours.top_logprobs or ()], top, atol=1e-5)
    plain = [one.id for one in engine.generate(prompt, **asked)]
    assert plain != [one.id for one in tokens]


def test_files_that_are_no_control_vector_are_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ModelLoadError, match="no tensor direction"):
        Edit.control_vector(model)
    with pytest.raises(errors.ModelLoadError, match="No such file"):
        Edit.control_vector(tmp_path / "missing.gguf")
    ControlVector((1,), np.float32(vector(4, 1)), "llama").save(tmp_path / "v.gguf")
    with pytest.raises(errors.InvalidEdit, match=r"layers has \[2\]"):
        Edit.control_vector(tmp_path / "v.gguf", layers=[2])
    whole = (tmp_path / "v.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:-40])
    with pytest.raises(errors.ModelLoadError, match="direction"):
        Edit.control_vector(tmp_path / "cut.gguf")
    with pytest.raises(errors.RequestError, match="layer 0"):
        ControlVector((0,), np.float32(vector(4, 1)), "llama").save(tmp_path / "v.gguf")


@pytest.mark.parametrize("method", ["mean", "pca"])
def test_a_direction_is_that_of_the_states_of_last_tokens(
    make_engine: MakeEngine, model: Path, method: Any
) -> None:
    engine = make_engine(model, n_slots=2, **EXACT)
    positive, negative = ([random_ids(9 + i, seed=10 * k + i) for i in range(5)] for k in (1, 2))
    found = kqview.vector(engine, positive, negative, method=method)
    assert found.layers == (1, 2)
    states = [
        np.stack([forward_ids(model, ids).hidden[1:, -1] for ids in some], 1)
        for some in (positive, negative)
    ]
    differences = states[0] - states[1]
    want = differences.mean(1)
    if method == "pca":
        for i, of_layer in enumerate(differences):
            values, directions = np.linalg.eigh(of_layer.T @ of_layer)
            first = directions[:, np.argmax(values)]
            want[i] = first * (first @ of_layer.mean(0))
    np.testing.assert_allclose(found.directions, want, rtol=1e-3, atol=1e-4)
    last = kqview.vector(engine, positive, negative, layers=[-1], method=method)
    assert last.layers == (N_LAYER - 1,)
    for layers in ([N_LAYER], 2, []):
        with pytest.raises(errors.InvalidCapture, match=r"hidden|layers"):
            kqview.vector(engine, positive, negative, layers=layers)  # type: ignore[arg-type]


def test_patching_all_positions_equals_the_reference(make_engine: MakeEngine, model: Path) -> None:
    engine = make_engine(model, n_slots=2, **EXACT)
    clean, corrupted = random_ids(12, seed=1), random_ids(12, seed=2)
    effects = kqview.patch(engine, clean, corrupted, (5, 9))
    assert effects.shape == (N_LAYER, N_HEAD)

    def difference(result: Any) -> float:
        return float(result.logits[-1, 5] - result.logits[-1, 9])

    at_clean, at_corrupted = (difference(forward_ids(model, ids)) for ids in (clean, corrupted))
    outputs = Reference.load(model).head_outputs(clean)
    for layer, head in ((0, 1), (1, 3), (2, 0)):
        patched = Reference.load(model).forward(
            corrupted, angle_type="f32", patched_heads={(layer, head): outputs[layer][head]}
        )
        want = (difference(patched) - at_corrupted) / (at_clean - at_corrupted)
        assert abs(effects[layer, head] - want) <= 1e-3 * max(1.0, abs(want))
    # At the last token alone, only that one's output is another.
    last = kqview.patch(engine, clean, corrupted, (5, 9), layers=[2], positions=[-1])
    np.testing.assert_allclose(last[0], effects[2], atol=1e-4)  # no layer reads the others
    with pytest.raises(errors.RequestError, match="12 tokens and corrupted 11"):
        kqview.patch(engine, clean, corrupted[1:], (5, 9))
    with pytest.raises(errors.RequestError, match="both prompts"):
        kqview.patch(engine, clean, clean, (5, 9))
    again = kqview.patch(engine, clean, corrupted, (5, 9), layers=[-1], positions=[-1])
    np.testing.assert_allclose(again, last, atol=1e-4)
    for options, says in (
        ({"metric": (5, 10**6)}, "a token of metric"),
        ({"metric": (5, -1)}, "a token of metric"),
        ({"metric": (5,)}, "metric must be"),
        ({"metric": 5}, "metric must be"),
        ({"layers": []}, "layers must be"),
        ({"layers": [N_LAYER]}, "layer 3"),
        ({"positions": []}, "positions must be"),
        ({"positions": [12]}, "positions has 12"),
    ):
        with pytest.raises(errors.RequestError, match=says):
            kqview.patch(engine, clean, corrupted, **{"metric": (5, 9), **options})  # type: ignore[arg-type]


def test_no_record_takes_cells_that_were_computed_for_another() -> None:
    target = EditTarget(n_layer=1, n_embd=4, n_heads={0: 2}, n_prompt=3)
    # Each record is gone, and its place in memory free, before the next one is made.
    keys = [HeadRecord([0]).write(_core.EditPlan(), target)[0] for _ in range(20)]
    assert len(set(keys)) == 20


# ---- hooks


def test_a_hook_sees_and_changes_the_tokens_of_its_request(
    make_engine: MakeEngine, model: Path
) -> None:
    engine, prompt = make_engine(model, n_slots=2, **EXACT), random_ids(20)
    seen: list[Any] = []

    def doubled(activations: Any) -> Any:
        seen.append(activations)
        return 2.0 * activations

    other = engine.generate(random_ids(9, seed=4), slot=1, max_tokens=6, capture=ALL)
    tokens = run(engine, prompt, 4, slot=0, capture=ALL, edits=Edit.hook(doubled, layers=[1]))

    def behind(il: int, x: Any) -> Any:
        return 2.0 * x if il == 1 else x

    assert error_of(model, prompt, tokens, Case([], behind_layer=behind)) <= 1e-5
    assert sum(len(one) for one in seen) == 23
    want = forward_ids(model, sequence_of(prompt, tokens), behind_layer=behind)
    assert relative_error(2.0 * np.concatenate(seen), want.hidden[1]) <= 1e-5  # views that are kept
    assert error_of(model, random_ids(9, seed=4), list(other), PLAIN) <= 1e-5
    assert cached(engine, prompt) == 0
    assert cached(engine, prompt, edits=Edit.hook(lambda rows: None, layers=[0])) == 0


@pytest.mark.parametrize("at", ["attention_out", "mlp_out"])
@pytest.mark.parametrize("way", WAYS)
def test_a_hook_changes_what_a_part_of_a_layer_adds(
    make_engine: MakeEngine, model: Path, way: str, at: Any
) -> None:
    engine, prompt = make_engine(model, **WAYS[way]), random_ids(20)
    edits = Edit.hook(lambda rows: 2.0 * rows, at=at, layers=[0, 2])
    tokens = run(engine, prompt, 4, capture=ALL, edits=edits)

    def behind(part: str, il: int, x: Any) -> Any:
        return 2.0 * x if part == at and il != 1 else x

    assert error_of(model, prompt, tokens, Case([], behind_part=behind)) <= LIMITS[way]
    assert error_of(model, prompt, tokens, PLAIN) > 2 * LIMITS[way]


def test_edits_before_and_behind_a_hook_act_in_order(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(20)
    edits = [
        Edit.add(vector(1), 1),
        Edit.hook(lambda rows: rows * 2.0, layers=[1]),
        Edit.add(vector(2), 1),
    ]
    tokens = run(engine, prompt, 3, capture=ALL, edits=edits)

    def behind(il: int, x: Any) -> Any:
        return 2.0 * (x + vector(1)) + vector(2) if il == 1 else x

    assert error_of(model, prompt, tokens, Case([], behind_layer=behind)) <= 1e-5


def test_a_hook_that_fails_ends_its_request_alone(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model, n_slots=2, **EXACT), random_ids(20)
    is_over = threading.Event()

    def raises(rows: Any) -> Any:
        raise KeyError("lost")

    def hangs(rows: Any) -> Any:
        is_over.wait(60)

    def calls(rows: Any) -> Any:
        return engine.score(prompt).logprobs  # waits for the engine, which waits for this

    for fn, limit_s, says in (
        (raises, 10.0, "raised KeyError"),
        (lambda rows: rows[:1], 10.0, "returned shape"),
        (lambda rows: rows * np.nan, 10.0, "not finite"),
        (hangs, 0.2, "longer than its limit"),
        (calls, 0.2, "longer than its limit"),
    ):
        other = engine.generate(random_ids(9, seed=4), slot=1, max_tokens=6, capture=ALL)
        edits = Edit.hook(fn, layers=[1], time_limit_s=limit_s)
        with pytest.raises(errors.RequestError, match=says):
            run(engine, prompt, 4, slot=0, edits=edits)
        assert error_of(model, random_ids(9, seed=4), list(other), PLAIN) <= 1e-5
    is_over.set()
    for arguments in ({"fn": 3}, {"at": "mlp_in"}, {"layers": []}, {"time_limit_s": 0}):
        with pytest.raises(errors.InvalidEdit):
            Edit.hook(**{"fn": raises, "layers": [1], **arguments})  # type: ignore[arg-type]


def test_threads_of_hooks_end_with_their_requests(make_engine: MakeEngine, model: Path) -> None:
    engine = make_engine(model, **EXACT)
    for _ in range(3):
        run(engine, random_ids(9), 2, edits=Edit.hook(lambda rows: None, layers=[0, 1]))
    gc.collect()
    hooks = [one for one in threading.enumerate() if one.name == "kqview-hook"]
    for one in hooks:
        one.join(10)
        assert not one.is_alive()


# ---- what is refused

NAN = float("nan")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Edit.add([1.0, NAN], 0), "not finite"),
        (lambda: Edit.add([1e30], 0), "beyond"),
        (lambda: Edit.add([[[1.0]]], 0), "shape"),
        (lambda: Edit.add("abc", 0), "array of floats"),
        (lambda: Edit.add([1.0], []), "layers"),
        (lambda: Edit.add([1.0], [0, 0]), "layers"),
        (lambda: Edit.add([1.0], ["a"]), "layers"),
        (lambda: Edit.add([1.0], 0, scale=NAN), "scale"),
        (lambda: Edit.add([[1.0], [2.0]], [0, 1, 2]), "2 rows"),
        (lambda: Edit.add([1.0], 0, positions=[1, 1]), "positions"),
        (lambda: Edit.set([[1.0], [2.0]], 0, [1]), "2 rows"),
        (lambda: Edit.set([1.0], 0, []), "positions"),
        (lambda: Edit.scale_heads({}), "factors"),
        (lambda: Edit.scale_heads({3: 1.0}), "key of factors"),  # type: ignore[dict-item]
        (lambda: Edit.scale_heads({(0, 0): NAN}), "factor"),
        (lambda: Edit.attention_bias([], 1.0), "spans"),
        (lambda: Edit.attention_bias([(0, 5), (4, 6)], 1.0), "disjoint"),
        (lambda: Edit.attention_bias([(5, 5)], 1.0), "start < stop"),
        (lambda: Edit.attention_bias([(0, 5)], 101.0), "log_factor"),
        (lambda: Edit.attention_bias([(0, 5)], NAN), "log_factor"),
        (lambda: Edit.block((3, 2), (0, 1)), "queries"),
        (lambda: Edit.block((0, None), (-1, 1)), "keys"),
    ],
)
def test_invalid_edits_are_refused(make: Any, says: str) -> None:
    with pytest.raises(errors.InvalidEdit, match=says):
        make()


@pytest.mark.parametrize("name", ["add", "set", "scale_heads", "attention_bias", "block"])
def test_arguments_of_any_kind_are_refused_or_taken(name: str) -> None:
    n_most = {"set": 3, "scale_heads": 1}.get(name, 4)
    n_least = {"set": 3, "scale_heads": 1}.get(name, 2)
    for seed in range(500):
        rng = random.Random(f"{name}{seed}")
        arguments = [values(rng) for _ in range(rng.randint(n_least, n_most))]
        # An object's own error is its caller's.
        with contextlib.suppress(errors.InvalidEdit, OwnError):
            getattr(Edit, name)(*arguments)


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        (Edit.add([1.0], 0), "1 values, but the model's residual stream 128"),
        (Edit.add(vector(1), 3), "layer 3, but the model has 3"),
        (Edit.add(vector(1), 0, positions=[10]), "positions has 10, but the prompt has 10"),
        (Edit.add(vector(1), 0, positions=[1, -9]), "positions has one twice"),
        (Edit.add(vector(1), [2, -1]), "layers has one twice"),
        (Edit.scale_heads({(2, 0): 0.5, (-1, 0): 0.5}), "factors has one twice"),
        (Edit.attention_bias([(0, 2)], 1.0, layers=[0, -3]), "layers has one twice"),
        (Edit.attention_bias([(0, 2)], 1.0, layers=[0], heads=[3, -1]), "heads has one twice"),
        (Edit.scale_heads({(0, 4): 0.0}), "head 4 of layer 0, which has 4"),
        (Edit.scale_heads({(-4, 0): 0.0}), "layer -4"),
        (Edit.attention_bias([(10, 12)], 1.0), "starts at 10, but the prompt has 10"),
        (Edit.attention_bias([(0, 2)], 1.0, layers=[7]), "layer 7"),
        (Edit.attention_bias([(0, 2)], 1.0, heads=[4]), "head 4"),
        ([Edit.block((0, None), (0, 1))] * 257, "at most 256"),
        ([None], r"edits\[0\]"),
        ("add", "list of Edit"),
    ],
)
def test_edits_that_the_model_has_no_place_for_are_refused(
    make_engine: MakeEngine, model: Path, edits: Any, says: str
) -> None:
    engine, prompt = make_engine(model), random_ids(10)
    for call in (engine.generate, engine.attend, engine.score):
        with pytest.raises(errors.InvalidEdit, match=says):
            call(prompt, edits=edits)
    assert len(run(engine, prompt, 2)) == 2


def test_positions_that_move_are_refused(make_engine: MakeEngine, model: Path) -> None:
    engine, prompt = make_engine(model), random_ids(10)
    for options in ({"context_shift": True}, {"reuse": "shift"}):
        with pytest.raises(errors.InvalidEdit, match=r"edits\[1\] names positions"):
            engine.generate(
                prompt,
                edits=[CASES["add"].edits, CASES["bias"].edits],
                **options,  # type: ignore[list-item]
            )
        run(engine, prompt, 2, edits=CASES["add"].edits, **options)
    with pytest.raises(errors.InvalidEdit, match="names positions"):
        engine.generate(prompt, edits=CASES["bias"].edits, context_shift=np.True_)


# ---- what it is for


def test_patching_finds_the_heads_that_copy(make_engine: MakeEngine) -> None:
    """Without those that patching ranks highest, the demo model copies no better than by chance."""
    engine = make_engine(DEMO, n_slots=2)
    rng = np.random.default_rng(3)
    words = engine.tokenize(" red blue green dog cat house tree river stone", add_special=False)
    effects = np.zeros((len(engine.model.attention_layers), engine.model.n_head))
    copied: list[tuple[list[int], int]] = []
    for i in range(12):
        ids = rng.choice(words, 8, replace=False).tolist()
        other = next(word for word in words if word not in ids)
        # The token behind the repeated one is to be copied; in the corrupted prompt it is another.
        clean, corrupted = [*ids, *ids[:4]], [*ids[:4], other, *ids[5:], *ids[:4]]
        if i < 4:
            effects += kqview.patch(engine, clean, corrupted, (ids[4], other))
        copied.append((clean, words.index(ids[4])))
    ranked = np.argsort(-effects, axis=None).tolist()
    layers, n_head = engine.model.attention_layers, engine.model.n_head

    def probability(heads: list[int]) -> float:
        """Of the token to copy, among the nine words; by chance it is 0.11."""
        chosen = {(layers[head // n_head], head % n_head): 0.0 for head in heads}
        capture = Capture("probs", layers=[], vocab_logits=True)
        found: list[float] = []
        for clean, i in copied:
            edits = [Edit.scale_heads(chosen)] if chosen else None
            options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            token = next(engine.generate(clean, capture=capture, edits=edits, **options))
            logits = np.asarray(token.logits, np.float64)[words]
            found.append(float(np.exp(logits[i]) / np.exp(logits).sum()))
        return float(np.mean(found))

    assert probability([]) > 0.9
    assert probability(ranked[:2]) < 0.25
    assert probability(ranked[:3]) < 0.15
    for _ in range(3):
        assert probability(rng.permutation(ranked[3:])[:2].tolist()) > 0.9


# ---- traces


def test_a_trace_says_which_edits_were_in_force_but_not_their_values(
    make_engine: MakeEngine, model: Path
) -> None:
    engine, prompt = make_engine(model, **EXACT), random_ids(20)

    @mod
    def changing(event: Any, actions: Any, tokenizer: Any) -> Any:
        is_third = isinstance(event, Added) and event.step == 3
        return actions.clear_edits() if is_third else None

    edits = [Edit.add(vector(1), 0), Edit.block((10, None), (0, 4))]
    generation = engine.generate(
        prompt, max_tokens=5, temperature=0.0, ignore_eos=True, mods=[changing], edits=edits,
        trace=True,
    )  # fmt: skip
    generation.read()
    assert generation.trace is not None
    stats = generation.trace.request.inference_stats
    assert stats is not None
    begun, ended = stats["edits"]
    kept = engine.slots[0].edits
    assert begun["start"] == 0
    assert [(one["hash"], one["first"]) for one in begun["edits"]] == list(kept[0][1])
    assert ended == {"start": kept[1][0], "edits": []}
    assert len(generation.trace.to_payload()) > 0
    plain = engine.generate(prompt, max_tokens=2, trace=True)
    plain.read()
    assert plain.trace is not None
    assert "edits" not in (plain.trace.request.inference_stats or {})
