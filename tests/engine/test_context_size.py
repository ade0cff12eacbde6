"""The context of a slot when none is asked for: what fits in memory, at most the trained one."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from kqview import Engine
from kqview.demo import MODEL_PATH
from kqview.engine import check_opening
from kqview.errors import OutOfMemory
from tests.support import tiny_gguf
from tests.support.rows import has_device
from tests.support.tiny_gguf import write_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 2**20
N_CTX_TRAIN = 2**20  # as files of small models claim
N_CTX_LEAST = 4096
PROMPT = list(range(65, 80))


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose trained context would take 1.5 GB."""
    return write_model(tmp_path_factory.mktemp("long") / "long.gguf", n_ctx_train=N_CTX_TRAIN)


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def set_free(n_bytes: int) -> None:
        monkeypatch.setattr("kqview.engine_options.free_memory_bytes", lambda: n_bytes)

    return set_free


def needed_bytes(model: Path, **options: int | None) -> int:
    host, *_ = check_opening(model, n_gpu_layers=0, **options)  # pyright: ignore[reportArgumentType]
    return host.needed_bytes


@pytest.mark.parametrize("n_slots", [1, 3])
@pytest.mark.parametrize("free_mib", [80, 200])
def test_default_context_is_the_largest_power_of_two_that_fits(
    long_model: Path, set_free: Callable[[int], None], free_mib: int, n_slots: int
):
    set_free(free_mib * MIB)
    with Engine(long_model, n_threads=1, n_slots=n_slots, n_gpu_layers=0) as engine:
        n_ctx = engine.n_ctx
        assert N_CTX_LEAST < n_ctx < N_CTX_TRAIN
        assert n_ctx.bit_count() == 1
        weights = long_model.stat().st_size
        most = (free_mib * MIB - weights) / 2 + weights
        assert engine.memory_bytes <= most
        assert needed_bytes(long_model, n_ctx=n_ctx, n_slots=n_slots) <= most * 1.01
        assert needed_bytes(long_model, n_ctx=2 * n_ctx, n_slots=n_slots) > most * 0.99
        # The server asks the same question before it opens a model.
        assert needed_bytes(long_model, n_slots=n_slots) == needed_bytes(
            long_model, n_ctx=n_ctx, n_slots=n_slots
        )
        assert len(list(engine.generate(PROMPT, max_tokens=3, ignore_eos=True))) == 3


def test_default_context_is_the_trained_one_where_that_fits(
    tmp_path: Path, set_free: Callable[[int], None], caplog: pytest.LogCaptureFixture
):
    model = write_model(tmp_path / "model.gguf", n_ctx_train=6000)
    set_free(2**40)
    with caplog.at_level(logging.INFO, logger="kqview.engine"), Engine(model, n_threads=1) as it:
        assert it.n_ctx == 6000
    assert [
        (r.levelname, "6000" in r.getMessage()) for r in caplog.records if r.name == "kqview.engine"
    ] == [("INFO", True)]


@pytest.mark.parametrize(("n_ctx_train", "n_ctx"), [(N_CTX_TRAIN, N_CTX_LEAST), (300, 300)])
def test_default_context_is_never_smaller_than_a_usable_one(
    tmp_path: Path, set_free: Callable[[int], None], n_ctx_train: int, n_ctx: int
):
    model = write_model(tmp_path / "model.gguf", n_ctx_train=n_ctx_train)
    set_free(0)
    with Engine(model, n_threads=1) as engine:
        assert engine.n_ctx == n_ctx


def test_context_that_is_asked_for_does_not_depend_on_free_memory(
    long_model: Path, set_free: Callable[[int], None]
):
    set_free(1)
    with Engine(long_model, n_threads=1, n_ctx=10_000) as engine:
        assert engine.n_ctx == 10_000


def test_slot_returns_to_an_engine_with_another_default_context(
    long_model: Path, set_free: Callable[[int], None]
):
    contexts: list[int] = []
    saved = b""
    for free_mib in (200, 40):
        set_free(free_mib * MIB)
        with Engine(long_model, n_threads=1) as engine:
            contexts.append(engine.n_ctx)
            slot = engine.slots[0]
            if saved:
                slot.restore(saved)
                assert list(slot.tokens)[: len(PROMPT)] == PROMPT
            list(engine.generate(PROMPT, max_tokens=3, slot=0))
            saved = bytes(slot.save())
    assert contexts[0] > contexts[1]


# ---- what a context will need, known before it is opened


@pytest.mark.parametrize("n_slots", [2, 40, 100, 128, 150, 200, 255, 256])
def test_large_context_needs_what_small_ones_of_as_many_slots_foretell(
    long_model: Path, n_slots: int
):
    n_ctx = -(-3 * 2**20 // n_slots // 256) * 256
    small, double, large = (
        needed_bytes(long_model, n_ctx=size, n_slots=n_slots) for size in (512, 1024, n_ctx)
    )
    assert large == pytest.approx(small + (n_ctx / 512 - 1) * (double - small), rel=0.05)


@pytest.mark.parametrize(
    "write", [tiny_gguf.write_model, tiny_gguf.write_mamba, tiny_gguf.write_gemma3n]
)
def test_memory_grows_as_steadily_beyond_what_is_planned_whole(
    tmp_path: Path, write: Callable[[Path], Path]
):
    model = write(tmp_path / "model.gguf")
    sizes = [needed_bytes(model, n_ctx=n_ctx, n_slots=256) for n_ctx in (768, 1024, 1280, 1536)]
    steps = [after - before for before, after in pairwise(sizes)]
    assert steps == pytest.approx([steps[0]] * 3, rel=0.1)
    for n_ctx in (256, 1100, 5000):
        by_slots = [needed_bytes(model, n_ctx=n_ctx, n_slots=2**i) for i in range(9)]
        assert by_slots == sorted(by_slots)


@pytest.mark.parametrize("write", [tiny_gguf.write_model, tiny_gguf.write_mamba])
@pytest.mark.parametrize(("n_ctx", "n_slots"), [(512, 5), (1024, 64), (1280, 220)])
def test_context_takes_what_was_estimated(
    tmp_path: Path, write: Callable[[Path], Path], n_ctx: int, n_slots: int
):
    model = write(tmp_path / "model.gguf")
    estimate = needed_bytes(model, n_ctx=n_ctx, n_slots=n_slots)
    with Engine(model, n_ctx=n_ctx, n_slots=n_slots, n_threads=1, n_gpu_layers=0) as engine:
        taken = engine.memory_bytes + 64 * n_ctx * n_slots  # llama.cpp's notes on each cell
    weights = model.stat().st_size
    # Products of long prompts may be computed on a device all the same; its buffers are no part of
    # an estimate of layers on the host.
    on_device = 2**20 if has_device() else 0
    assert taken - weights - on_device <= estimate <= 1.05 * taken + 2**20


def test_as_many_cells_are_refused_in_many_slots_as_in_few():
    for n_ctx, n_slots in ((2**22, 256), (2**23, 128), (2**30, 1)):
        with pytest.raises(OutOfMemory, match=f"{n_ctx} tokens x {n_slots} slots"):
            check_opening(MODEL_PATH, n_ctx=n_ctx, n_slots=n_slots, kv_type="f32", n_gpu_layers=0)


def test_a_model_that_guesses_needs_its_memory_too():
    alone = check_opening(MODEL_PATH, n_ctx=256, n_gpu_layers=0)
    both = check_opening(MODEL_PATH, n_ctx=256, n_gpu_layers=0, draft=MODEL_PATH)
    assert [one.needed_bytes for one in both] == 2 * [one.needed_bytes for one in alone]
    with Engine.demo(n_ctx=256) as engine, Engine.demo(n_ctx=256, draft=MODEL_PATH) as guessing:
        assert guessing.memory_bytes > 1.5 * engine.memory_bytes
