"""The part of ``kqview info`` that is about no model: versions, build flags, devices."""

import json
from collections.abc import Mapping
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

_GIB = 2**30


def show_system(*, as_json: bool) -> None:
    """Print `kqview.system_info` as tables or as JSON."""
    from kqview import system_info

    info = system_info()
    if as_json:
        typer.echo(json.dumps(info, indent=2))
        return
    console = Console(soft_wrap=True)
    about = Table(show_header=False, box=None)
    for name, value in _rows(info):
        about.add_row(name, Text(value))
    console.print(about)
    console.print()
    devices = Table(
        "device", "type", "description", "memory free", "compute capability", "capture", box=None
    )
    for device in info["devices"]:
        devices.add_row(*(Text(cell) for cell in _device_cells(device)))
    console.print(devices)


def _rows(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    cuda = "no CUDA"
    if info["cuda_version"] is not None:
        cuda = f"CUDA {info['cuda_version']} for {info['cuda_architectures']}"
    cpu = "any x86-64-v3 or ARMv8 machine" if info["is_portable"] else "this kind of CPU"
    driver = info["nvidia_driver"] or "none"
    if info["nvidia_driver_cuda"] is not None:
        driver = f"{info['nvidia_driver'] or 'unknown'}, runs CUDA {info['nvidia_driver_cuda']}"
    rows = [
        ("kqview", info["kqview_version"]),
        ("llama.cpp", info["llama_cpp_commit"]),
        ("built for", f"{cpu}; {cuda}"),
    ]
    for backend in info["backends"]:
        flags = " ".join(f"{k}={v}" for k, v in info["backend_features"][backend].items())
        rows.append((f"backend {backend}", flags))
    return [*rows, ("NVIDIA driver", driver), ("threads", str(info["n_threads_default"]))]


def _device_cells(device: Mapping[str, Any]) -> list[str]:
    total = device["memory_total_bytes"]
    memory = f"{device['memory_free_bytes'] / _GIB:.1f} of {total / _GIB:.1f} GiB"
    return [
        device["name"],
        device["type"],
        device["description"],
        memory if total else "unknown",
        device["compute_capability"] or "",
        device["capture"],
    ]
