"""system_info of the real build, and the check of device memory that comes before a load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import kqview
from kqview import Engine, _core, errors
from kqview.machine import default_threads
from tests.engine.conftest import fake_devices

if TYPE_CHECKING:
    from pathlib import Path

    from tests.engine.conftest import MakeEngine


def test_system_info_names_the_build_and_its_devices() -> None:
    info = kqview.system_info()
    assert json.loads(json.dumps(info)) == info
    assert info["kqview_version"] == kqview.__version__
    assert len(info["llama_cpp_commit"]) == 40 or "unpinned" in info["llama_cpp_commit"]
    assert info["n_threads_default"] == default_threads()
    assert info["backends"] == list(info["backend_features"])
    assert "CPU" in info["backends"]
    gpu_backends = (info["gpu_backends"] or "").split(",")
    assert ("CUDA" in gpu_backends) == (info["cuda_version"] is not None)
    named = {"ROCm": "HIP", "MTL": "Metal"}
    working = {named.get(name, name) for name in info["backends"]} - {"CPU", "BLAS", "RPC", "FAKE"}
    assert working <= set(gpu_backends)
    assert (info["cuda_version"] is None) == (info["cuda_architectures"] is None)
    (cpu,) = [device for device in info["devices"] if device["type"] == "CPU"]
    assert cpu["capture"] == "zero-copy"
    assert cpu["backend"] == "CPU"
    assert cpu["compute_capability"] is None
    assert 0 < cpu["memory_free_bytes"] <= cpu["memory_total_bytes"]
    for device in info["devices"]:
        assert (device["compute_capability"] is not None) == (device["backend"] == "CUDA")


def test_engine_on_the_host_captures_without_a_copy(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    info = make_engine(tiny_llama, n_gpu_layers=0).system_info()
    assert info["capture"] == "zero-copy"
    assert info["zero_copy"] is True
    assert info.keys() >= kqview.system_info().keys()


@pytest.mark.needs("developer build")
def test_engine_on_devices_says_that_rows_are_copied(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    with fake_devices(), make_engine(tiny_llama, n_gpu_layers=-1) as engine:
        info = engine.system_info()
    assert info["capture"] == "pinned"
    assert info["zero_copy"] is False


def test_device_without_room_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Path
) -> None:
    asked: list[tuple[object, ...]] = []

    def refuse(model: _core.ModelOptions, context: _core.EngineOptions) -> None:
        asked.append((model.path, model.n_gpu_layers, context.n_ctx))
        raise errors.OutOfMemory("CUDA0 needs more than there is")

    monkeypatch.setattr(_core, "check_device_memory", refuse)
    loaded: list[float] = []
    with pytest.raises(errors.OutOfMemory, match="CUDA0"):
        Engine(tiny_llama, n_ctx=64, n_gpu_layers=3, progress=loaded.append)
    assert asked == [(str(tiny_llama), 3, 64)]
    assert loaded == []


def test_check_of_device_memory_reads_no_file_without_a_device() -> None:
    if any(device["type"] in ("GPU", "IGPU") for device in kqview.system_info()["devices"]):
        pytest.skip("this machine has a device")
    model = _core.ModelOptions()
    model.path = "no such file"
    _core.check_device_memory(model, _core.EngineOptions())
