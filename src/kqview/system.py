"""What this build was made from and the devices that it finds: `system_info`."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from kqview import _core
from kqview.machine import default_threads

_OFFLOAD_TYPES: Final = ("GPU", "IGPU")


def system_info() -> dict[str, Any]:
    """Versions, build flags, hardware: plain values for printing, JSON or a bug report.

    Keys:
        kqview_version, llama_cpp_commit: str.
        is_portable: Built for any x86-64-v3 or ARMv8 machine and not for the one that built it.
        cuda_version: CUDA toolkit of the build, such as "13.0"; None for a build without CUDA.
        cuda_architectures: What its kernels are compiled for, such as "80,90"; None without.
        backends: Names of ggml's backends; backend_features: their build flags by name.
        devices: One dict each: name, description, type ("CPU", "GPU", "IGPU", "ACCEL"), backend,
            memory_free_bytes, memory_total_bytes, compute_capability ("9.0", None for all but
            NVIDIA's), capture (how attention comes from layers on it: "zero-copy", "pinned" for one
            copy into page-locked memory, "plain" for one into ordinary memory).
        nvidia_driver: Version of NVIDIA's driver; nvidia_driver_cuda: the newest CUDA that it
            runs. None where there is no driver.
        cpu_features: llama.cpp's line about the processor; n_threads_default: int.
    """
    return {**_core.build_info(), "n_threads_default": default_threads()}


def engine_info(n_gpu_layers: int) -> dict[str, Any]:
    """`system_info` with two keys more, for an engine with *n_gpu_layers*.

    Keys:
        capture: The slowest way on which attention of one of its layers reaches a view, as in
            ``devices``; zero_copy: whether that is "zero-copy".
    """
    info = system_info()
    capture = capture_path(info["devices"], n_gpu_layers)
    return {**info, "capture": capture, "zero_copy": capture == "zero-copy"}


def capture_path(devices: Iterable[Mapping[str, Any]], n_gpu_layers: int) -> str:
    """The slowest way of *devices* that hold layers: the host alone where none is offloaded."""
    if n_gpu_layers == 0:
        return "zero-copy"
    paths = {device["capture"] for device in devices if device["type"] in _OFFLOAD_TYPES}
    return next((path for path in ("plain", "pinned") if path in paths), "zero-copy")
