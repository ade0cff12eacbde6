"""Nobody copies attention: the array shows the memory that the compute kernel wrote."""

from __future__ import annotations

import statistics
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture
from tests.support.rows import KINDS, Kind, random_ids, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kqview.types import Token

    from .conftest import MakeEngine


def address_of(array: Any) -> int:
    return array.__array_interface__["data"][0]


@pytest.fixture
def token(make_engine: MakeEngine, tiny_llama: Path) -> Token:
    return run(make_engine(tiny_llama), random_ids(12), 3, capture="probs")[-1]


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_view_begins_where_the_kernel_wrote_in_a_block_of_the_pool(
    make_engine: MakeEngine, tiny_qwen2: Path, kind: Kind, dtype: Any, flash_attn: bool
) -> None:
    engine = make_engine(tiny_qwen2, flash_attn=flash_attn, n_ubatch=32)
    generation = engine.generate(
        random_ids(70), max_tokens=30, ignore_eos=True, capture=Capture(kind, dtype=dtype)
    )
    held = []
    written_at: list[int] = []
    source: Any = generation._source
    receive = source.receive

    def note_address(event: Any) -> Any:
        written_at.append(getattr(event, "written_at", 0))
        return receive(event)

    source.receive = note_address
    for token in generation:
        rows = token.attention
        assert isinstance(rows, np.ndarray)
        assert rows.flags.c_contiguous
        begin = address_of(rows)
        assert written_at[-1] == begin
        assert engine._core.pool_contains(begin)
        assert engine._core.pool_contains(begin + rows.nbytes - 1)
        held.append(rows)
    assert len({address_of(rows) for rows in held}) == 30
    assert engine.stats().copied_bytes == 0
    assert engine.stats().pool.n_leased == 30


def test_addresses_outside_the_pool_are_not_contained(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama)
    token = run(engine, random_ids(5), 1, capture="probs")[0]
    assert not engine._core.pool_contains(address_of(np.array(token.attention)))


def test_view_owns_nothing_and_its_base_is_the_lease(token: Token) -> None:
    rows = token.attention
    assert isinstance(rows, np.ndarray)
    assert not rows.flags.owndata
    base: Any = rows
    while (deeper := getattr(base, "base", None)) is not None or isinstance(base, memoryview):
        base = base.obj if isinstance(base, memoryview) else deeper
    assert not isinstance(base, np.ndarray | bytes | bytearray)
    assert type(base).__module__ == "nanobind"


@pytest.mark.parametrize(
    "part",
    [np.s_[:], np.s_[0], np.s_[..., 1:3], np.s_[::2, ::-1]],
    ids=["all", "layer", "columns", "step"],
)
def test_view_and_its_slices_cannot_be_written(token: Token, part: Any) -> None:
    assert isinstance(token.attention, np.ndarray)
    rows = token.attention[part]
    before = rows.copy()
    assert not rows.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        rows[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        rows += 1
    with pytest.raises(ValueError, match="read-only"):
        np.multiply(rows, 0, out=rows)
    np.testing.assert_array_equal(rows, before)


def test_view_cannot_be_made_writeable(token: Token) -> None:
    rows = token.attention
    assert isinstance(rows, np.ndarray)
    for view in (rows, rows[0], rows.reshape(-1), rows.T, rows.view(np.uint32), np.asarray(rows)):
        assert np.shares_memory(view, rows)
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.setflags(write=True)
    assert memoryview(rows).readonly
    assert not np.asarray(memoryview(rows)).flags.writeable
    assert rows.__array_interface__["data"][1]


def test_attention_rows_hold_their_block_while_any_slice_lives(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, poisons_blocks=True)
    tokens = run(engine, random_ids(12), 3, capture="probs")
    assert engine.stats().pool.n_leased == 3
    part: Any = tokens[1].attention[1, 2, 3:9]  # pyright: ignore[reportOptionalSubscript]
    expected = part.copy()
    tokens.clear()
    assert engine.stats().pool.n_leased == 1
    np.testing.assert_array_equal(part, expected)
    window = memoryview(part)
    del part
    assert engine.stats().pool.n_leased == 1
    assert window.tolist() == expected.tolist()
    window.release()
    del window
    assert engine.stats().pool.n_leased == 0


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_taking_a_token_allocates_nothing_of_a_rows_size(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_ctx=1200)
    generation = engine.generate(random_ids(1000), max_tokens=100, ignore_eos=True, capture="probs")
    held: list[Token] = []
    grown: list[int] = []
    for _ in range(100):
        tracemalloc.reset_peak()
        before, _peak = tracemalloc.get_traced_memory()
        token = next(generation)
        grown.append(tracemalloc.get_traced_memory()[1] - before)
        held.append(token)
    rows = held[-1].attention
    assert isinstance(rows, np.ndarray)
    assert rows.nbytes == 3 * 4 * 1099 * 4
    # No token took memory for its rows. A few kB may be another thread's, but not for every token.
    assert max(grown) < 3 * 4 * 1000 * 4
    assert statistics.median(grown) < rows.nbytes / 8
    numpy_data = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
    snapshot = tracemalloc.take_snapshot().filter_traces([numpy_data])
    assert sum(trace.size for trace in snapshot.traces) < rows.nbytes
    # A copy would have shown, in both measures.
    before, _peak = tracemalloc.get_traced_memory()
    copy = rows.copy()
    assert tracemalloc.get_traced_memory()[0] - before >= rows.nbytes
    snapshot = tracemalloc.take_snapshot().filter_traces([numpy_data])
    assert sum(trace.size for trace in snapshot.traces) >= copy.nbytes
