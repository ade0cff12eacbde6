"""Moving keys of every type and head size: done right, or refused before llama.cpp is reached.

llama.cpp rotates quantised keys by a matrix that it only has where 64 divides the head size, and
reads a null pointer where it moves them without: hence a process of its own for each head size.
Keys of the first layer depend on a token and its position alone, so its rows after a shift are
those of a fresh evaluation, as in test_shift_models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import kqview
from tests.support import tiny_gguf

QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
KV_TYPES = ("f32", "f16", "bf16", *QUANTISED)
HEAD_SIZES = (32, 64, 80, 96, 128)
OPERATIONS = ("slot.shift", 'reuse="shift"', "context_shift")
BLOCK = 32  # llama.cpp quantises so many values at a time: heads have to be whole ones
# Largest error of a row by its largest logit. Keys are rounded again after each move.
LIMITS = {
    **{"f32": 2e-4, "f16": 4e-3, "q8_0": 3e-2, "q5_1": 0.15, "q5_0": 0.15},
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
        capture_output=True, text=True, timeout=60, check=False,
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
                assert outcome <= LIMITS[kv_type], (kv_type, operation, outcome)


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
