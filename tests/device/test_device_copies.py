"""What the engine counts of copies from devices, and the rows of bench/cuda_copy.py."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Capture, Engine, EngineStats
from tests.support.rows import random_ids, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.engine.conftest import MakeEngine


# ---- how many, how many bytes, how long

N_PROMPT, N_TOKENS = 20, 12
N_DEVICES = 2
COPY_S = 0.02


def made_by(engine: Engine, work: Callable[[], object]) -> EngineStats:
    """What *work* added to the engine's counters."""
    before = engine.stats()
    work()
    return engine.stats().since(before)


@pytest.mark.parametrize(
    ("capture", "rows_of"),
    [
        (Capture("logits"), lambda model: model.n_layer * model.n_head * 4),
        (Capture("probs", dtype="float16"), lambda model: model.n_layer * model.n_head * 2),
        (Capture("logits", layers=[0, 2], heads=[1]), lambda _: 2 * 4),
    ],
    ids=["all", "float16", "chosen"],
)
def test_bytes_are_those_of_the_rows_that_are_handed_out(
    make_engine: MakeEngine, tiny_llama: Path, capture: Capture, rows_of: Callable[[Any], int]
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    made = made_by(engine, lambda: run(engine, random_ids(N_PROMPT), N_TOKENS, capture=capture))
    n_columns = sum(N_PROMPT + i for i in range(N_TOKENS))
    assert made.device_copy_bytes == rows_of(engine.model) * n_columns
    assert made.device_copy_bytes == made.attention_bytes
    assert made.captured_steps == N_TOKENS
    assert N_TOKENS <= made.device_copies <= N_DEVICES * N_TOKENS
    assert made.device_copy_s > 0


def test_nothing_is_copied_without_capture_or_from_layers_of_the_cpu(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    made = made_by(engine, lambda: run(engine, random_ids(N_PROMPT), N_TOKENS))
    assert (made.device_copies, made.device_copy_bytes, made.captured_steps) == (0, 0, 0)
    host = make_engine(tiny_llama, n_gpu_layers=0)
    made = made_by(host, lambda: run(host, random_ids(N_PROMPT), N_TOKENS, capture="logits"))
    assert (made.device_copies, made.device_copy_bytes, made.device_copy_s) == (0, 0, 0)
    assert made.captured_steps == N_TOKENS
    assert 0 < made.step_to_view_s < made.busy_s


@pytest.mark.parametrize("waits", [False, True])
def test_slow_copies_show_in_the_seconds(
    make_engine: MakeEngine, tiny_llama: Path, device: Any, waits: bool
) -> None:
    engine = make_engine(tiny_llama, n_gpu_layers=-1)
    engine._core.await_copies(waits)
    prompt = random_ids(N_PROMPT)
    run(engine, prompt, N_TOKENS, capture="logits")
    device.set(copy_s=COPY_S)
    made = made_by(engine, lambda: run(engine, prompt, N_TOKENS, capture="logits"))
    slow_s = made.device_copies * COPY_S
    assert made.device_copies == N_DEVICES * N_TOKENS
    # The copies of both devices are waited for one after the other, the second one from the start.
    assert slow_s <= made.device_copy_s
    # A step that waits for its rows ends with them; else they are the last part of its views.
    if waits:
        assert made.step_to_view_s < slow_s / 2
    else:
        assert made.step_to_view_s >= slow_s
    device.set()
    quick = made_by(engine, lambda: run(engine, prompt, N_TOKENS, capture="logits"))
    assert quick.device_copy_s < slow_s / 2


def test_rows_are_the_same_where_the_engine_waits_for_copies(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    waiting, usual = (make_engine(tiny_llama, n_gpu_layers=-1) for _ in range(2))
    waiting._core.await_copies(True)
    ours, theirs = (
        run(engine, random_ids(N_PROMPT), N_TOKENS, capture="probs") for engine in (waiting, usual)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.id == b.id
        assert a.attention is not None
        assert b.attention is not None
        assert (a.attention == b.attention).all()


def test_graph_that_moves_is_seen(device: Any) -> None:
    assert device.count_moved_graph() == 1
    device.forget_faults()


def test_memory_that_is_freed_in_use_is_seen(device: Any) -> None:
    assert device.count_freed_in_use() == 1
    device.forget_faults()


@pytest.mark.parametrize("n_slots", [1, 3, 4])
def test_a_token_has_a_copy_for_each_layer_at_most_however_many_heads(
    make_engine: MakeEngine, tiny_llama: Path, n_slots: int
) -> None:
    # Two of the layers are on one device, one is on the other. Layers that leave one row each are
    # one copy of a device; whole layers are, where no other slot's rows lie between them.
    engine = make_engine(tiny_llama, n_gpu_layers=-1, n_slots=n_slots)

    def generate(capture: Capture) -> None:
        running = [
            engine.generate(
                random_ids(N_PROMPT, seed=i), slot=i, max_tokens=N_TOKENS, temperature=0.0,
                ignore_eos=True, capture=capture,
            )
            for i in range(n_slots)
        ]  # fmt: skip
        for _ in range(N_TOKENS):
            for generation in running:
                next(generation)

    n_rows = n_slots * N_TOKENS
    made = made_by(engine, partial(generate, Capture("logits")))
    assert N_DEVICES * n_rows <= made.device_copies <= 3 * n_rows
    assert n_slots > 1 or made.device_copies == N_DEVICES * n_rows
    for capture in (
        Capture("logits", heads=[2]),
        Capture("logits", reduce="mean_heads"),
        Capture("logits", reduce="max"),
    ):
        made = made_by(engine, partial(generate, capture))
        assert made.device_copies == N_DEVICES * n_rows


# ---- the rows of bench/cuda_copy.py, with copies that take as long as they are told

pytest.importorskip("rich")
BENCH = Path(__file__).resolve().parents[2] / "bench"
BENCH_COPY_S = 0.05


@pytest.fixture
def rows(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine, tiny_llama: Path, device: Any
) -> dict[str, Any]:
    """Both rows, of an engine whose copies take `COPY_S` each."""
    monkeypatch.syspath_prepend(str(BENCH))
    copy, settings = (importlib.import_module(name) for name in ("cuda_copy", "settings"))
    asked_bytes: list[int] = []

    def copy_ms(n_bytes: int, n_copies: int) -> list[float]:
        asked_bytes.append(n_bytes)
        return [BENCH_COPY_S * 1000] * n_copies

    def open_engine(_settings: Any, *, flash_attn: bool, n_ctx: int) -> Any:
        return make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=flash_attn, n_ctx=n_ctx)

    monkeypatch.setattr(copy.pinned, "copy_ms", copy_ms)
    monkeypatch.setattr(copy, "open_engine", open_engine)
    device.set(copy_s=BENCH_COPY_S)
    wanted = settings.Settings(device="gpu", n_context=40, n_tokens=6, n_pairs=2)
    timings = {name: copy._measure(wanted, name, 40) for name in copy.COPY_CASES}
    # 3 layers of 4 heads: the rows of 40 to 45 tokens, on average
    assert asked_bytes == [3 * 4 * 4 * sum(range(40, 46)) // 6] * 2
    return timings


def test_copies_are_held_to_those_of_the_driver_and_views_to_their_limit(
    rows: dict[str, Any],
) -> None:
    # Of each device one, and one after the other.
    assert N_DEVICES <= rows["cuda-copy"].pairs.median_ratio < 2 * N_DEVICES
    # In an engine that waits for no copy.
    least = N_DEVICES * BENCH_COPY_S * 1000 / 0.5
    assert least <= rows["cuda-step-to-view"].pairs.median_ratio < 2 * least
