"""Context shift: what is left continues exactly, and columns are positions again.

The reference keeps what was computed: keys and values of the tokens that stay were computed with
the discarded ones before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import errors
from tests.support.cached_reference import CachedReference
from tests.support.reference import relative_error
from tests.support.rows import KINDS, Kind, random_ids

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import MakeEngine

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
        assert relative_error(rows, getattr(result, FIELDS[kind])[:, :, 0]) <= 2e-5


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
    assert relative_error(np.asarray(token.attention), result.probs[:, :, 0]) <= 2e-5


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
    with pytest.raises(errors.RequestError, match="shift"):
        engine.slots[0].shift(n_keep, n_discard)
    assert engine.slots[0].tokens == PROMPT


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
