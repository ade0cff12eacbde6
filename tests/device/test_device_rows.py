"""Rows of layers on a device: the values, the order of copies, and what happens when one fails.

The device's streams do what they are told as late as order allows, and its memory begins as NaN. So
a row that is read before its copy was waited for, a staging buffer used again too soon, or a copy
that does not wait for the compute gives wrong values here, every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

from kqview import Capture
from kqview.errors import DecodeError, KqviewError, OutOfMemory, UnsupportedModel
from tests.support import tiny_gguf
from tests.support.reference import relative_error
from tests.support.rows import CLOSE, KINDS, Kind, both, check_equal, in_turn, random_ids, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from kqview import Engine
    from kqview.types import Token
    from tests.engine.conftest import MakeEngine

N_PROMPT, N_TOKENS = 20, 12
N_DEVICES = 2
N_ROWS = 3 * 4  # of tiny_llama
SPANS = [(0, 3), (2, 21), (21, None), (0, None), (600, None)]
CAPTURES = {
    **{kind: Capture(kind) for kind in KINDS},
    "float16": Capture("logits", dtype="float16"),
    "heads": Capture("scores", layers=[2, 0], heads=[3, 1]),
    "mean_heads": Capture("probs", reduce="mean_heads"),
    "mean_heads float16": Capture("probs", reduce="mean_heads", dtype="float16"),
    "mean of heads": Capture("probs", heads=[0, 3], reduce="mean_heads"),
    "max_heads": Capture("probs", reduce="max_heads"),
    "mean": Capture("probs", reduce="mean"),
    "max": Capture("scores", reduce="max"),
    "top_k": Capture("probs", top_k=4),
    "hidden": Capture("probs", layers=[1], hidden=[0, 2]),
    "spans": Capture("probs", spans=SPANS),
    "spans of heads": Capture("probs", layers=[2, 0], heads=[3, 1], spans=SPANS, dtype="float16"),
    "spans of mean_heads": Capture("probs", reduce="mean_heads", spans=SPANS),
    "spans of mean": Capture("probs", reduce="mean", spans=SPANS, dtype="float16"),
}


Way = Literal["in graph", "beside", "by kernel"]


@pytest.fixture(params=["in graph", "beside", "by kernel"])
def device_rows(request: pytest.FixtureRequest) -> Way:
    return request.param


@pytest.fixture
def make_engine(make_engine: MakeEngine, device: Any, device_rows: Way) -> MakeEngine:
    """Engines of each way to compute rows; a kernel is what "auto" takes where there is one."""
    device.set(has_row_kernels=device_rows == "by kernel")
    return partial(make_engine, device_rows="auto" if device_rows == "by kernel" else device_rows)


def test_an_engine_is_closed_while_rows_are_computed(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, device_rows: Way
) -> None:
    """Keys stay until what computes rows from them beside the step is done."""
    before = device.counts()
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True, run_ahead=4)
    generation = engine.generate(
        random_ids(N_PROMPT), max_tokens=40, capture=Capture("logits"), ignore_eos=True
    )
    next(generation)
    engine.close()
    after = device.counts()
    if device_rows != "by kernel":  # which is compared with a graph before it is used
        assert (after["n_graphs_beside"] > before["n_graphs_beside"]) == (device_rows == "beside")
    assert after["n_freed_in_use"] == before["n_freed_in_use"]


def test_a_request_that_needs_more_room_frees_nothing_that_a_step_writes_to(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    """The step may be a part of a prompt, which nobody waits for: it still runs."""
    engine = make_engine(tiny_llama, n_gpu_layers=-1, n_slots=3, n_ubatch=16)
    before = device.counts()["n_freed_in_use"]
    running = [
        engine.generate(
            random_ids(40, seed=i), slot=i, max_tokens=2, ignore_eos=True, capture=Capture(kind)
        )
        for i, kind in enumerate(("logits", "scores", "probs"))
    ]
    assert all(len(list(generation)) == 2 for generation in running)
    assert device.counts()["n_freed_in_use"] == before


def test_events_are_waited_for_before_they_are_recorded_again(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True)
    before = device.counts()["n_new_events"]
    run(engine, random_ids(N_PROMPT), 40, capture="logits")
    assert device.counts()["n_new_events"] == before


@pytest.mark.parametrize("name", ["logits", "top_k"])
@pytest.mark.parametrize("fail_copy_in", [0, 1])
def test_a_failed_copy_leaves_no_other_one_behind(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, name: str, fail_copy_in: int
) -> None:
    """Memory that another device's copy is on its way to must not be used again."""
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True)
    prompt = random_ids(N_PROMPT)
    capture = CAPTURES[name]
    before = device.counts()["n_pending_copies"]  # of engines that broke
    want = run(engine, prompt, N_TOKENS, capture=capture)
    assert device.counts()["n_pending_copies"] == before
    device.set(fail_copy_in=fail_copy_in)
    with pytest.raises(DecodeError, match="this copy fails"):
        run(engine, prompt, 1, capture=capture)
    assert device.counts()["n_pending_copies"] == before
    device.set()
    check_equal(run(engine, prompt, N_TOKENS, capture=capture), want)


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("name", CAPTURES)
def test_rows_equal_those_of_the_cpu(
    make_engine: MakeEngine, tiny_llama: Path, name: str, flash_attn: bool
) -> None:
    # Flash attention differs in the sums of V between two devices no more than on one.
    engines = both(make_engine, tiny_llama, flash_attn=flash_attn)
    prompt = random_ids(N_PROMPT)
    theirs, ours = (run(e, prompt, N_TOKENS, capture=CAPTURES[name]) for e in engines)
    check_equal(ours, theirs)


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("reduce", [None, "mean_heads", "max_heads", "mean"])
@pytest.mark.parametrize("kind", ["logits", "scores"])
def test_rows_beyond_float16_saturate_on_the_device(
    make_engine: MakeEngine, tmp_path: Path, kind: Any, reduce: Any, flash_attn: bool
) -> None:
    # float16's largest is 65504: what a device made infinite would read as masked.
    model = tiny_gguf.write_preset(tmp_path / "large.gguf", "tiny_llama", score_spread=4e5)
    engine = make_engine(model, n_gpu_layers=-1, flash_attn=flash_attn, kv_type="f32")
    prompt = random_ids(N_PROMPT)
    whole, half = (
        np.asarray(engine.attend(prompt, Capture(kind, dtype=dtype, reduce=reduce)).array())
        for dtype in ("float32", "float16")
    )
    masked = np.isneginf(whole)
    assert masked.any()
    assert np.abs(whole[~masked]).max() > 2 * 65504
    np.testing.assert_array_equal(np.isneginf(half), masked)
    assert np.abs(half[~masked]).max() == 65504
    want = np.clip(whole, -65504, 65504, where=~masked, out=whole.copy())
    np.testing.assert_allclose(half, want, rtol=2e-3, atol=1e-2)


@pytest.mark.parametrize("n_gpu_layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["logits", "mean", "max_heads", "top_k", "hidden"])
def test_layers_of_cpu_and_devices_come_as_one_view(
    make_engine: MakeEngine, tiny_llama: Path, name: str, n_gpu_layers: int
) -> None:
    engines = both(make_engine, tiny_llama, n_gpu_layers=n_gpu_layers)
    prompt = random_ids(N_PROMPT)
    theirs, ours = (run(e, prompt, N_TOKENS, capture=CAPTURES[name]) for e in engines)
    check_equal(ours, theirs)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_keys_of_other_types(make_engine: MakeEngine, tmp_path: Path, kv_type: str) -> None:
    model = tiny_gguf.write_preset(tmp_path / "wide.gguf", "tiny_llama", n_embd=128)
    engines = both(make_engine, model, kv_type=kv_type, flash_attn=True)
    prompt = random_ids(N_PROMPT)
    theirs, ours = (run(e, prompt, 2, capture="logits")[0].attention for e in engines)
    assert ours is not None
    assert theirs is not None
    # ggml rounds q to the type of K, our kernel does not.
    assert relative_error(np.asarray(ours), np.asarray(theirs, np.float64)) < 2e-2


def test_late_and_early_copies_bring_the_same_bits(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    prompt = random_ids(N_PROMPT)
    late = run(engine, prompt, 60, capture="probs")
    device.set(is_late=False)
    early = run(engine, prompt, 60, capture="probs")
    for a, b in zip(late, early, strict=True):
        assert a.attention is not None
        assert b.attention is not None
        assert np.array_equal(a.attention, b.attention)
        np.testing.assert_allclose(a.attention.sum(axis=-1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("is_late", [True, False])
def test_rows_are_right_whichever_stream_a_driver_queues_copies_on(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, is_late: bool
) -> None:
    # CUDA copies between two streams on the source's, Vulkan on the destination's, which no order
    # binds to the compute.
    engines = both(make_engine, tiny_llama)
    prompt = random_ids(N_PROMPT)
    device.set(copies_on_destination=True, is_late=is_late)
    theirs, ours = (run(e, prompt, N_TOKENS, capture="probs") for e in engines)
    check_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_may_be_computed_on_a_device_that_holds_no_layer(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, kind: Kind
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=0)
    prompt = random_ids(70)
    theirs = np.asarray(engine.attend(prompt, kind).array())
    n_before = device.counts()["n_graphs"]
    device.set(offload_tokens=32)
    ours = np.asarray(make_engine(tiny_llama, n_gpu_layers=0).attend(prompt, kind).array())
    assert device.counts()["n_graphs"] > n_before
    np.testing.assert_allclose(ours, theirs, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("run_ahead", [0, 1, 8])
def test_each_token_has_its_own_row_however_far_it_runs_ahead(
    make_engine: MakeEngine, tiny_llama: Path, run_ahead: int
) -> None:
    engines = both(make_engine, tiny_llama, run_ahead=run_ahead)
    prompt = random_ids(N_PROMPT)
    theirs, ours = (run(e, prompt, 40, capture="logits") for e in engines)
    check_equal(ours, theirs)


def test_slots_that_capture_and_one_that_does_not(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    def generate(engine: Engine) -> list[list[Token]]:
        running = [
            engine.generate(
                random_ids(N_PROMPT, seed=i), slot=i, max_tokens=N_TOKENS, temperature=0.0,
                ignore_eos=True, capture=capture,
            )
            for i, capture in enumerate(["logits", None, Capture("logits", layers=[1])])
        ]  # fmt: skip
        return in_turn(running, N_TOKENS)

    cpu, gpu = both(make_engine, tiny_llama, n_slots=3)
    for theirs, ours in zip(generate(cpu), generate(gpu), strict=True):
        check_equal(ours, theirs)


@pytest.mark.parametrize("name", ["probs", "logits", "float16", "mean_heads", "max"])
@pytest.mark.parametrize("n_ubatch", [16, 512])
def test_rows_of_a_prompt(
    make_engine: MakeEngine, tiny_llama: Path, name: str, n_ubatch: int
) -> None:
    engines = both(make_engine, tiny_llama, n_ubatch=n_ubatch)
    prompt = random_ids(70)
    theirs, ours = (np.asarray(e.attend(prompt, CAPTURES[name]).array()) for e in engines)
    near = 2e-3 if ours.dtype == np.float16 else CLOSE
    np.testing.assert_allclose(ours, theirs, rtol=near, atol=near)
    theirs, ours = (np.asarray(e.attend(prompt, CAPTURES[name], last=5).array()) for e in engines)
    np.testing.assert_allclose(ours, theirs, rtol=near, atol=near)


def start_capturing(engine: Engine, slots: Iterable[int]) -> list[list[Token]]:
    """Texts in all slots at once, of which those in *slots* capture; their tokens."""
    running = [
        engine.generate(
            random_ids(N_PROMPT, seed=i), slot=i, max_tokens=N_TOKENS, temperature=0.0,
            ignore_eos=True, capture="probs" if i in slots else None,
        )
        for i in range(len(engine.slots))
    ]  # fmt: skip
    taken = in_turn(running, N_TOKENS)
    for generation in running:
        generation.close()
    return taken


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("slots", [[0], [5], [2, 3], [1, 6], [7]], ids=str)
def test_rows_are_right_whichever_slots_capture(
    make_engine: MakeEngine, tiny_llama: Path, slots: list[int], flash_attn: bool
) -> None:
    engines = both(make_engine, tiny_llama, n_slots=8, flash_attn=flash_attn)
    # Prompts of several slots are evaluated together, by flash attention that sums V in float16.
    limit = 1e-3 if flash_attn else CLOSE
    for theirs, ours in zip(*(start_capturing(e, slots) for e in engines), strict=True):
        check_equal(ours, theirs, limit)


def test_devices_hold_rows_of_the_slots_that_capture_alone(
    make_engine: MakeEngine, tiny_llama: Path, device_rows: Way
) -> None:
    # Rows of one token as a device has them, in its buffer and in two staging buffers; beside a
    # step only in its buffer, and once more while they are computed. What comes to it by slots that
    # do not capture is small.
    n_layer, n_head, n_ctx, n_slots = 3, 4, 2048, 8
    row_bytes = n_layer * n_head * n_ctx * 4
    n_copies = 3 if device_rows == "in graph" else 1
    held_bytes: dict[int, int] = {}
    for n_capturing in (1, 2, 8):
        engine = make_engine(
            tiny_llama, n_gpu_layers=-1, n_slots=n_slots, n_ctx=n_ctx, flash_attn=True
        )
        assert engine.stats().device_row_bytes == 0
        start_capturing(engine, range(n_capturing))
        held_bytes[n_capturing] = engine.stats().device_row_bytes
        engine.close()
    least = n_copies * row_bytes
    assert least <= held_bytes[1]
    most = least if device_rows == "in graph" else 2.2 * least  # a kernel has room for top k too
    assert least <= held_bytes[2] - held_bytes[1] <= most
    assert 7 * least <= held_bytes[8] - held_bytes[1] <= 7 * most


def test_memory_for_rows_stays_for_a_like_request_and_goes_after_many_rows_of_a_prompt(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1, n_ctx=4096, flash_attn=True)
    prompt = random_ids(N_PROMPT)

    def row_bytes(capture: str | None) -> int:
        run(engine, prompt, 2, capture=capture)
        return engine.stats().device_row_bytes

    of_a_token = row_bytes("logits")
    assert of_a_token == row_bytes(None) == row_bytes("logits") > 0
    want = np.asarray(engine.attend(prompt, "logits").array())
    of_a_prompt = engine.stats().device_row_bytes
    assert of_a_prompt > 100 * of_a_token
    assert row_bytes("logits") == of_a_token
    np.testing.assert_array_equal(np.asarray(engine.attend(prompt, "logits").array()), want)


def test_a_capture_without_room_leaves_the_captures_that_run(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    gc.collect()
    cpu, gpu = both(make_engine, tiny_llama, n_slots=2, n_ctx=2048)
    prompt = random_ids(N_PROMPT)
    want = run(cpu, prompt, N_TOKENS, capture="probs")
    first = gpu.generate(
        prompt, slot=0, max_tokens=N_TOKENS, ignore_eos=True, capture="probs",
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7,
    )  # fmt: skip
    got = [next(first)]
    device.set(memory_bytes=device.counts()["used_bytes"])
    with pytest.raises(OutOfMemory, match=r"FAKE\d .* MiB"):
        gpu.generate(
            prompt, slot=1, max_tokens=2, capture=Capture("logits", hidden=[0, 1, 2])
        ).read()
    got += first
    check_equal(got, want)


@pytest.mark.parametrize(("kind", "n_nodes"), [("logits", 1), ("scores", 2), ("probs", 2)])
def test_a_step_has_few_nodes_for_its_rows_and_none_for_rows_beside_it(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, device_rows: Way,
    kind: Kind, n_nodes: int,
) -> None:  # fmt: skip
    is_beside = device_rows != "in graph"
    # In the graph: the product; with it the scale, or the softmax, which reads llama.cpp's mask.
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True, n_slots=2)
    n_before = device.counts()["n_graphs_beside"]
    run(engine, random_ids(N_PROMPT), N_TOKENS, capture=kind)
    assert engine.stats().graph_nodes_added == (0 if is_beside else n_nodes * engine.model.n_layer)
    n_beside = device.counts()["n_graphs_beside"] - n_before
    # A kernel is compared with a graph once on each device.
    n_each = {"in graph": 0, "beside": N_TOKENS, "by kernel": 1}[device_rows]
    assert n_beside == N_DEVICES * n_each
    assert engine.stats().device_kernel_rows == (
        N_TOKENS * N_ROWS if device_rows == "by kernel" else 0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rows_on_their_way_keep_their_keys_when_a_text_is_shifted(
    make_engine: MakeEngine, tiny_llama: Path, kind: Kind
) -> None:
    engines = both(make_engine, tiny_llama, flash_attn=True, n_ctx=64)
    theirs, ours = (
        run(e, random_ids(50), 60, capture=kind, context_shift=True, n_keep=4) for e in engines
    )
    assert any(len(token.discarded) for token in ours)
    check_equal(ours, theirs)


def test_one_copy_on_each_device_a_step_and_none_without_capture(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, device_rows: Way
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    prompt = random_ids(N_PROMPT)

    def counted(capture: str | None) -> dict[str, int]:
        run(engine, prompt, 4, capture=capture)  # what is new to the engine is not counted
        before = device.counts()
        run(engine, prompt, N_TOKENS, capture=capture)
        return {name: n - before[name] for name, n in device.counts().items()}

    without, captured = counted(None), counted("logits")
    assert without["n_copies_to_host"] == N_TOKENS  # the logits of each token
    assert captured["n_graphs"] == without["n_graphs"]
    added = {name: n - without[name] for name, n in captured.items()}
    assert added["n_copies_to_host"] == N_DEVICES * N_TOKENS
    # Of the rows, or of the queries, which the graph beside the step gets from there.
    n_on_device = 2 if device_rows == "beside" else 1
    assert added["n_copies_on_device"] == n_on_device * N_DEVICES * N_TOKENS


def test_blocks_are_page_locked_until_there_is_no_more(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    prompt = random_ids(N_PROMPT)
    held = run(engine, prompt, 4, capture="logits")
    assert engine.stats().pool.pinned_bytes > 0
    assert engine.stats().pool.plain_fallbacks == 0
    device.set(pinned_bytes=0)
    held += run(engine, prompt, 30, capture="logits")
    assert engine.stats().pool.plain_fallbacks > 0


def test_a_copy_that_fails_ends_its_request_and_no_other(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1, n_slots=2)
    prompt = random_ids(N_PROMPT)
    want = run(engine, prompt, N_TOKENS, capture="probs", slot=0)
    for fail_copy_in in range(0, 30, 3):
        device.set()
        other = engine.generate(
            random_ids(5, seed=3), slot=1, max_tokens=40, temperature=0.0, ignore_eos=True
        )
        next(other)
        device.set(fail_copy_in=fail_copy_in)
        seen: list[Token] = []
        with contextlib.suppress(DecodeError):
            generation = engine.generate(
                prompt, slot=0, max_tokens=N_TOKENS, ignore_eos=True, capture="probs",
                temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=7,
            )  # fmt: skip
            seen.extend(generation)
        assert generation.finish_reason in ("length", "error")
        device.set()
        check_equal(seen, want[: len(seen)])
        with contextlib.suppress(DecodeError):  # the copy that failed was of its logits
            other.read()
        assert other.finish_reason in ("length", "error")
        check_equal(run(engine, prompt, N_TOKENS, capture="probs", slot=0), want)


def test_no_room_on_the_device_is_out_of_memory_and_the_engine_goes_on(
    make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> None:
    gc.collect()  # engines of tests before it, which would make room later
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    device.set(memory_bytes=device.counts()["used_bytes"] + 1000)
    with pytest.raises(OutOfMemory, match=r"FAKE\d .* MiB.* MiB"):
        run(engine, random_ids(4), 2, capture="logits")
    assert len(run(engine, random_ids(4), 2)) == 2
    device.set()
    assert run(engine, random_ids(4), 2, capture="logits")[0].attention is not None


def test_an_operation_that_the_device_has_not_is_refused(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, device_rows: Way
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=True, kv_type="f16")
    if device_rows == "by kernel":
        pytest.skip("a kernel needs none of ggml's operations")
    device.set(refused_op="SOFT_MAX")
    with pytest.raises(UnsupportedModel, match="SOFT_MAX"):
        run(engine, random_ids(4), 2, capture="probs")
    assert run(engine, random_ids(4), 2, capture="logits")[0].attention is not None


def test_cancelled_and_dropped_generations_leave_nothing_behind(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    prompt = random_ids(N_PROMPT)
    want = run(engine, prompt, N_TOKENS, capture="probs")
    for n_taken in (0, 1, 5):
        generation = engine.generate(prompt, max_tokens=200, capture="probs", ignore_eos=True)
        for _ in range(n_taken):
            next(generation)
        generation.close()
        # One that never ran leaves what was there.
        assert n_taken == 0 or engine.slots[0].n_tokens == N_PROMPT + n_taken - 1
    del generation
    check_equal(run(engine, prompt, N_TOKENS, capture="probs"), want)
    del want
    assert engine.stats().pool.n_leased == 0


def test_closing_while_rows_are_on_their_way(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    generation = engine.generate(random_ids(8), max_tokens=400, capture="probs", ignore_eos=True)
    first = next(generation)
    assert first.attention is not None
    kept = first.attention.copy()
    engine.close()
    with pytest.raises(KqviewError):
        generation.read()
    assert np.array_equal(first.attention, kept)


def test_an_async_consumer_gets_the_same(make_engine: MakeEngine, tiny_llama: Path) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    prompt = random_ids(N_PROMPT)
    want = run(engine, prompt, N_TOKENS, capture="probs", temperature=0.0)

    async def collect() -> list[Token]:
        generation = engine.generate(
            prompt, max_tokens=N_TOKENS, capture="probs", temperature=0.0, ignore_eos=True
        )
        return [token async for token in generation]

    check_equal(asyncio.run(collect()), want)


# ---- reductions: the host's values, and only what is left of the rows leaves the device

N_PROMPT, N_REDUCED = 20, 6
N_DEVICES = 2
HEADS = [3, 0, 1]
N_COLUMNS = sum(N_PROMPT + i for i in range(N_REDUCED))
# What is captured, and the bytes of a column that leave devices with 3 layers in all of 4 heads: a
# row a layer, or one of each device where layers are joined, which the host then adds up.
REDUCED = {
    "mean_heads": (Capture("logits", reduce="mean_heads"), 3 * 4),
    "max_heads": (Capture("scores", reduce="max_heads"), 3 * 4),
    "max_heads of probs": (Capture("probs", reduce="max_heads"), 3 * 4),
    "max_heads float16": (Capture("logits", reduce="max_heads", dtype="float16"), 3 * 2),
    "mean of heads": (Capture("scores", heads=HEADS, reduce="mean_heads"), 3 * 4),
    "max of heads": (Capture("logits", heads=HEADS, reduce="max_heads"), 3 * 4),
    "max of one head": (Capture("probs", heads=[2], reduce="max_heads"), 3 * 4),
    "max of layers": (Capture("logits", layers=[2, 0], reduce="max_heads"), 2 * 4),
    "mean": (Capture("logits", reduce="mean"), N_DEVICES * 4),
    "max": (Capture("scores", reduce="max"), N_DEVICES * 4),
    "mean of all probs": (Capture("probs", reduce="mean"), N_DEVICES * 4),
    "max float16": (Capture("probs", reduce="max", dtype="float16"), N_DEVICES * 4),
    "max of heads of a layer": (Capture("probs", layers=[1], heads=HEADS, reduce="max"), 4),
    "top_k of mean_heads": (Capture("probs", reduce="mean_heads", top_k=3), 3 * 4),
    "top_k of mean": (Capture("logits", reduce="mean", top_k=3), N_DEVICES * 4),
}


def copied(engine: Engine, capture: Capture) -> int:
    """Bytes that left devices for the rows of ``N_TOKENS`` tokens behind the prompt."""
    before = engine.stats()
    run(engine, random_ids(N_PROMPT), N_REDUCED, capture=capture)
    return engine.stats().since(before).device_copy_bytes


@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_rows_are_the_hosts_and_no_others_leave_the_device(
    make_engine: MakeEngine, tiny_llama: Path, name: str, flash_attn: bool, device_rows: Way
) -> None:
    capture, column_bytes = REDUCED[name]
    engines = both(make_engine, tiny_llama, flash_attn=flash_attn)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_REDUCED, capture=capture) for e in engines)
    check_equal(ours, theirs)
    # A kernel writes what is little straight into the block. Rows over layers of two devices, and
    # those without flash attention, are none of its.
    is_written = device_rows == "by kernel" and flash_attn and capture.reduce not in ("mean", "max")
    assert copied(engines[1], capture) == (0 if is_written else column_bytes * N_COLUMNS)


@pytest.mark.parametrize("refused_op", ["POOL_2D", "GET_ROWS"])
@pytest.mark.parametrize("name", ["mean of heads", "max_heads float16", "max", "top_k of mean"])
def test_a_device_that_cannot_reduce_leaves_it_to_the_host(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, name: str, refused_op: str
) -> None:
    capture, _ = REDUCED[name]
    device.set(refused_op=refused_op)
    engines = both(make_engine, tiny_llama)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_REDUCED, capture=capture) for e in engines)
    check_equal(ours, theirs)
    n_heads = 4 if capture.heads is None else len(capture.heads)
    assert copied(engines[1], capture) == 3 * n_heads * 4 * N_COLUMNS


@pytest.mark.parametrize("n_gpu_layers", [1, 2, 3])
@pytest.mark.parametrize("name", ["max of heads", "mean", "max", "top_k of mean"])
def test_devices_and_the_cpu_reduce_together(
    make_engine: MakeEngine, tiny_llama: Path, name: str, n_gpu_layers: int
) -> None:
    capture, _ = REDUCED[name]
    engines = both(make_engine, tiny_llama, n_gpu_layers=n_gpu_layers)
    theirs, ours = (run(e, random_ids(N_PROMPT), N_REDUCED, capture=capture) for e in engines)
    check_equal(ours, theirs)


@pytest.mark.parametrize("name", ["max_heads", "mean of heads", "mean", "max", "max float16"])
@pytest.mark.parametrize("n_ubatch", [16, 512])
def test_reduced_rows_of_a_prompt(
    make_engine: MakeEngine, tiny_llama: Path, name: str, n_ubatch: int
) -> None:
    capture, _ = REDUCED[name]
    engines = both(make_engine, tiny_llama, n_ubatch=n_ubatch)
    prompt = random_ids(70)
    for last in (None, 5):
        theirs, ours = (np.asarray(e.attend(prompt, capture, last=last).array()) for e in engines)
        near = 2e-3 if ours.dtype == np.float16 else 2e-5
        np.testing.assert_allclose(ours, theirs, rtol=near, atol=near)


def test_slots_with_reductions_of_their_own_in_one_batch(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    captures = [
        Capture("logits", heads=[1, 2], reduce="mean_heads"),
        Capture("logits", heads=[0], reduce="mean_heads"),
        Capture("scores", reduce="max"),
        Capture("logits"),
    ]

    def generate(engine: Engine) -> list[list[Any]]:
        running = [
            engine.generate(
                random_ids(N_PROMPT, seed=i), slot=i, max_tokens=N_REDUCED, temperature=0.0,
                ignore_eos=True, capture=capture,
            )
            for i, capture in enumerate(captures)
        ]  # fmt: skip
        steps = [[next(generation) for generation in running] for _ in range(N_REDUCED)]
        return [list(tokens) for tokens in zip(*steps, strict=True)]

    cpu, gpu = both(make_engine, tiny_llama, n_slots=len(captures))
    for theirs, ours in zip(generate(cpu), generate(gpu), strict=True):
        check_equal(ours, theirs)


def test_lists_of_heads_may_change_with_every_request(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    cpu, gpu = both(make_engine, tiny_llama)
    for i in range(12):
        heads = [[0], [1, 3], [2, 0, 1], None][i % 4]
        capture = Capture("probs", heads=heads, reduce=("mean_heads", "max", "mean")[i % 3])
        theirs, ours = (run(e, random_ids(N_PROMPT), 2, capture=capture) for e in (cpu, gpu))
        check_equal(ours, theirs)


@pytest.mark.parametrize("write", [tiny_gguf.write_gemma3n, tiny_gguf.write_gemma4])
@pytest.mark.parametrize("kind", ["logits", "scores", "probs"])
def test_joined_layers_of_other_masks_and_numbers_of_heads(
    make_engine: MakeEngine, tmp_path: Path, kind: Kind, write: Callable[[Path], Path]
) -> None:
    engines = both(make_engine, write(tmp_path / "model.gguf"))
    for reduce in ("mean", "max"):
        capture = Capture(kind, reduce=reduce)
        theirs, ours = (run(e, random_ids(60), 4, capture=capture) for e in engines)
        check_equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_windows(make_engine: MakeEngine, tmp_path: Path, kind: Kind) -> None:
    engines = both(make_engine, tiny_gguf.write_gemma3n(tmp_path / "model.gguf"))
    theirs, ours = (run(e, random_ids(60), 4, capture=kind) for e in engines)
    assert kind == "probs" or np.isneginf(np.asarray(theirs[0].rows)).any()
    check_equal(ours, theirs)
