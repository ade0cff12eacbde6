"""The rows of bench/cuda_copy.py, with copies that take as long as they are told."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.engine.conftest import MakeEngine

pytest.importorskip("rich")
BENCH = Path(__file__).resolve().parents[2] / "bench"
COPY_S = 0.03
N_DEVICES = 2


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
        return [COPY_S * 1000] * n_copies

    def open_engine(_settings: Any, *, flash_attn: bool, n_ctx: int) -> Any:
        return make_engine(tiny_llama, n_gpu_layers=-1, flash_attn=flash_attn, n_ctx=n_ctx)

    monkeypatch.setattr(copy.pinned, "copy_ms", copy_ms)
    monkeypatch.setattr(copy, "open_engine", open_engine)
    device.set(copy_s=COPY_S)
    wanted = settings.Settings(device="gpu", n_context=40, n_tokens=6, n_pairs=2)
    timings = {name: copy._measure(wanted, name, 40) for name in copy.COPY_CASES}
    # 3 layers of 4 heads: the rows of 40 to 45 tokens, on average
    assert asked_bytes == [3 * 4 * 4 * sum(range(40, 46)) // 6] * 2
    return timings


def test_copies_are_held_to_those_of_the_driver(rows: dict[str, Any]) -> None:
    # Of each device one, and one after the other.
    assert N_DEVICES <= rows["cuda-copy"].pairs.median_ratio < 2 * N_DEVICES


def test_views_are_held_to_their_limit_in_an_engine_that_waits_for_no_copy(
    rows: dict[str, Any],
) -> None:
    least = N_DEVICES * COPY_S * 1000 / 0.5
    assert least <= rows["cuda-step-to-view"].pairs.median_ratio < 2 * least
