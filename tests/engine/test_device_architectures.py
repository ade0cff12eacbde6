"""Every architecture that llama.cpp's own tests make, on a GPU beside the CPU.

Each model in a process of its own, where cuBLAS keeps float32: what is left are ggml's own kernels,
of which those for a few columns use TF32, and flash attention, which rounds keys and values to
float16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import tiny_gguf
from tests.support.archs import NAMES
from tests.support.device_check import DeviceReport, check

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.full, pytest.mark.needs("gpu")]

# By part of "<flash attention> <part>": limits of the first layer and of those above it. On an
# H100 prompts differed by at most 1.9e-6 and tokens by 1.5e-4.
LIMITS = {
    "off prompt": (1e-5, 1e-5),
    "off tokens": (5e-4, 5e-4),
    "on prompt": (1e-4, 2e-2),
    "on tokens": (5e-4, 2e-2),
}
# Sparse attention selects keys in the graph, which a device gives no rows of.
MAY_BE_REFUSED = {
    "deepseek32-moe", "deepseek4-moe", "dots3note-moe", "glm-dsa-moe", "glm5-next-moe",
    "hy_v4-moe", "minimax-m3-moe", "qwen4exp-moe",
}  # fmt: skip
WRITERS: dict[str, Callable[[Path], Path]] = {
    "gemma3n": tiny_gguf.write_gemma3n,
    "gemma4": tiny_gguf.write_gemma4,
    "qwen2": lambda path: tiny_gguf.write_preset(path, "tiny_qwen2"),
}


def check_report(report: DeviceReport, name: str) -> None:
    assert report.failure == ""
    assert not report.refused or name in MAY_BE_REFUSED, report.refused
    assert all("layer" in words for words in report.refused.values())
    for part, found in report.errors.items():
        assert all(a <= b for a, b in zip(found, LIMITS[part], strict=True)), (part, found)
    assert len(report.refused) == 2 or not report.layers or report.errors


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_gpu_are_those_of_the_cpu(architectures: dict[str, Path], name: str) -> None:
    check_report(check(architectures[name], NVIDIA_TF32_OVERRIDE="0"), name)


@pytest.mark.parametrize("name", WRITERS)
def test_rows_on_a_gpu_of_layers_that_share_a_cache_are_those_of_the_cpu(
    tmp_path: Path, name: str
) -> None:
    model = WRITERS[name](tmp_path / f"{name}.gguf")
    check_report(check(model, NVIDIA_TF32_OVERRIDE="0"), name)
