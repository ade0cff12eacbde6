"""Context shift, asked for (`Slot.shift`) and automatic (``context_shift=True``).

What is left continues exactly, and columns are positions again. The reference keeps what was
computed: keys and values of the tokens that stay were computed with the discarded ones before them.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kqview
from kqview import Capture, errors
from tests.support import tiny_gguf
from tests.support.reference import CachedReference, relative_error, row_errors
from tests.support.rows import KINDS, Kind, near, random_ids

if TYPE_CHECKING:
    from kqview import Token
    from tests.engine.conftest import MakeEngine


# ---- Slot.shift

PROMPT = random_ids(40)
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
FIELDS = {"logits": "kq", "scores": "scores", "probs": "probs"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("n_keep", "n_discard"), [(4, 10), (0, 7), (30, 9), (12, 1)])
def test_rows_after_a_shift_equal_reference(
    make_engine: MakeEngine,
    request: pytest.FixtureRequest,
    architecture: str,
    kind: Kind,
    n_keep: int,
    n_discard: int,
) -> None:
    model: Path = request.getfixturevalue(f"tiny_{architecture}")
    engine = make_engine(model, **EXACT)
    slot = engine.slots[0]
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    reference = CachedReference(model)
    reference.decode_all(PROMPT)
    assert slot.shift(n_keep, n_discard) == 40 - n_discard
    left = PROMPT[:n_keep] + PROMPT[n_keep + n_discard :]
    assert slot.tokens == left
    reference.discard(n_keep, n_discard)
    ids = [*left, 7, 9]
    tokens = list(engine.generate(ids, max_tokens=6, capture=kind, reuse="shift", **GREEDY))
    reference.decode(7)
    fed = [9, *(token.id for token in tokens[:-1])]
    for token, result in zip(tokens, reference.decode_all(fed), strict=True):
        rows = np.asarray(token.attention)
        assert rows.shape[-1] == reference.n_tokens - (len(fed) - 1 - token.index)
        assert relative_error(rows, getattr(result, FIELDS[kind])[:, :, 0]) <= near(2e-5)


def test_shifts_in_a_row_and_a_rollback_between(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    slot = engine.slots[0]
    reference = CachedReference(tiny_llama)
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    reference.decode_all(PROMPT)
    for n_keep, n_discard in ((3, 5), (0, 4), (20, 6)):
        slot.shift(n_keep, n_discard)
        reference.discard(n_keep, n_discard)
        options = {**GREEDY, "reuse": "shift"}
        with engine.generate([*slot.tokens, 5], max_tokens=20, **options) as generation:
            next(generation)
        reference.decode(5)
        assert slot.n_tokens == reference.n_tokens
    (token,) = engine.generate(
        [*slot.tokens, 6], max_tokens=1, capture="probs", reuse="shift", **GREEDY
    )
    result = reference.decode(6)
    assert relative_error(np.asarray(token.attention), result.probs[:, :, 0]) <= near(2e-5)


def test_other_slots_do_not_move(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_slots=3, **EXACT)
    for i in range(3):
        engine.generate(PROMPT, max_tokens=1, slot=i, **GREEDY).read()
    before = [list(engine.generate(PROMPT, max_tokens=8, slot=i, **GREEDY)) for i in (0, 2)]
    engine.slots[1].shift(5, 10)
    after = [list(engine.generate(PROMPT, max_tokens=8, slot=i, **GREEDY)) for i in (0, 2)]
    assert [[t.id for t in g] for g in before] == [[t.id for t in g] for g in after]
    assert engine.slots[1].tokens == PROMPT[:5] + PROMPT[15:]


@pytest.mark.parametrize(
    ("n_keep", "n_discard"),
    [(-1, 2), (0, 0), (0, -1), (41, 1), (30, 11), (2**63, 1), (1, 2**63), (2**31, 2**31)],
)
def test_ranges_beyond_the_tokens_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, n_keep: int, n_discard: int
) -> None:
    engine = make_engine(tiny_llama)
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    with pytest.raises(errors.RequestError, match=r"n_keep|n_discard"):
        engine.slots[0].shift(n_keep, n_discard)
    assert engine.slots[0].tokens == PROMPT


def test_ranges_are_removed_in_one_move(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    slot = engine.slots[0]
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    reference = CachedReference(tiny_llama)
    reference.decode_all(PROMPT)
    # In any order; two of them overlap.
    assert slot.remove([range(30, 33), (4, 8), (6, 12), (39, 40)]) == 28
    for start, stop in ((39, 40), (30, 33), (4, 12)):
        reference.discard(start, stop - start)
    left = PROMPT[:4] + PROMPT[12:30] + PROMPT[33:39]
    assert (slot.tokens, slot.n_exact) == (left, 4)
    tokens = list(
        engine.generate([*left, 7, 9], max_tokens=4, capture="probs", reuse="shift", **GREEDY)
    )
    reference.decode(7)
    fed = [9, *(token.id for token in tokens[:-1])]
    for token, result in zip(tokens, reference.decode_all(fed), strict=True):
        assert relative_error(token.rows, result.probs[:, :, 0]) <= near(2e-5)


@pytest.mark.parametrize(
    "ranges",
    [[(0, 41)], [(39, 2**40)], [(3, 3)], [(5, 4)], [(-1, 2)], [4], ["ab"], "ab", [(1, 2, 3)]],
)
def test_ranges_that_the_slot_does_not_have_remove_nothing(
    make_engine: MakeEngine, tiny_llama: Path, ranges: Any
) -> None:
    engine = make_engine(tiny_llama)
    engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
    with pytest.raises(errors.RequestError, match="ranges"):
        engine.slots[0].remove(ranges)
    assert engine.slots[0].tokens == PROMPT
    assert engine.slots[0].remove([]) == len(PROMPT)


def test_a_busy_slot_and_a_closed_engine_are_refused(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    generation = engine.generate(PROMPT, max_tokens=50, **GREEDY)
    next(generation)
    with pytest.raises(errors.BusyError):
        engine.slots[0].shift(0, 5)
    generation.close()
    engine.slots[0].shift(0, 5)
    engine.close()
    with pytest.raises(errors.ClosedError):
        engine.slots[0].shift(0, 5)


def test_recurrent_models_are_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    from tests.support import tiny_gguf

    engine = make_engine(tiny_gguf.write_mamba(tmp_path / "mamba.gguf"))
    engine.generate([1, 2, 3, 4], max_tokens=1, **GREEDY).read()
    with pytest.raises(errors.UnsupportedModel):
        engine.slots[0].shift(0, 2)
    assert engine.slots[0].tokens == [1, 2, 3, 4]


# ---- automatic: a full slot discards tokens and goes on

N_CTX = 64
SMALL: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": N_CTX}
SHIFT: dict[str, Any] = {**GREEDY, "context_shift": True}
# llama.cpp's flash attention rounds V to F16, which shows from the second layer on, the more the
# sharper heads are; another column would be an error of 1.
LIMITS = {False: 2e-5, True: 3e-2}


def check_rows(
    model: Path, tokens: list[Token], kind: Kind, n_keep: int, n_discard: int, limit: float
) -> CachedReference:
    """Every row against a reference that discards in step, and the columns it says it has."""
    reference = CachedReference(model)
    reference.decode_all(PROMPT[:-1])
    sequence = [*PROMPT, *(token.id for token in tokens)]
    n_gone = 0
    for token in tokens:
        fed = sequence[len(PROMPT) - 1 + token.index]
        if reference.n_tokens == N_CTX:
            reference.discard(n_keep, n_discard)
            n_gone += n_discard
        found = row_errors(reference.decode(fed), token, kind)
        assert found[0] <= near(2e-5)
        assert max(found) <= near(limit)
        assert token.discarded == range(n_keep, n_keep + n_gone)
        indices = token.source_indices(np.arange(reference.n_tokens))
        kept = [i for i in range(len(PROMPT) + token.index) if i not in token.discarded]
        assert indices.tolist() == kept
    assert n_gone > 0
    return reference


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_after_shifts_equal_reference(
    make_engine: MakeEngine, tiny_llama: Path, kind: Kind, flash_attn: bool
) -> None:
    engine = make_engine(tiny_llama, **SMALL | {"flash_attn": flash_attn})
    generation = engine.generate(
        PROMPT, max_tokens=90, capture=kind, n_keep=4, n_discard=20, **SHIFT
    )
    tokens = list(generation)
    assert len(tokens) == 90
    assert generation.finish_reason == "length"
    reference = check_rows(tiny_llama, tokens, kind, 4, 20, LIMITS[flash_attn])
    assert engine.slots[0].n_tokens == reference.n_tokens
    sequence = [*PROMPT, *generation.tokens]
    last = tokens[-1]
    held = [
        sequence[i] for i in last.source_indices(np.arange(np.asarray(last.attention).shape[-1]))
    ]
    assert engine.slots[0].tokens == held


@pytest.mark.parametrize(
    ("n_keep", "n_discard", "expected"),
    [
        (0, None, (0, 32)),
        (10, None, (10, 27)),
        (-1, None, (40, 12)),
        (-1, 1, (40, 1)),
        (0, 64, (0, 64)),
        (40, 24, (40, 24)),
    ],
)
def test_what_is_kept_and_discarded(
    make_engine: MakeEngine,
    tiny_qwen2: Path,
    n_keep: int,
    n_discard: int | None,
    expected: tuple[int, int],
) -> None:
    engine = make_engine(tiny_qwen2, **SMALL)
    tokens = list(
        engine.generate(
            PROMPT, max_tokens=60, capture="probs", n_keep=n_keep, n_discard=n_discard, **SHIFT
        )
    )
    check_rows(tiny_qwen2, tokens, "probs", *expected, 2e-5)


def test_prompt_that_fills_the_slot_is_shifted(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, **SMALL)
    prompt = random_ids(N_CTX, seed=3)
    tokens = list(engine.generate(prompt, max_tokens=20, capture="probs", **SHIFT))
    assert [np.asarray(t.attention).shape[-1] for t in tokens[:3]] == [64, 33, 34]
    with pytest.raises(errors.RequestError, match="n_keep"):
        engine.generate(prompt, n_keep=-1, **SHIFT)
    with pytest.raises(errors.PromptTooLong):
        engine.generate([*prompt, 1], **SHIFT)


def test_slots_shift_each_for_itself(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_slots=3, **SMALL)
    prompts = [random_ids(n, seed=n) for n in (10, 30, 50)]

    async def take(i: int) -> list[int]:
        generation = engine.generate(
            prompts[i], max_tokens=150, n_keep=i, capture="probs" if i == 1 else None, **SHIFT
        )
        return [token.id async for token in generation]

    async def take_all() -> list[list[int]]:
        return await asyncio.gather(*(take(i) for i in range(3)))

    together = asyncio.run(take_all())
    for i in range(3):
        alone = make_engine(tiny_llama, **SMALL)
        tokens = alone.generate(prompts[i], max_tokens=150, n_keep=i, **SHIFT)
        assert [token.id for token in tokens] == together[i]


def test_positions_of_the_largest_values_map_back(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, **SMALL)
    options = {"max_tokens": 60, "n_keep": 2, **SHIFT}
    whole = list(engine.generate(PROMPT, capture="probs", **options))
    engine.slots[0].clear()
    capture = Capture("probs", top_k=3)
    for full, token in zip(whole, engine.generate(PROMPT, capture=capture, **options), strict=True):
        best = np.argsort(-np.asarray(full.attention), axis=-1, kind="stable")[..., :3]
        np.testing.assert_array_equal(
            token.source_indices(np.asarray(token.attention_positions)), full.source_indices(best)
        )


@pytest.mark.parametrize(
    "options",
    [
        {"n_keep": -2},
        {"n_keep": 41},
        {"n_keep": 2**63},
        {"n_keep": 2**31 + 4},
        {"n_keep": 1.5},
        {"n_discard": 0},
        {"n_discard": -1},
        {"n_discard": 65},
        {"n_discard": 2**63},
        {"n_discard": 2**32 + 1},
        {"n_keep": 40, "n_discard": 25},
        {"n_keep": 2**31 - 1, "n_discard": 2**31 - 1},
        {"context_shift": 1},
        {"context_shift": False, "n_keep": 1},
        {"context_shift": False, "n_discard": 5},
    ],
)
def test_ranges_that_no_slot_has_are_refused(
    make_engine: MakeEngine, tiny_llama: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(tiny_llama, **SMALL)
    with pytest.raises(errors.RequestError, match=r"n_keep|n_discard|context_shift"):
        engine.generate(PROMPT, **SHIFT | options)
    assert engine.stats().n_requests == 0


# ---- keys of every type and head size
#
# llama.cpp rotates quantised keys by a matrix that it only has where 64 divides the head size, and
# reads a null pointer where it moves them without: hence a process of its own for each head size.
# Keys of the first layer depend on a token and its position alone, so its rows after a shift are
# those of a fresh evaluation.

QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
KV_TYPES = ("f32", "f16", "bf16", *QUANTISED)
HEAD_SIZES = (32, 64, 80, 96, 128)
OPERATIONS = ("slot.shift", 'reuse="shift"', "context_shift")
BLOCK = 32  # llama.cpp quantises so many values at a time: heads have to be whole ones
# Largest error of a row by its largest logit. Keys are rounded again after each move.
TYPE_LIMITS = {
    **{"f32": near(2e-4, "shifted"), "f16": 4e-3, "q8_0": 3e-2, "q5_1": 0.15, "q5_0": 0.15},
    **dict.fromkeys(("q4_1", "q4_0", "iq4_nl"), 0.35),
}
# Prints each case before what comes of it: the last line then names what ended the process.
SCRIPT = """
import json, sys
import numpy as np
from kqview import Capture, Engine, errors
MODEL, KV_TYPES, OPERATIONS = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
PROMPT = np.random.default_rng(1).integers(0, 256, 90).tolist()
LEFT = PROMPT[:8] + PROMPT[20:]
GREEDY = dict(temperature=0, ignore_eos=True)

def rows_of(engine, ids, **options):
    capture = Capture("logits", layers=[0])
    (token,) = engine.generate(ids, max_tokens=1, capture=capture, **GREEDY, **options)
    return np.asarray(token.attention[0])

def moved(engine, operation):
    '''What the slot holds after the operation.'''
    if operation == "slot.shift":
        engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
        engine.slots[0].shift(8, 12)
    elif operation == 'reuse="shift"':
        engine.generate(PROMPT, max_tokens=1, **GREEDY).read()
        again = engine.generate(LEFT, max_tokens=1, reuse="shift", **GREEDY)
        again.read()
        assert again.usage.cached_tokens == len(LEFT) - 1
    else:
        options = dict(context_shift=True, n_keep=8, n_discard=12)
        full = engine.generate(PROMPT, max_tokens=8, **options, **GREEDY)
        assert len(list(full)) == 8
        assert full.finish_reason == "length"
    return engine.slots[0].tokens

def case(kv_type, operation):
    n_ctx = 94 if operation == "context_shift" else 512
    try:
        options = dict(n_ctx=n_ctx, n_threads=1, kv_type=kv_type, flash_attn=kv_type != "f32")
        engine = Engine(MODEL, **options)
    except errors.RequestError:
        return "no such cache"
    with engine:
        try:
            held = moved(engine, operation)
        except errors.UnsupportedModel as refused:
            assert engine.slots[0].n_tokens in (0, len(PROMPT))
            return str(refused)
        kept = rows_of(engine, [*held, 7], reuse="shift")
        engine.slots[0].clear()
        fresh = rows_of(engine, [*held, 7])
        return float(np.abs(kept - fresh).max() / np.abs(fresh).max())

for kv_type in KV_TYPES:
    for operation in OPERATIONS:
        print(kv_type, operation, end=": ", flush=True)
        print(json.dumps(case(kv_type, operation)), flush=True)
"""


def run(model: Path, **environment: str) -> dict[tuple[str, str], float | str]:
    """What each case gave: the error of its rows, or what refused it."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(model), json.dumps(KV_TYPES),
         json.dumps(OPERATIONS)],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(kqview.__file__).parents[1]), **environment},
    )  # fmt: skip
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    cases: dict[tuple[str, str], float | str] = {}
    for line in done.stdout.splitlines():
        name, _, outcome = line.partition(": ")
        kv_type, _, operation = name.partition(" ")
        cases[kv_type, operation] = json.loads(outcome)
    return cases


def check(cases: dict[tuple[str, str], float | str], head_size: int) -> None:
    for kv_type in KV_TYPES:
        for operation in OPERATIONS:
            outcome = cases[kv_type, operation]
            if kv_type in QUANTISED and head_size % BLOCK:
                assert outcome == "no such cache"
            elif kv_type == "bf16":
                assert isinstance(outcome, str)
                assert "bf16" in outcome
            else:
                assert isinstance(outcome, float)
                assert outcome <= TYPE_LIMITS[kv_type], (kv_type, operation, outcome)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_positions_of_every_cache_type_move_or_are_refused(tmp_path: Path, head_size: int) -> None:
    model = tiny_gguf.write_model(
        tmp_path / "model.gguf", n_layer=2, n_embd=2 * head_size, n_head=2, n_head_kv=1
    )
    check(run(model), head_size)


def test_positions_move_where_llama_cpp_is_told_not_to_rotate_keys(tmp_path: Path) -> None:
    model = tiny_gguf.write_model(
        tmp_path / "model.gguf", n_layer=2, n_embd=128, n_head=2, n_head_kv=1
    )
    check(run(model, LLAMA_ATTN_ROT_DISABLE="1"), 64)
