"""What a process may use of a machine, from files laid out like Linux's; how its rows travel."""

from pathlib import Path

import pytest

from kqview.machine import (
    capture_path,
    default_threads,
    free_memory_bytes,
    physical_memory_bytes,
)

MIB = 2**20
CPU = {"type": "CPU", "capture": "zero-copy"}
GPU = {"type": "GPU", "capture": "pinned"}
REMOTE = {"type": "GPU", "capture": "plain"}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n", encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("cpu_max", "n_threads"),
    [
        ("400000 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("max 100000", 16),
        ("6400000 100000", 16),
        ("nonsense", 16),
    ],
)
def test_default_threads_follows_the_quota_of_cgroup_2(
    tmp_path: Path, cpu_max: str, n_threads: int
):
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": cpu_max})
    assert default_threads(root, n_available=16) == n_threads


def test_default_threads_obeys_the_tightest_quota_above_the_process(tmp_path: Path):
    files = {
        "proc/self/cgroup": "0::/pod/box",
        "sys/fs/cgroup/pod/cpu.max": "300000 100000",
        "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
    }
    assert default_threads(write(tmp_path, files), n_available=16) == 3


@pytest.mark.parametrize(("quota_us", "n_threads"), [("200000", 2), ("-1", 8)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_default_threads_follows_the_quota_of_cgroup_1(
    tmp_path: Path, mount: str, quota_us: str, n_threads: int
):
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/job",
        f"sys/fs/cgroup/{mount}/job/cpu.cfs_quota_us": quota_us,
        f"sys/fs/cgroup/{mount}/job/cpu.cfs_period_us": "100000",
    }
    assert default_threads(write(tmp_path, files), n_available=8) == n_threads


def test_default_threads_finds_the_quota_when_the_path_is_the_hosts(tmp_path: Path):
    files = {
        "proc/self/cgroup": "0::/kubepods/pod1/box",
        "sys/fs/cgroup/cpu.max": "200000 100000",
    }
    assert default_threads(write(tmp_path, files), n_available=8) == 2


@pytest.mark.parametrize("n_available", [1, 5])
def test_default_threads_without_cgroup_files_is_the_affinity(tmp_path: Path, n_available: int):
    assert default_threads(tmp_path, n_available=n_available) == n_available


def test_default_threads_here_is_at_least_one():
    assert default_threads() >= 1


def test_physical_memory_is_the_machines_without_a_limit(tmp_path: Path):
    files = {
        "proc/meminfo": "MemTotal:        8192 kB\nMemFree: 1 kB",
        "sys/fs/cgroup/memory.max": "max",
    }
    assert physical_memory_bytes(write(tmp_path, files)) == 8 * MIB


@pytest.mark.parametrize(
    "limit",
    [
        {"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/memory.max": str(3 * MIB)},
        {
            "proc/self/cgroup": "2:memory:/a",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(3 * MIB),
        },
    ],
    ids=["cgroup-2", "cgroup-1"],
)
def test_physical_memory_obeys_the_limit_of_the_cgroup(tmp_path: Path, limit: dict[str, str]):
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 8192 kB", **limit})
    assert physical_memory_bytes(root) == 3 * MIB


def test_physical_memory_ignores_the_huge_number_that_means_no_limit(tmp_path: Path):
    files = {
        "proc/meminfo": "MemTotal: 8192 kB",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    assert physical_memory_bytes(write(tmp_path, files)) == 8 * MIB


def test_physical_memory_here_is_positive():
    assert physical_memory_bytes() > MIB


@pytest.mark.parametrize(
    ("devices", "n_gpu_layers", "expected"),
    [
        ([CPU], -1, "zero-copy"),
        ([GPU, CPU], -1, "pinned"),
        ([GPU, CPU], 12, "pinned"),
        ([GPU, CPU], 0, "zero-copy"),
        ([GPU, REMOTE, CPU], -1, "plain"),
        ([{**GPU, "type": "IGPU"}, CPU], -1, "pinned"),
        ([{**CPU, "type": "ACCEL"}, CPU], -1, "zero-copy"),
    ],
)
def test_capture_path_is_the_slowest_of_the_devices_with_layers(
    devices: list[dict[str, str]], n_gpu_layers: int, expected: str
):
    assert capture_path(devices, n_gpu_layers) == expected


@pytest.mark.parametrize(
    ("files", "mib"),
    [
        ({}, 300),
        ({"sys/fs/cgroup/memory.max": "max"}, 300),
        # allowed - used + what of it is caches that may be dropped
        (
            {
                "sys/fs/cgroup/memory.max": str(200 * MIB),
                "sys/fs/cgroup/memory.current": str(150 * MIB),
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {20 * MIB}",
            },
            70,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(200 * MIB),
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(150 * MIB),
                "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {30 * MIB}",
            },
            80,
        ),
        # over its limit
        (
            {
                "sys/fs/cgroup/memory.max": str(100 * MIB),
                "sys/fs/cgroup/memory.current": str(101 * MIB),
            },
            0,
        ),
    ],
)
def test_free_memory_is_what_machine_and_cgroup_have_left(
    tmp_path: Path, files: dict[str, str], mib: int
):
    meminfo = f"MemTotal: {1000 * 1024} kB\nMemAvailable: {300 * 1024} kB"
    root = write(tmp_path, {"proc/self/cgroup": "0::/", "proc/meminfo": meminfo, **files})
    assert free_memory_bytes(root) == mib * MIB


def test_free_memory_without_a_figure_is_all_there_is(tmp_path: Path):
    root = write(tmp_path, {"proc/meminfo": f"MemTotal: {1000 * 1024} kB"})
    assert free_memory_bytes(root) == 1000 * MIB
