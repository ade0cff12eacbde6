"""Facts: the machine and the commits that figures belong to, as plain values for JSON."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from kqview import __version__, _core

_PACKAGE: Final = Path(__file__).resolve().parents[1]


def facts() -> dict[str, Any]:
    """What has to be known to read a time.

    Keys: date (UTC, ISO 8601), machine, system, cpu, n_cores, devices (other than the CPU),
    nvidia_driver (None without one), load_average (of the minute before, None where the system has
    none), kqview, kqview_commit, llama_cpp_commit.
    """
    build = _core.build_info()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": cpu_name(),
        "n_cores": os.cpu_count(),
        "devices": [d["description"] for d in build["devices"] if d["type"] != "CPU"],
        "nvidia_driver": build["nvidia_driver"],
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "kqview": __version__,
        "kqview_commit": _commit(),
        "llama_cpp_commit": build["llama_cpp_commit"],
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, with family, model and vectors: virtual machines may hide it."""
    fields: dict[str, str] = {}
    try:
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.processor() or "unknown processor"
    name = fields.get("model name") or platform.processor() or "unknown processor"
    flags = fields.get("flags", "").split()
    widest = next((flag for flag in ("avx512f", "avx2", "avx") if flag in flags), "")
    family, model = fields.get("cpu family"), fields.get("model")
    return name + (f" (family {family}, model {model}, {widest})" if family and widest else "")


def _commit() -> str:
    """Commit of the checkout that the package lies in, "-dirty" where files differ from it.

    An installed package may lie inside somebody else's repository, which is not asked.
    """
    root = _PACKAGE.parents[1]
    if _PACKAGE.parent.name != "src" or not (root / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:  # no git here
        return "unknown"
    return done.stdout.strip() or "unknown"
