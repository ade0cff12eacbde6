"""system_info and the `kqview info` that shows it, with devices that this machine need not have."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

import kqview
from kqview.cli.main import app
from kqview.system import capture_path

CPU = {
    "name": "CPU", "description": "some processor", "type": "CPU", "backend": "CPU",
    "memory_free_bytes": 2**33, "memory_total_bytes": 2**34, "compute_capability": None,
    "capture": "zero-copy",
}  # fmt: skip
GPU = {
    "name": "CUDA0", "description": "some accelerator", "type": "GPU", "backend": "CUDA",
    "memory_free_bytes": 70 * 2**30, "memory_total_bytes": 80 * 2**30,
    "compute_capability": "9.0", "capture": "pinned",
}  # fmt: skip
REMOTE = {**GPU, "name": "RPC0", "backend": "RPC", "memory_total_bytes": 0, "capture": "plain",
          "compute_capability": None}  # fmt: skip
INFO: dict[str, Any] = {
    "kqview_version": "1.2.3", "llama_cpp_commit": "0c1e570", "is_portable": False,
    "cuda_version": "13.0", "cuda_architectures": "80,90", "backends": ["CUDA", "CPU"],
    "backend_features": {"CUDA": {"ARCHS": "800,900"}, "CPU": {}}, "devices": [GPU, CPU],
    "nvidia_driver": "580.1", "nvidia_driver_cuda": "13.0", "cpu_features": "",
    "n_threads_default": 2,
}  # fmt: skip


def show(monkeypatch: pytest.MonkeyPatch, *arguments: str, **changes: Any) -> str:
    monkeypatch.setattr(kqview, "system_info", lambda: {**INFO, **changes})
    result = CliRunner().invoke(app, ["info", *arguments], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    ("devices", "n_gpu_layers", "expected"),
    [
        ([CPU], -1, "zero-copy"),
        ([GPU, CPU], -1, "pinned"),
        ([GPU, CPU], 12, "pinned"),
        ([GPU, CPU], 0, "zero-copy"),
        ([GPU, REMOTE, CPU], -1, "plain"),
        ([{**GPU, "type": "IGPU"}, CPU], -1, "pinned"),
        ([{**CPU, "name": "BLAS", "type": "ACCEL"}, CPU], -1, "zero-copy"),
    ],
)
def test_capture_path_is_the_slowest_of_the_devices_with_layers(
    devices: list[dict[str, Any]], n_gpu_layers: int, expected: str
):
    assert capture_path(devices, n_gpu_layers) == expected


def test_info_without_a_model_shows_build_driver_and_devices(monkeypatch: pytest.MonkeyPatch):
    text = show(monkeypatch)
    assert "1.2.3" in text
    assert "this kind of CPU; CUDA 13.0 for 80,90" in text
    assert "ARCHS=800,900" in text
    assert "580.1, runs CUDA 13.0" in text
    (gpu,) = [line for line in text.splitlines() if line.strip().startswith("CUDA0")]
    assert "some accelerator" in gpu
    assert "70.0 of 80.0 GiB" in gpu
    assert gpu.split()[-2:] == ["9.0", "pinned"]


def test_info_without_driver_or_cuda_says_so(monkeypatch: pytest.MonkeyPatch):
    text = show(
        monkeypatch,
        cuda_version=None,
        nvidia_driver=None,
        nvidia_driver_cuda=None,
        is_portable=True,
        devices=[CPU],
    )
    assert "any x86-64-v3 or ARMv8 machine; no CUDA" in text
    (driver,) = [line for line in text.splitlines() if "NVIDIA driver" in line]
    assert driver.split()[-1] == "none"


def test_info_shows_a_device_that_does_not_tell_its_memory(monkeypatch: pytest.MonkeyPatch):
    text = show(monkeypatch, devices=[REMOTE])
    (remote,) = [line for line in text.splitlines() if line.strip().startswith("RPC0")]
    assert "unknown" in remote
    assert remote.split()[-1] == "plain"


def test_info_json_without_a_model_is_system_info(monkeypatch: pytest.MonkeyPatch):
    assert json.loads(show(monkeypatch, "--json")) == INFO
