"""What this process may use of the machine: processors and memory, as its container sees them.

Reads the cgroup files of Linux, version 2 first and then version 1; elsewhere the whole machine
counts. Nothing is cached: a quota may change while the process runs.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = Path("/")
_UNKNOWN_MEMORY_BYTES: Final = 4 * 2**30  # for systems that tell neither way, on the careful side


def default_threads(root: Path = _ROOT, *, n_available: int | None = None) -> int:
    """Number of threads that this process can keep busy, at least 1.

    The smaller of the processors that it may run on and its cgroup's quota, rounded down: a thread
    that the quota does not pay for is stopped while all others wait for it.

    Args:
        root: Folder that stands for ``/``.
        n_available: Processors that it may run on, None to ask the system.
    """
    if n_available is None:
        n_available = _available_processors()
    quotas = [*_quotas_v2(root), *_quotas_v1(root)]
    return max(1, min([n_available, *(int(quota) for quota in quotas)]))


def physical_memory_bytes(root: Path = _ROOT) -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroup's limit if lower.

    Args:
        root: Folder that stands for ``/``.
    """
    limits = [*_memory_limits_v2(root), *_memory_limits_v1(root)]
    return min([_machine_memory_bytes(root), *limits])


def _available_processors() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _machine_memory_bytes(root: Path) -> int:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        key, _, value = line.partition(":")
        if key == "MemTotal" and (words := value.split()) and words[0].isdigit():
            return int(words[0]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return _UNKNOWN_MEMORY_BYTES


def _quotas_v2(root: Path) -> Iterator[float]:
    for folder in _cgroup_folders(root, "sys/fs/cgroup", controller=""):
        quota, _, period = (_read(folder / "cpu.max") or "").partition(" ")
        yield from _ratio(quota, period)


def _quotas_v1(root: Path) -> Iterator[float]:
    for mount in ("sys/fs/cgroup/cpu", "sys/fs/cgroup/cpu,cpuacct"):
        for folder in _cgroup_folders(root, mount, controller="cpu"):
            quota = _read(folder / "cpu.cfs_quota_us") or ""
            yield from _ratio(quota, _read(folder / "cpu.cfs_period_us") or "")


def _memory_limits_v2(root: Path) -> Iterator[int]:
    for folder in _cgroup_folders(root, "sys/fs/cgroup", controller=""):
        yield from _positive(_read(folder / "memory.max") or "")


def _memory_limits_v1(root: Path) -> Iterator[int]:
    for folder in _cgroup_folders(root, "sys/fs/cgroup/memory", controller="memory"):
        yield from _positive(_read(folder / "memory.limit_in_bytes") or "")


def _cgroup_folders(root: Path, mount: str, *, controller: str) -> Iterator[Path]:
    """Yield the process's cgroup folder and all above it; a limit anywhere among them binds.

    Inside a container the path may name a folder of the host that is not mounted: folders that do
    not exist simply hold no files.
    """
    path = Path(_cgroup_path(root, controller).lstrip("/"))
    for part in (path, *path.parents) if path.parts else (path,):
        yield root / mount / part


def _cgroup_path(root: Path, controller: str) -> str:
    # Lines read "<hierarchy>:<controllers>:<path>"; version 2 is the one without controllers.
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path
    return ""


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
