"""What this build contains and what the process may use: devices, threads, memory.

On Linux, CPUs and memory are those of the container, from its cgroup files (versions 1 and 2);
elsewhere, those of the whole machine. Nothing is cached, because a quota may change while the
process runs.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kqview import _core, backends

_ROOT: Final = Path("/")
_UNKNOWN_MEMORY_BYTES: Final = 4 * 2**30  # a cautious guess for systems that do not report it


def default_threads(root: Path = _ROOT, *, n_available: int | None = None) -> int:
    """Number of threads that this process can keep busy, at least 1.

    The number of CPUs it may run on or the quota of its cgroup, rounded down, whichever is smaller.
    A thread beyond the quota would be suspended while all others wait for it.

    Args:
        root: Folder to use as ``/``.
        n_available: Number of CPUs it may run on; None asks the system.
    """
    if n_available is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        n_available = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([n_available, *(int(quota) for quota in _quotas(root))]))


def physical_memory_bytes(root: Path = _ROOT) -> int:
    """Memory that this process may use: that of the machine or the limit of its cgroup, if lower.

    Args:
        root: Folder to use as ``/``.
    """
    return min([_machine_memory_bytes(root), *(limit for limit, _ in _cgroup_memory(root))])


def free_memory_bytes(root: Path = _ROOT) -> int:
    """Memory that this process may still take: what is free, or can be freed, now.

    That of the machine or what its cgroup has left, whichever is smaller. Caches of files count as
    free, except where the cgroup does not say how large they are.

    Args:
        root: Folder to use as ``/``.
    """
    free = _meminfo_bytes(root, "MemAvailable")
    machine = _machine_memory_bytes(root) if free is None else free
    return max(0, min([machine, *(left for _, left in _cgroup_memory(root))]))


def _meminfo_bytes(root: Path, name: str) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key == name and (words := value.split()) and words[0].isdigit():
            return int(words[0]) * 1024
    return None


def _machine_memory_bytes(root: Path) -> int:
    total = _meminfo_bytes(root, "MemTotal")
    if total is not None:
        return total
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN_MEMORY_BYTES


def _quotas(root: Path) -> Iterator[float]:
    """CPUs that each cgroup of the process allows."""
    for folder in _cgroup_folders(root, "", ""):
        quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
        yield from _ratio(quota, period)
    for mount in ("cpu", "cpu,cpuacct"):
        for folder in _cgroup_folders(root, mount, "cpu"):
            quota = _read(folder / "cpu.cfs_quota_us") or ""
            yield from _ratio(quota, _read(folder / "cpu.cfs_period_us") or "")


# Of cgroups of both versions: the controller, the files of limit and use, and the name, among its
# statistics, of the caches that the kernel drops first.
_CGROUP_MEMORY: Final = (
    ("", "memory.max", "memory.current", "inactive_file"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
    """Bytes that each cgroup of the process allows, and those that are left of them."""
    for controller, limit_name, use_name, cache_name in _CGROUP_MEMORY:
        for folder in _cgroup_folders(root, controller, controller):
            for limit in _positive(_read(folder / limit_name) or ""):
                used = sum(_positive(_read(folder / use_name) or ""))
                lines = (_read(folder / "memory.stat") or "").splitlines()
                statistics = dict(line.split(" ", 1) for line in lines if " " in line)
                yield limit, limit - used + sum(_positive(statistics.get(cache_name, "")))


def _cgroup_folders(root: Path, mount: str, controller: str) -> Iterator[Path]:
    """Yield the cgroup folder of the process and all its parents, each of which may set a limit.

    Version 2 has one mount and no controllers, version 1 a mount for each controller. Inside a
    container, the path may be one of the host; a folder that does not exist has no files.
    """
    path = Path()
    # Lines are "<hierarchy>:<controllers>:<path>"; version 2 has no controllers.
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        controllers, _, name = line.partition(":")[2].partition(":")
        if controller in controllers.split(","):
            path = Path(name.lstrip("/"))
            break
    for part in (path, *path.parents) if path.parts else (path,):
        yield root / "sys/fs/cgroup" / mount / part


def _ratio(quota: str, period: str) -> Iterator[float]:
    for quota_us in _positive(quota):  # "max" in version 2 and -1 in version 1 mean no limit
        for period_us in _positive(period):
            yield quota_us / period_us


def _positive(text: str) -> Iterator[int]:
    if text.strip().isdigit() and int(text) > 0:
        yield int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None


# ---- build and devices


_OFFLOAD_TYPES: Final = ("GPU", "IGPU")


def system_info() -> dict[str, Any]:
    """Versions, build flags and hardware as plain values, for printing, JSON or a bug report.

    Keys:
        kqview_version, llama_cpp_commit: str.
        is_portable: Whether the build runs on any x86-64 (with SSE4.2) or ARMv8 machine, rather
            than being made for this CPU.
        cpu_variant: The instructions that this process computes with, such as "avx512"; "native"
            in a build for this CPU. The environment variable KQVIEW_CPU chooses another one of
            cpu_variants, those in this build, lowest first.
        gpu_backends: Backends for GPUs in this build, such as "CUDA,Vulkan"; None for a CPU build.
        cuda_version: CUDA toolkit of the build, such as "13.0"; None for a build without CUDA.
        cuda_architectures: Architectures of its kernels, such as "80,90"; None without CUDA.
        backends: Names of ggml's backends that work on this machine (one without its driver does
            not); backend_features: their build flags by name.
        backend_packages: Installed packages with a backend for GPUs, such as "kqview_vulkan": a
            dict by name, with why it is not used; None where it is.
        devices: A dict for each: name, description, type ("CPU", "GPU", "IGPU", "ACCEL"), backend,
            memory_free_bytes, memory_total_bytes, compute_capability (such as "9.0"; None except
            for NVIDIA), capture (how attention of its layers reaches a view: "zero-copy", "pinned"
            for one copy to page-locked memory, "plain" for one copy to ordinary memory), row_kernel
            (whether kqview's own kernel computes rows there, where it can, instead of ggml's).
        nvidia_driver: Version of NVIDIA's driver; nvidia_driver_cuda: the newest CUDA version it
            supports. None without a driver.
        cpu_features: llama.cpp's description of the CPU; n_threads_default: int.

    Raises:
        UnsupportedModel: A package with a backend is for another kqview or llama.cpp.
    """
    packages = dict(backends.load())  # first: their devices are among those of build_info
    return {
        **_core.build_info(), "backend_packages": packages, "n_threads_default": default_threads(),
    }  # fmt: skip


def capture_path(devices: Iterable[Mapping[str, Any]], n_gpu_layers: int) -> str:
    """The slowest ``capture`` of the *devices* with layers; the host's if nothing is offloaded."""
    if n_gpu_layers == 0:
        return "zero-copy"
    paths = {device["capture"] for device in devices if device["type"] in _OFFLOAD_TYPES}
    return next((path for path in ("plain", "pinned") if path in paths), "zero-copy")
