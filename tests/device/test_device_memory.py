"""Memory that runs out on a device, page-locked memory, and head sizes that CUDA would convert."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.errors import DecodeError, OutOfMemory
from tests.support import tiny_gguf
from tests.support.reference import relative_error
from tests.support.rows import Kind, both, check_equal, random_ids, run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kqview.engine_options import DeviceRows
    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

N_PROMPT, N_TOKENS = 20, 6
PINNED = "not page-locked"


@pytest.fixture(params=["in graph", "beside"])
def device_rows(request: pytest.FixtureRequest) -> DeviceRows:
    return request.param


# ---- allocations that fail


def test_whichever_allocation_fails_is_out_of_memory_and_the_next_request_is_right(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, device_rows: DeviceRows
) -> None:
    cpu, gpu = both(make_engine, tiny_llama, n_slots=2, flash_attn=True, device_rows=device_rows)
    prompt = random_ids(N_PROMPT)
    want = run(cpu, prompt, N_TOKENS, capture="probs", slot=0)
    text = [token.id for token in run(cpu, prompt, 2 * N_TOKENS, slot=1)]
    for n_before in count():
        other = gpu.generate(
            prompt, slot=1, max_tokens=2 * N_TOKENS, ignore_eos=True,
            temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7,
        )  # fmt: skip
        got = [next(other).id]
        device.set(fail_buffer_in=n_before)
        try:
            ours = run(gpu, prompt, N_TOKENS, capture="probs", slot=0)
        except OutOfMemory:
            ours = None
        device.set()
        with contextlib.suppress(OutOfMemory):  # it shares the step whose graph found no room
            got += [token.id for token in other]
        assert got == text[: len(got)]
        assert other.finish_reason == ("length" if len(got) == len(text) else "error")
        if ours is not None:
            break
        check_equal(run(gpu, prompt, N_TOKENS, capture="probs", slot=0), want)
        gpu = make_engine(
            tiny_llama, n_gpu_layers=-1, n_slots=2, flash_attn=True, kv_type="f32",
            attention_kernel="llama.cpp", device_rows=device_rows,
        )  # fmt: skip
    check_equal(ours, want)
    assert n_before >= 8  # results, staging, compute buffers of both devices


def test_whichever_step_fails_ends_its_request_and_the_next_one_is_right(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, device_rows: DeviceRows
) -> None:
    engines = both(make_engine, tiny_llama, flash_attn=True, device_rows=device_rows)
    prompt = random_ids(N_PROMPT)
    want, first = (run(one, prompt, N_TOKENS, capture="probs") for one in engines)
    check_equal(first, want)
    gpu = engines[1]
    for n_before in count():
        device.set(fail_graph_in=n_before)
        try:
            ours = run(gpu, prompt, N_TOKENS, capture="probs", cache_prompt=False)
        except DecodeError:
            ours = None
        device.set()
        check_equal(run(gpu, prompt, N_TOKENS, capture="probs", cache_prompt=False), want)
        if ours is not None:
            break
    check_equal(ours, want)
    assert n_before >= N_TOKENS  # graphs of two devices


# ---- page-locked memory


def test_page_locking_holds_up_no_other_text(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    cpu, gpu = both(make_engine, tiny_llama, n_slots=2)
    prompt = random_ids(N_PROMPT)
    want = run(cpu, prompt, N_TOKENS, capture="logits", slot=0)
    device.set(holds_pins=True)
    try:
        captured = gpu.generate(
            prompt, slot=0, max_tokens=N_TOKENS, ignore_eos=True, capture="logits",
            temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7,
        )  # fmt: skip
        # A text of many steps begins and ends meanwhile.
        assert len(run(gpu, random_ids(9, seed=2), 40, slot=1)) == 40
        assert gpu.stats().pool.n_blocks == 0
    finally:
        device.set()
    check_equal(list(captured), want)
    assert gpu.stats().pool.plain_fallbacks == 0
    assert gpu.stats().pool.pinned_bytes > 0


@pytest.mark.parametrize("is_refused", [False, True])
def test_memory_that_is_not_page_locked_is_told_once(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, is_refused: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING)
    cpu, gpu = both(make_engine, tiny_llama, pinned_bytes=2**30 if is_refused else 8192)
    if is_refused:
        device.set(pinned_bytes=0)
    prompt = random_ids(N_PROMPT)
    want, ours = (run(one, prompt, 30, capture="logits") for one in (cpu, gpu))
    check_equal(ours, want)
    pool = gpu.stats().pool
    assert pool.plain_fallbacks > 1
    assert pool.pinned_bytes <= 8192
    run(gpu, prompt, 2)
    (said,) = (r.getMessage() for r in caplog.records if PINNED in r.getMessage())
    assert "pinned_bytes" in said


def test_no_memory_is_page_locked_where_none_is_wanted(
    make_engine: MakeEngine, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cpu, gpu = both(make_engine, tiny_llama, pinned_bytes=0)
    want, ours = (run(one, random_ids(4), 4, capture="logits") for one in (cpu, gpu))
    check_equal(ours, want)
    assert gpu.stats().pool.pinned_bytes == 0
    assert PINNED not in caplog.text


# ---- head sizes that are no multiple of 64


def check_close(ours: list[Token], theirs: list[Token]) -> None:
    """Keys and queries in float16."""
    for a, b in zip(ours, theirs, strict=True):
        assert a.id == b.id
        assert relative_error(np.asarray(a.rows), np.asarray(b.rows, np.float64)) < 5e-3


@pytest.mark.parametrize(("size", "kind"), [(80, "logits"), (96, "scores"), (112, "probs")])
def test_keys_of_every_head_size_stay_as_they_are(
    make_engine: MakeEngine, tmp_path: Path, device: Any, size: int, kind: Kind,
    device_rows: DeviceRows,
) -> None:  # fmt: skip
    # From 513 cells on CUDA would make them F32.
    model = tiny_gguf.write_preset(tmp_path / "model.gguf", "tiny_llama", n_embd=4 * size)
    options = {"kv_type": "f16", "flash_attn": True, "n_ctx": 1024, "device_rows": device_rows}
    engines = both(make_engine, model, **options)
    prompt = random_ids(600)

    def converted(name: str) -> int:
        device.set(poses_as_cuda=name == "CUDA")
        before = device.counts()["n_converted_products"]
        theirs, ours = (run(one, prompt, 3, capture=kind) for one in engines)
        check_close(ours, theirs)
        return device.counts()["n_converted_products"] - before

    assert converted("CUDA") == 0
    engines = both(make_engine, model, **options)
    assert converted("FAKE") > 0  # the count sees what it is about


def test_one_slot_of_several_has_its_keys_in_blocks(
    make_engine: MakeEngine, tmp_path: Path, device: Any
) -> None:
    model = tiny_gguf.write_preset(tmp_path / "model.gguf", "tiny_llama", n_embd=4 * 80)
    device.set(poses_as_cuda=True)
    before = device.counts()["n_converted_products"]
    engines = both(make_engine, model, kv_type="f16", flash_attn=True, n_ctx=1024, n_slots=2)
    for slot in (0, 1):
        theirs, ours = (
            run(one, random_ids(600, seed=slot), 3, capture="probs", slot=slot) for one in engines
        )
        check_close(ours, theirs)
    assert device.counts()["n_converted_products"] == before


@pytest.fixture
def one_device(device: Any) -> Iterator[Any]:
    """The devices of these tests share their memory: with one of them, what is free is its own."""
    device.unregister()
    device.register(1)
    yield device
    device.unregister()
    device.register(2)


@pytest.mark.parametrize("prompt_rows", [False, True])
def test_memory_that_products_take_is_there_or_the_request_is_refused(
    make_engine: MakeEngine, tmp_path: Path, one_device: Any, prompt_rows: bool
) -> None:
    device = one_device
    # Keys of several slots or queries are converted, into memory that is taken in the step.
    model = tiny_gguf.write_preset(tmp_path / "model.gguf", "tiny_llama", n_embd=4 * 80)
    device.set(poses_as_cuda=True)
    prompts = [random_ids(600, seed=slot) for slot in range(2)]

    def outcome(room: int | None) -> str:
        engine = make_engine(
            model, n_gpu_layers=-1, kv_type="f16", flash_attn=True, n_ctx=1024, n_slots=2
        )
        # What llama.cpp's own graphs need.
        assert len(run(engine, prompts[0], 2, slot=0)) == 2
        if room is not None:
            used = device.counts()["used_bytes"]
            device.set(poses_as_cuda=True, memory_bytes=used + room)
        try:
            if prompt_rows:
                engine.attend(prompts[1], "logits").array()
            else:
                running = [
                    engine.generate(
                        prompt, slot=slot, max_tokens=8, ignore_eos=True, capture="logits"
                    )
                    for slot, prompt in enumerate(prompts)
                ]
                for generation in running:
                    generation.read()
            said = "ran"
        except OutOfMemory as refused:
            said = str(refused)
        finally:
            device.set(poses_as_cuda=True)
        assert len(run(engine, prompts[0], 2, slot=0)) == 2  # the engine goes on
        engine.close()
        return said

    assert outcome(None) == "ran"
    n_most = 2**27 if prompt_rows else 2**23
    outcomes = [outcome(room) for room in range(0, n_most, n_most // 16)]
    assert outcomes[-1] == "ran"
    assert any("computing attention rows on FAKE" in said for said in outcomes), outcomes


# ---- rows beside the step


def test_rows_beside_a_step_hold_no_step_up(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    # Streams do what they were told as late as order allows: what is beside a step runs once the
    # next step's graph has, whatever time it takes; only the last one has no next step.
    n_devices = 2
    counted: dict[str, dict[str, int]] = {}
    for way in ("in graph", "beside"):
        engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True, device_rows=way)
        work = partial(run, engine, random_ids(N_PROMPT), N_TOKENS)
        work()
        work(capture="probs")
        before = device.counts()
        work()
        between = device.counts()
        work(capture="probs")
        after = device.counts()
        counted[way] = {
            name: after[name] - between[name] - (between[name] - before[name]) for name in after
        }
        nodes = engine.stats().graph_nodes_added
        assert nodes == 0 if way == "beside" else nodes > 0
    beside, in_graph = counted["beside"], counted["in graph"]
    assert beside["n_graphs_beside"] == n_devices * N_TOKENS
    assert beside["n_late_beside"] >= n_devices * (N_TOKENS - 1)
    assert in_graph["n_graphs_beside"] == 0
    # The stream of the step waits for nothing, and copies queries instead of rows.
    assert beside["n_waits"] == in_graph["n_waits"] == 0
    assert 0 < beside["n_copied_bytes"] < in_graph["n_copied_bytes"]
