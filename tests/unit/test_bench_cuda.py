"""The GPU's benchmark as far as it needs no GPU: its model, rows, figures and settings."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench import report
from kqview.types import EngineStats

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("rich")
BENCH = report.__file__.rpartition("/")[0]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def test_wide_model_has_the_shape_and_spread_that_it_was_written_with(
    script: Any, tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    wide = script("wide_model")
    shape = wide.Shape(n_layer=2, n_head=3, n_head_kv=1, head_size=32, n_ff=128, n_vocab=300)
    wide.write(tmp_path / "m.gguf", shape)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == 3 + 2 * 12
    assert tensors["blk.1.ffn_down.weight"].shape.tolist() == [128, 96]
    assert tensors["output.weight"].shape.tolist() == [96, 300]
    weights = {
        name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for name, tensor in tensors.items()
    }
    for name, size, std in wide._tensors(shape):
        assert weights[name].shape == size
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        assert abs(weights[name].mean() - mean) < 0.25 * std, name
        assert weights[name].std() == pytest.approx(std, rel=0.25), name
    assert not np.array_equal(weights["blk.0.attn_q.weight"], weights["blk.1.attn_q.weight"])


def test_wide_shape_is_that_of_a_7b_model(script: Any) -> None:
    wide = script("wide_model").WIDE
    assert (wide.n_layer, wide.n_head, wide.n_head_kv, wide.head_size) == (28, 28, 4, 128)
    assert wide.n_embd == 3584


def test_every_row_of_the_issue_is_a_case_with_its_target(script: Any) -> None:
    cuda = script("cuda")
    sizes = ("1k", "4k", "16k")
    own = {f"cuda-{k}-{n}-{way}" for k in sizes for n in (1, 8) for way in cuda.WHAT}
    assert own <= cuda.CASES.keys()
    assert cuda.TARGETS.keys() <= cuda.CASES.keys()
    assert {"cuda-copy", "cuda-step-to-view"} <= cuda.WEIGHTS.keys()


def test_figures_of_copies_are_those_of_a_step_between_two_readings(script: Any) -> None:
    copy = script("cuda_copy")
    before = EngineStats(
        captured_steps=10, device_copies=20, device_copy_bytes=100,
        device_copy_s=0.5, step_to_view_s=0.25,
    )  # fmt: skip
    after = EngineStats(
        captured_steps=14, device_copies=28, device_copy_bytes=900,
        device_copy_s=0.75, step_to_view_s=0.375,
    )  # fmt: skip
    found = copy.device_copies(before, after)
    assert found == copy.DeviceCopies(200, copy_ms=62.5, step_to_view_ms=31.25)


def test_figures_of_copies_that_were_not_made_are_left_out(script: Any) -> None:
    copy, models = script("cuda_copy"), script("models")
    with pytest.raises(models.NotHere, match="no row was copied"):
        copy.device_copies(EngineStats(), EngineStats(captured_steps=3, step_to_view_s=0.1))


def test_device_and_shape_are_part_of_the_flags_that_rows_are_told_apart_by(script: Any) -> None:
    settings = script("settings")
    parser = argparse.ArgumentParser()
    settings.add_options(parser)
    plain = settings.settings_of(parser.parse_args(["--threads", "1"]))
    assert plain.n_gpu_layers == 0
    assert "--device" not in plain.flags
    gpu = settings.settings_of(
        parser.parse_args(["--threads", "1", "--device", "gpu", "--shape", "7b"])
    )
    assert gpu.n_gpu_layers > 28
    assert gpu.flags == f"{plain.flags} --device gpu --shape 7b"


def test_bandwidth_without_a_driver_is_left_out(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned, models = script("pinned"), script("models")
    monkeypatch.setattr(pinned, "_LIBRARY", "libcuda-of-no-machine.so")
    with pytest.raises(models.NotHere, match="no NVIDIA driver"):
        pinned.copy_ms(1024)
