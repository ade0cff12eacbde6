"""Aborts of ggml, which CUDA's backend has for every failed call of the driver, are errors."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine
from kqview.errors import DecodeError, KqviewError, ModelLoadError, OutOfMemory
from tests.support.rows import random_ids, run

if TYPE_CHECKING:
    from tests.engine.conftest import MakeEngine

ROOT = Path(__file__).resolve().parents[2]
N_PROMPT, N_TOKENS = 20, 8
BROKEN = "open a new Engine"
NO_MEMORY = "CUDA error: out of memory"
LOST = "CUDA error: unspecified launch failure"


@pytest.mark.parametrize("seed", range(6))  # the step goes on: which call fails is a race
def test_an_abort_while_a_text_is_cut_is_an_error(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, seed: int
) -> None:
    """What waits for rows before a slot's cache changes reports the device's failure."""
    engine = make_engine(
        tiny_llama, n_gpu_layers=-1, n_slots=2, flash_attn=True, device_rows="beside", run_ahead=300
    )
    run(engine, random_ids(N_PROMPT, seed=1), 2, slot=1)
    running = engine.generate(
        random_ids(N_PROMPT), slot=0, max_tokens=300, ignore_eos=True, capture="probs"
    )
    next(running)
    device.set(abort_at="wait")
    with pytest.raises(DecodeError, match="fake device error|" + BROKEN):
        engine.generate(
            random_ids(N_PROMPT, seed=2 + seed), slot=1, max_tokens=300, ignore_eos=True,
            capture="probs",
        ).read()  # fmt: skip
    device.set()
    with contextlib.suppress(DecodeError):  # it may have ended before
        running.read()
    with pytest.raises(DecodeError, match=BROKEN):
        engine.generate(random_ids(N_PROMPT), max_tokens=2).read()


@pytest.mark.parametrize("abort_at", ["graph", "copy", "wait"])
def test_an_abort_in_a_step_breaks_the_engine_and_no_other(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, abort_at: str
) -> None:
    prompt = random_ids(N_PROMPT)
    other = make_engine(tiny_llama, n_gpu_layers=-1)
    want = run(other, prompt, N_TOKENS, capture="probs")
    engine = make_engine(tiny_llama, n_gpu_layers=-1, n_slots=2)
    held = run(engine, prompt, N_TOKENS, capture="probs", slot=0)
    running = engine.generate(prompt, slot=1, max_tokens=300, ignore_eos=True, capture="probs")
    next(running)
    device.set(abort_at=abort_at, abort_in=3)
    with pytest.raises(DecodeError, match="fake device error") as caught:
        engine.generate(prompt, slot=0, max_tokens=300, ignore_eos=True, capture="probs").read()
    assert BROKEN in str(caught.value)
    device.set()
    with pytest.raises(DecodeError, match=BROKEN):
        running.read()
    for work in (
        lambda: engine.generate(prompt, max_tokens=2).read(),
        lambda: engine.generate(prompt, max_tokens=2, capture="logits").read(),
        lambda: engine.slots[0].save(),
        lambda: engine.attend(prompt).array(),
    ):
        with pytest.raises(DecodeError, match=BROKEN):
            work()
    assert engine.stats().n_failed >= 2
    # Views and engines that are not of the broken one go on, and so do its own views.
    for a, b in zip(held, want, strict=True):
        assert a.attention is not None
        assert b.attention is not None
        assert np.array_equal(a.attention, b.attention)
    assert [t.id for t in run(other, prompt, N_TOKENS)] == [t.id for t in want]
    engine.close()
    del held, a, b
    again = make_engine(tiny_llama, n_gpu_layers=-1)
    assert [t.id for t in run(again, prompt, N_TOKENS)] == [t.id for t in want]


def test_memory_that_runs_out_in_a_step_is_out_of_memory_and_then_a_broken_engine(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    device.set(abort_at="graph", abort_log=NO_MEMORY)
    with pytest.raises(OutOfMemory, match=r"out of memory.*n_ctx"):
        engine.generate(random_ids(N_PROMPT), max_tokens=2).read()
    with pytest.raises(DecodeError, match=BROKEN):
        engine.generate(random_ids(N_PROMPT), max_tokens=2).read()


@pytest.mark.parametrize("log", [LOST, NO_MEMORY])
def test_a_broken_engine_leaves_its_context_and_the_weights_only_of_a_lost_device(
    tiny_llama: Path, device: Any, log: str
) -> None:
    def used_bytes() -> int:
        gc.collect()
        return device.counts()["used_bytes"]

    before = used_bytes()
    with Engine(tiny_llama, n_gpu_layers=-1, n_ctx=256, n_threads=1) as engine:
        opened = used_bytes()
        device.set(abort_at="graph", abort_log=log)
        with pytest.raises(KqviewError):
            engine.generate(random_ids(N_PROMPT), max_tokens=2).read()
    del engine
    assert before < used_bytes()
    if log == NO_MEMORY:
        assert used_bytes() < opened
    else:
        assert used_bytes() == opened


@pytest.mark.parametrize("abort_in", range(4))
@pytest.mark.parametrize("log", [LOST, NO_MEMORY])
def test_an_abort_while_an_engine_is_opened_is_an_error(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, abort_in: int, log: str
) -> None:
    device.set(abort_at="buffer", abort_in=abort_in, abort_log=log)
    expected = OutOfMemory if log == NO_MEMORY else ModelLoadError
    with pytest.raises(expected, match=r"llama\.cpp failed while"):
        Engine(tiny_llama, n_gpu_layers=-1, n_ctx=256, n_threads=1)
    device.set()
    assert len(run(make_engine(tiny_llama, n_gpu_layers=-1), random_ids(N_PROMPT), 2)) == 2


def test_an_abort_while_rows_get_their_memory_is_an_error(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    device.set(abort_at="buffer")
    with pytest.raises(DecodeError, match="fake device error"):
        run(engine, random_ids(N_PROMPT), 2, capture="logits")
    device.set()
    with pytest.raises(DecodeError, match=BROKEN):
        run(engine, random_ids(N_PROMPT), 2)


def test_an_abort_on_a_thread_of_llama_cpp_still_ends_the_process(tiny_llama: Path) -> None:
    script = f"""
import kqview._core, sys
fake = sys.modules["kqview._fake_device"]
fake.register(1)
engine = kqview.Engine({str(tiny_llama)!r}, n_ctx=256, n_threads=1)
fake.set(abort_at="thread", abort_log="lost")
engine.generate([65, 66], max_tokens=2).read()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=os.environ, capture_output=True, text=True,
        check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == -6, done.stderr
    assert "fake device error" in done.stderr
    assert "llama.cpp aborted the process" in done.stderr
